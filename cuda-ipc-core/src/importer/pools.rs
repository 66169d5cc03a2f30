//! Imported pools and pointers of them: one of each in the whole process, whoever asks, counted.
//!
//! The driver gives the same address for a pointer that is imported twice, and the first free unmaps it for both (A9); and it wants a pool's pointers freed
//! before the pool. So all imports of this process stand in one place: pools by {exporter's nonce, slot, generation}, pointers by the same of their
//! allocation, by their export data and by the address that came out. Imports and frees of one exporter's pools happen one after the other: whoever finds another at work waits, so nobody ever
//! meets a pointer that is being freed. That order is kept by a flag and not by a lock: none is held across a driver call.
//!
//! A pool knows one kind of access, for reading and writing, and gives it to a device for all of its memory. It is asked for only after the driver has said that
//! the device can reach the pool's, because it may be granted to one that cannot, and copy nothing (B36).

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cuda_driver_sys::CUdevice;

use super::error::{Deadline, ImportErrorKind};
use crate::key::Nonce;
use crate::sys::driver::{Cuda, DriverError, Pool};
use crate::sys::per_life::PerLife;
use crate::table::ChunkId;

static IMPORTS: PerLife<Imports> = PerLife::new();

/// All of this process.
#[derive(Debug, Default)]
struct Imports {
    state: Mutex<State>,
    /// Somebody is done with an exporter.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    exporters: HashMap<Nonce, Exporter>,
    /// Threads that wait: where there are none, nobody is woken, which is a system call.
    waiting: usize,
}

/// What is imported from one exporter's pools.
#[derive(Debug, Default)]
struct Exporter {
    /// Somebody is at work: what is below is theirs.
    busy: bool,
    pools: HashMap<ChunkId, ImportedPool>,
    /// By address.
    pointers: HashMap<u64, Pointer>,
    /// Addresses by export data, and the allocation that each was imported for.
    addresses: HashMap<[u8; 64], (u64, ChunkId)>,
}

/// An imported pool.
#[derive(Debug)]
struct ImportedPool {
    pool: Pool,
    /// The device that holds it, as this process numbers it.
    home: CUdevice,
    /// Devices that have access.
    devices: Vec<CUdevice>,
    /// How many pointers came by it.
    pointers: u64,
}

/// An imported pointer.
#[derive(Debug)]
struct Pointer {
    pool: ChunkId,
    users: u64,
    /// All export data that led here.
    data: Vec<[u8; 64]>,
}

/// An exporter's part, while this thread is at work on it.
#[derive(Debug)]
pub(super) struct Turn {
    imports: &'static Imports,
    nonce: Nonce,
    exporter: Exporter,
}

