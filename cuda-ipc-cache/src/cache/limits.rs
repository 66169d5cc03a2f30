//! What all windows may hold together, and who makes room.

use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use super::Shared;
use crate::error::CacheErrorKind;
use crate::window::{UnmapCause, Window};

impl Shared {
    /// Makes room for `bytes` more mapped bytes as far as idle chunks allow, least recently used windows first, `asking` last.
    pub(crate) fn make_room(&self, bytes: u64, asking: &Window) {
        let over = || (self.counters.mapped_bytes() + bytes).saturating_sub(self.options.max_mapped_bytes);
        if over() == 0 {
            return;
        }
        for window in self.by_last_use(asking) {
            if over() == 0 {
                return;
            }
            window.reclaim(Some(UnmapCause::Limit));
        }
        asking.reclaim(Some(UnmapCause::Limit));
    }

    /// Reserves address space for a window, taking it from idle windows if a limit asks for it.
    pub(crate) fn reserve(&self, len: u64, asking: &Window) -> Result<u64, CacheErrorKind> {
        let limits = &self.options;
        let fits = || self.reserved.load(Relaxed).saturating_add(len) <= limits.max_address_space;
        let few = || self.counters.windows() < limits.max_windows;
        if !(fits() && few()) {
            self.evict_windows(asking, || fits() && few());
        }
        if !fits() {
            return Err(CacheErrorKind::AddressSpace {
                wanted: len,
                reserved: self.reserved.load(Relaxed),
                limit: limits.max_address_space,
            });
        }
        let address = match self.cuda.reserve(len) {
            Ok(address) => address,
            Err(_) => {
                // The limit is a guess at what the process can have; the driver knows. Idle windows go before a lease fails.
                self.evict_windows(asking, || false);
                self.cuda.reserve(len).map_err(CacheErrorKind::Driver)?
            }
        };
        self.reserved.fetch_add(len, Relaxed);
        self.counters.window_opened();
        Ok(address)
    }

    /// Gives address space back.
    pub(crate) fn unreserve(&self, address: u64, len: u64) {
        // If the driver refuses, the space is lost to it too; counting it further would refuse windows for nothing.
        let _ = self.cuda.free_reservation(address, len);
        self.reserved.fetch_sub(len, Relaxed);
        self.counters.window_closed();
    }

    fn evict_windows(&self, asking: &Window, enough: impl Fn() -> bool) {
        for window in self.by_last_use(asking) {
            if enough() {
                return;
            }
            window.reclaim(Some(UnmapCause::Limit));
            window.release_address_space();
        }
    }

    /// Windows with address space, least recently used first, without `asking`.
    fn by_last_use(&self, asking: &Window) -> Vec<Arc<Window>> {
        let mut windows: Vec<_> = self.all_peers().iter().flat_map(|peer| peer.windows()).collect();
        windows.retain(|window| window.has_address_space() && !core::ptr::eq(Arc::as_ptr(window), asking));
        windows.sort_by_key(|window| window.last_used());
        windows
    }

    pub(crate) fn count_miss(&self) {
        self.counters.misses.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_imported(&self, chunks: u64, bytes: u64) {
        self.clock.fetch_add(1, Relaxed);
        self.counters.imported(chunks, bytes);
    }

    pub(crate) fn count_unmapped(&self, cause: UnmapCause, bytes: u64) {
        self.counters.unmapped(cause, bytes);
    }
}
