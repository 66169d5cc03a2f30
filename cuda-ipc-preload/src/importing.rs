//! The importer's side: what UCX opens as a fabric handle is a window.
//!
//! UCX imports, reserves, maps, sets access, and later unmaps and frees, for each region of its own cache. For a key of ours these are counted aliases of one
//! window: they make no driver call, and UCX's habit of unmapping a region that is in use cannot hurt. What is mapped in the window is the exporter's table's
//! business; every copy leases its range. Memory of pools is opened in other calls, and `pooled.rs` has what is different about it.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::{Cache, CacheError, CacheErrorKind, CacheStats, Hold, IntervalIndex, Lease, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::key::Key;
use cuda_ipc_core::sys::driver::{Cuda, Stream};

use crate::explain;
use crate::notes::notes;
use crate::pooled::{PoolError, Pooled, Stand};
use crate::settings::settings;
use crate::streams::Streams;

/// Marks handles of ours: no driver of today gives such numbers, which are no addresses either.
const ALIAS: u64 = 0xc1bc_0000_0000_0000;
const ALIAS_MASK: u64 = 0xffff_0000_0000_0000;

/// How long UCX's locks are held for mapping at import; the rest is mapped by the copies that use it.
const AT_IMPORT: Duration = Duration::from_millis(50);
/// How long an import or a copy may take before it is an error.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// See the module's documentation.
pub(crate) struct Importing {
    cuda: Cuda,
    cache: Mutex<Option<Arc<Cache>>>,
    aliases: Mutex<Aliases>,
    /// Windows by their addresses here, for copies.
    by_local: IntervalIndex<Window>,
    pooled: Pooled,
    next_alias: AtomicU64,
    streams: Arc<Streams>,
}

#[derive(Default)]
struct Aliases {
    /// Imported handles that UCX has not released yet.
    handles: HashMap<u64, Key>,
    /// Windows that UCX has reserved, by their address here.
    windows: BTreeMap<u64, Reserved>,
}

struct Reserved {
    hold: Hold,
    /// How often UCX has reserved it and not freed it.
    count: u64,
}

/// Where a range of a copy is that UCX has another address of: the range's number, and its address.
pub(crate) type Moved = (usize, u64);
/// Makes a copy that touches so many chunks, with what has moved.
pub(crate) type Copying<'a> = dyn Fn(u32, &[Moved]) -> CUresult + 'a;

/// A range of a copy that is an exporter's.
struct Found {
    window: Arc<Window>,
    /// The exporter's address.
    remote: u64,
    len: u64,
    /// Of a pool's memory: the range's number, and what stands for it.
    stand: Option<(usize, Arc<Stand>)>,
}

impl Importing {
    pub(crate) fn new(cuda: Cuda) -> Self {
        Self {
            cuda,
            cache: Mutex::default(),
            aliases: Mutex::default(),
            by_local: IntervalIndex::default(),
            pooled: Pooled::new(cuda),
            next_alias: AtomicU64::new(1),
            streams: Arc::new(Streams::new(cuda)),
        }
    }

    /// Opens the window of `key`, proves the route by mapping what is alive, and returns an alias for UCX.
    pub(crate) fn import(&self, key: &Key) -> Result<u64, CacheError> {
        let device = self.cuda.current_device().unwrap_or(0);
        let window = self.cache().window(key, device, true, Deadline::after(PATIENCE))?;
        // Until the first chunk is mapped nothing has shown that the route works; pointers may be handed to kernels, so the rest is mapped too.
        if settings().eager {
            window.map_all(window.base(), Deadline::after(AT_IMPORT))?;
        } else {
            prove_route(&window)?;
        }
        let alias = self.new_alias();
        self.lock().handles.insert(alias, *key);
        notes(|notes| notes.imported.set(Some((alias, *key))));
        Ok(alias)
    }

    /// Forgets an alias. `false` if it is none.
    pub(crate) fn release(&self, handle: u64) -> bool {
        looks_like_alias(handle) && self.lock().handles.remove(&handle).is_some()
    }

    /// Whether a handle is an alias.
    pub(crate) fn is_alias(&self, handle: u64) -> bool {
        looks_like_alias(handle) && self.lock().handles.contains_key(&handle)
    }

    /// The address of the window that this thread has just imported; `None` if it has imported none of this length. An error if the exporter has ended since.
    pub(crate) fn reserve(&self, len: u64) -> Option<Result<u64, CacheError>> {
        let (_, key) = notes(|notes| notes.imported.take()).filter(|(_, key)| key.len == len)?;
        Some(self.reserve_for(&key))
    }

    fn reserve_for(&self, key: &Key) -> Result<u64, CacheError> {
        let window = self.cache().window(key, self.cuda.current_device().unwrap_or(0), true, Deadline::after(PATIENCE))?;
        let hold = window.hold_address()?;
        let address = hold.address();
        let mut aliases = self.lock();
        aliases
            .windows
            .entry(address)
            .or_insert_with(|| {
                self.by_local.insert(address, window.len(), window.clone());
                Reserved { hold, count: 0 }
            })
            .count += 1;
        Ok(address)
    }

    /// Takes one reservation of UCX's back. `false` if the address is none of ours.
    pub(crate) fn free(&self, address: u64) -> bool {
        let mut aliases = self.lock();
        let Some(reserved) = aliases.windows.get_mut(&address) else { return false };
        reserved.count = reserved.count.saturating_sub(1);
        if reserved.count == 0 {
            self.by_local.remove(address, reserved.hold.window());
            let last = aliases.windows.remove(&address);
            drop(aliases);
            // Idle chunks stay mapped under the cache's limits.
            drop(last);
        }
        true
    }

