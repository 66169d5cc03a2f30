//! pidfd_getfd: what it fetches and each way it refuses, told apart.

use crate::child::Child;
use crate::seccomp::with_refusal;
use crate::sys::{self, drop_to, is_cloexec, is_root, limit_fds, memfd, prctl, seek, skip, yama_scope};
use pidfd_sys::{Errno, Error, Ptracer, Step, has_exited, numbers, pidfd_getfd, pidfd_open, raw, set_ptracer};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;

/// Two users without rights; neither is the overflow user, which some sandboxes run as.
const USER: u32 = 54_321;
const OTHER_USER: u32 = 54_322;

fn failed(errno: Errno) -> Error {
    Error { step: Step::PidfdGetfd, errno }
}

/// Opens and fetches as `uid` from a process that is a sibling of the target.
fn fetch_as(uid: u32, pid: u32, fd: i32) -> Result<i32, Error> {
    let caller = Child::start(|link| {
        let dropped = drop_to(uid).map_or_else(|errno| errno.0, |()| 0);
        link.send(dropped);
        link.send_result(raw::pidfd_open(pid).and_then(|pidfd| raw::pidfd_getfd(pidfd, fd)).map(|_| 0));
    });
    assert_eq!(caller.receive(), 0, "changing to uid {uid}");
    caller.result()
}

/// Starts a process of `USER`, or of this user where that is not root, that is not dumpable after the second `go_on`. After the first one it
/// lets any process trace it where Yama asks for that. None, after printing why, where ids cannot be changed.
fn target_of_user() -> Option<Child> {
    let child = Child::start(|link| {
        // Changing ids clears dumpable, and so would fork from such a process.
        link.send(drop_to(USER).and_then(|()| prctl(libc::PR_SET_DUMPABLE, 1)).map_or_else(|errno| errno.0, |_| 0));
        link.wait();
        link.send_result(set_ptracer(Ptracer::Any).map(|_| 0));
        link.wait();
        link.send(prctl(libc::PR_SET_DUMPABLE, 0).map_or_else(|errno| errno.0, |_| 0));
        link.park();
    });
    match child.receive() {
        0 => Some(child),
        errno => {
            skip(&format!("cannot become another user: {}", Errno(errno)));
            None
        }
    }
}

#[test]
fn the_fetched_descriptor_is_the_same_file_and_close_on_exec() {
    let ours = memfd();
    let number = ours.as_raw_fd();
    let child = Child::start(|link| {
        link.send(0);
        link.wait();
        link.send(seek(number, 0, libc::SEEK_CUR).unwrap_or(-1));
        link.park();
    });
    child.receive();
    let inode = File::from(ours).metadata().expect("fstat").ino(); // and closes ours
    let pidfd = pidfd_open(child.pid()).expect("it runs");
    let fetched = pidfd_getfd(pidfd.as_fd(), number).expect("our own child");
    assert!(is_cloexec(fetched.as_raw_fd()));

    seek(fetched.as_raw_fd(), 4711, libc::SEEK_SET).expect("a memfd can seek");
    child.go_on();
    assert_eq!(child.receive(), 4711, "one open file description, so one offset");
    drop(child);
    assert_eq!(File::from(fetched).metadata().expect("it outlives the process").ino(), inode);
}

#[test]
fn a_number_that_is_not_open_there_and_a_descriptor_that_is_no_pidfd() {
    let held = memfd();
    let closed = held.as_raw_fd();
    let child = Child::start(|link| {
        sys::close(closed);
        link.send(0);
        link.park();
    });
    child.receive();
    let pidfd = pidfd_open(child.pid()).expect("it runs");
    for number in [closed, -1, i32::MIN, i32::MAX] {
        assert_eq!(pidfd_getfd(pidfd.as_fd(), number).expect_err("not open"), failed(Errno::EBADF), "{number}");
    }
    assert_eq!(pidfd_getfd(held.as_fd(), 0).expect_err("a memfd"), failed(Errno::EBADF));
    assert_eq!(raw::pidfd_getfd(-1, 0), Err(failed(Errno::EBADF)));
}

#[test]
fn a_dead_process() {
    let mut child = Child::idle();
    let pidfd = pidfd_open(child.pid()).expect("it runs");
    child.kill();
    expect_exiting(pidfd_getfd(pidfd.as_fd(), 0).expect_err("a zombie has no descriptors"));
    child.reap();
    assert_eq!(pidfd_getfd(pidfd.as_fd(), 0).expect_err("reaped"), failed(Errno::ESRCH));
}

#[test]
fn a_process_without_its_first_thread_looks_dead_but_is_not() {
    let child = Child::without_first_thread();
    let pidfd = pidfd_open(child.pid()).expect("it runs");
    expect_exiting(pidfd_getfd(pidfd.as_fd(), 0).expect_err("the first thread has no descriptors any more"));
    assert_eq!(has_exited(pidfd.as_fd()), Ok(false));
}

