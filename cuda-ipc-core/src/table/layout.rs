//! Where each word of a table stands. All numbers are counts of 64-bit words unless a name says bytes.
//!
//! A table is a header, then the entries, then an index from address to entry: a root of leaf numbers and leaves of entry numbers, one leaf word for
//! each 2 MiB of address space. The file is fixed in size and sparse: only touched pages exist. Entries and leaves never move, and a leaf, once given to a
//! part of the address space, stays there, so a reader can follow numbers without a lock.

/// Bytes of address space that one leaf word stands for: the allocation granularity of device memory.
pub const GRANULE: u64 = 1 << 21;

/// Value of header word [`MAGIC`].
pub(super) const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"CIPCTABL");
/// Value of header word [`VERSION`].
pub(super) const VERSION_VALUE: u64 = 1;

// Header words. Epoch and births have cache lines of their own: readers poll the epoch in every lease.
pub(super) const MAGIC: usize = 0;
pub(super) const VERSION: usize = 1;
pub(super) const NONCE: usize = 2;
pub(super) const ENTRIES: usize = 3;
pub(super) const ROOT: usize = 4;
pub(super) const LEAVES: usize = 5;
pub(super) const LEAF_LEN: usize = 6;
/// Counts deaths. Its low half is the futex word that sweepers wait on.
pub(super) const EPOCH: usize = 8;
/// Counts publications.
pub(super) const BIRTHS: usize = 16;
/// Leaves given out so far; written and read by the writer only.
pub(super) const LEAVES_USED: usize = 24;
pub(super) const HEADER_LEN: usize = 32;

// Words of an entry.
pub(super) const STATE: usize = 0;
pub(super) const FD_AND_KIND: usize = 1;
pub(super) const ADDRESS: usize = 2;
pub(super) const LEN: usize = 3;
pub(super) const BUFFER_ID: usize = 4;
pub(super) const POOL: usize = 5;
pub(super) const DEVICE: usize = 6;
pub(super) const BLOB: usize = 8;
pub(super) const BLOB_LEN: usize = 8;
pub(super) const ENTRY_LEN: usize = 16;

/// The capacities of a table. Real tables have [`Layout::STANDARD`]; smaller ones are for models and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Entries.
    pub entries: u32,
    /// Words of the index's root.
    pub root: u32,
    /// Leaves of the index.
    pub leaves: u32,
    /// Words of one leaf.
    pub leaf_len: u32,
}

impl Layout {
    /// The layout of table version 1: a million chunks anywhere in a 52-bit address space, 4096 leaves of 32 GiB each.
    ///
    /// The leaves cover a whole 47-bit user address space at once, so reservations at ever new addresses cannot use them up on x86-64. The file is
    /// 641 MiB long and takes memory only for pages in use: one page for each 32 chunks and one for each GiB of addresses with chunks.
    pub const STANDARD: Self = Self { entries: 1 << 20, root: 1 << 17, leaves: 1 << 12, leaf_len: 1 << 14 };

    /// Length of the whole table.
    pub const fn words(&self) -> usize {
        self.leaf_start(self.leaves)
    }

    /// Length of the whole table in bytes.
    pub const fn bytes(&self) -> usize {
        self.words() * size_of::<u64>()
    }

    pub(super) const fn entry_start(&self, slot: u32) -> usize {
        HEADER_LEN + slot as usize * ENTRY_LEN
    }

    pub(super) const fn root_start(&self) -> usize {
        self.entry_start(self.entries)
    }

    pub(super) const fn leaf_start(&self, leaf: u32) -> usize {
        self.root_start() + self.root as usize + leaf as usize * self.leaf_len as usize
    }

    /// Which root word and which word of its leaf stand for `address`; `None` beyond the address space the index covers.
    pub(super) fn index_of(&self, address: u64) -> Option<(usize, usize)> {
        let granule = address / GRANULE;
        let root = usize::try_from(granule / u64::from(self.leaf_len)).ok()?;
        let within = usize::try_from(granule % u64::from(self.leaf_len)).ok()?;
        (root < self.root as usize).then_some((root, within))
    }

    /// First address beyond what the index covers.
    pub const fn address_limit(&self) -> u64 {
        self.root as u64 * self.leaf_len as u64 * GRANULE
    }
}

/// Byte offset of the epoch's futex word (its low half; tables are little endian) from the start of the table.
pub const EPOCH_FUTEX_BYTE_OFFSET: usize = EPOCH * size_of::<u64>();
