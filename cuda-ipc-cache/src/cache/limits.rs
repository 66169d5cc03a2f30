//! What all windows may hold together, and who makes room.

use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use super::Shared;
use crate::error::CacheErrorKind;
use crate::window::{UnmapCause, Window};

impl Shared {
    /// Counts `bytes` more as mapped, and makes room for them as far as idle chunks allow: least recently used windows first, `asking` last.
    ///
    /// Counted before they are mapped, so that two who ask at once do not both get the last room.
    pub(crate) fn claim(&self, bytes: u64, asking: &Window) {
        self.counters.claim(bytes);
        let enough = || self.counters.mapped_bytes() <= self.options.max_mapped_bytes;
        if enough() {
            return;
        }
        for window in self.by_last_use(Some(asking)) {
            window.evict(enough);
            if enough() {
                return;
            }
        }
        asking.evict(enough);
    }

    /// Gives up what is idle beyond the limits: what leases had to exceed them for, and have ended since.
    pub(crate) fn keep_limits(&self) {
        let enough = || self.counters.mapped_bytes() <= self.options.max_mapped_bytes;
        if !enough() {
            self.by_last_use(None).iter().for_each(|window| window.evict(enough));
        }
        let few = || self.counters.windows() <= self.options.max_windows;
        if !few() {
            self.evict_windows(None, few);
        }
    }

    /// Takes a claim back whose bytes were not mapped.
    pub(crate) fn unclaim(&self, bytes: u64) {
        self.counters.unclaim(bytes);
    }

    /// Reserves address space for a window, taking it from idle windows if a limit asks for it.
    pub(crate) fn reserve(&self, len: u64, asking: &Window) -> Result<u64, CacheErrorKind> {
        let few = || self.counters.windows() < self.options.max_windows;
        let mut claimed = self.claim_space(len);
        if !(claimed && few()) {
            self.evict_windows(Some(asking), || {
                claimed = claimed || self.claim_space(len);
                claimed && few()
            });
        }
        if !claimed && !self.claim_space(len) {
            return Err(self.no_space(len));
        }
        let reserve = || self.cuda.with_relaxed_capture(|| self.cuda.reserve(len));
        let reserved = reserve().or_else(|_| {
            // The limit is a guess at what the process can have; the driver knows. Idle windows go before a lease fails.
            self.evict_windows(Some(asking), || false);
            reserve()
        });
        match reserved {
            Ok(_) => self.counters.window_opened(),
            Err(_) => drop(self.reserved.fetch_sub(len, Relaxed)),
        }
        reserved.map_err(CacheErrorKind::Driver)
    }

    /// Makes room for one more window, whose address space is the driver's own affair.
    pub(crate) fn admit(&self, asking: &Window) {
        let few = || self.counters.windows() < self.options.max_windows;
        if !few() {
            self.evict_windows(Some(asking), few);
        }
        self.counters.window_opened();
    }

    /// Such a window has no address any more.
    pub(crate) fn dismiss(&self) {
        self.counters.window_closed();
    }

    /// What to say where `wanted` bytes of address space are too many.
    pub(crate) fn no_space(&self, wanted: u64) -> CacheErrorKind {
        CacheErrorKind::AddressSpace { wanted, reserved: self.reserved.load(Relaxed), limit: self.options.max_address_space }
    }

    fn claim_space(&self, len: u64) -> bool {
        let within = |reserved: u64| reserved.checked_add(len).filter(|&sum| sum <= self.options.max_address_space);
        self.reserved.fetch_update(Relaxed, Relaxed, within).is_ok()
    }

    /// Gives address space back.
    pub(crate) fn unreserve(&self, address: u64, len: u64) {
        // If the driver refuses, the space is lost to it too; counting it further would refuse windows for nothing.
        let _ = self.cuda.with_relaxed_capture(|| self.cuda.free_reservation(address, len));
        self.reserved.fetch_sub(len, Relaxed);
        self.counters.window_closed();
    }

    fn evict_windows(&self, asking: Option<&Window>, mut enough: impl FnMut() -> bool) {
        for window in self.by_last_use(asking) {
            if enough() {
                return;
            }
            window.evict(|| false);
            window.release_address_space();
        }
    }

    /// Windows with address space, least recently used first, without `asking`.
    fn by_last_use(&self, asking: Option<&Window>) -> Vec<Arc<Window>> {
        let mut windows: Vec<_> = self.all_peers().iter().flat_map(|peer| peer.windows()).collect();
        windows.retain(|window| window.has_address_space() && asking.is_none_or(|asking| !core::ptr::eq(Arc::as_ptr(window), asking)));
        windows.sort_by_key(|window| window.last_used());
        windows
    }

    pub(crate) fn count_miss(&self) {
        self.counters.misses.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_imported(&self, chunks: u64) {
        self.clock.fetch_add(1, Relaxed);
        self.counters.imported(chunks);
    }

    pub(crate) fn count_leases_of_the_past(&self, chunks: u64) {
        self.counters.past_leases.fetch_add(chunks, Relaxed);
    }

    pub(crate) fn count_unmapped(&self, cause: UnmapCause, bytes: u64) {
        self.counters.unmapped(cause, bytes);
    }
}
