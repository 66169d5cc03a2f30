//! A window: this process's mirror of one reservation of a peer, or of one allocation of a peer's pool.
//!
//! A window has address space of the reservation's length, in which the chunk at `base + x` in the exporter appears at `local base + x`, once somebody has
//! asked for it. [`Window::lease`] is its use. The hit path is here and in `slot.rs`: no lock, no system call, no driver call, no allocation. The rest of
//! the window's life is in its parts:
//!
//! - `state.rs`: what is mapped, and who may change which granules: one at a time (`../flight.rs`).
//! - `fill.rs`: a miss. Look the chunks up, clear what is dead, import what is missing.
//! - `hold.rs`: an address range that stays.
//! - `pooled.rs`: what is different where the window is of a pool's allocation: one chunk, at an address that the driver chooses anew with each import.
//! - `reclaim.rs`: unmapping what is dead or too much, when no lease is on it.
//!
//! A window without address space (fresh, or evicted) is as good as any: the next miss reserves some. So users keep their `Arc<Window>` for as long as they
//! have the key.

mod fill;
mod hold;
mod pooled;
mod reclaim;
mod state;

use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::Arc;

use cuda_ipc_core::importer::{Deadline, Peer};
use cuda_ipc_core::table::GRANULE;

use crate::cache::Shared;
use crate::error::{CacheError, CacheErrorKind};
use crate::lease::Lease;
use crate::slot::{self, Slot};
use crate::slots::Slots;

use state::{Board, Locked};

pub use hold::Hold;
pub(crate) use reclaim::Reclaimed;
pub use reclaim::UnmapCause;

/// See the module's documentation. Usable from any thread.
// The fields that a hit reads come first and fill one cache line, and the slots of a small window the next: with thousands of windows, lines are what a hit
// costs.
#[repr(C, align(128))]
pub struct Window {
    base: u64,
    len: u64,
    /// First address of the window here; 0 while it has none. Changes only while nothing can be leased.
    local_base: core::sync::atomic::AtomicU64,
    peer: Arc<Peer>,
    cache: Arc<Shared>,
    /// The cache's clock when the window was last used.
    last_used: core::sync::atomic::AtomicU64,
    slots: Slots,

    writable: bool,
    /// Slot of the pool allocation that it is of; `None` where it is of a reservation.
    pool_slot: Option<u32>,
    /// Bit mask of the ordinals of devices that have access.
    devices: core::sync::atomic::AtomicU64,
    /// Leases taken of chunks that are not mapped any more.
    past_takes: core::sync::atomic::AtomicU64,
    /// Flights, and what is mapped. Woken when a flight has landed, and when the last lease of a retiring chunk has ended.
    board: Board,
}

/// What tells a peer's windows apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Named {
    pub(crate) pool_slot: Option<u32>,
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) writable: bool,
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("peer", &self.peer.nonce())
            .field("base", &format_args!("{:#x}", self.base))
            .field("len", &format_args!("{:#x}", self.len))
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}

impl Window {
    /// `None` if there is no memory to describe so many granules.
    pub(crate) fn new(cache: Arc<Shared>, peer: Arc<Peer>, named: Named) -> Option<Self> {
        let last_used = cache.clock().into();
        let Named { pool_slot, base, len, writable } = named;
        Some(Self {
            pool_slot,
            peer,
            cache,
            base,
            len,
            writable,
            slots: Slots::new(len.div_ceil(GRANULE))?,
            local_base: 0.into(),
            devices: 0.into(),
            last_used,
            past_takes: 0.into(),
            board: Board::default(),
        })
    }

    /// First address of the reservation, or of the pool's allocation, in the exporter.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Its length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Never: a reservation has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Whether devices may write through it. Through a window of a pool's allocation they always may: a pool gives access to read and write, or none.
    pub const fn writable(&self) -> bool {
        self.writable
    }

    /// Whether it is of a pool's allocation.
    pub(crate) const fn is_pooled(&self) -> bool {
        self.pool_slot.is_some()
    }

