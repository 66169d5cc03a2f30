//! pidfd_getfd(2): a duplicate of another process's file descriptor.
//!
//! # Safety
//! The system call takes three integers and touches no memory of ours. The other unsafe operation takes ownership of the number it returned.

#[cfg(feature = "std")]
use crate::Error;
#[cfg(feature = "std")]
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub(crate) mod raw {
    use crate::{Errno, Error, Step, numbers};

    /// Duplicates descriptor `target_fd` of the process that `pidfd` names, as a plain number.
    ///
    /// The caller owns the result, which is close-on-exec. Errors and source: as the function of this name at the crate's root.
    pub fn pidfd_getfd(pidfd: i32, target_fd: i32) -> Result<i32, Error> {
        let (pidfd, target_fd) = (libc::c_long::from(pidfd), libc::c_long::from(target_fd));
        let flags: libc::c_long = 0;
        // SAFETY: pidfd_getfd reads three integers and no memory; the number is this architecture's (`numbers`), so no other call can be meant.
        let fd = unsafe { libc::syscall(numbers::PIDFD_GETFD, pidfd, target_fd, flags) };
        match i32::try_from(fd) {
            Ok(fd) if fd >= 0 => Ok(fd),
            _ => Err(Step::PidfdGetfd.failed(Errno::last())),
        }
    }
}

/// Duplicates descriptor `target_fd` of the process that `pidfd` names into the calling process.
///
/// The new descriptor is close-on-exec and shares the open file description with the target, as after dup(2): file offset and status flags are
/// common to both, and the file stays open until both have closed it. The target is not told. It may close `target_fd` and reuse the number at
/// any moment, so a caller verifies what it got before use.
/// Errors: `EPERM` if the caller may not ptrace the target (ids, dumpable, capabilities, Yama) or a seccomp filter refuses; `ESRCH` if the target
/// has exited, or its first thread has, while others may still run (ask [`has_exited`](crate::has_exited)); `EBADF` if `target_fd` is not open
/// there, `pidfd` is not a pidfd, or, on older kernels, the target is exiting; `EMFILE` and `ENFILE` when a descriptor table is full; `ENOSYS`
/// before Linux 5.6 and from sandboxes.
/// Source: pidfd_getfd(2), ptrace(2) ("Ptrace access mode checking").
#[cfg(feature = "std")]
pub fn pidfd_getfd(pidfd: BorrowedFd<'_>, target_fd: i32) -> Result<OwnedFd, Error> {
    let fd = raw::pidfd_getfd(pidfd.as_raw_fd(), target_fd)?;
    // SAFETY: the kernel has just made this descriptor for us and nothing else in the process knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
