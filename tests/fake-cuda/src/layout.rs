//! The bytes that processes share: one state file per directory, mapped by every process of the fake machine.
//!
//! All types are plain `repr(C)` data for which zero bytes are a valid, empty value, because a fresh file is all zeros. [`Header`] holds what is
//! touched without the lock (atomics) and the lock itself; [`Body`] belongs to whoever holds the lock. What the fields mean to each other is
//! `chunks.rs` and `registry.rs`.

use core::cell::UnsafeCell;
use core::sync::atomic::AtomicU64;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"fakecuda");
/// Changes with every change of this file.
pub(crate) const LAYOUT: u64 = 2;
pub(crate) const MAX_PROCESSES: usize = 256;
pub(crate) const MAX_DEVICES: usize = 16;
/// Chunks per device.
pub(crate) const MAX_CHUNKS: usize = 1 << 18;
/// Size and alignment of physical memory, and the allocation granularity the driver reports.
pub(crate) const GRANULE: u64 = 2 << 20;
/// Granules in an arena at most: 4 TiB.
pub(crate) const MAX_GRANULES: usize = 1 << 21;
/// An arena is this many times as large as the device's memory, so that fragmentation never makes an allocation fail that a GPU would serve.
pub(crate) const ARENA_FACTOR: u64 = 4;
/// End of a list of chunk slots.
pub(crate) const NIL: u32 = 0;

#[repr(C, align(4096))]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) layout: AtomicU64,
    /// Source of chunk generations; never goes back, so that stale handle bytes never name a new chunk.
    pub(crate) generation: AtomicU64,
    /// Driver calls made by forked children of any process of this directory.
    pub(crate) calls_after_fork: AtomicU64,
    /// Process-shared and robust.
    pub(crate) mutex: UnsafeCell<libc::pthread_mutex_t>,
    pub(crate) counters: [Counters; MAX_PROCESSES],
    pub(crate) body: UnsafeCell<Body>,
}

/// What one process has, for itself and for whoever watches. Cleared when the process is found dead.
#[repr(C)]
pub(crate) struct Counters {
    pub(crate) handles: [AtomicU64; MAX_DEVICES],
    pub(crate) mappings: [AtomicU64; MAX_DEVICES],
    pub(crate) mapped_bytes: [AtomicU64; MAX_DEVICES],
    pub(crate) reservations: AtomicU64,
    pub(crate) reserved_bytes: AtomicU64,
    pub(crate) exports_made: AtomicU64,
    pub(crate) imports_made: AtomicU64,
    pub(crate) driver_calls: AtomicU64,
    pub(crate) calls_after_fork: AtomicU64,
    pub(crate) copies: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) copies_into_dead_mappings: AtomicU64,
    pub(crate) internal_errors: AtomicU64,
    pub(crate) pools: AtomicU64,
    pub(crate) primary_retains: AtomicU64,
}

#[repr(C, align(4096))]
pub(crate) struct Body {
    /// Bytes per device.
    pub(crate) memory: u64,
    /// Physical devices.
    pub(crate) devices: u32,
    pub(crate) processes: [Process; MAX_PROCESSES],
    pub(crate) gpus: [Gpu; MAX_DEVICES],
}

#[repr(C)]
pub(crate) struct Process {
    /// 1 from attaching until the process is found dead.
    pub(crate) used: u32,
    /// For people who look at the file; never used to decide anything.
    pub(crate) pid: u32,
}

#[repr(C)]
pub(crate) struct Gpu {
    pub(crate) used_bytes: u64,
    /// Slots up to this one have been used.
    pub(crate) high_water: u32,
    /// List of free slots below the high-water mark.
    pub(crate) free: u32,
    /// List of chunks that have been exported and that no process refers to: alive only while an exported fd is open.
    pub(crate) orphans: u32,
    /// Where the search for free granules starts.
    pub(crate) cursor: u32,
    pub(crate) chunks: [Chunk; MAX_CHUNKS],
    /// One bit a granule, set where in use.
    pub(crate) granules: [u64; MAX_GRANULES / 64],
}

/// One physical allocation, or (without granules) a memory pool.
#[repr(C)]
pub(crate) struct Chunk {
    /// [`ChunkKind`] as a number; 0 is free.
    pub(crate) kind: u16,
    /// [`EXPORTED`], [`ORPHAN`].
    pub(crate) flags: u16,
    /// Handle types asked for at creation.
    pub(crate) handle_types: u32,
    pub(crate) generation: u64,
    pub(crate) granule: u32,
    pub(crate) granules: u32,
    /// Bytes asked for.
    pub(crate) bytes: u64,
    /// Next slot of the list this slot is in.
    pub(crate) next: u32,
    pub(crate) unused: u32,
    /// One bit per process that has a handle or a mapping.
    pub(crate) holders: [u64; MAX_PROCESSES / 64],
}

/// An fd of this chunk has been given out at some time.
pub(crate) const EXPORTED: u16 = 1;
/// The chunk is in the orphan list (it may have found a holder again).
pub(crate) const ORPHAN: u16 = 2;

/// What a chunk was made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum ChunkKind {
    /// `cuMemCreate`.
    Vmm = 1,
    /// `cuMemAlloc`.
    Plain = 2,
    /// A memory pool: no memory of its own.
    Pool = 3,
    /// An allocation from a pool.
    Pooled = 4,
}
