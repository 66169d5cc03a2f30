//! has_exited: alive, zombie, reaped, half dead, interrupted.
//!
//! # Safety
//! The interruption test sets a handler that does nothing and a timer, in a child of its own.

use crate::child::Child;
use crate::sys::{self, limit_fds, memfd, skip};
use core::time::Duration;
use pidfd_sys::{Errno, Error, Step, has_exited, pidfd_open, process_stat, raw};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

fn failed(errno: Errno) -> Error {
    Error { step: Step::PidfdPoll, errno }
}

#[test]
fn it_turns_true_at_death_and_stays_so() {
    let mut child = Child::idle();
    let pidfd = pidfd_open(child.pid()).expect("it runs");
    assert_eq!(has_exited(pidfd.as_fd()), Ok(false));
    child.kill();
    assert_eq!(has_exited(pidfd.as_fd()), Ok(true), "zombie");
    child.reap();
    assert_eq!(has_exited(pidfd.as_fd()), Ok(true), "reaped");
}

#[test]
fn a_process_lives_as_long_as_any_of_its_threads() {
    let child = Child::without_first_thread();
    let pidfd = pidfd_open(child.pid()).expect("it runs");
    let stat = process_stat(child.pid()).expect("it runs");
    assert_eq!((stat.state, stat.threads), (b'Z', 2), "one letter for two very different states");
    assert_eq!(has_exited(pidfd.as_fd()), Ok(false));
    child.kill();
    assert_eq!(has_exited(pidfd.as_fd()), Ok(true));
}

#[test]
fn a_number_that_is_not_open() {
    assert_eq!(raw::has_exited(-1), Err(failed(Errno::EBADF)));
    assert_eq!(raw::has_exited(i32::MAX), Err(failed(Errno::EBADF)));
    let file = memfd();
    let number = file.as_raw_fd();
    let child = Child::start(|link| {
        sys::close(number);
        link.send_result(raw::has_exited(number).map(i32::from));
    });
    assert_eq!(child.result(), Err(failed(Errno::EBADF)));
}

#[test]
fn a_limit_of_zero_descriptors_disables_poll() {
    let target = Child::idle();
    let pidfd = pidfd_open(target.pid()).expect("it runs");
    let child = Child::start(|link| {
        if limit_fds(0).is_ok() {
            link.send_result(raw::has_exited(pidfd.as_raw_fd()).map(i32::from));
        }
    });
    assert_eq!(child.result(), Err(failed(Errno::EINVAL)));
}

#[test]
fn interruptions_are_not_seen() {
    extern "C" fn nothing(_: libc::c_int) {}

    let target = Child::idle();
    let pidfd = pidfd_open(target.pid()).expect("it runs");
    let number = pidfd.as_raw_fd();
    let child = Child::start(|link| {
        let handler: extern "C" fn(libc::c_int) = nothing;
        // SAFETY: the handler has signal's type and does nothing.
        unsafe { libc::signal(libc::SIGALRM, handler as libc::sighandler_t) };
        let step = libc::timeval { tv_sec: 0, tv_usec: 20 };
        let timer = libc::itimerval { it_interval: step, it_value: step };
        // SAFETY: `timer` is a local of the right type and no old value is asked for.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, core::ptr::null_mut()) };

        let start = Instant::now();
        let (mut interrupted, mut outcome) = (0, Ok(0));
        while outcome == Ok(0)
            && (start.elapsed() < Duration::from_millis(300) || interrupted == 0 && start.elapsed() < Duration::from_secs(3))
        {
            outcome = raw::has_exited(number).map(i32::from);
            let mut entry = libc::pollfd { fd: number, events: libc::POLLIN, revents: 0 };
            // SAFETY: one local entry. The bare call beside ours shows that interruptions happen.
            interrupted += i32::from(unsafe { libc::poll(&raw mut entry, 1, 0) } < 0);
        }
        link.send(interrupted);
        link.send_result(outcome);
    });
    if child.receive() == 0 {
        skip("no poll was interrupted, so nothing is shown about EINTR");
    }
    assert_eq!(child.result(), Ok(0));
}