impl Turn {
    /// Waits until nobody else is at work on this exporter's imports. Without a deadline where something is to be given back: others are at work for the time
    /// of a few driver calls.
    pub(super) fn wait_for(nonce: Nonce, deadline: Option<Deadline>) -> Result<Self, ImportErrorKind> {
        let imports = IMPORTS.get().map_err(ImportErrorKind::Syscall)?;
        let mut state = imports.lock();
        while state.exporters.get(&nonce).is_some_and(|exporter| exporter.busy) {
            if deadline.is_some_and(|deadline| deadline.is_over()) {
                return Err(ImportErrorKind::DeadlineOver);
            }
            state.waiting += 1;
            state = match deadline {
                Some(deadline) => imports.changed.wait_timeout(state, deadline.remaining()).unwrap_or_else(PoisonError::into_inner).0,
                None => imports.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            state.waiting -= 1;
        }
        let place = state.exporters.entry(nonce).or_default();
        let exporter = core::mem::take(place);
        place.busy = true;
        drop(state);
        Ok(Self { imports, nonce, exporter })
    }

    /// Whether the pool is imported.
    pub(super) fn has_pool(&self, pool: ChunkId) -> bool {
        self.exporter.pools.contains_key(&pool)
    }

    /// Keeps a pool that the driver has just imported.
    pub(super) fn add_pool(&mut self, id: ChunkId, pool: Pool, home: CUdevice) {
        self.exporter.pools.insert(id, ImportedPool { pool, home, devices: Vec::new(), pointers: 0 });
    }

    /// Gives devices access to the pool, unless they have it.
    pub(super) fn open_to(&mut self, cuda: &Cuda, id: ChunkId, devices: &[CUdevice]) -> Result<(), ImportErrorKind> {
        let Some(imported) = self.exporter.pools.get_mut(&id) else { return Err(ImportErrorKind::Retired) };
        for &device in devices {
            if imported.devices.contains(&device) {
                continue;
            }
            let home = imported.home;
            if device != home && !cuda.can_access_peer(device, home).map_err(ImportErrorKind::Driver)? {
                return Err(ImportErrorKind::NoPeerAccess { device, home });
            }
            cuda.with_context_if_needed(home, || cuda.open_pool_to(imported.pool, device)).map_err(ImportErrorKind::Driver)?;
            imported.devices.push(device);
        }
        Ok(())
    }

    /// Whether this export data belongs to an import for another allocation, which must go before: nothing says whether that shows the same memory.
    pub(super) fn is_in_use(&self, allocation: ChunkId, data: &[u8; 64]) -> bool {
        self.exporter.addresses.get(data).is_some_and(|(_, known)| *known != allocation)
    }

    /// The address of the allocation with this export data, imported by `pool` if it is not, and counted once more.
    pub(super) fn pointer(&mut self, cuda: &Cuda, pool: ChunkId, allocation: ChunkId, data: &[u8; 64]) -> Result<u64, ImportErrorKind> {
        if self.is_in_use(allocation, data) {
            return Err(ImportErrorKind::StillInUse);
        }
        if let Some(&(address, _)) = self.exporter.addresses.get(data)
            && let Some(pointer) = self.exporter.pointers.get_mut(&address)
        {
            pointer.users += 1;
            return Ok(address);
        }
        let Some(imported) = self.exporter.pools.get_mut(&pool) else { return Err(ImportErrorKind::Retired) };
        let address = cuda
            .with_context_if_needed(imported.home, || cuda.import_pool_pointer(imported.pool, data))
            .map_err(ImportErrorKind::Driver)?;
        // An address that is here already is one mapping with that, whatever the data said.
        let pointer = self.exporter.pointers.entry(address).or_insert_with(|| {
            imported.pointers += 1;
            Pointer { pool, users: 0, data: Vec::new() }
        });
        pointer.users += 1;
        pointer.data.push(*data);
        self.exporter.addresses.insert(*data, (address, allocation));
        Ok(address)
    }

    /// The pool by which what is at this address was imported.
    pub(super) fn pool_of(&self, address: u64) -> Option<ChunkId> {
        self.exporter.pointers.get(&address).map(|pointer| pointer.pool)
    }

    /// Takes one user off a pointer; frees it after its last one, and its pool after its last pointer.
    ///
    /// Errors: the driver's; then the pointer has the user still, for another try.
    pub(super) fn release(&mut self, cuda: &Cuda, address: u64) -> Result<(), DriverError> {
        let Some(pointer) = self.exporter.pointers.get_mut(&address) else { return Ok(()) };
        if pointer.users > 1 {
            pointer.users -= 1;
            return Ok(());
        }
        let home = self.exporter.pools.get(&pointer.pool).map_or(0, |pool| pool.home);
        match cuda.free_pool_pointer(home, address) {
            Ok(()) => {}
            // It is not there: somebody else has freed it.
            Err(error) if error.is_no_such_memory() => {}
            Err(error) => return Err(error),
        }
        if let Some(pointer) = self.exporter.pointers.remove(&address) {
            for data in &pointer.data {
                self.exporter.addresses.remove(data);
            }
            if let Some(pool) = self.exporter.pools.get_mut(&pointer.pool) {
                pool.pointers -= 1;
            }
        }
        Ok(())
    }

    /// Destroys pools without pointers. What the driver does not take back is tried again after the next one's work.
    pub(super) fn clear(&mut self, cuda: &Cuda) {
        self.exporter.pools.retain(|_, imported| {
            if imported.pointers != 0 {
                return true;
            }
            // A driver bug wants access of other devices taken back first (nvbug 5698116). Nothing can be done where that fails.
            imported.devices.retain(|&device| device == imported.home || cuda.close_pool_to(imported.pool, device).is_err());
            cuda.destroy_pool(imported.home, imported.pool).is_err()
        });
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let exporter = core::mem::take(&mut self.exporter);
        let mut state = self.imports.lock();
        if exporter.pools.is_empty() && exporter.pointers.is_empty() {
            state.exporters.remove(&self.nonce);
        } else {
            state.exporters.insert(self.nonce, exporter);
        }
        let somebody_waits = state.waiting != 0;
        drop(state);
        if somebody_waits {
            self.imports.changed.notify_all();
        }
    }
}

impl Imports {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under this lock would be a bug of ours; the map is changed in single steps, so going on is better than failing for ever.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
