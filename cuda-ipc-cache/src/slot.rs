//! One 2 MiB granule of a window: the lock-free state that a lease takes and a reclaimer takes away.
//!
//! The slot at a chunk's first granule is its *head*. One word of it holds everything that has to change together: two flags, the number of leases, and how
//! often a lease was taken. All of its changes are atomic additions or bit operations on that word, which therefore has one order that everybody sees:
//!
//! - Taking a lease adds one and looks at what the word was: mapped and not retiring means that the lease stands; anything else is undone.
//! - Retiring sets a flag and looks at how many leases there were. A lease that stands was added before the flag, so it is in that number, and while it is
//!   there nothing is unmapped. A lease that comes later sees the flag.
//! - Who ends the last lease of a retiring chunk is told so, and wakes whoever waits for it.
//!
//! Identity, length and the checked epoch stand beside the word. They are written before the chunk becomes mapped and stay while a lease is held, or
//! while the chunk's flight (see `window.rs`) is.

use cuda_ipc_core::table::{ChunkId, Reader, Word};

use crate::sync::{AtomicU64, Ordering};

const MAPPED: u64 = 1;
const RETIRING: u64 = 1 << 1;
/// Not a head: `place` says how many granules back the head is.
const INTERIOR: u64 = 1 << 2;
const LEASE: u64 = 1 << 3;
const LEASES: u64 = ((1 << 21) - 1) * LEASE;
/// Counts takes, for statistics; wraps off the top of the word.
const TAKE: u64 = 1 << 24;
/// A lease beyond this many is refused, long before the field could overflow into the takes.
const MAX_LEASES: u64 = 1 << 20;

/// See the module's documentation. All zeros is an empty slot.
#[derive(Debug)]
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
#[repr(C)]
pub struct Slot {
    word: AtomicU64,
    /// The table's epoch before the chunk was last found live.
    checked: AtomicU64,
    /// Head: table slot (low half) and length in granules (high half). Interior: granules back to the head.
    place: AtomicU64,
    generation: AtomicU64,
}

/// What a look at a slot says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Glance {
    /// A chunk begins here.
    Head,
    /// It belongs to the chunk that begins this many granules before.
    Interior(u32),
    /// Nothing is mapped here.
    Empty,
}

impl Slot {
    /// An empty slot.
    pub fn new() -> Self {
        Self { word: AtomicU64::new(0), checked: AtomicU64::new(0), place: AtomicU64::new(0), generation: AtomicU64::new(0) }
    }

    /// Where to look for the chunk of this granule. Only a hint: everything may change before the next step.
    #[inline]
    pub fn glance(&self) -> Glance {
        let word = self.word.load(Ordering::Acquire);
        if word & MAPPED != 0 {
            Glance::Head
        } else if word & INTERIOR != 0 {
            Glance::Interior(low(self.place.load(Ordering::Relaxed)))
        } else {
            Glance::Empty
        }
    }

    /// Takes a lease: `Ok` if the chunk is mapped and not retiring; then it stays mapped until [`Slot::end`]. `Err(true)`: nothing was taken, but the caller
    /// has to wake waiters as after `end`.
    #[inline]
    pub fn take(&self) -> Result<(), bool> {
        let before = self.word.fetch_add(LEASE + TAKE, Ordering::Acquire);
        if before & (MAPPED | RETIRING) == MAPPED && (before & LEASES) / LEASE < MAX_LEASES {
            return Ok(());
        }
        Err(self.give_back())
    }

    /// Undoes a take that came to nothing; otherwise as [`Slot::end`].
    #[inline]
    pub fn give_back(&self) -> bool {
        was_last(self.word.fetch_sub(LEASE + TAKE, Ordering::Release))
    }

    /// Ends a lease. `true`: it was the last one of a retiring chunk, and whoever waits for that has to be woken.
    #[inline]
    pub fn end(&self) -> bool {
        was_last(self.word.fetch_sub(LEASE, Ordering::Release))
    }

    /// Whether the chunk is still what the exporter has; `epoch` was loaded from the table before this call. Needs a lease or the flight.
    #[inline]
    pub fn is_current<W: Word>(&self, table: &Reader<'_, W>, epoch: u64) -> bool {
        if self.checked.load(Ordering::Relaxed) == epoch {
            return true;
        }
        // Something has died since: compare this chunk, and remember the epoch from before the comparison, for this chunk alone.
        let live = table.is_live(self.id());
        if live {
            self.checked.store(epoch, Ordering::Relaxed);
        }
        live
    }

