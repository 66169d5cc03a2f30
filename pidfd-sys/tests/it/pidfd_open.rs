//! pidfd_open: what it opens and each way it refuses.

use crate::child::Child;
use crate::seccomp::with_refusal;
use crate::sys::{is_cloexec, limit_fds};
use pidfd_sys::{Errno, Error, Step, numbers, pidfd_open, raw};
use std::os::fd::AsRawFd;

fn failed(errno: Errno) -> Error {
    Error { step: Step::PidfdOpen, errno }
}

#[test]
fn a_pidfd_is_close_on_exec() {
    let child = Child::idle();
    for pid in [std::process::id(), child.pid()] {
        let pidfd = pidfd_open(pid).expect("it runs");
        assert!(is_cloexec(pidfd.as_raw_fd()));
    }
}

#[test]
fn numbers_that_name_no_process() {
    for pid in [0, 1 << 31, u32::MAX] {
        assert_eq!(pidfd_open(pid).expect_err("not a pid"), failed(Errno::EINVAL), "{pid}");
    }
    // Above every possible pid_max.
    assert_eq!(pidfd_open(i32::MAX as u32).expect_err("no such process"), failed(Errno::ESRCH));
}

#[test]
fn a_zombie_can_be_opened_and_a_reaped_process_cannot() {
    let mut child = Child::idle();
    child.kill();
    pidfd_open(child.pid()).expect("a zombie keeps its number");
    child.reap();
    assert_eq!(pidfd_open(child.pid()).expect_err("reaped"), failed(Errno::ESRCH));
}

#[test]
fn a_thread_that_leads_no_process_is_refused() {
    // SAFETY: no arguments, cannot fail.
    let thread = std::thread::spawn(|| pidfd_open(unsafe { libc::gettid() }.cast_unsigned()));
    let error = thread.join().expect("no panic").expect_err("not a process");
    assert!([failed(Errno::ENOENT), failed(Errno::EINVAL)].contains(&error), "{error}");
}

#[test]
fn a_full_descriptor_table() {
    let own = std::process::id();
    let child = Child::start(|link| {
        if limit_fds(0).is_ok() {
            link.send_result(raw::pidfd_open(own));
        }
    });
    assert_eq!(child.result(), Err(failed(Errno::EMFILE)));
}

#[test]
fn a_filter_decides_the_errno() {
    let own = std::process::id();
    for errno in [Errno::EPERM, Errno::ENOSYS, Errno::EACCES, Errno(4095)] {
        let Some(result) = with_refusal(numbers::PIDFD_OPEN, errno.0, || raw::pidfd_open(own)) else { return };
        assert_eq!(result, Err(failed(errno)));
    }
    let Some(result) = with_refusal(numbers::PIDFD_GETFD, Errno::EPERM.0, || raw::pidfd_open(own).map(|_| 0)) else { return };
    assert_eq!(result, Ok(0), "a filter on the other call does not touch this one");
}
