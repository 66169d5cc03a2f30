//! Unmapping: dead chunks, idle chunks beyond a limit, everything of a dead peer.
//!
//! A chunk is first made to refuse leases, then unmapped once it has none: at once, or by whoever comes next (a miss in its place, `trim`, the sweeper)
//! after its last lease has ended. Unmapping holds the chunk's flight and no lock.

use core::ops::AddAssign;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::time::Duration;

use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::sys::driver::DriverError;
use cuda_ipc_core::table::{GRANULE, Reader};

use super::Window;
use super::state::{Locked, MappedChunk};
use crate::error::{CacheError, CacheErrorKind};
use crate::lease::Lease;

/// How often running work is asked whether it is complete, by somebody who waits for it.
const POLL: Duration = Duration::from_micros(200);

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

/// What came of reclaiming.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reclaimed {
    /// Bytes unmapped.
    pub(crate) bytes: u64,
    /// The driver refused to unmap something: to be tried again soon.
    pub(crate) refused: bool,
    /// Work still runs that may use something: to be looked at again very soon.
    pub(crate) draining: bool,
    /// Somebody has passed by one of our flights.
    passed_by: bool,
}

impl Window {
    /// Unmaps the chunks with these heads, which the caller's flight covers, but for those that are in use. Returns the head of one of these.
    pub(super) fn clear(&self, heads: &[u32], cause: UnmapCause) -> Result<Option<u32>, CacheError> {
        for &head in heads {
            self.mark_retiring(head, cause);
        }
        let mut leased = None;
        for &head in heads {
            if self.is_in_use(head) {
                leased.get_or_insert(head);
            } else {
                self.unmap(head).map_err(|error| self.error(CacheErrorKind::Driver(error), self.address_of(head)))?;
            }
        }
        Ok(leased)
    }

