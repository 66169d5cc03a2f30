//! Flights: who may change which granules of a window.
//!
//! Whoever imports into or unmaps a range of granules holds a flight over it. Flights over disjoint ranges go on side by side; over a range in flight one
//! waits, and then either finds its work done or shares the failure. So no chunk is imported twice, and nobody repeats a failure that has just happened.

use std::collections::BTreeMap;
use std::sync::MutexGuard;

use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::table::ChunkId;

use super::Window;
use crate::error::{CacheError, CacheErrorKind};

/// What a window's lock guards.
#[derive(Debug, Default)]
pub(super) struct Inner {
    flights: Vec<Flight>,
    next: u64,
    /// The last failure, for those who waited for it.
    failure: Option<(u64, CacheError)>,
    /// Mapped chunks by the granule of their head.
    pub(super) mapped: BTreeMap<u32, MappedChunk>,
    /// Ranges (granules) in which a failed import may have left something mapped: to be unmapped before the address space can go.
    pub(super) stuck: Vec<(u32, u32)>,
    /// No imports any more: the peer is dead or was purged.
    pub(super) closed: bool,
}

/// A chunk that is mapped in the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct MappedChunk {
    pub(super) id: ChunkId,
    pub(super) granules: u32,
    /// Leases are refused, and it is unmapped when the last one ends.
    pub(super) retiring: bool,
}

#[derive(Debug)]
struct Flight {
    number: u64,
    first: u32,
    last: u32,
}

/// What came of asking for a flight.
pub(super) enum Entry<'w> {
    /// It is ours.
    Flying(FlightGuard<'w>),
    /// Somebody else's over this range has just landed: look again.
    Landed,
}

/// A flight; dropping it lands.
pub(super) struct FlightGuard<'w> {
    window: &'w Window,
    number: u64,
    failure: Option<CacheError>,
}

impl Window {
    /// Asks for a flight over granules `first..=last`. Waits, until the deadline, while another one overlaps.
    pub(super) fn enter(&self, first: u32, last: u32, deadline: Deadline) -> Result<Entry<'_>, CacheError> {
        let mut inner = self.lock();
        let Some(blocking) = inner.blocking(first, last) else { return Ok(Entry::Flying(self.take_off(&mut inner, first, last))) };
        loop {
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(self.error(CacheErrorKind::DeadlineOver, self.address_of(first)));
            }
            inner = match self.changed.wait_timeout(inner, left) {
                Ok((inner, _)) => inner,
                Err(poisoned) => poisoned.into_inner().0,
            };
            if inner.flights.iter().all(|flight| flight.number != blocking) {
                return match inner.failure {
                    Some((number, error)) if number == blocking => Err(error),
                    _ => Ok(Entry::Landed),
                };
            }
        }
    }

    /// A flight over granules `first..=last` if nobody has one there.
    pub(super) fn try_enter(&self, first: u32, last: u32) -> Option<FlightGuard<'_>> {
        let mut inner = self.lock();
        inner.blocking(first, last).is_none().then(|| self.take_off(&mut inner, first, last))
    }

    fn take_off(&self, inner: &mut MutexGuard<'_, Inner>, first: u32, last: u32) -> FlightGuard<'_> {
        inner.next += 1;
        let number = inner.next;
        inner.flights.push(Flight { number, first, last });
        FlightGuard { window: self, number, failure: None }
    }

    /// The exporter's address of a granule.
    pub(super) fn address_of(&self, granule: u32) -> u64 {
        self.base + u64::from(granule) * cuda_ipc_core::table::GRANULE
    }
}

impl Inner {
    fn blocking(&self, first: u32, last: u32) -> Option<u64> {
        self.flights.iter().find(|flight| flight.first <= last && first <= flight.last).map(|flight| flight.number)
    }
}

impl FlightGuard<'_> {
    /// Lands with a failure that those who waited share.
    pub(super) fn fail(mut self, error: CacheError) -> CacheError {
        self.failure = Some(error);
        error
    }
}

impl Drop for FlightGuard<'_> {
    fn drop(&mut self) {
        let mut inner = self.window.lock();
        inner.flights.retain(|flight| flight.number != self.number);
        if let Some(error) = self.failure {
            inner.failure = Some((self.number, error));
        }
        drop(inner);
        self.window.changed.notify_all();
    }
}
