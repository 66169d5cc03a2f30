//! The reading side of a table: an importer, who trusts nothing in it.
//!
//! The memory belongs to another process that may be hostile or broken, and changes under the reader. Everything is copied word by word, then checked; no
//! value read decides where the next read goes without a bound. What a reader cannot tell is whether an entry *lies* (names another fd of its process): that
//! costs the exporter's own data, never the importer's.

use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::chunk::{Chunk, ChunkId, ChunkKind, InvalidEntry, NO_FD, code};
use super::layout::*;
use super::word::Word;
use super::writer::{LIVE, STATE_BITS};
use crate::key::Nonce;

/// How often a look-up starts over while the table changes under it. An honest exporter changes it a few times in the microseconds of one look-up.
const ATTEMPTS: u32 = 64;

/// Reads a table.
#[derive(Debug)]
pub struct Reader<'a, W> {
    words: &'a [W],
    layout: Layout,
}

impl<W> Clone for Reader<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Reader<'_, W> {}

/// Why some memory is not the table that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HeaderError {
    /// Shorter than a table of the expected layout.
    Short {
        /// Length found, in words.
        words: usize,
    },
    /// It does not begin with the table's magic: some other file of the exporter.
    Magic(u64),
    /// A version this code does not read.
    Version(u64),
    /// Capacities other than the version's.
    Layout,
    /// A table of another process life: the pid or the fd number has been reused, or the process has called exec.
    Nonce {
        /// What the key says.
        expected: Nonce,
        /// What the table says.
        found: Nonce,
    },
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Short { words } => write!(f, "not an export table: only {words} words long"),
            Self::Magic(found) => write!(f, "not an export table: it begins with {found:#018x}"),
            Self::Version(found) => write!(f, "export table version {found} is not {VERSION_VALUE}"),
            Self::Layout => f.write_str("export table with other capacities than its version has"),
            Self::Nonce { expected, found } => {
                write!(f, "export table of another process life: nonce {found}, the key says {expected}")
            }
        }
    }
}

/// Why a look-up gave no chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LookupError {
    /// No live chunk at this address.
    NoChunk(u64),
    /// The table kept changing for every attempt; try again later.
    Unsettled,
    /// An entry no honest exporter writes.
    Invalid {
        /// Number of the entry.
        slot: u32,
        /// What is wrong with it.
        what: InvalidEntry,
    },
    /// The index leads to an entry that does not cover the address, or to one that overlaps its neighbour.
    Inconsistent {
        /// The address looked up.
        address: u64,
        /// Number of the entry.
        slot: u32,
    },
}

impl fmt::Display for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoChunk(address) => write!(f, "no live chunk at {address:#x}"),
            Self::Unsettled => f.write_str("the export table kept changing during the look-up"),
            Self::Invalid { slot, what } => write!(f, "table entry {slot}: {what}"),
            Self::Inconsistent { address, slot } => write!(f, "table entry {slot} contradicts the index or its neighbour at {address:#x}"),
        }
    }
}

impl<'a, W: Word> Reader<'a, W> {
    /// Reads `words` as the table with this layout and nonce.
    pub fn open(words: &'a [W], layout: Layout, nonce: Nonce) -> Result<Self, HeaderError> {
        let len = words.len();
        let reader = Self { words: words.get(..layout.words()).ok_or(HeaderError::Short { words: len })?, layout };
        match (reader.get(MAGIC), reader.get(VERSION)) {
            (MAGIC_VALUE, VERSION_VALUE) => {}
            (MAGIC_VALUE, version) => return Err(HeaderError::Version(version)),
            (magic, _) => return Err(HeaderError::Magic(magic)),
        }
        let capacities = [(ENTRIES, layout.entries), (ROOT, layout.root), (LEAVES, layout.leaves), (LEAF_LEN, layout.leaf_len)];
        if capacities.iter().any(|&(at, expected)| reader.get(at) != u64::from(expected)) {
            return Err(HeaderError::Layout);
        }
        let found = Nonce(reader.get(NONCE));
        if found != nonce {
            return Err(HeaderError::Nonce { expected: nonce, found });
        }
        Ok(reader)
    }

