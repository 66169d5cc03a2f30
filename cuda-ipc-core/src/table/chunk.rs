//! One table entry as a value, and what an importer must check before it believes one.

use core::fmt;

use super::layout::{GRANULE, Layout};

/// Identity of a chunk's life in a table: an entry's slot and the generation it had. Never used twice by one table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ChunkId {
    /// Number of the entry.
    pub slot: u32,
    /// How often the entry had been published, this time included.
    pub generation: u64,
}

/// What kind of memory an entry offers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ChunkKind {
    /// One physical allocation of `cuMemCreate`, mapped at the entry's address.
    Vmm,
    /// A memory pool; it has an fd and no address.
    Pool,
    /// One allocation of the pool in another entry; it has an address and an export blob, and no fd.
    PoolAllocation {
        /// Slot of the pool's entry.
        pool: u32,
        /// The 64 bytes of `CUmemPoolPtrExportData`.
        blob: [u8; 64],
    },
}

/// What an entry says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Chunk {
    /// What is offered.
    pub kind: ChunkKind,
    /// Number of the fd in the exporter; `None` where the exporter holds none (past its fd budget, and pool allocations).
    pub fd: Option<u32>,
    /// First address in the exporter.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID` in the exporter.
    pub buffer_id: u64,
    /// UUID of the GPU that holds the memory.
    pub device: [u8; 16],
}

impl Chunk {
    /// First address after the chunk.
    pub const fn end(&self) -> u64 {
        self.address.saturating_add(self.len)
    }

    /// Checks what no honest writer gets wrong, so that nothing absurd reaches the driver.
    pub(super) fn validate(&self, layout: &Layout) -> Result<(), InvalidEntry> {
        if let Some(fd) = self.fd
            && i32::try_from(fd).is_err()
        {
            return Err(InvalidEntry::Fd(fd));
        }
        match self.kind {
            ChunkKind::Vmm => {
                let aligned = self.address.is_multiple_of(GRANULE) && self.len.is_multiple_of(GRANULE);
                let inside = self.address.checked_add(self.len).is_some_and(|end| end <= layout.address_limit());
                if self.address == 0 || self.len == 0 || !aligned || !inside {
                    return Err(InvalidEntry::Range { address: self.address, len: self.len });
                }
            }
            ChunkKind::Pool => {}
            ChunkKind::PoolAllocation { pool, .. } => {
                if pool >= layout.entries {
                    return Err(InvalidEntry::Pool(pool));
                }
                if self.address == 0 || self.len == 0 || self.address.checked_add(self.len).is_none() {
                    return Err(InvalidEntry::Range { address: self.address, len: self.len });
                }
            }
        }
        Ok(())
    }
}

/// What is wrong with an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InvalidEntry {
    /// Not a kind this version knows.
    Kind(u8),
    /// Not an fd number.
    Fd(u32),
    /// A range that is empty, unaligned, or beyond the address space.
    Range {
        /// First address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A pool slot the table does not have.
    Pool(u32),
}

impl fmt::Display for InvalidEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Kind(kind) => write!(f, "unknown kind {kind}"),
            Self::Fd(fd) => write!(f, "impossible fd number {fd}"),
            Self::Range { address, len } => write!(f, "impossible range {address:#x}+{len:#x}"),
            Self::Pool(slot) => write!(f, "impossible pool slot {slot}"),
        }
    }
}

/// Codes of the kinds in the table.
pub(super) mod code {
    pub(crate) const VMM: u8 = 1;
    pub(crate) const POOL: u8 = 2;
    pub(crate) const POOL_ALLOCATION: u8 = 3;
}

/// An fd field that says "no fd".
pub(super) const NO_FD: u32 = u32::MAX;
