//! Why a lease or a window could not be had.

use core::fmt;

use cuda_ipc_core::importer::ImportError;
use cuda_ipc_core::sys::driver::DriverError;

/// A refused lease or window. The window is as usable as before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheError {
    /// The fact.
    pub kind: CacheErrorKind,
    /// Pid of the exporter, in its own PID namespace.
    pub pid: u32,
    /// The exporter's address that it is about.
    pub address: u64,
}

/// The fact behind a [`CacheError`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CacheErrorKind {
    /// The range is empty, or not inside the window's reservation.
    OutsideWindow,
    /// No live chunk at the address: freed, never exported, or part of another reservation.
    NoChunk,
    /// The chunk was replaced while somebody still leases what was there before.
    Busy,
    /// The deadline was over.
    DeadlineOver,
    /// The exporter frees and replaces chunks faster than they can be imported.
    KeptChanging,
    /// Too many leases on one chunk.
    TooManyLeases,
    /// The import failed.
    Import(ImportError),
    /// The exporter refused before, for this reason, and is not asked again yet.
    Refused(ImportError),
    /// The windows' address space would exceed its limit, and nothing idle can make room.
    AddressSpace {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes reserved now.
        reserved: u64,
        /// The limit.
        limit: u64,
    },
    /// A driver call outside an import failed.
    Driver(DriverError),
    /// A device ordinal beyond 63.
    Device(i32),
    /// The window was closed, because its peer has exited or was purged. A new key may open a new one.
    Closed,
    /// It is an allocation of a pool: the driver chooses its address anew with each import, so none can be held.
    NoReservation,
    /// The rkey says that the exporter has no lane for the memory.
    NoIpc,
    /// The cache belongs to the parent process.
    Forked,
}

impl CacheError {
    /// Whether the same call may succeed later without anybody changing a setting.
    pub const fn retryable(&self) -> bool {
        match self.kind {
            CacheErrorKind::Busy
            | CacheErrorKind::DeadlineOver
            | CacheErrorKind::KeptChanging
            | CacheErrorKind::TooManyLeases
            | CacheErrorKind::Refused(_)
            | CacheErrorKind::AddressSpace { .. } => true,
            CacheErrorKind::Import(error) => error.retryable(),
            _ => false,
        }
    }
}

impl CacheError {
    /// The failed import behind it, if it is one: now, or remembered from before.
    pub const fn import(&self) -> Option<&ImportError> {
        match &self.kind {
            CacheErrorKind::Import(error) | CacheErrorKind::Refused(error) => Some(error),
            _ => None,
        }
    }
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CacheErrorKind::Import(error) => error.fmt(f),
            kind => write!(f, "memory {:#x} of process {}: {kind}", self.address, self.pid),
        }
    }
}

impl fmt::Display for CacheErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OutsideWindow => f.write_str("the range is not inside the window's reservation"),
            Self::NoChunk => f.write_str("no live chunk there"),
            Self::Busy => f.write_str("replaced, while what was there before is still in use"),
            Self::DeadlineOver => f.write_str("the deadline was over"),
            Self::KeptChanging => f.write_str("it kept changing"),
            Self::TooManyLeases => f.write_str("too many leases on one chunk"),
            Self::Import(error) => error.fmt(f),
            Self::Refused(error) => write!(f, "not tried again yet after: {error}"),
            Self::AddressSpace { wanted, reserved, limit } => {
                write!(
                    f,
                    "a window of {wanted:#x} bytes does not fit: {reserved:#x} of {limit:#x} bytes of address space are reserved and in use"
                )
            }
            Self::Driver(error) => error.fmt(f),
            Self::Device(ordinal) => write!(f, "device ordinal {ordinal} is beyond 63"),
            Self::Closed => f.write_str("the window was closed: the process has exited or was purged"),
            Self::NoReservation => f.write_str("memory of a pool has no address that can be held"),
            Self::NoIpc => f.write_str("its exporter has no lane for it"),
            Self::Forked => f.write_str("the cache belongs to the parent process"),
        }
    }
}

impl core::error::Error for CacheError {}
