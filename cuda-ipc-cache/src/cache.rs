//! The cache: peers, their windows, and the limits that all windows share.
//!
//! [`Cache::window`] turns a key into its window, reaching the exporter if it is not known yet; [`Window::lease`] is all the rest of the time. What happens
//! in the background, `sweeper.rs` does; what the windows may hold together, `limits.rs` knows; whom not to ask again yet, `refusals.rs`.

mod limits;
mod refusals;
mod sweeper;

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_driver_sys::CUdevice;
use cuda_ipc_core::importer::{Bell, ConnectOptions, Deadline, ImportErrorKind, Peer};
use cuda_ipc_core::key::{Key, KeyKind, Nonce};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::sys::ProcessLife;
use cuda_ipc_core::sys::driver::Cuda;

use crate::drain::Drain;
use crate::error::{CacheError, CacheErrorKind};
use crate::index::IntervalIndex;
use crate::opened::Opened;
use crate::stats::{CacheStats, Counters};
use crate::window::{Named, Window};

use refusals::Refusals;
use sweeper::Thoroughness;

/// Settings of a [`Cache`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheOptions {
    /// Bytes that may stay mapped. Idle windows make room, least recently used first; what is leased is counted, and stays even beyond the limit until its
    /// leases end.
    pub max_mapped_bytes: u64,
    /// Windows that may keep address space, likewise.
    pub max_windows: u64,
    /// Bytes of address space that all windows may reserve. A window that does not fit even after idle ones made room is an error.
    pub max_address_space: u64,
    /// Whether chunks stay mapped after their last lease. If not, they are unmapped when it ends.
    pub keep_idle: bool,
    /// Whether a thread unmaps what exporters have freed and what dead peers have left. If not, [`Cache::trim`] is the caller's to call.
    pub sweep: bool,
    /// How long a refused peer is left alone at first; doubles with each refusal.
    pub first_backoff: Duration,
    /// How long it is left alone at most.
    pub last_backoff: Duration,
    /// By which ways exporters may be reached.
    pub connect: ConnectOptions,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            max_mapped_bytes: 1 << 40,
            max_windows: 4096,
            // Half of what a process has on x86-64; the driver and the application need some too.
            max_address_space: 1 << 46,
            keep_idle: true,
            sweep: true,
            first_backoff: Duration::from_millis(100),
            last_backoff: Duration::from_secs(30),
            connect: ConnectOptions::default(),
        }
    }
}

/// Windows of other processes' memory. Usable from any thread; dropping it closes every window that nobody holds, and stops its thread.
#[derive(Debug)]
pub struct Cache {
    shared: Arc<Shared>,
}

/// What windows and the sweeper share with the cache.
#[derive(Debug)]
pub(crate) struct Shared {
    cuda: Cuda,
    options: CacheOptions,
    /// Says whether work still runs that used memory under leases that have ended.
    drain: Option<Arc<dyn Drain>>,
    /// The process life that made the cache; `None` where that cannot be told, which lets no peer be reached either.
    life: Option<ProcessLife>,
    peers: Mutex<HashMap<Nonce, Arc<PeerWindows>>>,
    /// Windows of dead and purged peers that have something mapped still. `None` once the cache is gone: then they are their users' alone.
    closing: Mutex<Option<Vec<Arc<Window>>>>,
    refusals: Mutex<Refusals>,
    pub(crate) counters: Counters,
    /// Ticks with each import: the order of uses that evictions go by.
    clock: AtomicU64,
    reserved: AtomicU64,
    bell: Bell,
    /// Something was left that no change of an epoch will announce: the next sweep looks at everything.
    unsettled: AtomicBool,
}

type WindowMap = BTreeMap<Named, Arc<Window>>;

/// A peer and its windows.
#[derive(Debug)]
pub struct PeerWindows {
    peer: Arc<Peer>,
    /// By base, length and access, pool allocations by their slot too. A larger reservation made later at the same base is another window.
    /// `None` once the peer is dead or purged: whoever was about to add a window looks the peer up again.
    windows: Mutex<Option<WindowMap>>,
    /// The same by address, for readers: one index for each access.
    by_address: [IntervalIndex<Window>; 2],
    /// The peer's epoch before the last sweep that left nothing behind: while it stands, there is nothing to sweep.
    swept: AtomicU64,
}

impl Cache {
    /// As [`Cache::new`], for a user who ends leases before the work is complete: nothing is unmapped before `drain` says so.
    pub fn with_drain(cuda: Cuda, options: CacheOptions, drain: Arc<dyn Drain>) -> Self {
        Self::make(cuda, options, Some(drain))
    }

    /// Makes a cache with no peers. It starts its thread with the first one.
    pub fn new(cuda: Cuda, options: CacheOptions) -> Self {
        Self::make(cuda, options, None)
    }

