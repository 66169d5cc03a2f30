//! The importer's side for pools: what UCX imports as pointers of a fabric pool are windows of pool allocations.
//!
//! UCX imports a pool once for each 64 bytes that name it, keeps it for good, and imports and frees pointers of it. The pool is an alias here and nothing else:
//! which allocation is meant, the pointer's 64 bytes say, which are a key of ours as well.
//!
//! The driver chooses where an imported allocation appears, gives that place to something else once it is freed, and cannot be told otherwise. So UCX is given
//! an address of ours: address space of the allocation's length, reserved and never mapped, that is nobody else's for as long as UCX may use it. A copy leases
//! the allocation and goes to where it is; one that was freed fails the copy, whatever has come to its place. No such address ever reaches the driver; a kernel
//! has no use for it, and reads of one are an error of its own.
//!
//! After its last user an address stays a while, like an idle window: UCX may free a region that another of its threads is about to copy with.

use core::fmt;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_ipc_cache::{CacheError, IntervalIndex, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::key::{Key, KeyKind, Nonce};
use cuda_ipc_core::sys::ProcessLife;
use cuda_ipc_core::sys::driver::{Cuda, DriverError};
use cuda_ipc_core::table::GRANULE;

use crate::importing::{PATIENCE, looks_like_alias};

/// Addresses without users that are kept at most.
const MOST_IDLE: usize = 256;

/// Why UCX gets no address.
#[derive(Debug)]
pub(crate) enum PoolError {
    /// The allocation could not be imported.
    Cache(CacheError),
    /// No address space to stand for it.
    Driver(DriverError),
    /// The pointer's bytes are no key of an allocation of this pool's process.
    Stranger,
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache(error) => write!(f, "{error}"),
            Self::Driver(error) => write!(f, "no address space for memory of a pool: {error}"),
            Self::Stranger => f.write_str("a pointer that is not of the pool it came with"),
        }
    }
}

impl From<CacheError> for PoolError {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}

/// Imported pools, and the addresses that stand for their allocations.
pub(crate) struct Pooled {
    cuda: Cuda,
    inner: Mutex<Inner>,
    /// By the addresses that UCX has, for copies.
    by_address: IntervalIndex<Stand>,
}

#[derive(Default)]
struct Inner {
    pools: HashMap<u64, ImportedPool>,
    stands: BTreeMap<u64, Used>,
    /// Addresses of stands by the key that they were made for.
    by_key: HashMap<Key, u64>,
    /// Those without users, the longest idle first.
    idle: VecDeque<u64>,
}

/// A pool, as UCX has imported it.
struct ImportedPool {
    exporter: Nonce,
    /// Devices that UCX has asked access for.
    devices: Vec<i32>,
    /// UCX imports the first pointer of a new pool twice, and frees it once: the address that the first of these calls got.
    first: Option<u64>,
}

struct Used {
    stand: Arc<Stand>,
    key: Key,
    /// How often UCX has imported it and not freed it.
    count: u64,
}

/// Address space that stands for an allocation towards UCX. Freed when UCX and the last copy have done with it.
pub(crate) struct Stand {
    cuda: Cuda,
    life: Option<ProcessLife>,
    window: Arc<Window>,
    address: u64,
    /// Bytes of address space.
    len: u64,
    /// Bit mask of the devices that copies have been made on.
    devices: AtomicU64,
}

impl Stand {
    /// The window of the allocation.
    pub(crate) fn window(&self) -> Arc<Window> {
        self.window.clone()
    }

    /// The exporter's address that an address here stands for.
    pub(crate) fn remote(&self, address: u64) -> u64 {
        self.window.base() + (address - self.address)
    }

    /// Gives a device access that is going to copy.
    pub(crate) fn open_to(&self, device: i32) -> Result<(), CacheError> {
        let bit = u32::try_from(device).ok().and_then(|device| 1_u64.checked_shl(device)).unwrap_or(0);
        if bit == 0 || self.devices.load(Relaxed) & bit == 0 {
            self.window.add_device(device, Deadline::after(PATIENCE))?;
            self.devices.fetch_or(bit, Relaxed);
        }
        Ok(())
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // What a forked child has of its parent's is not the driver's business.
        if self.life.is_some_and(ProcessLife::is_current) {
            let _ = self.cuda.free_reservation(self.address, self.len);
        }
    }
}

impl Pooled {
    pub(crate) fn new(cuda: Cuda) -> Self {
        Self { cuda, inner: Mutex::default(), by_address: IntervalIndex::default() }
    }

    /// Takes a pool under an alias. `false` if the key is not of a pool.
    pub(crate) fn import(&self, key: &Key, alias: u64) -> bool {
        if key.kind != KeyKind::Pool {
            return false;
        }
        self.lock().pools.insert(alias, ImportedPool { exporter: key.nonce, devices: Vec::new(), first: None });
        true
    }