    /// Identity of the chunk here. Needs a lease or the flight.
    #[inline]
    pub fn id(&self) -> ChunkId {
        ChunkId { slot: low(self.place.load(Ordering::Relaxed)), generation: self.generation.load(Ordering::Relaxed) }
    }

    /// Length of the chunk here in granules. Needs a lease or the flight.
    #[inline]
    pub fn granules(&self) -> u32 {
        low(self.place.load(Ordering::Relaxed) >> 32)
    }

    /// Makes an empty slot the head of a mapped chunk: leases can be taken from here on. Needs the flight.
    pub fn publish(&self, id: ChunkId, granules: u32, checked: u64) {
        self.place.store(u64::from(granules) << 32 | u64::from(id.slot), Ordering::Relaxed);
        self.generation.store(id.generation, Ordering::Relaxed);
        self.checked.store(checked, Ordering::Relaxed);
        self.word.fetch_or(MAPPED, Ordering::Release);
    }

    /// Remembers that the chunk was found live after the epoch was `epoch`. Needs a lease or the flight.
    pub fn mark_checked(&self, epoch: u64) {
        self.checked.store(epoch, Ordering::Relaxed);
    }

    /// Makes an empty slot part of the chunk whose head is `back` granules before. Needs the flight.
    pub fn publish_interior(&self, back: u32) {
        self.place.store(back.into(), Ordering::Relaxed);
        self.word.fetch_or(INTERIOR, Ordering::Release);
    }

    /// Refuses leases from here on, and says how many there are. Needs the flight.
    pub fn retire(&self) -> u64 {
        (self.word.fetch_or(RETIRING, Ordering::AcqRel) & LEASES) / LEASE
    }

    /// How many leases there are. With the chunk retiring, 0 stays 0 but for takers that are about to undo theirs.
    pub fn leases(&self) -> u64 {
        (self.word.load(Ordering::Acquire) & LEASES) / LEASE
    }

    /// Allows leases again on a chunk that could not be unmapped or need not be. Needs the flight.
    pub fn revive(&self) {
        self.word.fetch_and(!RETIRING, Ordering::Release);
    }

    /// Makes the slot empty, after its chunk was unmapped, and returns how often it had been leased. Needs the flight.
    pub fn clear(&self) -> u64 {
        let before = self.word.fetch_and(!(MAPPED | RETIRING | INTERIOR), Ordering::Release);
        // Whoever counts as a lease now is about to give that back, and the take with it.
        let takes = (before / TAKE).wrapping_sub((before & LEASES) / LEASE) & (u64::MAX / TAKE);
        self.word.fetch_sub(takes * TAKE, Ordering::Relaxed);
        takes
    }

    /// Whether there is no room for one more lease.
    pub fn is_full(&self) -> bool {
        self.leases() >= MAX_LEASES
    }

    /// How often a lease was taken here, modulo 2^40.
    pub fn takes(&self) -> u64 {
        self.word.load(Ordering::Relaxed) / TAKE
    }
}

/// Takes a lease on the chunk that covers `granule`, and says where its head is. `Err(true)`: as with [`Slot::take`].
#[inline]
pub fn hold(slots: &[Slot], granule: u32) -> Result<u32, bool> {
    let slot = |at: u32| slots.get(at as usize).ok_or(false);
    let head = match slot(granule)?.glance() {
        Glance::Head => granule,
        Glance::Interior(back) => granule.checked_sub(back).ok_or(false)?,
        Glance::Empty => return Err(false),
    };
    let slot = slot(head)?;
    slot.take()?;
    // Between the look and the lease another chunk may have come to begin here, one that does not reach as far.
    if granule - head < slot.granules() { Ok(head) } else { Err(slot.give_back()) }
}

impl Default for Slot {
    fn default() -> Self {
        Self::new()
    }
}

const fn was_last(before: u64) -> bool {
    before & RETIRING != 0 && before & LEASES == LEASE
}

/// The low half.
#[allow(clippy::cast_possible_truncation, reason = "that is the point")]
const fn low(value: u64) -> u32 {
    value as u32
}