    /// Waits, until the deadline, for the leases on the retiring chunk at `head` to end. `Busy` at once if leases of the caller's own are on a retiring chunk
    /// in `first..=last`: nobody can clear that before the caller ends them.
    pub(super) fn wait_for_leases(
        &self,
        head: u32,
        (first, last): (u32, u32),
        deadline: Deadline,
        holding: &[&Lease<'_>],
    ) -> Result<(), CacheError> {
        let busy = || Err(self.error(CacheErrorKind::Busy, self.address_of(head)));
        if self.blocked_by(holding, first, last) {
            return busy();
        }
        loop {
            let retiring = |inner: &Locked<'_>| inner.mapped.get(&head).copied().filter(|chunk| chunk.retiring.is_some());
            let Some(chunk) = retiring(&self.lock()) else { return Ok(()) };
            // Asked without a lock: it may call the driver.
            let running = chunk.drain.is_some_and(|ticket| !self.cache.is_drained(ticket));
            let left = deadline.remaining();
            let inner = self.lock();
            // Looked at under the lock: an end of a retiring chunk's last lease passes through it. Another chunk may be there by now.
            if self.leases(head) == 0 && !running || retiring(&inner).is_none() {
                return Ok(());
            }
            if left.is_zero() {
                drop(inner);
                return busy();
            }
            // Nobody announces the end of running work.
            drop(self.board.wait(inner, if running { left.min(POLL) } else { left }));
        }
    }

    /// Whether a retiring chunk has leases, or work may still use it that was submitted under one. Needs the flight.
    fn is_in_use(&self, head: u32) -> bool {
        if self.leases(head) != 0 {
            return true;
        }
        let Some(ticket) = self.lock().mapped.get(&head).map(|chunk| chunk.drain) else { return false };
        // Asked without a lock: it may call the driver.
        let ticket = match ticket {
            Some(ticket) => ticket,
            None => match self.cache.mark_drain() {
                Some(ticket) => ticket,
                None => return false,
            },
        };
        if let Some(chunk) = self.lock().mapped.get_mut(&head) {
            chunk.drain = Some(ticket);
        }
        !self.cache.is_drained(ticket)
    }

    /// Unmaps what is dead and idle, and what has been waiting for its leases; with `all`, everything that is idle.
    ///
    /// Never waits: what is leased is left for the next call, what is in flight for whoever lands.
    pub(crate) fn reclaim(&self, all: Option<UnmapCause>) -> Reclaimed {
        let mut reclaimed = self.reclaim_range((0, self.last_granule()), all, || false);
        if self.cache.is_current() {
            reclaimed.refused |= self.unstick();
        }
        reclaimed
    }

    /// Unmaps idle chunks until there is `enough`.
    pub(crate) fn evict(&self, enough: impl Fn() -> bool) {
        self.reclaim_range((0, self.last_granule()), Some(UnmapCause::Limit), enough);
    }

    /// Unmaps idle chunks with heads in `first..end`: what ending a lease does where nothing idle is kept.
    #[cold]
    pub(super) fn reclaim_idle(&self, first: u32, end: u32) {
        let reclaimed = self.reclaim_range((first, end.saturating_sub(1)), Some(UnmapCause::Limit), || false);
        self.cache.come_back(reclaimed);
    }

    /// Does what somebody left undone who has passed by a flight over `first..=last`.
    #[cold]
    pub(super) fn catch_up(&self, first: u32, last: u32) {
        if self.is_closed() {
            self.cache.settle(self);
        } else if !self.cache.keeps_idle() {
            self.reclaim_idle(first, last + 1);
        } else {
            self.cache.unsettle();
        }
    }

    fn reclaim_range(&self, (first, last): (u32, u32), all: Option<UnmapCause>, enough: impl Fn() -> bool) -> Reclaimed {
        let mut total = Reclaimed::default();
        // In a forked child the lock may be held by a thread that is not there, and nothing here is the child's.
        let Some(table) = self.peer.table().filter(|_| self.cache.is_current()) else { return total };
        let mut all = all;
        loop {
            let mut round = Reclaimed::default();
            for head in self.candidates((first, last), all, &table) {
                if enough() {
                    break;
                }
                let Some(flight) = self.try_enter(head, head) else { continue };
                round += self.reclaim_chunk(head, all, &table);
                round.passed_by |= flight.land_quietly();
            }
            total += round;
            if !round.passed_by {
                return total;
            }
            if self.cache.keeps_idle() || self.is_closed() {
                self.catch_up(first, last);
                return total;
            }
            // Who passed by a flight of ours may have ended the very lease that stopped us. Here and not by `catch_up`, which would come back here.
            all = all.or(Some(UnmapCause::Limit));
        }
    }

    /// Heads of the chunks that seem worth a flight.
    fn candidates(&self, (first, last): (u32, u32), all: Option<UnmapCause>, table: &Reader<'_, AtomicU64>) -> Vec<u32> {
        let wanted = |head: u32, chunk: &MappedChunk| {
            let over = chunk.retiring.is_some() || !table.is_live(chunk.id);
            match all {
                _ if over => true,
                // A live chunk in use must not even refuse a lease for a moment when only a limit asks.
                Some(UnmapCause::Limit) => self.leases(head) == 0,
                Some(_) => true,
                None => false,
            }
        };
        self.lock().mapped.range(first..=last).filter(|&(&head, chunk)| wanted(head, chunk)).map(|(&head, _)| head).collect()
    }

    /// Unmaps the chunk at `head`, under its flight, if it is over or `all` are to go, and has no lease.
    fn reclaim_chunk(&self, head: u32, all: Option<UnmapCause>, table: &Reader<'_, AtomicU64>) -> Reclaimed {
        let nothing = Reclaimed::default();
        let Some(chunk) = self.lock().mapped.get(&head).copied() else { return nothing };
        let cause = match (chunk.retiring, all) {
            (Some(cause), _) => cause,
            (None, _) if !table.is_live(chunk.id) => UnmapCause::Dead,
            (None, Some(cause)) => cause,
            (None, None) => return nothing,
        };
        self.mark_retiring(head, cause);
        let leased = self.leases(head) != 0;
        if leased || self.is_in_use(head) {
            // A live chunk that is in use stays usable when a limit asked; a dead or purged one refuses new leases from now on. So does one that is only
            // waiting for running work where nothing idle is kept: no lease will end and bring somebody back.
            if chunk.retiring.is_none() && cause == UnmapCause::Limit && (leased || self.cache.keeps_idle()) {
                self.revive(head);
                return nothing;
            }
            // Who ends a lease says so; nobody announces the end of running work.
            return Reclaimed { draining: !leased, ..nothing };
        }
        match self.unmap(head) {
            Ok(bytes) => Reclaimed { bytes, ..nothing },
            Err(_) => Reclaimed { refused: true, ..nothing },
        }
    }

    /// Gives the address space back if nothing is mapped in it, nor about to be.
    pub(crate) fn release_address_space(&self) {
        // The address of a pool's allocation goes when it is unmapped.
        if !self.cache.is_current() || self.pool_slot.is_some() {
            return;
        }
        let Some(_flight) = self.try_enter(0, self.last_granule()) else { return };
        let base = {
            let inner = self.lock();
            if !inner.mapped.is_empty() || !inner.stuck.is_empty() || inner.holds != 0 {
                return;
            }
            // Under the lock, so that a hold either comes before or finds none.
            self.local_base.swap(0, AcqRel)
        };
        if base != 0 {
            self.cache.unreserve(base, self.len);
        }
    }

    /// Refuses imports from now on and unmaps what is idle. For a dead peer.
    pub(crate) fn close(&self) -> Reclaimed {
        self.lock().closed = true;
        let reclaimed = self.reclaim(Some(UnmapCause::Purged));
        self.release_address_space();
        reclaimed
    }

    /// Closes the window if it has nothing and nobody is about to change that.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut inner = self.lock();
        let empty = self.is_empty_now(&inner);
        inner.closed |= empty;
        empty
    }

    /// Whether it refuses imports for good.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Whether it has nothing: no chunk, no address space, no flight.
    pub(crate) fn has_nothing(&self) -> bool {
        self.is_empty_now(&self.lock())
    }

