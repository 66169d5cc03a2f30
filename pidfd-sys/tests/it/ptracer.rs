//! set_ptracer: with Yama, without it, and where nobody can tell.

use crate::child::Child;
use crate::seccomp::with_refusal;
use crate::sys::{check, is_root, skip, yama_scope};
use pidfd_sys::{Errno, Error, Ptracer, PtracerOutcome, Step, numbers, set_ptracer};

fn failed(errno: Errno) -> Error {
    Error { step: Step::SetPtracer, errno }
}

fn number(outcome: PtracerOutcome) -> i32 {
    match outcome {
        PtracerOutcome::Set => 1,
        PtracerOutcome::NotNeeded => 2,
    }
}

#[test]
fn the_outcome_says_whether_there_is_a_yama() {
    let parent = std::process::id();
    let child = Child::start(|link| {
        for tracer in [Ptracer::Any, Ptracer::Pid(parent), Ptracer::Nobody, Ptracer::Pid(i32::MAX as u32)] {
            link.send_result(set_ptracer(tracer).map(number));
        }
    });
    let yama = yama_scope().is_some();
    let want = Ok(number(if yama { PtracerOutcome::Set } else { PtracerOutcome::NotNeeded }));
    for tracer in ["any", "the parent", "nobody"] {
        assert_eq!(child.result(), want, "{tracer}");
    }
    let absent = child.result();
    assert_eq!(absent, if yama { Err(failed(Errno::EINVAL)) } else { want }, "a process that is not there");
}

#[test]
fn a_number_that_would_mean_nobody_or_anybody_is_refused() {
    for pid in [0, 1 << 31, u32::MAX] {
        assert_eq!(set_ptracer(Ptracer::Pid(pid)), Err(failed(Errno::EINVAL)), "{pid}");
    }
}

#[test]
fn a_filter_decides_the_errno() {
    for errno in [Errno::EPERM, Errno::ENOSYS] {
        let Some(result) = with_refusal(libc::SYS_prctl, errno.0, || set_ptracer(Ptracer::Nobody).map(number)) else { return };
        assert_eq!(result, Err(failed(errno)));
    }
}

#[test]
fn without_proc_a_refusal_stays_a_refusal() {
    if !is_root() {
        skip("leaving /proc behind by chroot needs root");
        return;
    }
    if yama_scope().is_some() {
        skip("with Yama the kernel does not refuse");
        return;
    }
    let child = Child::start(|link| {
        // A directory of the kernel's own that has no `proc` in it.
        // SAFETY: a string constant.
        let rc = unsafe { libc::chroot(c"/proc/self/fdinfo".as_ptr()) };
        link.send(check(rc.into()).unwrap_or(-1));
        link.send_result(set_ptracer(Ptracer::Any).map(number));
    });
    if child.receive() != 0 {
        skip("chroot is refused");
        return;
    }
    assert_eq!(child.result(), Err(failed(Errno::EINVAL)));
}

#[test]
fn the_operation_is_yamas() {
    assert_eq!(numbers::PR_SET_PTRACER.to_be_bytes(), *b"Yama");
}
