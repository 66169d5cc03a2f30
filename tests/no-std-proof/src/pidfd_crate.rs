//! pidfd-sys without `std`: the calls on plain numbers.

use pidfd_sys::{Errno, raw};

use crate::text::Text;

/// Calls that fail in every kernel and sandbox, by numbers that are no process and no descriptor.
pub(crate) fn calls() -> bool {
    raw::pidfd_open(u32::MAX).is_err() && raw::pidfd_getfd(-1, -1).is_err() && raw::has_exited(-1).is_err()
}

pub(crate) fn texts() -> bool {
    let Err(error) = raw::has_exited(-1) else { return false };
    !Text::of(error).is_empty() && !Text::of(Errno::EBADF).is_empty()
}