    /// The exporter.
    pub const fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Leases `[address, address + len)`, addresses of the exporter: the memory that is there *now*, mapped here until the lease ends.
    ///
    /// A hit costs tens of nanoseconds. A miss imports the missing chunks, and only these, in the calling thread. Errors: [`CacheError`]; the window is as
    /// usable as before. `Busy` if a chunk was replaced while a lease on its old memory did not end before the deadline.
    #[inline]
    pub fn lease(&self, address: u64, len: u64, deadline: Deadline) -> Result<Lease<'_>, CacheError> {
        match self.try_lease(address, len) {
            Some(lease) => Ok(lease),
            None => self.lease_slow(address, len, deadline, &[]),
        }
    }

    /// As [`Window::lease`], for a caller who holds leases already: if a replaced chunk is blocked by one of `holding`, the answer is `Busy` at once, since
    /// the caller would wait for itself.
    pub fn lease_holding(&self, address: u64, len: u64, deadline: Deadline, holding: &[&Lease<'_>]) -> Result<Lease<'_>, CacheError> {
        match self.try_lease(address, len) {
            Some(lease) => Ok(lease),
            None => self.lease_slow(address, len, deadline, holding),
        }
    }

    /// The hit path alone: a lease if every chunk of the range is mapped and current, else `None`.
    #[inline]
    pub fn try_lease(&self, address: u64, len: u64) -> Option<Lease<'_>> {
        let (first, last) = self.granules(address, len)?;
        let table = self.peer.table()?;
        // Loaded before the checks it will stand for.
        let epoch = table.epoch();
        let mut head = self.hold(first)?;
        let (first_head, mut chunks) = (head, 0_u32);
        loop {
            chunks += 1;
            let slot = self.slots.get(head as usize)?;
            if !slot.is_current(&table, epoch) {
                break;
            }
            let next = head + slot.granules();
            if next > last {
                self.touch();
                let address = self.local_base.load(Acquire) + (address - self.base);
                return Some(Lease::new(self, first_head, chunks, address));
            }
            match self.hold(next) {
                Some(held) => head = held,
                None => break,
            }
        }
        self.each(first_head, chunks, Slot::give_back);
        None
    }

    /// Takes a lease on the chunk that covers `granule`, and returns the granule of its head.
    #[inline]
    fn hold(&self, granule: u32) -> Option<u32> {
        slot::hold(&self.slots, granule).map_err(|last| self.ended(last)).ok()
    }

    /// Ends a lease of `chunks` chunks, the first of which has its head at `first`.
    #[inline]
    pub(crate) fn end(&self, first: u32, chunks: u32) {
        self.each(first, chunks, Slot::end);
    }

    #[inline]
    fn each(&self, first: u32, chunks: u32, end: impl Fn(&Slot) -> bool) {
        let mut head = first;
        for _ in 0..chunks {
            let Some(slot) = self.slots.get(head as usize) else { return };
            // Read before the end: afterwards the chunk may be gone.
            head += slot.granules();
            self.ended(end(slot));
        }
        if !self.cache.keeps_idle() {
            self.reclaim_idle(first, head);
        }
    }

    /// After an end: `last` says that somebody may be waiting for it.
    #[inline]
    fn ended(&self, last: bool) {
        if last {
            self.wake_reclaimers();
        }
    }

    #[cold]
    fn wake_reclaimers(&self) {
        if self.cache.is_current() {
            self.board.wake();
            self.cache.lease_ended(self);
        }
    }

    /// First and last granule of a range; `None` if it is empty or not inside.
    #[inline]
    fn granules(&self, address: u64, len: u64) -> Option<(u32, u32)> {
        let offset = address.checked_sub(self.base)?;
        if len == 0 || offset >= self.len || len > self.len - offset {
            return None;
        }
        // The number of slots fits a u32: a reservation of 2^53 bytes does not exist.
        Some(((offset / GRANULE).try_into().ok()?, ((offset + len - 1) / GRANULE).try_into().ok()?))
    }

    /// Remembers that the window was used at the cache's present tick.
    #[inline]
    fn touch(&self) {
        let now = self.cache.clock();
        if self.last_used.load(Relaxed) != now {
            self.last_used.store(now, Relaxed);
        }
    }

    /// When it was last used, in ticks of the cache's clock, which counts imports.
    pub(crate) fn last_used(&self) -> u64 {
        self.last_used.load(Relaxed)
    }

    /// How often chunks of this window were leased: each chunk of a lease counts. Walks all mapped chunks.
    pub fn takes(&self) -> u64 {
        let inner = self.lock();
        let mapped: u64 = inner.mapped.keys().filter_map(|&head| self.slots.get(head as usize)).map(Slot::takes).sum();
        self.past_takes.load(Relaxed) + mapped
    }

    fn lock(&self) -> Locked<'_> {
        self.board.lock()
    }

    fn error(&self, kind: CacheErrorKind, address: u64) -> CacheError {
        CacheError { kind, pid: self.peer.pid(), address }
    }
}
