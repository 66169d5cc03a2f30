//! What a cache has done and holds: cheap counters, read at any time.

use core::sync::atomic::AtomicBool;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use crate::window::UnmapCause;

/// Counts and totals of a cache, as of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Peers known now.
    pub peers: u64,
    /// Windows with address space now.
    pub windows: u64,
    /// Chunks mapped now, allocations of pools among them.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Among the chunks, those that wait for leases to end before they are unmapped.
    pub waiting_unmaps: u64,
    /// Bytes of address space reserved now.
    pub address_space: u64,
    /// Legacy handles that users of this cache have open now.
    pub legacy_handles: u64,
    /// Chunks leased since the start: a lease of three chunks counts three. Hits and misses together.
    pub chunk_leases: u64,
    /// Leases that were no hits.
    pub misses: u64,
    /// Chunks imported.
    pub imported_chunks: u64,
    /// Chunks unmapped because their exporter retired them.
    pub unmapped_dead: u64,
    /// Chunks unmapped because another took their place.
    pub unmapped_replaced: u64,
    /// Chunks unmapped because of a limit, or because nothing idle is kept.
    pub unmapped_limit: u64,
    /// Chunks unmapped because their peer exited or was purged.
    pub unmapped_purged: u64,
    /// Contacts with an exporter that failed.
    pub refused: u64,
    /// Keys answered by a refusal that was remembered.
    pub refused_again: u64,
    /// Passes of the sweeper.
    pub sweeps: u64,
}

/// The counters behind [`CacheStats`]; none of them is touched by a hit.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) misses: AtomicU64,
    imported_chunks: AtomicU64,
    mapped_bytes: AtomicU64,
    windows: AtomicU64,
    /// Chunks leased of windows that are no more.
    pub(crate) past_leases: AtomicU64,
    unmapped_dead: AtomicU64,
    unmapped_replaced: AtomicU64,
    unmapped_limit: AtomicU64,
    unmapped_purged: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) refused_again: AtomicU64,
    pub(crate) sweeps: AtomicU64,
    pub(crate) legacy_handles: AtomicU64,
    /// Whether the sweeper's thread runs.
    pub(crate) sweeping: AtomicBool,
}

impl Counters {
    pub(crate) fn imported(&self, chunks: u64) {
        self.imported_chunks.fetch_add(chunks, Relaxed);
    }

    /// Counts bytes as mapped, from before they are.
    pub(crate) fn claim(&self, bytes: u64) {
        self.mapped_bytes.fetch_add(bytes, Relaxed);
    }

    /// They are not mapped after all.
    pub(crate) fn unclaim(&self, bytes: u64) {
        self.mapped_bytes.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn unmapped(&self, cause: UnmapCause, bytes: u64) {
        let counter = match cause {
            UnmapCause::Dead => &self.unmapped_dead,
            UnmapCause::Replaced => &self.unmapped_replaced,
            UnmapCause::Limit => &self.unmapped_limit,
            UnmapCause::Purged => &self.unmapped_purged,
        };
        counter.fetch_add(1, Relaxed);
        self.unclaim(bytes);
    }

    pub(crate) fn window_opened(&self) {
        self.windows.fetch_add(1, Relaxed);
    }

    pub(crate) fn window_closed(&self) {
        self.windows.fetch_sub(1, Relaxed);
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Relaxed)
    }

    pub(crate) fn windows(&self) -> u64 {
        self.windows.load(Relaxed)
    }

    /// The counts, without what a walk over the windows gives.
    pub(crate) fn read(&self) -> CacheStats {
        CacheStats {
            chunk_leases: self.past_leases.load(Relaxed),
            misses: self.misses.load(Relaxed),
            imported_chunks: self.imported_chunks.load(Relaxed),
            unmapped_dead: self.unmapped_dead.load(Relaxed),
            unmapped_replaced: self.unmapped_replaced.load(Relaxed),
            unmapped_limit: self.unmapped_limit.load(Relaxed),
            unmapped_purged: self.unmapped_purged.load(Relaxed),
            refused: self.refused.load(Relaxed),
            refused_again: self.refused_again.load(Relaxed),
            legacy_handles: self.legacy_handles.load(Relaxed),
            sweeps: self.sweeps.load(Relaxed),
            ..CacheStats::default()
        }
    }
}
