//! Whose processes may talk with this one over a socket.

use crate::sys::SyscallError;
use crate::sys::socket::Socket;

/// What the kernel shows for a user that does not exist in this user namespace, where nobody has changed it.
const OVERFLOW_UID: u32 = 65_534;

/// The users that this process serves, or lets itself be served by.
#[derive(Clone, Debug)]
pub(crate) struct Users {
    own: u32,
    listed: Vec<u32>,
    overflow: u32,
}

/// Why somebody is not one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stranger {
    /// Another user.
    Uid(u32),
    /// A user of another user namespace, who looks like this uid here and may be anyone.
    Unmapped(u32),
}

impl Users {
    /// This process's own user and these.
    pub(crate) fn new(listed: &[u32]) -> Self {
        let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok().and_then(|text| text.trim().parse().ok());
        Self { own: rustix::process::geteuid().as_raw(), listed: listed.to_vec(), overflow: overflow.unwrap_or(OVERFLOW_UID) }
    }

    /// Whether users other than this process's own are among them.
    pub(crate) fn has_others(&self) -> bool {
        self.listed.iter().any(|&uid| uid != self.own)
    }

    /// Whether the process at the other end belongs to one of them.
    ///
    /// The overflow uid never does, not even where this process has it: who is unmapped looks the same. Errors: the system call's.
    pub(crate) fn judge(&self, socket: &Socket) -> Result<Result<(), Stranger>, SyscallError> {
        let uid = socket.peer()?.uid;
        Ok(if uid == self.overflow {
            Err(Stranger::Unmapped(uid))
        } else if uid == self.own || self.listed.contains(&uid) {
            Ok(())
        } else {
            Err(Stranger::Uid(uid))
        })
    }
}