    fn make(cuda: Cuda, options: CacheOptions, drain: Option<Arc<dyn Drain>>) -> Self {
        Self {
            shared: Arc::new(Shared {
                cuda,
                options,
                drain,
                life: ProcessLife::current().ok(),
                peers: Mutex::default(),
                closing: Mutex::new(Some(Vec::new())),
                refusals: Mutex::default(),
                counters: Counters::default(),
                clock: AtomicU64::new(1),
                reserved: AtomicU64::new(0),
                bell: Bell::new(),
                unsettled: AtomicBool::new(false),
            }),
        }
    }

    /// The window of what `key` names (a reservation, or an allocation of a pool), accessible for `device` (an ordinal of this process). Nothing is imported yet.
    ///
    /// A peer's first key costs a contact, which has some tens of microseconds; a refusal is remembered and answered at once until it expires. Errors:
    /// [`CacheError`]. Keep the window for as long as the key is of use.
    pub fn window(&self, key: &Key, device: CUdevice, writable: bool, deadline: Deadline) -> Result<Arc<Window>, CacheError> {
        let error = |kind| CacheError { kind, pid: key.pid, address: key.base };
        if !self.shared.is_current() {
            return Err(error(CacheErrorKind::Forked));
        }
        let named = match key.kind {
            KeyKind::Reservation => Named { pool_slot: None, base: key.base, len: key.len, writable },
            KeyKind::PoolAllocation { slot } => Named { pool_slot: Some(slot), base: key.base, len: key.len, writable: true },
            _ => return Err(error(CacheErrorKind::OutsideWindow)),
        };
        // What could never have address space is not worth the memory that describes a window.
        if key.len > self.shared.options.max_address_space {
            return Err(error(self.shared.no_space(key.len)));
        }
        let window = loop {
            let peer = self.shared.peer(key, deadline)?;
            if let Some(window) = peer.window(&self.shared, named).map_err(error)? {
                break window;
            }
        };
        window.add_device(device, deadline)?;
        Ok(window)
    }

    /// Opens what `rkey` names for `device` (an ordinal of this process), whatever carries it: the one call for users who do not care.
    ///
    /// The rkey's bytes decide: a window of chunks or of a pool's allocation, a mapping by a legacy handle, or memory of this very process. Nothing is
    /// imported yet but a legacy handle. A pool's memory and a legacy mapping can be written whatever was asked for. Errors: [`CacheError`]; [`CacheErrorKind::NoIpc`] where the exporter has said that there is no lane.
    pub fn open(&self, rkey: &Rkey, device: CUdevice, writable: bool, deadline: Deadline) -> Result<Opened, CacheError> {
        Opened::new(self, rkey, device, writable, deadline)
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The windows of a peer that is known already.
    pub fn peer(&self, nonce: Nonce) -> Option<Arc<PeerWindows>> {
        self.shared.is_current().then(|| self.shared.lock_peers().get(&nonce).cloned()).flatten()
    }

    /// Unmaps what exporters have retired, everything of peers that have exited, and what is beyond the limits, unless it is leased. Returns how many bytes
    /// of the dead were unmapped.
    pub fn trim(&self) -> u64 {
        self.shared.sweep(Thoroughness::Everything).bytes
    }

    /// Forgets a peer: unmaps what is idle, lets no more be imported, and unmaps the rest as its leases end. Returns the bytes unmapped now.
    ///
    /// A later key of the same peer makes new windows.
    pub fn purge_peer(&self, nonce: Nonce) -> u64 {
        self.shared.close_peer(nonce).bytes
    }

    /// Counts and totals as of now.
    pub fn stats(&self) -> CacheStats {
        self.shared.stats()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // In a forked child nothing here is ours, and a lock may be held by a thread that is not there.
        if !self.shared.is_current() {
            return;
        }
        let nonces: Vec<Nonce> = self.shared.lock_peers().keys().copied().collect();
        for nonce in nonces {
            self.shared.close_peer(nonce);
        }
        let closing = self.shared.lock_closing().take();
        // The last try for those that nobody holds; after the lock, since it takes the driver's time.
        drop(closing);
        self.shared.bell.ring();
    }
}

impl PeerWindows {
    /// The peer.
    pub const fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Its windows with this access by address. Readers take no lock.
    pub const fn index(&self, writable: bool) -> &IntervalIndex<Window> {
        let [read, write] = &self.by_address;
        if writable { write } else { read }
    }

    /// The window of this reservation or allocation, made if there is none. `Ok(None)` if the peer is dead or purged.
    fn window(&self, shared: &Arc<Shared>, named: Named) -> Result<Option<Arc<Window>>, CacheErrorKind> {
        let mut windows = self.lock();
        let Some(windows) = &mut *windows else { return Ok(None) };
        if let Some(window) = windows.get(&named) {
            return Ok(Some(window.clone()));
        }
        let window = Window::new(shared.clone(), self.peer.clone(), named).ok_or_else(|| shared.no_space(named.len))?;
        let window = Arc::new(window);
        windows.insert(named, window.clone());
        self.index(named.writable).insert(named.base, named.len, window.clone());
        Ok(Some(window))
    }

