//! Why an exporter's broker gave nothing, and why neither way to an exporter is open.

use core::fmt;

use pidfd_sys::Errno;

use super::error::{ImportError, ImportErrorKind};
use crate::broker::{MessageError, Refusal};
use crate::sys::SyscallError;

/// Why the broker could not be asked, or what it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BrokerError {
    /// Nobody listens under the exporter's names: it has none of its own (any more), is in another network namespace, or is gone.
    NoListener {
        /// The errno of connecting to its abstract name.
        abstract_name: i32,
        /// The errno of connecting to its file in the socket directory, if there is a directory.
        socket_dir: Option<i32>,
    },
    /// Who listens under the exporter's name belongs to another user, whom this process does not believe.
    OtherUser {
        /// The user, as this user namespace numbers it.
        uid: u32,
    },
    /// Who listens under the exporter's name belongs to a user who does not exist in this user namespace.
    UnmappedUser {
        /// What the kernel shows instead.
        uid: u32,
    },
    /// Who listens under the exporter's name does not know its nonce.
    Impostor,
    /// The exporter said no.
    Refused(Refusal),
    /// It closed the connection without an answer.
    Closed,
    /// What it answered is no message of this version.
    Message(MessageError),
    /// What it answered is no answer to what was asked.
    Unexpected,
    /// It did not give a chunk's fd until the deadline.
    Busy {
        /// What it lacked; 0 if it did not say.
        errno: u32,
    },
    /// Its driver did not export the chunk.
    Export {
        /// The `CUresult` there.
        code: u32,
    },
    /// A system call of this process failed.
    Syscall(SyscallError),
    /// The deadline was over.
    DeadlineOver,
}

impl BrokerError {
    /// Whether the same may succeed later without anybody changing a setting.
    pub const fn retryable(&self) -> bool {
        match self {
            Self::Closed | Self::Busy { .. } | Self::DeadlineOver => true,
            Self::Refused(refusal) => matches!(refusal, Refusal::TooMany(_) | Refusal::Resources(_)),
            Self::Syscall(error) => matches!(Errno(error.errno), Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM),
            _ => false,
        }
    }
}

impl fmt::Display for BrokerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoListener { abstract_name, socket_dir } => {
                write!(f, "nobody listens under its abstract socket name in this network namespace ({})", Errno(abstract_name))?;
                match socket_dir {
                    Some(errno) => write!(f, ", nor in the socket directory ({})", Errno(errno)),
                    None => f.write_str(", and no socket directory is set"),
                }
            }
            Self::OtherUser { uid } => write!(f, "its socket's name is held by a process of user {uid}"),
            Self::UnmappedUser { uid } => {
                write!(f, "its socket's name is held by a process whose user does not exist in this user namespace (seen as {uid})")
            }
            Self::Impostor => f.write_str("its socket's name is held by a process that does not know its nonce"),
            Self::Refused(refusal) => write!(f, "it refused: {refusal}"),
            Self::Closed => f.write_str("it closed the connection"),
            Self::Message(error) => error.fmt(f),
            Self::Unexpected => f.write_str("it answered something else than was asked"),
            Self::Busy { errno: 0 } => f.write_str("it gave no fd before the deadline"),
            Self::Busy { errno } => write!(f, "it had no fd to give before the deadline ({} there)", Errno(errno.cast_signed())),
            Self::Export { code } => write!(f, "its cuMemExportToShareableHandle failed with CUresult {code}"),
            Self::Syscall(error) => error.fmt(f),
            Self::DeadlineOver => f.write_str("no answer before the deadline"),
        }
    }
}

impl core::error::Error for BrokerError {}

/// Why a process could not be reached by pidfd, where another way may be open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PidfdRefusal {
    /// A call was refused, or does not exist.
    Call(pidfd_sys::Error),
    /// The pid counts in another PID namespace.
    OtherPidNamespace {
        /// Inode of the exporter's.
        theirs: u32,
        /// Inode of this process's.
        ours: u32,
    },
}

impl fmt::Display for PidfdRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::OtherPidNamespace { theirs, ours } => write!(f, "the exporter is in PID namespace {theirs}, this process in {ours}"),
        }
    }
}

impl PidfdRefusal {
    /// The refusal behind a failed import, if it is one.
    pub(super) const fn of(error: &ImportError) -> Option<Self> {
        match error.kind {
            _ if !error.other_route_may_work() => None,
            ImportErrorKind::OtherPidNamespace { theirs, ours } => Some(Self::OtherPidNamespace { theirs, ours }),
            ImportErrorKind::Pidfd(error) => Some(Self::Call(error)),
            _ => None,
        }
    }

    /// Whether the pid is nobody's, in the namespace in which it counts.
    pub(super) fn is_no_such_process(&self) -> bool {
        matches!(self, Self::Call(error) if error.step == pidfd_sys::Step::PidfdOpen && error.errno == Errno::ESRCH)
    }
}
