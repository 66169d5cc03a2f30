//! The islands of unsafe code: each file wraps one foreign interface so that the rest of the crate is safe code.
//!
//! - [`driver`]: calls of the CUDA driver.
//! - `table_file.rs`: the memory files of export tables, mapped.
//! - `fork.rs`: process identity.
//! - `per_life.rs`: values that a forked child does not share.
//! - `process_fd.rs`: fds that a forked child must not keep.
//! - `socket.rs`: Unix sockets, and who is at their other end.
//! - `thread.rs`: threads of ours that take no signals.

pub mod driver;
pub(crate) mod fork;
pub(crate) mod per_life;
pub(crate) mod process_fd;
pub(crate) mod socket;
pub(crate) mod table_file;
pub(crate) mod thread;

pub use fork::{FirstLife, ProcessLife};
pub use thread::spawn as spawn_quiet;

/// A system call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SyscallError {
    /// The call.
    pub call: &'static str,
    /// Its errno.
    pub errno: i32,
}

impl core::fmt::Display for SyscallError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: {}", self.call, pidfd_sys::Errno(self.errno))
    }
}

impl core::error::Error for SyscallError {}

/// Names the call of an errno that rustix reports.
pub(crate) fn failed(call: &'static str) -> impl Fn(rustix::io::Errno) -> SyscallError {
    move |errno| SyscallError { call, errno: errno.raw_os_error() }
}

/// Random bytes, from getrandom(2).
pub(crate) fn random<const N: usize>() -> Result<[u8; N], SyscallError> {
    let mut bytes = [0; N];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(SyscallError { call: "getrandom", errno: error.raw_os_error().unwrap_or(0) }),
    }
}
