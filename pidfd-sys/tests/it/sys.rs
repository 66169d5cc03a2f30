//! Thin wrappers around the C library calls that the tests need; all may be used between fork and exec.
//!
//! # Safety
//! The calls take integers, or one pointer to a local that outlives the call.

use pidfd_sys::Errno;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};

/// Prints what is missing, past the test harness's capture.
pub(crate) fn skip(reason: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

/// Waits until `condition` holds, for at most ten seconds.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..10_000 {
        if condition() {
            return;
        }
        std::thread::sleep(core::time::Duration::from_millis(1));
    }
    panic!("never happened: {what}");
}

/// Turns a C return value into a result; call it right after the call.
pub(crate) fn check(rc: libc::c_long) -> Result<i32, Errno> {
    match i32::try_from(rc) {
        Ok(value) if value >= 0 => Ok(value),
        _ => Err(Errno::last()),
    }
}

pub(crate) fn is_root() -> bool {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Makes the calling process one of `uid` without any privilege. Does nothing where the caller is not root.
pub(crate) fn drop_to(uid: u32) -> Result<(), Errno> {
    if !is_root() {
        return Ok(());
    }
    let id = libc::c_long::from(uid);
    let none: libc::c_long = 0;
    // The raw calls: the C library's wrappers would signal other threads, which a forked child does not have.
    // SAFETY: a count of zero, so the null list is not read.
    check(unsafe { libc::syscall(libc::SYS_setgroups, none, none) })?;
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_setresgid, id, id, id) })?;
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_setresuid, id, id, id) })?;
    Ok(())
}

pub(crate) fn prctl(operation: libc::c_int, argument: libc::c_ulong) -> Result<i32, Errno> {
    let unused: libc::c_ulong = 0;
    // SAFETY: the tests use operations that take integers only.
    check(unsafe { libc::prctl(operation, argument, unused, unused, unused) }.into())
}

/// Sets the soft limit on descriptors.
pub(crate) fn limit_fds(limit: libc::rlim_t) -> Result<(), Errno> {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limits` is a local of the right type.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) }.into())?;
    limits.rlim_cur = limit;
    // SAFETY: as above.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) }.into())?;
    Ok(())
}

/// Makes a memfd that is not close-on-exec.
pub(crate) fn memfd() -> OwnedFd {
    // SAFETY: a string constant and no flags.
    let fd = check(unsafe { libc::memfd_create(c"pidfd-sys test".as_ptr(), 0) }.into()).expect("memfd_create");
    // SAFETY: just made, nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn is_cloexec(fd: i32) -> bool {
    // SAFETY: integers only.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFD) }.into()).expect("F_GETFD");
    flags & libc::FD_CLOEXEC != 0
}

pub(crate) fn close(fd: i32) {
    // SAFETY: the tests pass numbers that they own, or that no one uses.
    unsafe { libc::close(fd) };
}

pub(crate) fn seek(fd: i32, offset: libc::off_t, whence: libc::c_int) -> Result<i32, Errno> {
    // SAFETY: integers only.
    check(unsafe { libc::lseek(fd, offset, whence) })
}

/// The first line of Yama's scope file, or none where the kernel has no Yama.
pub(crate) fn yama_scope() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    Some(text.trim().parse().expect("ptrace_scope is a number"))
}