    fn is_empty_now(&self, inner: &Locked<'_>) -> bool {
        inner.is_quiet() && inner.mapped.is_empty() && inner.stuck.is_empty() && inner.holds == 0 && !self.has_address_space()
    }

    /// Whether it has address space.
    pub(crate) fn has_address_space(&self) -> bool {
        self.local_base.load(Acquire) != 0
    }

    /// Number of mapped chunks, their bytes, and how many of them wait for leases to end.
    pub fn usage(&self) -> (u64, u64, u64) {
        let inner = self.lock();
        let bytes = inner.mapped.values().map(|chunk| self.bytes_of(chunk.granules)).sum();
        let waiting = inner.mapped.values().filter(|chunk| chunk.retiring.is_some()).count();
        (inner.mapped.len() as u64, bytes, waiting as u64)
    }

    fn leases(&self, head: u32) -> u64 {
        self.slots.get(head as usize).map_or(0, |slot| slot.leases())
    }

    /// Makes a chunk refuse leases; a cause that it has already stays.
    fn mark_retiring(&self, head: u32, cause: UnmapCause) {
        let mut inner = self.lock();
        if let (Some(chunk), Some(slot)) = (inner.mapped.get_mut(&head), self.slots.get(head as usize)) {
            chunk.retiring.get_or_insert(cause);
            slot.retire();
        }
    }

    fn revive(&self, head: u32) {
        let mut inner = self.lock();
        if let (Some(chunk), Some(slot)) = (inner.mapped.get_mut(&head), self.slots.get(head as usize)) {
            chunk.retiring = None;
            chunk.drain = None;
            slot.revive();
        }
    }

    /// Unmaps a retiring chunk without leases, under its flight, and returns its bytes. On a driver error it stays as it is, retiring, for the next reclaim.
    fn unmap(&self, head: u32) -> Result<u64, DriverError> {
        let Some(MappedChunk { granules, retiring, .. }) = self.lock().mapped.get(&head).copied() else { return Ok(0) };
        let address = self.local_base.load(Acquire) + u64::from(head) * GRANULE;
        let bytes = self.bytes_of(granules);
        if self.pool_slot.is_some() {
            self.close_pooled()?;
        } else {
            let cuda = self.cache.cuda();
            cuda.with_relaxed_capture(|| cuda.unmap(address, bytes))?;
        }
        let mut inner = self.lock();
        inner.mapped.remove(&head);
        for granule in head..head + granules {
            if let Some(slot) = self.slots.get(granule as usize) {
                self.past_takes.fetch_add(slot.clear(), Relaxed);
            }
        }
        drop(inner);
        self.cache.count_unmapped(retiring.unwrap_or(UnmapCause::Purged), bytes);
        Ok(bytes)
    }

    /// Bytes of a mapped chunk of so many granules.
    fn bytes_of(&self, granules: u32) -> u64 {
        // Allocations of a pool have any length.
        if self.pool_slot.is_some() { self.len } else { u64::from(granules) * GRANULE }
    }

    /// Tries again to unmap what a failed import could not. `true` if the driver refuses still.
    fn unstick(&self) -> bool {
        let stuck = self.lock().stuck.clone();
        for (first, last) in stuck {
            let Some(_flight) = self.try_enter(first, last) else { continue };
            if self.is_unstuck(first, last) {
                self.lock().stuck.retain(|&range| range != (first, last));
            }
        }
        !self.lock().stuck.is_empty()
    }

    fn is_unstuck(&self, first: u32, last: u32) -> bool {
        if self.lock().mapped.range(first..=last).next().is_some() {
            // Imported anew since; then it was unmapped after all.
            return true;
        }
        let (address, len) = (self.local_base.load(Acquire) + u64::from(first) * GRANULE, u64::from(last - first + 1) * GRANULE);
        let cuda = self.cache.cuda();
        // "No such memory" says that it is not mapped any more.
        cuda.with_relaxed_capture(|| cuda.unmap(address, len)).map_or_else(|error| error.is_no_such_memory(), |()| true)
    }

    /// Whether one of the caller's own leases is on a retiring chunk in `first..=last`.
    fn blocked_by(&self, holding: &[&Lease<'_>], first: u32, last: u32) -> bool {
        if holding.is_empty() {
            return false;
        }
        let retiring: Vec<u32> =
            self.lock().mapped.range(first..=last).filter(|(_, chunk)| chunk.retiring.is_some()).map(|(&head, _)| head).collect();
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

impl AddAssign for Reclaimed {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.refused |= other.refused;
        self.draining |= other.draining;
        self.passed_by |= other.passed_by;
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // No lease borrows the window any more. In a forked child nothing here is ours, and neither call does anything.
        while self.reclaim(Some(UnmapCause::Purged)).draining {
            // Nobody comes after this. Running work ends by itself.
            std::thread::sleep(POLL);
        }
        self.release_address_space();
        if self.cache.is_current() {
            self.cache.count_leases_of_the_past(self.takes());
        }
    }
}
