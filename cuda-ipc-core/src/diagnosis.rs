//! Which cause is behind a lost lane: from facts to one cause, without guessing.
//!
//! "Operation not permitted" has a dozen causes, each with another remedy. This module owns the judgement: [`Facts`] go in, the one [`Cause`] that they prove
//! comes out, or [`Cause::Unknown`] where they prove none. It makes no call; what collects facts is `importer::Witness` (feature `std`). What a cause is called,
//! its sentence and its remedy are in `diagnosis/cause.rs`, the judgement is in `diagnosis/find.rs`.
//!
//! Two rules hold the judgement honest. A fact that is not known proves nothing, so every fact has a way to say that. And a trial on the own process shows only
//! what a filter of system calls or an old kernel does: the kernel lets every process look into itself before it asks Yama or anybody else, so the own process
//! never stands for another one.

mod cause;
mod find;

use core::fmt;

pub use cause::{Cause, Remedy};
pub use find::find;

use crate::reason;

/// A cause, and the facts that it was found from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The cause.
    pub cause: Cause,
    /// What is known.
    pub facts: Facts,
}

impl Diagnosis {
    /// Judges `facts`.
    pub fn of(facts: Facts) -> Self {
        Self { cause: find(&facts), facts }
    }

    /// What to do about it.
    pub fn remedy(&self) -> Remedy {
        self.cause.remedy()
    }
}

/// The cause's sentence, and the facts where no cause was found.
impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)?;
        if self.cause == Cause::Unknown {
            write!(f, " ({})", self.facts)?;
        }
        Ok(())
    }
}

/// The two calls by which one process takes a file descriptor of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// pidfd_open(2).
    PidfdOpen,
    /// pidfd_getfd(2).
    PidfdGetfd,
}

impl Call {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PidfdOpen => "pidfd_open",
            Self::PidfdGetfd => "pidfd_getfd",
        }
    }

    /// The first kernel that has it.
    pub const fn since(self) -> KernelVersion {
        match self {
            Self::PidfdOpen => KernelVersion { major: 5, minor: 3 },
            Self::PidfdGetfd => KernelVersion { major: 5, minor: 6 },
        }
    }
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// A call towards the exporter failed with this errno.
    Call(Call, i32),
    /// No call was made, because the key's pid counts in another PID namespace.
    OtherPidNamespace,
    /// The exporter has ended: its pidfd was readable, its connection was closed, or no such process was in its own namespace.
    Ended,
    /// The process with the key's pid has no table of the key's nonce: it is not the exporter, or no longer.
    NotTheExporter,
    /// The exporter's broker gave nothing, and nothing else was tried.
    Broker(BrokerFailure),
    /// A call of this process's own failed with this errno.
    OwnCall(i32),
    /// A driver call of the import failed with this `CUresult`.
    Driver(u32),
    /// The exporter could not share the memory.
    Export(reason::Cause),
    /// Something else, which no setting of the machine explains.
    Other,
}

/// What an exporter's broker did not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BrokerFailure {
    /// Nobody listens under the exporter's names.
    NoListener {
        /// Whether a socket directory was looked into, too.
        socket_dir: bool,
    },
    /// The other side belongs to another user, or does not serve this one.
    OtherUser,
    /// The user of one side does not exist in the user namespace of the other.
    UnmappedUser,
    /// A side is out of file descriptors, with this errno.
    OutOfFiles(i32),
    /// Something else.
    Other,
}

/// How a harmless form of the failed call went on some process. Nothing is fetched: the fd number that is asked for is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// Not tried, or it could not be.
    NotDone,
    /// The kernel would have done it.
    Works,
    /// The errno.
    Fails(i32),
}

/// Major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    /// The first number.
    pub major: u16,
    /// The second.
    pub minor: u16,
}

impl KernelVersion {
    /// Reads it from the beginning of a release such as `6.1.0-18-amd64`.
    pub fn parse(release: &str) -> Option<Self> {
        let mut parts = release.trim().split(['.', '-', '+', '~']);
        Some(Self { major: parts.next()?.parse().ok()?, minor: parts.next()?.parse().ok()? })
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Whether Yama, a security module of the kernel, restricts who may look into whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yama {
    /// The kernel has none.
    Absent,
    /// `kernel.yama.ptrace_scope`.
    Scope(u8),
}

/// What is known of the process that has the exporter's pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Nothing.
    Unknown,
    /// It lives.
    Lives,
    /// It lives, but its first thread has exited.
    LivesWithoutFirstThread,
    /// A readable pidfd, or a closed connection, says that it has exited; or every thread of it is on its way out, from which none returns.
    Exited,
}

/// What is known of an exporter. `None`: nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFacts {
    /// Whether it lives.
    pub life: Life,
    /// Whether its real, effective and saved user and group are this process's real ones.
    pub same_ids: Option<bool>,
    /// Whether it is dumpable: prctl(2), `PR_SET_DUMPABLE`.
    pub dumpable: Option<bool>,
    /// Whether this process has each capability that it has.
    pub capabilities_covered: Option<bool>,
    /// Whether the kernel lets this process read what only a tracer may read (its namespaces): the same questions as for fetching an fd, but Yama's.
    pub readable: Option<bool>,
    /// Whether it is in this process's PID namespace.
    pub same_pid_namespace: Option<bool>,
    /// Whether it is in this process's user namespace.
    pub same_user_namespace: Option<bool>,
}

