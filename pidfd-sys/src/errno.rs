//! The kernel's error number as an open integer, with the names this project meets.
//!
//! # Safety
//! The one unsafe operation reads the calling thread's `errno` through the address the C library gives for it.

use core::fmt;

/// An error number of the running architecture, kept as the kernel gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident)*) => {
        #[allow(missing_docs)]
        impl Errno {
            $(pub const $name: Self = Self(libc::$name);)*
        }

        const NAMES: &[(i32, &str)] = &[$((libc::$name, stringify!($name))),*];
    };
}

errnos! {
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR EINVAL
    ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC ESPIPE EROFS EMLINK EPIPE EDOM ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY ELOOP
    ENODATA ETIME EPROTO EBADMSG EOVERFLOW EUSERS ENOTSOCK EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT EOPNOTSUPP
    EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN ENETUNREACH ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ESHUTDOWN ETOOMANYREFS
    ETIMEDOUT ECONNREFUSED EHOSTDOWN EHOSTUNREACH EALREADY EINPROGRESS ESTALE EREMOTEIO EDQUOT ECANCELED EOWNERDEAD ENOTRECOVERABLE
}

impl Errno {
    /// Returns the error number of this thread's last failed C library call.
    ///
    /// Meaningful only directly after a call that reported failure.
    /// Source: errno(3).
    #[must_use]
    pub fn last() -> Self {
        // SAFETY: no precondition; glibc, musl and uClibc return the address of the calling thread's variable.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the address is valid, aligned and initialised for this thread's whole life, and no other thread has it.
        Self(unsafe { *place })
    }

    /// Returns the symbolic name, or none for a number that is not in this crate's list.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(number, _)| *number == self.0).map(|(_, name)| *name)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "errno {}", self.0),
        }
    }
}