    /// A reader of words that [`Reader::open`] has accepted before, without looking at the header again. `None` if they are shorter than the layout.
    #[inline]
    pub fn resume(words: &'a [W], layout: Layout) -> Option<Self> {
        Some(Self { words: words.get(..layout.words())?, layout })
    }

    /// The number of deaths so far. Load it *before* the check whose result it shall stand for.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.get(EPOCH)
    }

    /// The number of publications so far.
    pub fn births(&self) -> u64 {
        self.get(BIRTHS)
    }

    /// Whether this life of a chunk is live, as of some moment during the call.
    ///
    /// Called after an fd was fetched by its number, `true` says that the fetched fd is this chunk's.
    #[inline]
    pub fn is_live(&self, id: ChunkId) -> bool {
        W::fence(Acquire);
        id.slot < self.layout.entries && self.get(self.layout.entry_start(id.slot) + STATE) == id.generation << STATE_BITS | LIVE
    }

    /// The live VMM chunk that covers `address`.
    ///
    /// Errors: [`LookupError`].
    pub fn chunk_at(&self, address: u64) -> Result<(ChunkId, Chunk), LookupError> {
        for _ in 0..ATTEMPTS {
            let (births, epoch) = (self.births(), self.epoch());
            match self.try_chunk_at(address) {
                Err(LookupError::NoChunk(_)) => {}
                other => return other,
            }
            W::fence(Acquire);
            if births == self.births() && epoch == self.epoch() {
                return Err(LookupError::NoChunk(address));
            }
        }
        Err(LookupError::Unsettled)
    }

    /// The first live VMM chunk that covers an address in `[from, to)`; `None` if there is none.
    ///
    /// Walks the index: a microsecond for each GiB without chunks. Entries that make no sense are passed over.
    pub fn next_chunk(&self, from: u64, to: u64) -> Option<(ChunkId, Chunk)> {
        let mut at = from;
        while at < to {
            let (root, within) = self.layout.index_of(at)?;
            if self.get(self.layout.root_start() + root) == 0 {
                // No leaf: nothing in all of its part of the address space.
                let left = u64::from(self.layout.leaf_len) - within as u64;
                at = (at / GRANULE + left).saturating_mul(GRANULE);
                continue;
            }
            if self.index(at).is_some()
                && let Ok(found) = self.chunk_at(at)
            {
                return Some(found);
            }
            at = (at / GRANULE + 1).saturating_mul(GRANULE);
        }
        None
    }

    /// The chunks that cover `[address, address + len)`, in order: each call of the iterator is one look-up.
    ///
    /// The first error ends it; a hole is [`LookupError::NoChunk`] with its address. A chunk that begins before the end of its neighbour is
    /// [`LookupError::Unsettled`] where the neighbour has died since it was read (both made room for a larger chunk), else
    /// [`LookupError::Inconsistent`].
    pub fn chunks(&self, address: u64, len: u64) -> Chunks<'a, W> {
        Chunks { reader: *self, previous: None, cursor: address, end: address.saturating_add(len) }
    }

    /// The chunk in `slot`, of any kind, if it is live.
    pub fn chunk_in(&self, slot: u32) -> Result<Option<(ChunkId, Chunk)>, LookupError> {
        for _ in 0..ATTEMPTS {
            let state = self.state(slot);
            if state & ((1 << STATE_BITS) - 1) != LIVE {
                return Ok(None);
            }
            let read = self.fields(slot);
            // The fields were read before this fence, the state is read after it: equal states mean that no field was written in between.
            W::fence(Acquire);
            if self.state_relaxed(slot) != state {
                continue;
            }
            let invalid = |what| LookupError::Invalid { slot, what };
            let chunk = read.map_err(invalid)?;
            chunk.validate(&self.layout).map_err(invalid)?;
            return Ok(Some((ChunkId { slot, generation: state >> STATE_BITS }, chunk)));
        }
        Err(LookupError::Unsettled)
    }

    fn try_chunk_at(&self, address: u64) -> Result<(ChunkId, Chunk), LookupError> {
        let none = LookupError::NoChunk(address);
        let slot = self.index(address).ok_or(none)?;
        let (id, chunk) = self.chunk_in(slot)?.ok_or(none)?;
        if !matches!(chunk.kind, ChunkKind::Vmm) || address < chunk.address || address >= chunk.end() {
            // The slot may have been reused for another chunk since the index was read; then the index has changed by now.
            W::fence(Acquire);
            return Err(if self.index(address) == Some(slot) && self.is_live(id) {
                LookupError::Inconsistent { address, slot }
            } else {
                none
            });
        }
        Ok((id, chunk))
    }

    /// The slot that the index has for `address`.
    fn index(&self, address: u64) -> Option<u32> {
        let (root, within) = self.layout.index_of(address)?;
        let leaf = u32::try_from(self.get(self.layout.root_start() + root)).ok()?.checked_sub(1)?;
        if leaf >= self.layout.leaves {
            return None;
        }
        let slot = u32::try_from(self.get(self.layout.leaf_start(leaf) + within)).ok()?.checked_sub(1)?;
        (slot < self.layout.entries).then_some(slot)
    }

    fn fields(&self, slot: u32) -> Result<Chunk, InvalidEntry> {
        let entry = self.layout.entry_start(slot);
        let relaxed = |at: usize| self.words.get(entry + at).map_or(0, |word| word.load(Relaxed));
        let fd_and_kind = relaxed(FD_AND_KIND);
        let [f0, f1, f2, f3, kind, ..] = fd_and_kind.to_le_bytes();
        let fd = u32::from_le_bytes([f0, f1, f2, f3]);
        let mut device = [0; 16];
        for (at, bytes) in device.as_chunks_mut().0.iter_mut().enumerate() {
            *bytes = relaxed(DEVICE + at).to_le_bytes();
        }
        let kind = match kind {
            code::VMM => ChunkKind::Vmm,
            code::POOL => ChunkKind::Pool,
            code::POOL_ALLOCATION => {
                let mut blob = [0; BLOB_LEN * 8];
                for (at, bytes) in blob.as_chunks_mut().0.iter_mut().enumerate() {
                    *bytes = relaxed(BLOB + at).to_le_bytes();
                }
                ChunkKind::PoolAllocation { pool: u32::try_from(relaxed(POOL)).unwrap_or(u32::MAX), blob }
            }
            other => return Err(InvalidEntry::Kind(other)),
        };
        Ok(Chunk {
            kind,
            fd: (fd != NO_FD).then_some(fd),
            address: relaxed(ADDRESS),
            len: relaxed(LEN),
            buffer_id: relaxed(BUFFER_ID),
            device,
        })
    }

    fn state(&self, slot: u32) -> u64 {
        if slot < self.layout.entries { self.get(self.layout.entry_start(slot) + STATE) } else { 0 }
    }

    fn state_relaxed(&self, slot: u32) -> u64 {
        self.words.get(self.layout.entry_start(slot) + STATE).map_or(0, |word| word.load(Relaxed))
    }

    // All indices come from the layout, whose length `open` checked; one outside would read as 0.
    #[inline]
    fn get(&self, at: usize) -> u64 {
        self.words.get(at).map_or(0, |word| word.load(Acquire))
    }
}

/// Iterator over the chunks of a range; see [`Reader::chunks`].
#[derive(Debug)]
pub struct Chunks<'a, W> {
    reader: Reader<'a, W>,
    previous: Option<ChunkId>,
    cursor: u64,
    end: u64,
}

impl<W: Word> Iterator for Chunks<'_, W> {
    type Item = Result<(ChunkId, Chunk), LookupError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.cursor >= self.end {
            return None;
        }
        let (id, chunk) = match self.reader.chunk_at(self.cursor) {
            Ok(found) => found,
            Err(error) => {
                self.cursor = self.end;
                return Some(Err(error));
            }
        };
        if let Some(previous) = self.previous.replace(id)
            && chunk.address != self.cursor
        {
            let address = core::mem::replace(&mut self.cursor, self.end);
            let honest = !self.reader.is_live(previous);
            return Some(Err(if honest { LookupError::Unsettled } else { LookupError::Inconsistent { address, slot: id.slot } }));
        }
        self.cursor = chunk.end();
        Some(Ok((id, chunk)))
    }
}
