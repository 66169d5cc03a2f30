//! Errno, Step and Error as text.

use pidfd_sys::{Errno, Error, Step};

#[test]
fn an_error_names_the_call_and_the_errno() {
    assert_eq!(Error { step: Step::PidfdGetfd, errno: Errno::EPERM }.to_string(), "pidfd_getfd: EPERM (1)");
    assert_eq!(Error { step: Step::PidfdOpen, errno: Errno(4095) }.to_string(), "pidfd_open: errno 4095");
    assert_eq!(Step::SetPtracer.to_string(), "prctl(PR_SET_PTRACER)");
}

#[test]
fn names_are_unique_and_those_that_are_met_are_there() {
    for (errno, name) in [
        (Errno::EPERM, "EPERM"),
        (Errno::ESRCH, "ESRCH"),
        (Errno::EBADF, "EBADF"),
        (Errno::EINVAL, "EINVAL"),
        (Errno::EMFILE, "EMFILE"),
        (Errno::ENOSYS, "ENOSYS"),
        (Errno::EAGAIN, "EAGAIN"),
        (Errno::ETOOMANYREFS, "ETOOMANYREFS"),
    ] {
        assert_eq!(errno.name(), Some(name));
    }
    assert_eq!(Errno(0).name(), None);
    assert_eq!(Errno(-1).name(), None);
    let names: Vec<_> = (0..4096).filter_map(|number| Errno(number).name()).collect();
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(names.len(), unique.len());
}

#[test]
fn last_is_this_threads_errno() {
    // SAFETY: integers only; -1 is never open.
    assert_eq!(unsafe { libc::close(-1) }, -1);
    assert_eq!(Errno::last(), Errno::EBADF);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(Errno::EBADF.0));
}
