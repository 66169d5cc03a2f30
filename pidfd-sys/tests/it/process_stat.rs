//! process_stat: names that look like syntax, states, start times.
//!
//! # Safety
//! PR_SET_NAME reads a string constant.

use crate::child::Child;
use crate::sys::{check, wait_until};
use core::time::Duration;
use pidfd_sys::{Errno, Error, Step, process_stat};

#[test]
fn a_name_that_looks_like_the_syntax_around_it() {
    for name in [c"a) (b c", c") R 1 2 3 4 5 6", c"((((", c""] {
        let child = Child::start(|link| {
            let unused: libc::c_ulong = 0;
            // SAFETY: `name` is a constant that ends in NUL.
            let rc = unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), unused, unused, unused) };
            link.send(check(rc.into()).unwrap_or(-1));
            link.park();
        });
        assert_eq!(child.receive(), 0);
        let text = std::fs::read(format!("/proc/{}/comm", child.pid())).expect("it runs");
        assert_eq!(text.strip_suffix(b"\n"), Some(name.to_bytes()), "the name is in effect");
        wait_until("it sleeps", || child.state() == b'S');
        assert_eq!(process_stat(child.pid()).expect("it runs").threads, 1);
    }
}

#[test]
fn a_zombie_and_a_reaped_process() {
    let mut child = Child::idle();
    let alive = process_stat(child.pid()).expect("it runs");
    child.kill();
    let dead = process_stat(child.pid()).expect("not reaped yet");
    assert_eq!(dead.state, b'Z');
    assert_eq!(dead.start_time_ticks, alive.start_time_ticks);
    child.reap();
    assert_eq!(process_stat(child.pid()), Err(Error { step: Step::ReadStat, errno: Errno::ENOENT }));
}

#[test]
fn start_times_tell_processes_apart_and_stay() {
    let first = Child::idle();
    let before = process_stat(first.pid()).expect("it runs");
    std::thread::sleep(Duration::from_millis(50));
    let second = Child::idle();
    let (first, second) = (process_stat(first.pid()).expect("it runs"), process_stat(second.pid()).expect("it runs"));
    assert_eq!(first.start_time_ticks, before.start_time_ticks);
    assert!(second.start_time_ticks > first.start_time_ticks, "{first:?} {second:?}");
}

#[test]
fn threads_are_counted() {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || wait.recv());
    assert!(process_stat(std::process::id()).expect("it runs").threads >= 2);
    drop(release);
    thread.join().expect("no panic").expect_err("the sender is gone");
}

#[test]
fn a_number_that_is_no_pid() {
    for pid in [0, u32::MAX] {
        assert_eq!(process_stat(pid), Err(Error { step: Step::ReadStat, errno: Errno::ENOENT }), "{pid}");
    }
}
