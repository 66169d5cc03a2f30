//! pidfd_open(2): a file descriptor that names a process, immune to pid reuse from then on.
//!
//! # Safety
//! The system call takes two integers and touches no memory of ours. The other unsafe operation takes ownership of the number it returned.

#[cfg(feature = "std")]
use crate::Error;
#[cfg(feature = "std")]
use std::os::fd::{FromRawFd, OwnedFd};

pub(crate) mod raw {
    use crate::{Errno, Error, Step, numbers};

    /// Opens a pidfd for the process with number `pid` in the caller's PID namespace, as a plain number.
    ///
    /// The caller owns the result, which is close-on-exec. Errors and source: as the function of this name at the crate's root.
    pub fn pidfd_open(pid: u32) -> Result<i32, Error> {
        let pid = libc::c_long::from(pid.cast_signed());
        let flags: libc::c_long = 0;
        // SAFETY: pidfd_open reads two integers and no memory; the number is this architecture's (`numbers`), so no other call can be meant.
        let fd = unsafe { libc::syscall(numbers::PIDFD_OPEN, pid, flags) };
        match i32::try_from(fd) {
            Ok(fd) if fd >= 0 => Ok(fd),
            _ => Err(Step::PidfdOpen.failed(Errno::last())),
        }
    }
}

/// Opens a pidfd for the process with number `pid` in the caller's PID namespace.
///
/// The pidfd is close-on-exec and keeps naming the same process after the number is reused, so whoever learnt `pid` earlier checks the process's
/// identity after this call, not before. It needs no right over the process, and a zombie can be opened.
/// Errors: `ESRCH` if this namespace has no such process; `EINVAL` for 0 and numbers above `i32::MAX`; `ENOENT` (older kernels: `EINVAL`) for a
/// thread that does not lead its process; `EMFILE` and `ENFILE` when a descriptor table is full; `EPERM` from a seccomp filter only; `ENOSYS`
/// before Linux 5.3 and from sandboxes.
/// Source: pidfd_open(2).
#[cfg(feature = "std")]
pub fn pidfd_open(pid: u32) -> Result<OwnedFd, Error> {
    let fd = raw::pidfd_open(pid)?;
    // SAFETY: the kernel has just made this descriptor for us and nothing else in the process knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