fn expect_exiting(error: Error) {
    if error == failed(Errno::EBADF) {
        skip("this kernel answers EBADF for an exiting process; newer ones ESRCH");
    } else {
        assert_eq!(error, failed(Errno::ESRCH));
    }
}

#[test]
fn a_full_descriptor_table() {
    let target = Child::idle();
    let pidfd = pidfd_open(target.pid()).expect("it runs");
    let child = Child::start(|link| {
        if limit_fds(0).is_ok() {
            link.send_result(raw::pidfd_getfd(pidfd.as_raw_fd(), 0));
        }
    });
    let result = child.result();
    if yama_scope().is_some_and(|scope| scope > 0) && !is_root() {
        skip("Yama refuses a sibling before the table is looked at");
    } else {
        assert_eq!(result, Err(failed(Errno::EMFILE)));
    }
}

#[test]
fn a_filter_decides_the_errno() {
    let target = Child::idle();
    let pidfd = pidfd_open(target.pid()).expect("it runs");
    for errno in [Errno::EPERM, Errno::ENOSYS, Errno::EACCES, Errno(4095)] {
        let Some(result) = with_refusal(numbers::PIDFD_GETFD, errno.0, || raw::pidfd_getfd(pidfd.as_raw_fd(), 0)) else { return };
        assert_eq!(result, Err(failed(errno)));
    }
    // The filter answers before the kernel looks at anything: also for oneself, where no other gate applies.
    let own = pidfd_open(std::process::id()).expect("it runs");
    let Some(result) = with_refusal(numbers::PIDFD_GETFD, Errno::EPERM.0, || raw::pidfd_getfd(own.as_raw_fd(), 0)) else { return };
    assert_eq!(result, Err(failed(Errno::EPERM)));
}

#[test]
fn ids_and_dumpable_each_refuse_with_eperm() {
    let file = memfd();
    let Some(target) = target_of_user() else { return };
    target.go_on();
    assert!(target.result().is_ok(), "PR_SET_PTRACER");
    let fetch = |uid| fetch_as(uid, target.pid(), file.as_raw_fd());

    if yama_scope().is_some_and(|scope| scope > 1) {
        skip("Yama's scope is above 1: nobody without CAP_SYS_PTRACE may fetch");
        return;
    }
    assert_eq!(fetch(USER), Ok(0), "same user, dumpable");
    if is_root() {
        assert_eq!(fetch(OTHER_USER), Err(failed(Errno::EPERM)), "another user");
    } else {
        skip("another user's process: needs root to make one");
    }
    target.go_on();
    assert_eq!(target.receive(), 0, "PR_SET_DUMPABLE");
    assert_eq!(fetch(USER), Err(failed(Errno::EPERM)), "same user, not dumpable");
    if is_root() {
        let pidfd = pidfd_open(target.pid()).expect("it runs");
        match pidfd_getfd(pidfd.as_fd(), file.as_raw_fd()) {
            Ok(_) => (),
            Err(error) => skip(&format!("root without CAP_SYS_PTRACE: {error}")),
        }
    }
}

#[test]
fn another_users_process_without_root() {
    // SAFETY: no arguments, cannot fail.
    let uid = unsafe { libc::getuid() };
    let owner = std::fs::metadata("/proc/1").map(|process| process.uid());
    if is_root() || owner.as_ref().is_ok_and(|owner| *owner == uid) {
        skip("process 1 belongs to this user or this user may do anything");
        return;
    }
    let pidfd = pidfd_open(1).expect("opening needs no right");
    assert_eq!(pidfd_getfd(pidfd.as_fd(), 0).expect_err("not ours"), failed(Errno::EPERM));
}

#[test]
fn yama_refuses_a_sibling_until_the_target_names_it() {
    if yama_scope() != Some(1) {
        skip("no Yama with scope 1 here");
        return;
    }
    let file = memfd();
    let Some(target) = target_of_user() else { return };
    let fetch = || fetch_as(USER, target.pid(), file.as_raw_fd());
    assert_eq!(fetch(), Err(failed(Errno::EPERM)));
    target.go_on();
    assert_eq!(target.result(), Ok(0));
    assert_eq!(fetch(), Ok(0));
}

#[test]
fn oneself_is_always_allowed_so_it_proves_nothing_about_others() {
    let file = memfd();
    let number = file.as_raw_fd();
    let child = Child::start(|link| {
        if prctl(libc::PR_SET_DUMPABLE, 0).is_ok() {
            link.send_result(raw::pidfd_open(std::process::id()).and_then(|pidfd| raw::pidfd_getfd(pidfd, number)).map(|_| 0));
        }
    });
    assert_eq!(child.result(), Ok(0), "not dumpable, and still granted");
}
