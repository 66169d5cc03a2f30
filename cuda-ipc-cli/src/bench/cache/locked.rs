//! What a cache with locks would cost: the same windows in an ordered map under a lock, with counts of users.
//!
//! It does the least that such a cache has to do: find the range and count a user, then count the user off. It looks at no epoch and no chunk.

use core::hint::black_box;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::contest::{Rng, Work};
use super::loops::{Place, no_windows};
use crate::failure::Failure;

/// How the map is locked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Locking {
    /// For reading, and each region has its count under a mutex of its own.
    Read,
    /// For writing, both to take and to end, as a registration cache does whose counts and lists stand under its one lock.
    Write,
}

struct Region {
    end: u64,
    users: Mutex<u64>,
    /// The same where the map's lock guards it.
    users_under_map: AtomicU64,
}

type Map = BTreeMap<(u32, u64), Arc<Region>>;

/// Windows by peer and address.
pub(super) struct Locked {
    map: RwLock<Map>,
}

impl Locked {
    pub(super) fn new(windows: impl Iterator<Item = (Place, u64)>) -> Self {
        let region = |len: u64, place: Place| {
            Arc::new(Region { end: place.address + len, users: Mutex::new(0), users_under_map: AtomicU64::new(0) })
        };
        Self { map: RwLock::new(windows.map(|(place, len)| ((place.peer, place.address), region(len, place))).collect()) }
    }

    /// Takes and ends.
    fn hit(&self, place: Place, locking: Locking) -> Option<()> {
        if locking == Locking::Read {
            let region = find(&self.map.read().unwrap_or_else(PoisonError::into_inner), place)?.clone();
            *lock(&region.users) += 1;
            black_box(region.end);
            *lock(&region.users) -= 1;
            return Some(());
        }
        let region = {
            let map = self.map.write().unwrap_or_else(PoisonError::into_inner);
            let region = find(&map, place)?;
            add(&region.users_under_map, 1);
            region.clone()
        };
        black_box(region.end);
        let _map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        add(&region.users_under_map, u64::MAX);
        Some(())
    }
}

/// The region around a place.
fn find(map: &Map, place: Place) -> Option<&Arc<Region>> {
    let (_, region) = map.range(..=(place.peer, place.address)).next_back()?;
    (place.address < region.end).then_some(region)
}

fn lock(users: &Mutex<u64>) -> MutexGuard<'_, u64> {
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wrapping addition under a lock: as cheap as that of a plain number.
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Relaxed).wrapping_add(more), Relaxed);
}

/// Hits of such a cache.
pub(super) struct Hits<'a> {
    pub(super) cache: &'a Locked,
    pub(super) locking: Locking,
    pub(super) lanes: &'a [Vec<Place>],
}

impl Work for Hits<'_> {
    fn batch(&self, thread: usize, rng: &mut Rng) -> Result<u64, Failure> {
        const BATCH: u64 = 1024;
        let places = self.lanes.get(thread).map_or(&[][..], Vec::as_slice);
        for _ in 0..BATCH {
            let place = rng.pick(places).ok_or_else(no_windows)?;
            self.cache.hit(*place, self.locking).ok_or_else(no_windows)?;
        }
        Ok(BATCH)
    }
}
