//! Leases of C callers: numbered places without a lock, each of which also keeps a window in place.
//!
//! A lease of the cache borrows its window. C cannot borrow, and may end a lease twice or after its window's handle was released. So a lease of C's is a
//! *place* here: one word says of which window it is, of which generation, and in which state. Taking a place is one compare-exchange, ending a lease is
//! another, and whoever comes second with the same handle finds another generation.
//!
//! A place that is not free is also a *claim* on its window: `windows.rs` gives the memory of a window back only when no place names it. How a taker and a
//! closer agree without a lock is `words.rs`; what is added here is that a closer sees every place: those of a block are taken only after the block was counted.
//!
//! Each thread has a *lane*, a run of places of its own as long as there are no more threads than lanes, and begins its search where it found or freed one last:
//! lease after lease uses one place, whose cache line no other thread touches.

use core::cell::Cell;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, fence};

use cuda_ipc_cache::LeaseParts;

use crate::blocks::Blocks;
use crate::failure::Failure;
use crate::handle::{Id, Kind, PLACES, STALE, UNKNOWN};
use crate::status::CUDA_IPC_ERR_TOO_MANY_HANDLES;
use crate::words::{ClaimWord, Claimed};

const LANES: u32 = 64;
/// Places of a lane.
const LANE: u32 = PLACES / LANES;
/// Places that are looked at before the lane is made longer.
const PROBES: u32 = 64;

/// One place. Half a cache line, so that it never lies across two.
#[derive(Debug)]
#[repr(align(32))]
struct Place {
    word: ClaimWord,
    parts: [AtomicU64; 2],
}

#[derive(Debug)]
#[repr(align(128))]
struct Lane {
    places: Blocks<Place>,
    /// Where the next search begins. Released after the place was made, so that nobody takes a place of a block that a closer could miss.
    cursor: AtomicU32,
}

static ALL: [Lane; LANES as usize] = [const { Lane { places: Blocks::new(), cursor: AtomicU32::new(0) } }; LANES as usize];

/// A place that is not free: while this lives, its window's memory stays.
#[derive(Debug)]
pub(crate) struct Claim {
    place: &'static Place,
    /// Its number among all.
    number: u32,
    word: Claimed,
}

/// Claims the window at `window` (a place of `windows.rs`), open or not: whether it is open is to be asked afterwards.
#[inline]
pub(crate) fn claim(window: u32) -> Result<Claim, Failure> {
    let number = own_lane();
    let lane = ALL.get(number as usize).ok_or(UNKNOWN)?;
    let at = lane.cursor.load(Acquire);
    match lane.take(number, at, window) {
        Some(claim) => Ok(claim),
        None => lane.search(number, at, window),
    }
}

impl Lane {
    #[inline]
    fn take(&'static self, number: u32, at: u32, window: u32) -> Option<Claim> {
        Claim::take(self.places.get(at)?, number * LANE + at, window)
    }

    #[cold]
    fn search(&'static self, number: u32, from: u32, window: u32) -> Result<Claim, Failure> {
        loop {
            let len = self.places.len();
            for step in 0..PROBES.min(len) {
                let at = (from + step) % len;
                if let Some(claim) = self.take(number, at, window) {
                    self.cursor.store(at, Release);
                    return Ok(claim);
                }
            }
            if !self.places.grow(len, LANE, Place::new) {
                // As long as it may be: the last try is a long one.
                let free = (0..len).find_map(|at| self.take(number, at, window));
                return free.ok_or(Failure::plain(CUDA_IPC_ERR_TOO_MANY_HANDLES));
            }
            self.cursor.store(len, Release);
            if let Some(claim) = self.take(number, len, window) {
                return Ok(claim);
            }
        }
    }
}

/// Takes back the lease of a handle, for its one and only end. The parts are those that [`Claim::publish`] was given.
#[inline]
pub(crate) fn end(id: Id) -> Result<(Claim, LeaseParts), Failure> {
    let place = find(id).ok_or(UNKNOWN)?;
    let stale = Failure::plain(STALE);
    let live = place.word.live(id.generation).ok_or(stale)?;
    // Read before the word is changed: as long as it is the same word, it is the same lease.
    let parts = place.parts();
    let word = place.word.end(live).ok_or(stale)?;
    Ok((Claim { place, number: id.place, word }, parts))
}

/// The parts of a live lease whose window's place `is_meant`; `None` if the handle is of no live lease, or of another window. Only a hint: it may end at any time.
/// The lease was live while `is_meant` was asked.
pub(crate) fn peek(id: Id, is_meant: impl FnOnce(u32) -> bool) -> Option<LeaseParts> {
    let place = find(id)?;
    let live = place.word.live(id.generation).filter(|live| is_meant(live.window()))?;
    let parts = place.parts();
    fence(Acquire);
    place.word.is_still(live).then_some(parts)
}

/// Whether any place claims the window. Sequentially consistent with [`claim`]; see the module's documentation.
pub(crate) fn is_claimed(window: u32) -> bool {
    ALL.iter().flat_map(|lane| lane.places.iter()).any(|place| place.word.names(window))
}