    /// Whether an address is in a window that UCX has reserved.
    pub(crate) fn owns(&self, address: u64) -> bool {
        self.by_local.find(address, 1, |_| ()).is_some()
    }

    /// Gives a device access to the window around `address`.
    pub(crate) fn add_device(&self, address: u64, device: i32) -> Result<(), CacheError> {
        match self.by_local.find(address, 1, Arc::clone) {
            Some(window) => window.add_device(device, Deadline::after(PATIENCE)),
            None => Ok(()),
        }
    }

    /// What this side has of pools.
    pub(crate) const fn pooled(&self) -> &Pooled {
        &self.pooled
    }

    /// Takes a pool that UCX imports, and returns an alias for it. `None` if the key is not of a pool.
    pub(crate) fn import_pool(&self, key: &Key) -> Option<u64> {
        let alias = self.new_alias();
        self.pooled.import(key, alias).then_some(alias)
    }

    /// Imports an allocation of an imported pool and returns the address that stands for it. Whether this is another import, see [`Pooled::point`].
    pub(crate) fn import_pointer(&self, pool: u64, key: &Key) -> Result<(u64, bool), PoolError> {
        let devices = self.pooled.devices(pool, key)?;
        let device = self.cuda.current_device().ok().or_else(|| devices.first().copied()).unwrap_or(0);
        let window = self.cache().window(key, device, true, Deadline::after(PATIENCE))?;
        for &device in &devices {
            window.add_device(device, Deadline::after(PATIENCE))?;
        }
        // Nothing else shows that the route works.
        window.map_all(window.base(), Deadline::after(AT_IMPORT))?;
        self.pooled.point(pool, key, &window)
    }

    fn new_alias(&self) -> u64 {
        ALIAS | (self.next_alias.fetch_add(1, Ordering::Relaxed) & !ALIAS_MASK)
    }

    /// Runs `copy` with those of `ranges` (address and length) leased that are the exporter's; `None` if none is, and then nothing was run.
    ///
    /// `copy` is told how many chunks are leased, and where those ranges are that UCX has another address of: their numbers, in order, and their addresses. All
    /// or nothing: if one range is dead, nothing is copied.
    pub(crate) fn copy(
        &self,
        ranges: impl Iterator<Item = (u64, u64)>,
        stream: Stream,
        copy: &Copying<'_>,
    ) -> Option<Result<CUresult, CacheError>> {
        let found: Vec<Found> = ranges.enumerate().filter_map(|(number, range)| self.find(number, range)).collect();
        if found.is_empty() {
            return None;
        }
        let mut leases: Vec<Lease<'_>> = Vec::with_capacity(found.len());
        let mut moved = Vec::new();
        for Found { window, remote, len, stand } in &found {
            if let Some((_, stand)) = stand
                && let Ok(device) = self.cuda.current_device()
                && let Err(error) = stand.open_to(device)
            {
                return Some(Err(error));
            }
            let (remote, len) = (*remote, *len);
            explain::BYTES.fetch_add(len, Ordering::Relaxed);
            let hit = window.try_lease(remote, len);
            let count = if hit.is_some() { &explain::HITS } else { &explain::MISSES };
            count.fetch_add(1, Ordering::Relaxed);
            let lease = hit.map_or_else(
                || {
                    // A miss may have to wait for a lease to end; not for one of this very copy.
                    let holding: Vec<&Lease<'_>> = leases.iter().collect();
                    window.lease_holding(remote, len, Deadline::after(PATIENCE), &holding)
                },
                Ok,
            );
            match lease {
                Ok(lease) => {
                    moved.extend(stand.as_ref().map(|(number, _)| (*number, lease.address())));
                    leases.push(lease);
                }
                Err(error) => return Some(Err(error)),
            }
        }
        let result = copy(leases.iter().map(Lease::chunks).fold(0, u32::saturating_add), &moved);
        // Before the leases end: who finds them ended finds the stream.
        self.streams.used(stream);
        Some(Ok(result))
    }

    fn find(&self, number: usize, (address, len): (u64, u64)) -> Option<Found> {
        if let Some(window) = self.by_local.find(address, 1, Arc::clone) {
            let remote = window.base() + (address - window.local_address()?);
            return Some(Found { window, remote, len, stand: None });
        }
        let stand = self.pooled.find(address)?;
        Some(Found { window: stand.window(), remote: stand.remote(address), len, stand: Some((number, stand)) })
    }

    /// UCX is about to destroy a stream.
    pub(crate) fn stream_destroyed(&self, stream: Stream) {
        self.streams.destroyed(stream);
    }

    /// What was imported, if anything. Waits for nobody.
    pub(crate) fn stats(&self) -> Option<CacheStats> {
        let cache = self.cache.try_lock().ok()?.clone();
        cache.map(|cache| cache.stats())
    }

    fn cache(&self) -> Arc<Cache> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.get_or_insert_with(|| Arc::new(Cache::with_drain(self.cuda, settings().cache.clone(), self.streams.clone()))).clone()
    }

    fn lock(&self) -> MutexGuard<'_, Aliases> {
        self.aliases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maps the first chunk that there is.
fn prove_route(window: &Window) -> Result<(), CacheError> {
    let end = window.base() + window.len();
    let Some((_, first)) = window.peer().table().and_then(|table| table.next_chunk(window.base(), end)) else { return Ok(()) };
    match window.lease(first.address.max(window.base()), 1, Deadline::after(PATIENCE)) {
        // It died meanwhile, which is no word on the route: whoever uses it will be told.
        Err(error) if !matches!(error.kind, CacheErrorKind::NoChunk | CacheErrorKind::KeptChanging) => Err(error),
        _ => Ok(()),
    }
}

pub(crate) const fn looks_like_alias(handle: u64) -> bool {
    handle & ALIAS_MASK == ALIAS
}
