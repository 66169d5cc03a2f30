//! poll(2) on a pidfd: whether the process is gone.
//!
//! # Safety
//! The one unsafe operation is poll on an array of one entry that lives on this stack frame.

#[cfg(feature = "std")]
use crate::Error;
#[cfg(feature = "std")]
use std::os::fd::{AsRawFd, BorrowedFd};

pub(crate) mod raw {
    use crate::{Errno, Error, Step};

    /// Tells whether every thread of the process that `pidfd` names has exited, from a plain number.
    ///
    /// Errors and source: as the function of this name at the crate's root.
    pub fn has_exited(pidfd: i32) -> Result<bool, Error> {
        // poll skips negative numbers without a word.
        if pidfd < 0 {
            return Err(Step::PidfdPoll.failed(Errno::EBADF));
        }
        loop {
            let mut entry = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
            // SAFETY: `entry` is one initialised pollfd, the count is one, and nothing else refers to it; poll writes only `revents`.
            let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
            if ready >= 0 {
                return if entry.revents & libc::POLLNVAL == 0 {
                    Ok(entry.revents & libc::POLLIN != 0)
                } else {
                    Err(Step::PidfdPoll.failed(Errno::EBADF))
                };
            }
            let errno = Errno::last();
            if errno != Errno::EINTR {
                return Err(Step::PidfdPoll.failed(errno));
            }
        }
    }
}

/// Tells whether every thread of the process that `pidfd` names has exited; does not wait.
///
/// True for a zombie and after it was reaped. False while any thread runs, also when the first thread has exited and
/// [`pidfd_getfd`](crate::pidfd_getfd) therefore answers `ESRCH`. A descriptor of another kind is not noticed: the answer is then whether it has
/// input. Interrupted calls are repeated.
/// Errors: `EBADF` if the number is not open; `EINVAL` where the soft limit on descriptors is 0; `ENOMEM`.
/// Source: poll(2), pidfd_open(2).
#[cfg(feature = "std")]
pub fn has_exited(pidfd: BorrowedFd<'_>) -> Result<bool, Error> {
    raw::has_exited(pidfd.as_raw_fd())
}
