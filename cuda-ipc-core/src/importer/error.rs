//! Why an import failed: the step, the fact, the exporter's pid and the address.

use core::fmt;
use core::time::Duration;
use std::time::Instant;

use super::NotATableFile;
use super::broker_error::{BrokerError, PidfdRefusal};
use crate::import::Step;
use crate::sys::driver::DriverError;
use crate::table::{HeaderError, LookupError};

/// The moment at which a call gives up.
///
/// Checked between steps: a driver call that blocks is not interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// That much later than now; a duration beyond what the clock can say means about a century.
    pub fn after(duration: Duration) -> Self {
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);
        let now = Instant::now();
        Self(now.checked_add(duration).unwrap_or(now + CENTURY))
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }

    /// The moment itself.
    pub(super) const fn instant(&self) -> Instant {
        self.0
    }

    /// The one half of what is left from now.
    pub(super) fn half(&self) -> Self {
        Self(Instant::now() + self.remaining() / 2)
    }

    /// What is left; zero if it is over.
    pub fn remaining(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// A failed import. Everything is as it was before: fds, handles, address space, mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportError {
    /// Where it failed.
    pub step: ImportStep,
    /// What failed.
    pub kind: ImportErrorKind,
    /// The exporter's pid, as the key says.
    pub pid: u32,
    /// The address in the exporter that it failed for: of the chunk, or of the reservation before there is a chunk.
    pub address: u64,
    /// Bytes that stayed mapped at the caller's addresses because undoing failed too. 0 but for a broken driver.
    pub stuck_bytes: u64,
}

/// The steps of an import, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportStep {
    /// Judging from the key alone whether its exporter can be reached.
    Key,
    /// Opening a pidfd.
    OpenPeer,
    /// Fetching the table's fd.
    FetchTable,
    /// Checking and mapping the table.
    OpenTable,
    /// Asking the exporter's broker for the table.
    AskBroker,
    /// Looking chunks up.
    Lookup,
    /// Reserving address space.
    Reserve,
    /// One of a chunk's steps.
    Chunk(Step),
}

/// The fact behind an [`ImportError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportErrorKind {
    /// The key was made on another machine, or before a reboot.
    OtherHost,
    /// The key's pid means nothing here: it counts in another PID namespace.
    OtherPidNamespace {
        /// Inode of the exporter's.
        theirs: u32,
        /// Inode of this process's.
        ours: u32,
    },
    /// The key was made by this very process: use the pointer itself.
    OwnProcess,
    /// A key of a kind that this call does not take.
    KeyKind,
    /// The range is not inside what the key names.
    OutsideReservation,
    /// A pidfd call failed.
    Pidfd(pidfd_sys::Error),
    /// The exporter has exited.
    ExporterGone,
    /// The fd number of the key is not a table (any more).
    NotATable(NotATableFile),
    /// It is a table, but not the one of the key.
    Table(HeaderError),
    /// A chunk could not be found.
    Lookup(LookupError),
    /// The chunk was retired while it was being imported.
    Retired,
    /// The exporter holds no fd for the chunk; it has to be asked for one.
    NoFd,
    /// The exporter's broker gave nothing.
    Broker(BrokerError),
    /// The exporter can be reached neither by pidfd nor by its broker.
    NoRoute {
        /// Why not by pidfd.
        pidfd: PidfdRefusal,
        /// Why not by the broker.
        broker: BrokerError,
    },
    /// A driver call failed.
    Driver(DriverError),
    /// The GPU that holds the memory is not visible to this process (CUDA_VISIBLE_DEVICES, a container's devices).
    DeviceNotVisible {
        /// Its UUID.
        uuid: [u8; 16],
    },
    /// This process still has an import of what the exporter offered in its place before, and it is not known to be the same memory.
    StillInUse,
    /// What was mapped is shorter than what the exporter says, and its rest would be other memory of this process.
    TooShort {
        /// Bytes that are there.
        mapped: u64,
    },
    /// The device that asks cannot reach memory of the one that holds it.
    NoPeerAccess {
        /// Ordinal here of the one that asks.
        device: i32,
        /// Ordinal here of the one that holds the memory.
        home: i32,
    },
    /// The deadline was over before the step.
    DeadlineOver,
    /// The object was made by a process that has forked since.
    Forked,
    /// A system call of this process failed.
    Syscall(crate::sys::SyscallError),
}