impl PeerFacts {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self {
        life: Life::Unknown,
        same_ids: None,
        dumpable: None,
        capabilities_covered: None,
        readable: None,
        same_pid_namespace: None,
        same_user_namespace: None,
    };
}

/// All that a judgement rests on. `None`: not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// What went wrong.
    pub failure: Failure,
    /// What the exporter's broker did not do either, if it was asked.
    pub broker: Option<BrokerFailure>,
    /// The running kernel.
    pub kernel: Option<KernelVersion>,
    /// Whether a filter of system calls is in force on this process (seccomp(2)).
    pub filtered: Option<bool>,
    /// Yama's setting.
    pub yama: Option<Yama>,
    /// The failed call on this process itself: shows filters and missing calls, and never Yama.
    pub on_self: Trial,
    /// The failed call on a process that is neither this one nor a descendant of it: its parent.
    pub on_neighbour: Trial,
    /// Whether this process has CAP_SYS_PTRACE in its user namespace.
    pub may_trace: Option<bool>,
    /// The exporter.
    pub peer: PeerFacts,
    /// The soft RLIMIT_NOFILE of this process.
    pub open_files_limit: Option<u64>,
    /// Whether the exporter's GPU is one of this process's.
    pub gpu_visible: Option<bool>,
}

impl Facts {
    /// A failure of which nothing else is known.
    pub const fn of(failure: Failure) -> Self {
        Self {
            failure,
            broker: None,
            kernel: None,
            filtered: None,
            yama: None,
            on_self: Trial::NotDone,
            on_neighbour: Trial::NotDone,
            may_trace: None,
            peer: PeerFacts::UNKNOWN,
            open_files_limit: None,
            gpu_visible: None,
        }
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.failure {
            Failure::Call(call, errno) => write!(f, "{}: errno {errno}", call.name())?,
            Failure::OwnCall(errno) => write!(f, "a call of this process: errno {errno}")?,
            Failure::Driver(code) => write!(f, "the driver: CUresult {code}")?,
            Failure::Export(cause) => write!(f, "the exporter: {cause}")?,
            Failure::OtherPidNamespace => f.write_str("another PID namespace")?,
            Failure::Ended => f.write_str("the exporter has ended")?,
            Failure::NotTheExporter => f.write_str("the process with its pid is not the exporter")?,
            Failure::Broker(_) => f.write_str("the broker gave nothing")?,
            Failure::Other => f.write_str("no call failed")?,
        }
        if let Some(broker) = self.broker {
            f.write_str(match broker {
                BrokerFailure::NoListener { .. } => "; its broker: nobody listens",
                BrokerFailure::OtherUser => "; its broker: another user",
                BrokerFailure::UnmappedUser => "; its broker: a user of another namespace",
                BrokerFailure::OutOfFiles(_) => "; its broker: out of file descriptors",
                BrokerFailure::Other => "; its broker: gave nothing",
            })?;
        }
        match self.kernel {
            Some(kernel) => write!(f, "; kernel {kernel}")?,
            None => f.write_str("; kernel unknown")?,
        }
        known(f, "system call filter", self.filtered)?;
        match self.yama {
            Some(Yama::Absent) => f.write_str("; no Yama")?,
            Some(Yama::Scope(scope)) => write!(f, "; Yama ptrace_scope {scope}")?,
            None => f.write_str("; Yama unknown")?,
        }
        trial(f, "the call on itself", self.on_self)?;
        trial(f, "on its parent", self.on_neighbour)?;
        known(f, "CAP_SYS_PTRACE", self.may_trace)?;
        let peer = &self.peer;
        f.write_str(match peer.life {
            Life::Unknown => "; exporter: life unknown",
            Life::Lives => "; exporter: lives",
            Life::LivesWithoutFirstThread => "; exporter: lives, its first thread does not",
            Life::Exited => "; exporter: has exited",
        })?;
        known(f, "same user and group", peer.same_ids)?;
        known(f, "dumpable", peer.dumpable)?;
        known(f, "capabilities covered", peer.capabilities_covered)?;
        known(f, "readable", peer.readable)?;
        known(f, "same PID namespace", peer.same_pid_namespace)?;
        known(f, "same user namespace", peer.same_user_namespace)?;
        if let Some(visible) = self.gpu_visible {
            known(f, "its GPU is visible", Some(visible))?;
        }
        Ok(())
    }
}

fn known(f: &mut fmt::Formatter<'_>, what: &str, whether: Option<bool>) -> fmt::Result {
    let answer = whether.map_or("unknown", |yes| if yes { "yes" } else { "no" });
    write!(f, "; {what}: {answer}")
}

fn trial(f: &mut fmt::Formatter<'_>, what: &str, trial: Trial) -> fmt::Result {
    match trial {
        Trial::NotDone => write!(f, "; {what}: not tried"),
        Trial::Works => write!(f, "; {what}: works"),
        Trial::Fails(errno) => write!(f, "; {what}: errno {errno}"),
    }
}
