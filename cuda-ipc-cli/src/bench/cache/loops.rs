//! The loops that are measured: take a lease and end it, of windows found in different ways.
//!
//! A loop has a lane for each thread. Nothing but the random number generator, the choice of a window by it, and the lease stands in a loop; what the first
//! two take is measured by [`Nothing`].

use core::hint::black_box;
use std::sync::Arc;

use cuda_ipc_cache::{IntervalIndex, PeerWindows, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::table::GRANULE;

use super::contest::{Rng, Work};
use crate::failure::Failure;

/// How many leases of one window follow each other in a run.
pub(super) const RUN: u64 = 64;

/// What is leased of a window, and how much of it.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// Chunks in a lease.
    pub(super) chunks: u32,
    /// Chunks in each window that leases are taken of.
    pub(super) of: u32,
    /// Never comes; made once, since making one asks the clock.
    pub(super) deadline: Deadline,
}

impl Piece {
    /// Offset and length of the lease with this number of a run: other bytes each time, in the same number of chunks.
    #[inline]
    const fn at(&self, number: u64) -> (u64, u64) {
        const PART: u64 = GRANULE / RUN;
        if self.chunks == 1 {
            return (number % RUN * PART, PART);
        }
        let starts = self.of.saturating_sub(self.chunks) as u64 + 1;
        (number % starts * GRANULE, self.chunks as u64 * GRANULE)
    }

    /// How many leases make a batch: enough that looking at the clock does not count.
    pub(super) const fn batch(&self) -> u64 {
        let leases = 4096 / self.chunks as u64 / RUN * RUN;
        if leases < RUN { RUN } else { leases }
    }
}

/// A window and where it is found: its address in an index of a peer.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) address: u64,
    /// Number of the peer in the lane.
    pub(super) peer: u32,
}

/// An index that leases are found by.
pub(super) trait Index: Send + Sync {
    /// As [`IntervalIndex::find`].
    fn find<R>(&self, address: u64, len: u64, with: impl FnOnce(&Arc<Window>) -> R) -> Option<R>;
}

/// The cache's own.
impl Index for Arc<PeerWindows> {
    #[inline]
    fn find<R>(&self, address: u64, len: u64, with: impl FnOnce(&Arc<Window>) -> R) -> Option<R> {
        self.index(false).find(address, len, with)
    }
}

impl Index for Arc<IntervalIndex<Window>> {
    #[inline]
    fn find<R>(&self, address: u64, len: u64, with: impl FnOnce(&Arc<Window>) -> R) -> Option<R> {
        IntervalIndex::find(self, address, len, with)
    }
}

/// Leases of windows that the user holds, in random order.
pub(super) struct ByHandle {
    pub(super) lanes: Vec<Vec<Arc<Window>>>,
    pub(super) piece: Piece,
}

impl Work for ByHandle {
    fn batch(&self, thread: usize, rng: &mut Rng) -> Result<u64, Failure> {
        let windows = self.lanes.get(thread).map_or(&[][..], Vec::as_slice);
        for number in 0..self.piece.batch() {
            let window = rng.pick(windows).ok_or_else(no_windows)?;
            lease(window, window.base(), number, &self.piece)?;
        }
        Ok(self.piece.batch())
    }
}

/// What one thread looks windows up in, and by what.
pub(super) struct Lane<I> {
    /// By number of the peer.
    pub(super) indexes: Vec<I>,
    pub(super) places: Vec<Place>,
}

/// Leases of windows that are found by address.
pub(super) struct ByAddress<I> {
    pub(super) lanes: Vec<Lane<I>>,
    pub(super) piece: Piece,
    /// How many leases of one window follow each other: 1, or [`RUN`].
    pub(super) run: u64,
}

impl<I: Index> Work for ByAddress<I> {
    fn batch(&self, thread: usize, rng: &mut Rng) -> Result<u64, Failure> {
        let lane = self.lanes.get(thread).ok_or_else(no_windows)?;
        let mut number = 0;
        while number < self.piece.batch() {
            let place = rng.pick(&lane.places).ok_or_else(no_windows)?;
            let index = lane.indexes.get(place.peer as usize).ok_or_else(no_windows)?;
            for _ in 0..self.run {
                let (offset, len) = self.piece.at(number);
                let leased = index.find(place.address + offset, len, |window| lease(window, place.address, number, &self.piece));
                leased.ok_or_else(no_windows)??;
                number += 1;
            }
        }
        Ok(number)
    }
}

/// The generator and the choice, without a lease.
pub(super) struct Nothing<'a> {
    pub(super) lanes: &'a [Vec<Arc<Window>>],
}

impl Work for Nothing<'_> {
    fn batch(&self, thread: usize, rng: &mut Rng) -> Result<u64, Failure> {
        const BATCH: u64 = 4096;
        let windows = self.lanes.get(thread).map_or(&[][..], Vec::as_slice);
        for _ in 0..BATCH {
            // The handle is loaded, as everywhere else; the window is not looked at.
            black_box(Arc::as_ptr(rng.pick(windows).ok_or_else(no_windows)?));
        }
        Ok(BATCH)
    }
}

/// Takes a lease and ends it.
#[inline]
fn lease(window: &Window, base: u64, number: u64, piece: &Piece) -> Result<(), Failure> {
    let (offset, len) = piece.at(number);
    match window.lease(base + offset, len, piece.deadline) {
        Ok(lease) => {
            black_box(lease.address());
            Ok(())
        }
        Err(error) => Err(failed(&error)),
    }
}

#[cold]
fn failed(error: &cuda_ipc_cache::CacheError) -> Failure {
    Failure::new("taking a lease that should be a hit", error)
}

#[cold]
pub(super) fn no_windows() -> Failure {
    Failure::new("measuring", "a thread has no window, or its index does not find it")
}
