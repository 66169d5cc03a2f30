//! The writing side of a table: the exporter, alone.

use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::chunk::{Chunk, ChunkId, ChunkKind, NO_FD, code};
use super::layout::*;
use super::word::Word;
use crate::key::Nonce;

/// State bits of an entry's state word; the generation stands above them.
pub(super) const STATE_BITS: u32 = 2;
pub(super) const LIVE: u64 = 1;
pub(super) const DEAD: u64 = 2;

/// Writes a table. There is one writer per table; it takes `&mut self` to change anything.
///
/// The writer finds no free slots: which slot to use is its owner's choice, among slots that are not live. It trusts its own words as little as needed: a
/// wild write into the table costs importers an error, not the exporter a panic.
pub struct Writer<'a, W> {
    words: &'a [W],
    layout: Layout,
}

/// Why a chunk could not be published. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PublishError {
    /// The slot does not exist or is live.
    Slot(u32),
    /// The chunk's address or length is not a multiple of [`GRANULE`], or lies beyond the index.
    Range {
        /// First address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The index has no leaf left for this part of the address space.
    IndexFull(u64),
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Slot(slot) => write!(f, "table slot {slot} is not free"),
            Self::Range { address, len } => write!(f, "chunk {address:#x}+{len:#x} does not fit the table's 2 MiB granules"),
            Self::IndexFull(address) => write!(f, "the table's index has no room for address {address:#x}"),
        }
    }
}

impl<'a, W: Word> Writer<'a, W> {
    /// Makes zeroed `words` a table of this layout, owned by the process life that `nonce` names. `None` if `words` is shorter than the layout.
    pub fn create(words: &'a [W], layout: Layout, nonce: Nonce) -> Option<Self> {
        let words = words.get(..layout.words())?;
        let writer = Self { words, layout };
        for (at, value) in [
            (NONCE, nonce.0),
            (ENTRIES, layout.entries.into()),
            (ROOT, layout.root.into()),
            (LEAVES, layout.leaves.into()),
            (LEAF_LEN, layout.leaf_len.into()),
            (VERSION, VERSION_VALUE),
        ] {
            writer.put(at, value);
        }
        writer.word(MAGIC)?.store(MAGIC_VALUE, Release);
        Some(writer)
    }

    /// The writer of a table that [`Writer::create`] has made. There must be no other at the same time. `None` if `words` is shorter than the layout.
    pub fn resume(words: &'a [W], layout: Layout) -> Option<Self> {
        Some(Self { words: words.get(..layout.words())?, layout })
    }

    /// How many entries the table can hold.
    pub const fn capacity(&self) -> u32 {
        self.layout.entries
    }

    /// Publishes `chunk` in `slot` and returns its identity. Importers can find it from then on.
    ///
    /// Errors: [`PublishError`]; nothing has changed then.
    pub fn publish(&mut self, slot: u32, chunk: &Chunk) -> Result<ChunkId, PublishError> {
        let entry = self.layout.entry_start(slot);
        let state = if slot < self.layout.entries { self.get(entry + STATE) } else { LIVE };
        if state & ((1 << STATE_BITS) - 1) == LIVE {
            return Err(PublishError::Slot(slot));
        }
        chunk.validate(&self.layout).map_err(|_| PublishError::Range { address: chunk.address, len: chunk.len })?;
        let indexed = matches!(chunk.kind, ChunkKind::Vmm);
        if indexed {
            self.ensure_leaves(chunk)?;
        }
        let generation = (state >> STATE_BITS) + 1;
        // The previous life's dead mark comes before this life's fields for every reader that sees one of the fields.
        W::fence(Release);
        self.put_fields(entry, chunk);
        self.put_release(entry + STATE, generation << STATE_BITS | LIVE);
        if indexed {
            self.set_index(chunk, u64::from(slot) + 1);
        }
        self.count(BIRTHS);
        Ok(ChunkId { slot, generation })
    }

    /// Retires a chunk: marks it dead, then counts the epoch. `false` if it was not live any more.
    ///
    /// When this returns, every importer that loads the epoch learns of the death; the caller wakes those who sleep on it, and only then closes the
    /// chunk's fd and lets the memory go.
    pub fn retire(&mut self, id: ChunkId) -> bool {
        if !self.is_live(id) {
            return false;
        }
        let entry = self.layout.entry_start(id.slot);
        self.put_release(entry + STATE, id.generation << STATE_BITS | DEAD);
        // Orders the dead mark before the epoch here and before the close of the fd later, for a reader who fetched a reused number.
        W::fence(SeqCst);
        self.count(EPOCH);
        let (address, len) = (self.get(entry + ADDRESS), self.get(entry + LEN));
        if (self.get(entry + FD_AND_KIND) >> 32) & 0xff == u64::from(code::VMM) {
            self.clear_index(address, len, u64::from(id.slot) + 1);
        }
        true
    }

