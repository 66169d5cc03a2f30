//! Why memory cannot be shared, as facts.
//!
//! A refusal is a value and never an error of the caller's: whoever packs an rkey goes on with its other lanes. Text names the fact; what to do about it is
//! the diagnosis' business.

use core::fmt;

/// Why an exporter offers no handle for a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoIpc {
    /// The fact.
    pub cause: Cause,
    /// The address it was found at, in this process.
    pub address: u64,
}

/// The fact behind a [`NoIpc`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The range is empty or wraps around.
    EmptyRange,
    /// Not memory that the CUDA driver knows: pageable host memory, or memory that was freed.
    NotDeviceMemory,
    /// There was memory of this exporter's at the address, and it is gone.
    Freed,
    /// Host memory that the driver knows: pinned, registered, or placed on a host's NUMA node.
    HostMemory,
    /// Managed memory has no handle.
    Managed,
    /// Memory of `cuMemAlloc` in the middle of other memory: the legacy handle carries it by itself, but not both together.
    Legacy,
    /// The allocator asked for no handle type when it created the memory, so no handle exists.
    NoHandleType,
    /// The allocator asked for a fabric handle only. Such handles work here: a transport with a lane for them can take it.
    FabricOnly,
    /// The allocator asked for a fabric handle only, and the driver refuses these (no IMEX channel).
    FabricRefused {
        /// The `CUresult` of the trial.
        code: u32,
    },
    /// The driver exports no POSIX fds on this device, although the allocator asked for them.
    PosixRefused {
        /// The `CUresult` of the trial.
        code: u32,
    },
    /// Memory of the device's default pool, which has no handle type.
    DefaultPool,
    /// Memory of a pool that was created without a POSIX_FD handle type.
    PoolWithoutHandle,
    /// Memory of a POSIX_FD pool in the middle of other memory: the pool's fd carries it by itself, but not both together.
    PosixPool,
    /// Nothing is mapped here, inside a larger range.
    Hole,
    /// The range leaves the reservation it begins in.
    LeavesReservation {
        /// First address of the reservation.
        base: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The range leaves the allocation it begins in.
    LeavesAllocation {
        /// First address of the allocation.
        base: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The range lies on more than one GPU.
    SeveralDevices,
    /// A chunk that is not a whole number of 2 MiB granules.
    Unaligned {
        /// Length of the chunk in bytes.
        len: u64,
    },
    /// The memory was freed or replaced during the export, again and again.
    KeptChanging,
    /// The export table has no free entry or no index leaf.
    TableFull,
    /// The process has no file descriptor left.
    TooManyFiles {
        /// The soft RLIMIT_NOFILE.
        limit: u64,
    },
    /// The table could not be made.
    Table {
        /// The system call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
    /// A driver call failed.
    Driver {
        /// The driver function.
        call: &'static str,
        /// Its `CUresult`.
        code: u32,
    },
    /// The exporter was made by a process that has forked since; a child makes its own.
    Forked,
}

impl Cause {
    /// A short name that does not change: for counting and for machines.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::EmptyRange => "empty-range",
            Self::NotDeviceMemory => "not-device-memory",
            Self::Freed => "freed",
            Self::HostMemory => "host-memory",
            Self::Managed => "managed",
            Self::Legacy => "legacy",
            Self::NoHandleType => "no-handle-type",
            Self::FabricOnly => "fabric-only",
            Self::FabricRefused { .. } => "fabric-refused",
            Self::PosixRefused { .. } => "posix-refused",
            Self::DefaultPool => "default-pool",
            Self::PoolWithoutHandle => "pool-without-handle",
            Self::PosixPool => "posix-pool",
            Self::Hole => "hole",
            Self::LeavesReservation { .. } => "leaves-reservation",
            Self::LeavesAllocation { .. } => "leaves-allocation",
            Self::SeveralDevices => "several-devices",
            Self::Unaligned { .. } => "unaligned",
            Self::KeptChanging => "kept-changing",
            Self::TableFull => "table-full",
            Self::TooManyFiles { .. } => "too-many-files",
            Self::Table { .. } => "table",
            Self::Driver { .. } => "driver",
            Self::Forked => "forked",
        }
    }
}

impl fmt::Display for NoIpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory at {:#x} cannot be shared: {}", self.address, self.cause)
    }
}

impl core::error::Error for NoIpc {}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::EmptyRange => f.write_str("the range is empty or wraps around"),
            Self::NotDeviceMemory => f.write_str("the CUDA driver knows no memory there (it is host memory, or was freed)"),
            Self::Freed => f.write_str("it has been freed since it was exported before"),
            Self::HostMemory => f.write_str("it is host memory"),
            Self::Managed => f.write_str("it is managed memory"),
            Self::Legacy => f.write_str("it is cuMemAlloc memory, which goes by a legacy handle, in the middle of other memory"),
            Self::NoHandleType => f.write_str("its allocator asked for no handle type"),
            Self::FabricOnly => f.write_str("its allocator asked for a fabric handle only"),
            Self::FabricRefused { code } => {
                write!(f, "its allocator asked for a fabric handle only, and the driver refuses fabric handles (CUresult {code})")
            }
            Self::PosixRefused { code } => write!(f, "the driver exports no POSIX fds on its device (CUresult {code})"),
            Self::DefaultPool => f.write_str("it belongs to its device's default pool, which has no handle type"),
            Self::PoolWithoutHandle => f.write_str("its pool was created without the POSIX_FD handle type"),
            Self::PosixPool => f.write_str("it belongs to a POSIX_FD pool, which goes by the pool's handle, in the middle of other memory"),
            Self::Hole => f.write_str("the range has a hole there"),
            Self::LeavesReservation { base, len } => write!(f, "the range leaves its reservation {base:#x}+{len:#x}"),
            Self::LeavesAllocation { base, len } => write!(f, "the range leaves its allocation {base:#x}+{len:#x}"),
            Self::SeveralDevices => f.write_str("the range lies on more than one GPU"),
            Self::Unaligned { len } => write!(f, "its chunk of {len:#x} bytes is not a whole number of 2 MiB granules"),
            Self::KeptChanging => f.write_str("it kept being freed and replaced during the export"),
            Self::TableFull => f.write_str("the export table is full"),
            Self::TooManyFiles { limit } => write!(f, "the process is out of file descriptors (RLIMIT_NOFILE {limit})"),
            Self::Table { call, errno } => write!(f, "no export table: {call} failed with errno {errno}"),
            Self::Driver { call, code } => write!(f, "{call} failed with CUresult {code}"),
            Self::Forked => f.write_str("this exporter belongs to the parent process"),
        }
    }
}
