//! What a window knows of its mapped chunks, and its flights: those of `flight.rs`, with the window's errors and what is to be done after a landing.

use std::collections::BTreeMap;

use cuda_ipc_core::importer::{Deadline, ImportErrorKind, PooledImport};
use cuda_ipc_core::table::{ChunkId, GRANULE};

use super::Window;
use super::reclaim::UnmapCause;
use crate::error::{CacheError, CacheErrorKind};
use crate::flight;
use crate::sync::MutexGuard;

/// What a window's lock guards beside the flights.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Mapped chunks by the granule of their head.
    pub(super) mapped: BTreeMap<u32, MappedChunk>,
    /// Ranges (granules) in which a failed import may have left something mapped: to be unmapped before the address space can go.
    pub(super) stuck: Vec<(u32, u32)>,
    /// No imports any more: the peer is dead or was purged, or the cache has forgotten the window.
    pub(super) closed: bool,
    /// What is imported of a pool, where the window is of its allocation. Taken and put by who has the flight. Boxed: most windows have none.
    pub(super) pooled: Option<Box<PooledImport>>,
    /// How many holds keep the address range.
    pub(super) holds: u64,
}

/// A chunk that is mapped in the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct MappedChunk {
    pub(super) id: ChunkId,
    pub(super) granules: u32,
    /// Leases are refused, and it is unmapped for this reason when the last one ends.
    pub(super) retiring: Option<UnmapCause>,
    /// The ticket of the work that may have used it, once it is retiring and has no lease.
    pub(super) drain: Option<u64>,
}

pub(super) type Board = flight::Board<State, CacheError>;
pub(super) type Locked<'b> = MutexGuard<'b, flight::Inner<State, CacheError>>;
pub(super) type Entry<'w> = flight::Entry<Flight<'w>, CacheError>;

/// A flight over granules of a window; dropping it lands.
pub(super) struct Flight<'w> {
    window: &'w Window,
    range: (u32, u32),
    flight: Option<flight::Flight<'w, State, CacheError>>,
}

impl Window {
    /// Asks for a flight over granules `first..=last`. Waits, until the deadline, while another one overlaps.
    pub(super) fn enter(&self, first: u32, last: u32, deadline: Deadline) -> Result<Entry<'_>, CacheError> {
        match self.board.enter(first, last, deadline) {
            Some(flight::Entry::Flying(flight)) => Ok(Entry::Flying(self.flight((first, last), flight))),
            Some(flight::Entry::Landed(failure)) => Ok(Entry::Landed(failure)),
            None => Err(self.error(CacheErrorKind::DeadlineOver, self.address_of(first))),
        }
    }

    /// A flight over granules `first..=last` if nobody has one there; otherwise whoever has one will catch up.
    pub(super) fn try_enter(&self, first: u32, last: u32) -> Option<Flight<'_>> {
        self.board.try_enter(first, last).map(|flight| self.flight((first, last), flight))
    }

    fn flight<'w>(&'w self, range: (u32, u32), flight: flight::Flight<'w, State, CacheError>) -> Flight<'w> {
        Flight { window: self, range, flight: Some(flight) }
    }

    /// The exporter's address of a granule.
    pub(super) fn address_of(&self, granule: u32) -> u64 {
        self.base + u64::from(granule) * GRANULE
    }

    /// The last granule.
    pub(super) fn last_granule(&self) -> u32 {
        u32::try_from(self.len.div_ceil(GRANULE)).unwrap_or(u32::MAX).saturating_sub(1)
    }
}

impl Flight<'_> {
    /// Lands with a failure that those who waited may share. What one caller could not wait for, another may: a deadline is not shared.
    pub(super) fn fail(mut self, error: CacheError) -> CacheError {
        let own = match error.kind {
            CacheErrorKind::DeadlineOver => true,
            CacheErrorKind::Import(error) => error.kind == ImportErrorKind::DeadlineOver,
            _ => false,
        };
        self.land((!own).then_some(error));
        error
    }

    /// Lands where the caller catches up by itself: says whether somebody has passed by.
    pub(super) fn land_quietly(mut self) -> bool {
        self.flight.take().is_some_and(|flight| flight.land(None))
    }

    fn land(&mut self, failure: Option<CacheError>) {
        let Some(flight) = self.flight.take() else { return };
        let (first, last) = self.range;
        if flight.land(failure) {
            self.window.catch_up(first, last);
        } else if !self.window.cache.keeps_idle() {
            // The flight may have left something idle itself, by an import that somebody else's failure made useless.
            self.window.reclaim_idle(first, last + 1);
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.land(None);
    }
}