fn find(id: Id) -> Option<&'static Place> {
    ALL.get((id.place / LANE) as usize)?.places.get(id.place % LANE)
}

impl Claim {
    #[inline]
    fn take(place: &'static Place, number: u32, window: u32) -> Option<Self> {
        Some(Self { place, number, word: place.word.take(window)? })
    }

    /// The window that is claimed.
    #[inline]
    pub(crate) fn window(&self) -> u32 {
        self.word.window()
    }

    /// Makes it a lease with a handle, which only [`end`] ends.
    #[inline]
    pub(crate) fn publish(self, parts: LeaseParts) -> u64 {
        let [first, second] = parts.to_words();
        self.place.parts[0].store(first, Relaxed);
        self.place.parts[1].store(second, Relaxed);
        self.place.word.publish(self.word);
        let id = Id { place: self.number, generation: self.word.generation() };
        // From here on it is the handle's.
        core::mem::forget(self);
        id.encode(Kind::Lease)
    }
}

impl Drop for Claim {
    #[inline]
    fn drop(&mut self) {
        self.place.word.free(self.word);
        // Of another thread's lane, the line would have to come here and go back.
        let lane = self.number / LANE;
        if lane == own_lane()
            && let Some(lane) = ALL.get(lane as usize)
        {
            lane.cursor.store(self.number % LANE, Release);
        }
    }
}

impl Place {
    fn new() -> Self {
        Self { word: ClaimWord::new(), parts: [const { AtomicU64::new(0) }; 2] }
    }

    #[inline]
    fn parts(&self) -> LeaseParts {
        let [first, second] = &self.parts;
        LeaseParts::from_words([first.load(Relaxed), second.load(Relaxed)])
    }
}

thread_local! {
    // Without a destructor: a lane is nobody's property, and a thread may end at any time.
    static LANE_OF_THREAD: Cell<u32> = const { Cell::new(u32::MAX) };
}

#[inline]
fn own_lane() -> u32 {
    match LANE_OF_THREAD.with(Cell::get) {
        u32::MAX => assign_lane(),
        number => number,
    }
}

#[cold]
fn assign_lane() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Relaxed) % LANES;
    LANE_OF_THREAD.with(|lane| lane.set(number));
    number
}

#[cfg(test)]
mod tests {
    use super::{claim, end, is_claimed, peek};
    use crate::handle::{Id, Kind};
    use cuda_ipc_cache::LeaseParts;

    fn id(handle: u64) -> Id {
        Id::decode(handle, Kind::Lease).expect("a lease")
    }

    fn parts(number: u64) -> LeaseParts {
        LeaseParts::from_words([number, number << 32 | 7])
    }

    #[test]
    fn a_lease_ends_once() {
        let handle = claim(11).expect("a place").publish(parts(5));
        assert!(is_claimed(11) && !is_claimed(12));
        assert_eq!(peek(id(handle), |at| at == 11), Some(parts(5)));
        assert_eq!(peek(id(handle), |at| at == 12), None);
        let (claim, found) = end(id(handle)).expect("the first end");
        assert_eq!((found, claim.window(), is_claimed(11)), (parts(5), 11, true));
        assert!(end(id(handle)).is_err(), "while it is being ended");
        drop(claim);
        assert!(!is_claimed(11));
        assert!(end(id(handle)).is_err(), "twice");
        // The same place, another generation.
        let next = super::claim(11).expect("a place").publish(parts(6));
        assert_ne!(next, handle);
        assert!(end(id(handle)).is_err(), "of another lease in its place");
        assert_eq!(end(id(next)).expect("an end").1, parts(6));
    }

    #[test]
    fn many_leases_at_a_time_have_places_of_their_own() {
        let handles: Vec<u64> = (0..5000).map(|number| claim(21).expect("a place").publish(parts(number))).collect();
        let mut distinct = handles.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), handles.len());
        // Any order; those that stay are not touched.
        for (number, handle) in handles.iter().enumerate().step_by(2) {
            assert_eq!(end(id(*handle)).expect("an end").1, parts(number as u64));
        }
        let again: Vec<u64> = (0..2500).map(|number| claim(22).expect("a place").publish(parts(number))).collect();
        for (number, handle) in handles.iter().enumerate().skip(1).step_by(2) {
            assert_eq!(end(id(*handle)).expect("an end").1, parts(number as u64));
        }
        assert!(!is_claimed(21) && is_claimed(22));
        again.into_iter().for_each(|handle| drop(end(id(handle)).expect("an end")));
        assert!(!is_claimed(22));
    }

    #[test]
    fn of_many_who_end_one_lease_one_does() {
        for round in 0..200 {
            let handle = claim(31).expect("a place").publish(parts(round));
            let ends: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| usize::from(end(id(handle)).is_ok()))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
            });
            assert_eq!(ends, 1);
        }
    }

    #[test]
    fn a_claim_that_comes_to_nothing_frees_its_place() {
        let first = claim(41).expect("a place");
        assert!(is_claimed(41));
        drop(first);
        assert!(!is_claimed(41));
    }
}