    /// Forgets a pool; its pointers live on. `false` if it is no alias: one that is forgotten already is.
    pub(crate) fn destroy(&self, pool: u64) -> bool {
        looks_like_alias(pool) && {
            self.lock().pools.remove(&pool);
            true
        }
    }

    /// Gives a device access to what was imported of the pool, and to what will be.
    pub(crate) fn set_access(&self, pool: u64, device: i32) -> Result<(), CacheError> {
        let stands: Vec<Arc<Stand>> = {
            let mut inner = self.lock();
            let Some(pool) = inner.pools.get_mut(&pool) else { return Ok(()) };
            if !pool.devices.contains(&device) {
                pool.devices.push(device);
            }
            let exporter = pool.exporter;
            inner.stands.values().filter(|used| used.count != 0 && used.key.nonce == exporter).map(|used| used.stand.clone()).collect()
        };
        // Of all pools of that exporter: UCX does not say which is whose, and access more than asked for is what it wants of fabric pools, too.
        stands.iter().try_for_each(|stand| stand.open_to(device))
    }

    /// The devices that UCX has asked access for; an error if the allocation's key is not of the pool's process.
    pub(crate) fn devices(&self, pool: u64, key: &Key) -> Result<Vec<i32>, PoolError> {
        let is_allocation = matches!(key.kind, KeyKind::PoolAllocation { .. });
        match self.lock().pools.get(&pool) {
            Some(imported) if is_allocation && imported.exporter == key.nonce => Ok(imported.devices.clone()),
            _ => Err(PoolError::Stranger),
        }
    }

    /// The address that stands for an imported allocation, with one more user. Whether this is another import, and not the second one of a pool's first pointer.
    pub(crate) fn point(&self, pool: u64, key: &Key, window: &Arc<Window>) -> Result<(u64, bool), PoolError> {
        if let Some(found) = self.count(pool, key, window) {
            return Ok(found);
        }
        let len = key.len.next_multiple_of(GRANULE);
        let address = self.cuda.reserve(len).map_err(PoolError::Driver)?;
        let life = ProcessLife::current().ok();
        let stand = Arc::new(Stand { cuda: self.cuda, life, window: window.clone(), address, len, devices: 0.into() });
        // Another thread may have made one meanwhile: then there are two, and the newer one is the one to be found.
        let mut inner = self.lock();
        self.by_address.insert(address, key.len, stand.clone());
        inner.stands.insert(address, Used { stand, key: *key, count: 1 });
        inner.by_key.insert(*key, address);
        inner.first_of(pool, address);
        Ok((address, true))
    }

    fn count(&self, pool: u64, key: &Key, window: &Arc<Window>) -> Option<(u64, bool)> {
        let mut inner = self.lock();
        let address = *inner.by_key.get(key)?;
        let used = inner.stands.get_mut(&address).filter(|used| Arc::ptr_eq(&used.stand.window, window))?;
        used.count += 1;
        let was_idle = used.count == 1;
        if was_idle {
            inner.idle.retain(|&idle| idle != address);
        }
        let is_second = inner.first_of(pool, address);
        if is_second && let Some(used) = inner.stands.get_mut(&address) {
            used.count -= 1;
        }
        Some((address, !is_second))
    }

    /// Takes one user off. `false` if the address stands for nothing.
    pub(crate) fn free(&self, address: u64) -> bool {
        let mut inner = self.lock();
        let Some(used) = inner.stands.get_mut(&address) else { return false };
        if used.count == 0 {
            return true;
        }
        used.count -= 1;
        if used.count != 0 {
            return true;
        }
        inner.idle.push_back(address);
        let oldest = if inner.idle.len() > MOST_IDLE { inner.idle.pop_front() } else { None };
        let last = oldest.and_then(|address| inner.stands.remove(&address));
        if let Some(last) = &last {
            self.by_address.remove(last.stand.address, &last.stand);
            if inner.by_key.get(&last.key) == Some(&last.stand.address) {
                inner.by_key.remove(&last.key);
            }
        }
        drop(inner);
        // Its addresses are freed by the driver.
        drop(last);
        true
    }

    /// What an address of UCX's stands for.
    pub(crate) fn find(&self, address: u64) -> Option<Arc<Stand>> {
        self.by_address.find(address, 1, Arc::clone)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Takes note that a pointer of the pool was imported: whether it is the second import of the pool's first.
    fn first_of(&mut self, pool: u64, address: u64) -> bool {
        let Some(pool) = self.pools.get_mut(&pool) else { return false };
        if pool.devices.is_empty() {
            // Before access was set nothing of the pool is in use yet.
            pool.first = Some(address);
            return false;
        }
        pool.first.take() == Some(address)
    }
}