    fn windows(&self) -> Vec<Arc<Window>> {
        self.lock().as_ref().map(|windows| windows.values().cloned().collect()).unwrap_or_default()
    }

    /// Lets no window be added any more, and gives up those there are.
    fn close(&self) -> Vec<Arc<Window>> {
        let windows = self.lock().take().unwrap_or_default();
        for index in &self.by_address {
            index.retain(|_| false);
        }
        windows.into_values().collect()
    }

    /// Forgets windows that nobody holds and that hold nothing.
    fn forget_unused(&self) {
        let mut windows = self.lock();
        let Some(windows) = &mut *windows else { return };
        // One count here, one in the index. A reader of the index who takes one just now finds it closed.
        let before = windows.len();
        windows.retain(|_, window| Arc::strong_count(window) > 2 || !window.close_if_empty());
        if windows.len() != before {
            for index in &self.by_address {
                index.retain(|window| !window.is_closed());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<WindowMap>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    pub(crate) const fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Whether this is the process life that made the cache. In a forked child nothing of it may be used: a lock may be held by a thread that is not there.
    #[inline]
    pub(crate) fn is_current(&self) -> bool {
        self.life.is_none_or(ProcessLife::is_current)
    }

    /// The present tick.
    #[inline]
    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// A ticket for the work that may still run; `None` where leases outlive the work.
    pub(crate) fn mark_drain(&self) -> Option<u64> {
        self.drain.as_ref().map(|drain| drain.mark())
    }

    /// Whether the work of a ticket is complete.
    pub(crate) fn is_drained(&self, ticket: u64) -> bool {
        self.drain.as_ref().is_none_or(|drain| drain.is_complete(ticket))
    }

    #[inline]
    pub(crate) const fn keeps_idle(&self) -> bool {
        self.options.keep_idle
    }

    /// The known peer of `key`, or a new one, unless it has refused lately.
    fn peer(self: &Arc<Self>, key: &Key, deadline: Deadline) -> Result<Arc<PeerWindows>, CacheError> {
        let fail = |kind| CacheError { kind, pid: key.pid, address: key.base };
        let known = self.lock_peers().get(&key.nonce).cloned();
        if let Some(known) = known {
            // There was none to be had when the peer was new, perhaps.
            if self.options.sweep {
                self.ensure_sweeper();
            }
            return Ok(known);
        }
        if let Some(refusal) = self.lock_refusals().standing(key.nonce) {
            self.counters.refused_again.fetch_add(1, Ordering::Relaxed);
            return Err(fail(CacheErrorKind::Refused(refusal)));
        }
        // No lock while the exporter is being reached. Two threads may both reach it; one of the two peers is kept.
        let peer = Peer::connect_with(key, &self.options.connect, deadline).map_err(|error| {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            // What may pass by itself is no verdict, and "use the pointer itself" is none on the peer.
            if !error.retryable() && error.kind != ImportErrorKind::OwnProcess {
                self.lock_refusals().add(key.nonce, error, &self.options);
            }
            fail(CacheErrorKind::Import(error))
        })?;
        self.lock_refusals().forget(key.nonce);
        let fresh = PeerWindows {
            peer: Arc::new(peer),
            windows: Mutex::new(Some(BTreeMap::new())),
            by_address: Default::default(),
            swept: AtomicU64::new(0),
        };
        let kept = self.lock_peers().entry(key.nonce).or_insert_with(|| Arc::new(fresh)).clone();
        self.bell.ring();
        if self.options.sweep {
            self.ensure_sweeper();
        }
        Ok(kept)
    }

    fn stats(&self) -> CacheStats {
        let mut stats = self.counters.read();
        if !self.is_current() {
            return stats;
        }
        let windows: Vec<Arc<Window>> = {
            // The order of `close_peer`, which moves windows from one to the other; and under its lock, so that each is seen once.
            let closing = self.lock_closing();
            let peers = self.all_peers();
            stats.peers = peers.len() as u64;
            peers.iter().flat_map(|peer| peer.windows()).chain(closing.iter().flatten().cloned()).collect()
        };
        for window in windows {
            let (chunks, bytes, waiting) = window.usage();
            stats.windows += u64::from(window.has_address_space());
            stats.chunks += chunks;
            stats.bytes += bytes;
            stats.waiting_unmaps += waiting;
            stats.chunk_leases += window.takes();
        }
        stats.address_space = self.reserved.load(Ordering::Relaxed);
        stats
    }

    fn all_peers(&self) -> Vec<Arc<PeerWindows>> {
        self.lock_peers().values().cloned().collect()
    }

    fn all_closing(&self) -> Vec<Arc<Window>> {
        self.lock_closing().clone().unwrap_or_default()
    }

    fn lock_closing(&self) -> MutexGuard<'_, Option<Vec<Arc<Window>>>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_peers(&self) -> MutexGuard<'_, HashMap<Nonce, Arc<PeerWindows>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