impl ImportError {
    /// Whether the same call may succeed later without anybody changing a setting.
    pub const fn retryable(&self) -> bool {
        use pidfd_sys::Errno;
        match self.kind {
            ImportErrorKind::Pidfd(error) => matches!(error.errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM),
            ImportErrorKind::Syscall(error) => matches!(Errno(error.errno), Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM),
            ImportErrorKind::Broker(error) | ImportErrorKind::NoRoute { broker: error, .. } => error.retryable(),
            ImportErrorKind::Lookup(LookupError::Unsettled)
            | ImportErrorKind::Retired
            | ImportErrorKind::StillInUse
            | ImportErrorKind::DeadlineOver => true,
            _ => false,
        }
    }

    /// Whether the pidfd route is closed but another way to the same exporter may be open: a refusal, another PID namespace, a kernel without the calls,
    /// or an exporter that holds no fd.
    pub const fn other_route_may_work(&self) -> bool {
        self.kind.other_route_may_work()
    }
}

impl ImportErrorKind {
    /// What a failed import by the driver means, of memory of the GPU with this UUID.
    pub(super) const fn of_import(error: DriverError, uuid: [u8; 16]) -> Self {
        const INVALID_DEVICE: u32 = 101;
        if error.code == INVALID_DEVICE { Self::DeviceNotVisible { uuid } } else { Self::Driver(error) }
    }

    pub(super) const fn other_route_may_work(&self) -> bool {
        use pidfd_sys::Errno;
        match self {
            Self::OtherPidNamespace { .. } | Self::NoFd => true,
            Self::Pidfd(error) => matches!(error.errno, Errno::EPERM | Errno::ENOSYS | Errno::EACCES | Errno::ESRCH),
            _ => false,
        }
    }
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "import of {:#x} from process {} failed at {}: {}", self.address, self.pid, self.step, self.kind)?;
        if self.stuck_bytes != 0 {
            write!(f, " ({} bytes could not be unmapped again)", self.stuck_bytes)?;
        }
        Ok(())
    }
}

impl core::error::Error for ImportError {}

impl fmt::Display for ImportStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "reading the key",
            Self::OpenPeer => "opening the exporter",
            Self::FetchTable => "fetching the export table",
            Self::OpenTable => "opening the export table",
            Self::AskBroker => "asking the exporter's broker",
            Self::Lookup => "looking the chunks up",
            Self::Reserve => "reserving address space",
            Self::Chunk(step) => return write!(f, "the chunk's {step}"),
        })
    }
}

impl fmt::Display for ImportErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OtherHost => f.write_str("the key was made on another machine or before a reboot"),
            Self::OtherPidNamespace { theirs, ours } => write!(f, "the exporter is in PID namespace {theirs}, this process in {ours}"),
            Self::OwnProcess => f.write_str("the key was made by this process"),
            Self::KeyKind => f.write_str("the key is of another kind"),
            Self::OutsideReservation => f.write_str("the range is not inside what the key names"),
            Self::Pidfd(error) => error.fmt(f),
            Self::ExporterGone => f.write_str("the exporter has exited"),
            Self::NotATable(error) => error.fmt(f),
            Self::Table(error) => error.fmt(f),
            Self::Lookup(error) => error.fmt(f),
            Self::Retired => f.write_str("the exporter retired the chunk meanwhile"),
            Self::NoFd => f.write_str("the exporter holds no fd for the chunk"),
            Self::Broker(error) => write!(f, "by the exporter's broker: {error}"),
            Self::NoRoute { pidfd, broker } => write!(f, "by pidfd: {pidfd}; by the exporter's broker: {broker}"),
            Self::Driver(error) => error.fmt(f),
            Self::DeviceNotVisible { uuid } => {
                f.write_str("its GPU ")?;
                uuid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str(" is not visible to this process")
            }
            Self::StillInUse => f.write_str("an import of what was there before is still in use"),
            Self::TooShort { mapped } => write!(f, "only {mapped:#x} bytes of it are there"),
            Self::NoPeerAccess { device, home } => write!(f, "device {device} cannot access memory of device {home}"),
            Self::DeadlineOver => f.write_str("the deadline was over"),
            Self::Forked => f.write_str("it was made by the parent process"),
            Self::Syscall(error) => error.fmt(f),
        }
    }
}