    /// Withdraws a live chunk's fd number without retiring the chunk: importers go by the broker from then on.
    ///
    /// A reader may have copied the old number; its re-check would not notice a close. So this is a death and a birth at once: the caller gets a new
    /// identity for the same chunk. `chunk` is what was published as `id`.
    ///
    /// Errors: [`PublishError::Slot`] if `id` was not live any more; nothing has changed then, and dead memory does not come back to life.
    pub fn republish_without_fd(&mut self, id: ChunkId, chunk: &Chunk) -> Result<ChunkId, PublishError> {
        if !self.retire(id) {
            return Err(PublishError::Slot(id.slot));
        }
        self.publish(id.slot, &Chunk { fd: None, ..*chunk })
    }

    /// Whether this life of the slot is live.
    pub fn is_live(&self, id: ChunkId) -> bool {
        id.slot < self.layout.entries && self.get(self.layout.entry_start(id.slot) + STATE) == id.generation << STATE_BITS | LIVE
    }

    fn put_fields(&self, entry: usize, chunk: &Chunk) {
        let (kind, pool, blob) = match chunk.kind {
            ChunkKind::Vmm => (code::VMM, 0, [0; 64]),
            ChunkKind::Pool => (code::POOL, 0, [0; 64]),
            ChunkKind::PoolAllocation { pool, blob } => (code::POOL_ALLOCATION, u64::from(pool), blob),
        };
        self.put(entry + FD_AND_KIND, u64::from(chunk.fd.unwrap_or(NO_FD)) | u64::from(kind) << 32);
        self.put(entry + ADDRESS, chunk.address);
        self.put(entry + LEN, chunk.len);
        self.put(entry + BUFFER_ID, chunk.buffer_id);
        self.put(entry + POOL, pool);
        for (at, bytes) in chunk.device.as_chunks().0.iter().enumerate() {
            self.put(entry + DEVICE + at, u64::from_le_bytes(*bytes));
        }
        for (at, bytes) in blob.as_chunks().0.iter().enumerate() {
            self.put(entry + BLOB + at, u64::from_le_bytes(*bytes));
        }
    }

    /// Gives a leaf to every part of the address space that `chunk` touches. Leaves given out stay, so a failure half way loses nothing.
    fn ensure_leaves(&mut self, chunk: &Chunk) -> Result<(), PublishError> {
        let full = || PublishError::IndexFull(chunk.address);
        let (first, _) = self.layout.index_of(chunk.address).ok_or_else(full)?;
        let (last, _) = self.layout.index_of(chunk.end() - 1).ok_or_else(full)?;
        for root in first..=last {
            let root = self.layout.root_start() + root;
            if self.get(root) == 0 {
                let used = self.get(LEAVES_USED);
                if used >= self.layout.leaves.into() {
                    return Err(full());
                }
                self.put(LEAVES_USED, used + 1);
                self.put_release(root, used + 1);
            }
        }
        Ok(())
    }

    fn set_index(&self, chunk: &Chunk, value: u64) {
        for address in granules(chunk.address, chunk.len) {
            if let Some(at) = self.leaf_word(address) {
                self.put_release(at, value);
            }
        }
    }

    fn clear_index(&self, address: u64, len: u64, value: u64) {
        // A published chunk has a leaf under each granule; a length that a wild write made absurd ends at the first gap.
        for at in granules(address, len).map_while(|address| self.leaf_word(address)) {
            if self.get(at) == value {
                self.put_release(at, 0);
            }
        }
    }

    fn leaf_word(&self, address: u64) -> Option<usize> {
        let (root, within) = self.layout.index_of(address)?;
        let leaf = u32::try_from(self.get(self.layout.root_start() + root).checked_sub(1)?).ok()?;
        (leaf < self.layout.leaves).then(|| self.layout.leaf_start(leaf) + within)
    }

    fn word(&self, at: usize) -> Option<&W> {
        self.words.get(at)
    }

    // All indices come from the layout, whose length `create` checked; an index outside would read as 0 and write nothing.
    fn get(&self, at: usize) -> u64 {
        self.word(at).map_or(0, |word| word.load(Acquire))
    }

    fn put(&self, at: usize, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Relaxed);
        }
    }

    fn put_release(&self, at: usize, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Release);
        }
    }

    fn count(&self, at: usize) {
        self.put_release(at, self.get(at).wrapping_add(1));
    }
}

/// The addresses of the granules in `[address, address + len)`.
fn granules(address: u64, len: u64) -> impl Iterator<Item = u64> {
    (0..len / GRANULE).map(move |granule| address.saturating_add(granule * GRANULE))
}
