//! Unmapping: dead chunks, idle chunks beyond a limit, everything of a dead peer.
//!
//! A chunk is first made to refuse leases, then unmapped once it has none: at once, or by whoever comes next (a miss in its place, `trim`, the sweeper)
//! after its last lease has ended. Unmapping holds the chunk's flight and no lock.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::table::GRANULE;

use super::Window;
use crate::error::{CacheError, CacheErrorKind};
use crate::lease::Lease;

/// Why something was unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum UnmapCause {
    /// The exporter retired it.
    Dead,
    /// Another chunk took its place, or needs its address.
    Replaced,
    /// It was idle and the cache over a limit, or the cache keeps nothing idle.
    Limit,
    /// Its peer has exited or was purged, or the cache is closing.
    Purged,
}

/// What came of a [`Window::reclaim`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Reclaimed {
    /// Bytes unmapped.
    pub(crate) freed_bytes: u64,
    /// Whether something had to be left: leased, in flight, or refused by the driver.
    pub(crate) left: bool,
}

impl core::ops::AddAssign for Reclaimed {
    fn add_assign(&mut self, other: Self) {
        self.freed_bytes += other.freed_bytes;
        self.left |= other.left;
    }
}

impl Window {
    /// Unmaps the chunks with these heads, which the caller's flight covers. Waits, until the deadline, for leases on them.
    pub(super) fn clear(&self, heads: &[u32], cause: UnmapCause, deadline: Deadline, holding: &[&Lease<'_>]) -> Result<(), CacheError> {
        for &head in heads {
            self.mark_retiring(head);
        }
        for &head in heads {
            let Some(slot) = self.slots.get(head as usize) else { continue };
            let address = self.address_of(head);
            let mut inner = self.lock();
            while slot.leases() != 0 {
                let own = holding.iter().any(|lease| core::ptr::eq(lease.window(), self) && self.lease_covers(lease, head));
                // Waiting on the window's lock: an end of a retiring chunk's last lease passes through it.
                let left = deadline.remaining();
                if own || left.is_zero() {
                    return Err(self.error(CacheErrorKind::Busy, address));
                }
                inner = match self.changed.wait_timeout(inner, left) {
                    Ok((inner, _)) => inner,
                    Err(poisoned) => poisoned.into_inner().0,
                };
            }
            drop(inner);
            self.unmap(head, cause).map_err(|error| self.error(CacheErrorKind::Driver(error), address))?;
        }
        Ok(())
    }

    /// Unmaps what is dead and idle, and what has been waiting for its leases; with `all`, everything that is idle.
    ///
    /// Never waits: what is leased or in flight is left for the next call.
    pub(crate) fn reclaim(&self, all: Option<UnmapCause>) -> Reclaimed {
        let Some(table) = self.peer.table() else { return Reclaimed::default() };
        let heads: Vec<u32> = {
            // Nothing is published or unmapped under the lock, so the identities stand; a look at each costs nanoseconds.
            let inner = self.lock();
            let wanted = inner.mapped.iter().filter(|(_, chunk)| all.is_some() || chunk.retiring || !table.is_live(chunk.id));
            wanted.map(|(&head, _)| head).collect()
        };
        let freed_bytes = self.reclaim_chunks(&heads, all);
        self.unstick();
        let inner = self.lock();
        Reclaimed { freed_bytes, left: !inner.stuck.is_empty() || heads.iter().any(|head| inner.mapped.contains_key(head)) }
    }

    /// Unmaps the chunks with heads in `first..end` if they are idle: what ending a lease does where nothing idle is kept.
    #[cold]
    pub(super) fn reclaim_idle(&self, first: u32, end: u32) {
        let heads: Vec<u32> = self.lock().mapped.range(first..end).map(|(&head, _)| head).collect();
        self.reclaim_chunks(&heads, Some(UnmapCause::Limit));
    }

    fn reclaim_chunks(&self, heads: &[u32], all: Option<UnmapCause>) -> u64 {
        let Some(table) = self.peer.table() else { return 0 };
        let epoch = table.epoch();
        let mut freed = 0;
        for &head in heads {
            let Some(_flight) = self.try_enter(head, head) else { continue };
            let (Some(slot), Some(chunk)) = (self.slots.get(head as usize), self.lock().mapped.get(&head).copied()) else { continue };
            let cause = match all {
                _ if chunk.retiring || !slot.is_current(&table, epoch) => UnmapCause::Dead,
                Some(cause) => cause,
                None => continue,
            };
            let retired_here = self.mark_retiring(head);
            if slot.leases() != 0 {
                // A live chunk that is in use stays usable when a limit asked; a dead or purged one refuses new leases from now on.
                if retired_here && cause == UnmapCause::Limit {
                    self.revive(head);
                }
                continue;
            }
            if self.unmap(head, cause).is_ok() {
                freed += u64::from(chunk.granules) * GRANULE;
            }
        }
        freed
    }

    /// Gives the address space back if nothing is mapped in it. `false` if something is, or is about to be.
    pub(crate) fn release_address_space(&self) -> bool {
        let everything = u32::try_from(self.slots.len()).unwrap_or(u32::MAX).saturating_sub(1);
        let Some(_flight) = self.try_enter(0, everything) else { return false };
        {
            let inner = self.lock();
            if !inner.mapped.is_empty() || !inner.stuck.is_empty() {
                return false;
            }
        }
        let base = self.local_base.swap(0, AcqRel);
        if base != 0 {
            self.cache.unreserve(base, self.len);
        }
        true
    }

    /// Refuses imports from now on and unmaps what is idle. For a dead peer.
    pub(crate) fn close(&self, cause: UnmapCause) -> Reclaimed {
        self.lock().closed = true;
        let reclaimed = self.reclaim(Some(cause));
        self.release_address_space();
        reclaimed
    }

    /// Whether it refuses imports for good.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Whether it has address space.
    pub(crate) fn has_address_space(&self) -> bool {
        self.local_base.load(Acquire) != 0
    }

    /// Number of mapped chunks, their bytes, and how many of them wait for leases to end.
    pub fn usage(&self) -> (u64, u64, u64) {
        let inner = self.lock();
        let granules: u64 = inner.mapped.values().map(|chunk| u64::from(chunk.granules)).sum();
        let waiting = inner.mapped.values().filter(|chunk| chunk.retiring).count();
        (inner.mapped.len() as u64, granules * GRANULE, waiting as u64)
    }

    /// Makes a chunk refuse leases. `true` if it did not before.
    fn mark_retiring(&self, head: u32) -> bool {
        let mut inner = self.lock();
        let Some(chunk) = inner.mapped.get_mut(&head) else { return false };
        let fresh = !core::mem::replace(&mut chunk.retiring, true);
        if let Some(slot) = self.slots.get(head as usize) {
            slot.retire();
        }
        fresh
    }

    fn revive(&self, head: u32) {
        let mut inner = self.lock();
        if let (Some(chunk), Some(slot)) = (inner.mapped.get_mut(&head), self.slots.get(head as usize)) {
            chunk.retiring = false;
            slot.revive();
        }
    }

    /// Unmaps a retiring chunk without leases, under its flight. On a driver error it stays as it is, retiring, for the next reclaim.
    fn unmap(&self, head: u32, cause: UnmapCause) -> Result<(), cuda_ipc_core::sys::driver::DriverError> {
        let Some(chunk) = self.lock().mapped.get(&head).copied() else { return Ok(()) };
        let address = self.local_base.load(Acquire) + u64::from(head) * GRANULE;
        let len = u64::from(chunk.granules) * GRANULE;
        let cuda = self.cache.cuda();
        cuda.with_relaxed_capture(|| cuda.unmap(address, len))?;
        let mut inner = self.lock();
        inner.mapped.remove(&head);
        for granule in head..head + chunk.granules {
            if let Some(slot) = self.slots.get(granule as usize) {
                self.past_takes.fetch_add(slot.clear(), Relaxed);
            }
        }
        drop(inner);
        self.cache.count_unmapped(cause, len);
        Ok(())
    }

    /// Tries again to unmap what a failed import could not.
    fn unstick(&self) {
        let stuck = core::mem::take(&mut self.lock().stuck);
        if stuck.is_empty() {
            return;
        }
        let (base, cuda) = (self.local_base.load(Acquire), self.cache.cuda());
        let still = stuck.into_iter().filter(|&(first, last)| {
            let Some(_flight) = self.try_enter(first, last) else { return true };
            if self.lock().mapped.range(first..=last).next().is_some() {
                // Imported anew since; then it was unmapped after all.
                return false;
            }
            let len = u64::from(last - first + 1) * GRANULE;
            // "No such memory" says that it is not mapped any more.
            cuda.unmap(base + u64::from(first) * GRANULE, len).is_err_and(|error| !error.is_no_such_memory())
        });
        let still: Vec<_> = still.collect();
        self.lock().stuck.extend(still);
    }

    /// Whether one of the caller's own leases is on a retiring chunk in `first..=last`: then nobody can clear it before the caller ends that lease.
    pub(super) fn blocked_by(&self, holding: &[&Lease<'_>], first: u32, last: u32) -> bool {
        if holding.is_empty() {
            return false;
        }
        let retiring: Vec<u32> =
            self.lock().mapped.range(first..=last).filter(|(_, chunk)| chunk.retiring).map(|(&head, _)| head).collect();
        retiring.iter().any(|&head| holding.iter().any(|lease| core::ptr::eq(lease.window(), self) && self.lease_covers(lease, head)))
    }

    fn lease_covers(&self, lease: &Lease<'_>, head: u32) -> bool {
        let mut at = lease.first_head();
        (0..lease.chunks()).any(|_| {
            let here = at == head;
            at += self.slots.get(at as usize).map_or(1, |slot| slot.granules());
            here
        })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // No lease borrows the window any more. In a forked child nothing here is ours, and `reclaim` does nothing.
        self.reclaim(Some(UnmapCause::Purged));
        self.release_address_space();
    }
}
