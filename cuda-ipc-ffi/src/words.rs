//! The two words that a hit and a release agree by: one of a lease's place, one of a window's place. Nothing else is atomic between them.
//!
//! - A *claim* is a place's word while it is not free: {generation, window, state}. Who has a claim on a window and has then found it open may use it until
//!   the claim is gone.
//! - A window's word is {generation, open}. Who has shut it and has then found no claim on it may take it away.
//!
//! Each first writes its own word and then reads the other's, all of it sequentially consistent, so at least one of the two sees the other. `leases.rs` and
//! `windows.rs` keep the words; `tests/loom_words.rs` runs this file on a model checker.

use super::sync::{AtomicU64, Ordering, between_own_word_and_the_other};

/// States of a claim's word, in its low bits.
const FREE: u64 = 0;
/// Claimed, and no handle has been given out yet.
const TAKING: u64 = 1;
const LIVE: u64 = 2;
/// Being ended by the one who came first.
const ENDING: u64 = 3;
const STATE: u64 = 3;
const WINDOW_SHIFT: u32 = 2;
const WINDOW_BITS: u32 = 24;
const WINDOW: u64 = ((1 << WINDOW_BITS) - 1) << WINDOW_SHIFT;
const GENERATION_SHIFT: u32 = WINDOW_SHIFT + WINDOW_BITS;
/// Generations of 37 bits, as handles have.
const GENERATIONS: u64 = 1 << 37;

/// The generation after this one; never 0.
pub(crate) const fn next_generation(generation: u64) -> u64 {
    if generation + 1 >= GENERATIONS { 1 } else { generation + 1 }
}

/// What a claim's word was when its holder last wrote it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Claimed(u64);

impl Claimed {
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to 24 bits")]
    pub(crate) const fn window(self) -> u32 {
        ((self.0 & WINDOW) >> WINDOW_SHIFT) as u32
    }

    #[inline]
    pub(crate) const fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }
}

/// The word of a lease's place.
#[derive(Debug)]
pub(crate) struct ClaimWord(AtomicU64);

impl ClaimWord {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(1 << GENERATION_SHIFT | FREE))
    }

    /// Claims `window`, if the place is free. Whether the window is open is to be asked afterwards.
    #[inline]
    pub(crate) fn take(&self, window: u32) -> Option<Claimed> {
        let free = self.0.load(Ordering::Relaxed);
        if free & STATE != FREE {
            return None;
        }
        let word = free & !(WINDOW | STATE) | (window as u64) << WINDOW_SHIFT | TAKING;
        self.0.compare_exchange(free, word, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        between_own_word_and_the_other();
        Some(Claimed(word))
    }

    /// Makes a claim a lease, which whoever has its generation may end. What was written before is seen by who ends it.
    #[inline]
    pub(crate) fn publish(&self, claimed: Claimed) {
        self.0.store(claimed.0 & !STATE | LIVE, Ordering::Release);
    }

    /// The lease of this generation, if it is there: for one who reads what belongs to it and then calls [`ClaimWord::end`].
    #[inline]
    pub(crate) fn live(&self, generation: u64) -> Option<Claimed> {
        let word = self.0.load(Ordering::Acquire);
        (word >> GENERATION_SHIFT == generation && word & STATE == LIVE).then_some(Claimed(word))
    }

    /// Takes the lease back. `None`: somebody else has.
    #[inline]
    pub(crate) fn end(&self, live: Claimed) -> Option<Claimed> {
        let ending = live.0 & !STATE | ENDING;
        self.0.compare_exchange(live.0, ending, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        Some(Claimed(ending))
    }

    /// Whether it is the same live lease still, after what belongs to it was read.
    pub(crate) fn is_still(&self, live: Claimed) -> bool {
        self.0.load(Ordering::SeqCst) == live.0
    }

    /// Gives the claim up; the place is another generation's from here on. What was done under the claim comes before.
    #[inline]
    pub(crate) fn free(&self, claimed: Claimed) {
        self.0.store(next_generation(claimed.generation()) << GENERATION_SHIFT | FREE, Ordering::Release);
    }

    /// Whether it is a claim on `window`.
    pub(crate) fn names(&self, window: u32) -> bool {
        let word = self.0.load(Ordering::SeqCst);
        word & STATE != FREE && Claimed(word).window() == window
    }
}

/// The word of a window's place.
#[derive(Debug)]
pub(crate) struct OpenWord(AtomicU64);

const OPEN: u64 = 1;

impl OpenWord {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(1 << 1))
    }

    /// Opens it; the generation that its handle has. For the one who keeps the books.
    pub(crate) fn open(&self) -> u64 {
        let generation = self.generation();
        self.0.store(generation << 1 | OPEN, Ordering::SeqCst);
        generation
    }

    /// Whether the window of this generation is open. For one who has a claim on it.
    #[inline]
    pub(crate) fn is_open(&self, generation: u64) -> bool {
        self.0.load(Ordering::SeqCst) == generation << 1 | OPEN
    }

    /// Whether any window is open here, as it seems.
    #[inline]
    pub(crate) fn seems_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) & OPEN != 0
    }

    /// Shuts it. What claims there are is to be asked afterwards.
    pub(crate) fn shut(&self) {
        self.0.fetch_and(!OPEN, Ordering::SeqCst);
        between_own_word_and_the_other();
    }

    /// Makes the place another generation's, after its window was taken away.
    pub(crate) fn turn(&self) {
        self.0.store(next_generation(self.generation()) << 1, Ordering::SeqCst);
    }

    fn generation(&self) -> u64 {
        self.0.load(Ordering::Relaxed) >> 1
    }
}
