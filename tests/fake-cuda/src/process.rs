//! The state of this process behind one lock, and `cuInit`.
//!
//! The lock is never held across a copy or a user's callback. Parts of the state are kept by the files that own their rules; here is what binds them:
//! the devices this process sees and the chunks it holds.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use cuda_driver_sys::CUresult;

use crate::abi::{Answer, INVALID};
use crate::chunks::{ChunkId, ChunkInfo};
use crate::config::{Asynchronous, Config};
use crate::context::Contexts;
use crate::copy::Copies;
use crate::fork;
use crate::layout::ChunkKind;
use crate::legacy::Opened;
use crate::pool::Pools;
use crate::registry::{self, Registry};
use crate::space::Space;
use crate::stream::Streams;
use crate::vmm::Handles;

/// Everything the driver knows in this process.
pub(crate) struct Process {
    pub(crate) registry: &'static Registry,
    /// Physical number of each visible device, by ordinal.
    pub(crate) devices: Vec<usize>,
    pub(crate) fabric: bool,
    pub(crate) peers: bool,
    pub(crate) asynchronous: Asynchronous,
    pub(crate) space: Space,
    pub(crate) handles: Handles,
    pub(crate) contexts: Contexts,
    pub(crate) copies: Copies,
    pub(crate) streams: Streams,
    pub(crate) pools: Pools,
    pub(crate) opened: Opened,
    holds: BTreeMap<ChunkId, u32>,
}

static PROCESS: OnceLock<Mutex<Process>> = OnceLock::new();
static INITIALISING: Mutex<()> = Mutex::new(());
/// Signalled whenever something asynchronous completes or is added.
static CHANGED: Condvar = Condvar::new();

/// `cuInit`.
pub(crate) fn init(flags: u32) -> Answer {
    if flags != 0 {
        return Err(INVALID);
    }
    let _one_at_a_time = INITIALISING.lock().unwrap_or_else(PoisonError::into_inner);
    if is_initialised() {
        return Ok(());
    }
    let config = Config::from_environment();
    let registry = match registry::get().map_or_else(|| join(&config), Ok) {
        Ok(registry) => registry,
        Err(error) => {
            eprintln!("fake cuda: cannot join {}: {error}", config.dir.display());
            return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        }
    };
    let devices = config.visible(registry.exports.len());
    if devices.is_empty() {
        return Err(CUresult::CUDA_ERROR_NO_DEVICE);
    }
    let process = Process {
        registry,
        contexts: Contexts::new(devices.len()),
        pools: Pools::new(devices.len()),
        devices,
        fabric: config.fabric,
        peers: config.peers,
        asynchronous: config.asynchronous,
        space: Space::new(config.va),
        handles: Handles::default(),
        copies: Copies::default(),
        streams: Streams::default(),
        opened: Opened::default(),
        holds: BTreeMap::new(),
    };
    PROCESS.get_or_init(|| Mutex::new(process));
    Ok(())
}

fn join(config: &Config) -> std::io::Result<&'static Registry> {
    let registry = Registry::attach(config)?;
    fork::mark()?;
    Ok(registry::set(registry))
}

/// Whether `cuInit` has succeeded.
pub(crate) fn is_initialised() -> bool {
    PROCESS.get().is_some()
}

/// The state; only for calls that come after `cuInit`.
pub(crate) fn lock() -> Result<MutexGuard<'static, Process>, CUresult> {
    let process = PROCESS.get().ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED)?;
    Ok(process.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Tells waiters that something has changed.
pub(crate) fn notify() {
    CHANGED.notify_all();
}

/// Waits for [`notify`], at most `micros`.
pub(crate) fn wait(guard: MutexGuard<'static, Process>, micros: u64) -> MutexGuard<'static, Process> {
    CHANGED.wait_timeout(guard, core::time::Duration::from_micros(micros)).unwrap_or_else(PoisonError::into_inner).0
}

impl Process {
    /// The ordinal as an index, if there is such a device.
    pub(crate) fn device(&self, ordinal: i32) -> Result<usize, CUresult> {
        usize::try_from(ordinal).ok().filter(|&device| device < self.devices.len()).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    /// The ordinal of a physical device, where this process sees it.
    pub(crate) fn ordinal(&self, gpu: usize) -> Option<usize> {
        self.devices.iter().position(|&physical| physical == gpu)
    }

    /// Makes a chunk and holds it.
    pub(crate) fn create(&mut self, gpu: usize, bytes: u64, kind: ChunkKind, types: u32) -> Result<(ChunkId, ChunkInfo), CUresult> {
        let mut locked = self.registry.lock();
        let id = locked.create(gpu, bytes, kind, types).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let info = locked.info(id).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
        drop(locked);
        self.holds.insert(id, 1);
        Ok((id, info))
    }

    /// Holds a chunk that exists, once more.
    pub(crate) fn hold(&mut self, id: ChunkId, kind: ChunkKind) -> Option<ChunkInfo> {
        let info = self.registry.lock().hold(id, kind)?;
        *self.holds.entry(id).or_insert(0) += 1;
        Some(info)
    }

    /// Whether this process holds the chunk.
    pub(crate) fn is_held(&self, id: ChunkId) -> bool {
        self.holds.contains_key(&id)
    }

    /// Ends one hold.
    pub(crate) fn unhold(&mut self, id: ChunkId) {
        if let Some(count) = self.holds.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                self.holds.remove(&id);
                self.registry.lock().drop_hold(id);
            }
        }
    }
}
