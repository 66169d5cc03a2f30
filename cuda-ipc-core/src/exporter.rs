//! The exporter: publishes the chunks of ranges that are to be shared, and takes them back when their memory goes.
//!
//! An [`Exporter`] owns one export table. [`Exporter::export`] takes the lane that fits the memory (`lane.rs`): it walks a range of chunks (`walk.rs` runs
//! the machine of [`crate::export`]) or takes an allocation of a pool (`pooled.rs`), publishes what the table lacks and returns an [`Export`], which holds
//! the key and counts as one user of each chunk; memory of `cuMemAlloc` goes by its legacy handle (`legacy.rs`), without the table. A chunk leaves the table when its last export is released, when the
//! owner of the memory says that it goes ([`Exporter::retire`]), or when a sweep finds it gone (`sweep.rs`). `broker.rs` hands fds to importers that may not fetch
//! them. `state.rs` is the bookkeeping behind all of this; no lock of it is held across a driver call.

mod broker;
mod lane;
mod legacy;
mod pooled;
mod state;
mod sweep;
mod walk;

use core::fmt;
use core::time::Duration;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::export::Walk;
use crate::key::{HostId, Key, KeyKind, Nonce};
use crate::own_handles::OwnHandle;
use crate::reason::{Cause, NoIpc};
use crate::rkey::{Payload, Rkey};
use crate::sys::driver::Cuda;
use crate::sys::table_file::OwnTable;
use crate::sys::{SyscallError, failed, fork};
use crate::table::{ChunkId, Layout, Writer};

pub use broker::BrokerFailures;

use broker::Broker;
use state::State;

/// Settings of an [`Exporter`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExporterOptions {
    /// How often a thread looks for chunks whose memory has gone without a word. `None`: never; then [`Exporter::sweep`] is the caller's to call. A pass
    /// costs under a microsecond for each published chunk; with very many chunks the pause grows with the length of a pass.
    pub sweep_interval: Option<Duration>,
    /// How many fds of the soft RLIMIT_NOFILE are left to the application. Chunks past the rest are published without an fd.
    pub fd_reserve: u64,
    /// Whether importers that may not fetch fds, or are in another PID namespace, can ask for them at a socket. It has an abstract name, which importers in the
    /// same network namespace can reach, and is served by a thread from the first export on until a moment after the last one was released.
    pub broker: bool,
    /// A directory in which the socket is to have a file too, for importers in other network namespaces. It has to belong to this user or root; it is made
    /// if it is not there.
    pub socket_dir: Option<PathBuf>,
    /// Permission bits that the directory may have at most. What others may do there can keep importers away; it cannot deceive them.
    pub socket_dir_mode: u32,
    /// Users besides this process's own whose importers are served, as this user namespace numbers them.
    pub allowed_uids: Vec<u32>,
}

impl Default for ExporterOptions {
    fn default() -> Self {
        Self {
            sweep_interval: Some(Duration::from_millis(100)),
            fd_reserve: 256,
            broker: true,
            socket_dir: None,
            socket_dir_mode: 0o700,
            allowed_uids: Vec::new(),
        }
    }
}

/// Publishes memory of this process for others to import.
///
/// Clones share one table. Usable from any thread. A forked child cannot use its parent's exporter ([`Cause::Forked`]) and makes its own.
#[derive(Clone)]
pub struct Exporter {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    cuda: Cuda,
    table: OwnTable,
    identity: Identity,
    options: ExporterOptions,
    state: Mutex<State>,
    broker: Broker,
}

/// What every key of this exporter says about its process.
#[derive(Clone, Copy, Debug)]
struct Identity {
    token: u64,
    nonce: Nonce,
    pid: u32,
    pid_namespace: u32,
    host: HostId,
}

/// Counts of an exporter, as of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExporterStats {
    /// Chunks published now, allocations of pools among them.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Fds held for them: one for each chunk, one for each pool.
    pub fds: u64,
    /// Pools published now.
    pub pools: u64,
    /// Chunks ever published.
    pub published: u64,
    /// Chunks ever retired, for any reason.
    pub retired: u64,
    /// Among these, chunks that a sweep found gone.
    pub swept: u64,
    /// Exports that were refused; [`Exporter::refusals`] says why.
    pub refused: u64,
}

/// Exports that were refused for one cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refused {
    /// The first of them.
    pub first: NoIpc,
    /// How many there were.
    pub times: u64,
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter").field("identity", &self.shared.identity).finish_non_exhaustive()
    }
}

impl Exporter {
    /// Makes an exporter with an empty table. It holds one fd (the table's) and no thread until something is exported.
    ///
    /// Errors: the system call that failed, and its errno.
    pub fn new(cuda: Cuda, options: ExporterOptions) -> Result<Self, SyscallError> {
        let identity = Identity::of_this_process()?;
        let table = OwnTable::create()?;
        Writer::create(table.words(), Layout::STANDARD, identity.nonce).ok_or(SyscallError { call: "mmap", errno: libc::ENOMEM })?;
        fork::add_own_nonce(identity.nonce.0);
        Ok(Self { shared: Arc::new(Shared { cuda, table, identity, options, state: Mutex::default(), broker: Broker::default() }) })
    }

    /// Makes `[address, address + len)` importable and returns the export, whose rkey any process on this machine may be given.
    ///
    /// A range of chunks may begin and end inside chunks, but must lie in one reservation, on one GPU, without a hole; other memory in one allocation. What
    /// is published already costs no export call. Errors: [`NoIpc`] names the cause and the address; nothing has changed then.
    ///
    /// Nothing here waits for work on the memory: before another process is told to read, wait for what was written (cuCtxSynchronize, or the stream or event
    /// of the work; cuMemcpyHtoD from pageable memory returns before its bytes are there).
    ///
    /// Source: cuMemRetainAllocationHandle, cuMemExportToShareableHandle; cuMemPoolExportToShareableHandle, cuMemPoolExportPointer; cuIpcGetMemHandle.
    pub fn export(&self, address: u64, len: u64) -> Result<Export, NoIpc> {
        let outcome = self.export_by_lane(address, len);
        if let (Err(refused), true) = (&outcome, self.shared.is_current()) {
            self.shared.lock().count_refusal(refused);
        }
        outcome
    }

    fn export_by_lane(&self, address: u64, len: u64) -> Result<Export, NoIpc> {
        let shared = &self.shared;
        let mut walk = Walk::new(address, len);
        let run = shared.run(&mut walk);
        let refused = |cause| NoIpc { cause, address };
        let export = match walk.into_result() {
            Ok((base, reservation_len)) => Export {
                shared: shared.clone(),
                payload: Payload::Posix(shared.key(KeyKind::Reservation, base, reservation_len)),
                address,
                len,
                device: run.device,
                chunks: run.covered,
                _own: None,
            },
            // What begins with memory of another kind has published nothing yet.
            Err((Cause::Legacy, at)) if at == address => return shared.export_legacy(address, len).map_err(refused),
            Err((Cause::PosixPool, at)) if at == address => {
                let pooled = shared.export_pooled(address, len).map_err(refused)?;
                let kind = KeyKind::PoolAllocation { slot: pooled.covered.id.slot };
                Export {
                    shared: shared.clone(),
                    payload: Payload::Posix(shared.key(kind, pooled.covered.address, pooled.len)),
                    address,
                    len,
                    device: pooled.device,
                    chunks: vec![pooled.covered],
                    _own: None,
                }
            }
            Err((Cause::NotDeviceMemory | Cause::Hole, at)) if at == address && shared.lock().was_exported(address) => {
                return Err(refused(Cause::Freed));
            }
            Err((cause, address)) => return Err(NoIpc { cause, address }),
        };
        shared.ensure_broker();
        Ok(export)
    }

    /// Retires every published chunk that touches `[address, address + len)`, and stops exports in progress from publishing one.
    ///
    /// For the owner of the memory, right *before* it unmaps or frees it: when this returns, importers know that the chunks are dead and no fd pins them, but
    /// one that is on its way to an importer this moment.
    /// Returns how many chunks were retired. Makes no driver call.
    pub fn retire(&self, address: u64, len: u64) -> usize {
        if !self.shared.is_current() {
            return 0;
        }
        let retired = {
            let mut state = self.shared.lock();
            state.cancel_walks(address, len);
            state.retire_range(&self.shared.table, address, len)
        };
        // The fds close here, after the lock and after the epoch.
        retired.len()
    }

    /// Retires every chunk that the driver no longer has at its address, or whose fd the application has closed. Returns how many.
    ///
    /// The thread of [`ExporterOptions::sweep_interval`] calls this; call it at will.
    pub fn sweep(&self) -> usize {
        self.shared.sweep()
    }

    /// The table's nonce: a key with it was made by this exporter.
    pub fn nonce(&self) -> Nonce {
        self.shared.identity.nonce
    }

    /// Why importers cannot reach the broker by one of its names, as far as the last beginning has shown. An export does not fail for that.
    pub fn broker_failures(&self) -> BrokerFailures {
        if self.shared.is_current() { self.shared.broker.failures() } else { BrokerFailures::default() }
    }

    /// What could not be exported, by cause: the first of each, and how often. For a caller who says each cause once.
    pub fn refusals(&self) -> Vec<Refused> {
        if self.shared.is_current() { self.shared.lock().refusals() } else { Vec::new() }
    }

    /// Counts as of now.
    pub fn stats(&self) -> ExporterStats {
        if self.shared.is_current() { self.shared.lock().stats() } else { ExporterStats::default() }
    }
}

/// A range that is being shared. Dropping it takes its count off each chunk; a chunk without exports is retired.
pub struct Export {
    shared: Arc<Shared>,
    payload: Payload,
    address: u64,
    len: u64,
    device: [u8; 16],
    chunks: Vec<CoveredChunk>,
    /// Of a legacy handle: keeps it known as this process's own.
    _own: Option<OwnHandle>,
}

/// A chunk that an export covers, in whole or in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoveredChunk {
    /// The chunk's first address.
    pub address: u64,
    /// Its identity in the table.
    pub id: ChunkId,
}

impl Export {
    /// The key of the range's reservation or of its pool allocation; `None` where a legacy handle is what importers get.
    pub const fn key(&self) -> Option<Key> {
        match self.payload {
            Payload::Posix(key) => Some(key),
            _ => None,
        }
    }

    /// All that an importer needs: the key with the range and its device; or the legacy handle, with the *whole* allocation as the range.
    pub const fn rkey(&self) -> Rkey {
        Rkey { payload: self.payload, base: self.address, len: self.len, device: self.device }
    }

    /// The chunks that this export covers, in order of address: one for a pool allocation, none where a legacy handle is what importers get.
    pub fn chunks(&self) -> &[CoveredChunk] {
        &self.chunks
    }

    /// Ends the export without taking its count off the chunks: they stay published until their memory goes. For callers who are not told when the last key
    /// dies.
    pub fn keep_published(mut self) {
        self.chunks = Vec::new();
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("payload", &self.payload)
            .field("address", &self.address)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.shared.uncount(&self.chunks);
    }
}

impl Shared {
    /// Whether this is the process life that made the exporter. Everything else here may only be used if it is: a child has no table, and the lock may
    /// have been held when it was forked.
    fn is_current(&self) -> bool {
        fork::is_current(self.identity.token)
    }

    fn key(&self, kind: KeyKind, base: u64, len: u64) -> Key {
        let Identity { nonce, pid, pid_namespace, host, .. } = self.identity;
        Key { kind, pid, table_fd: self.table.fd_number(), nonce, pid_namespace, host, base, len }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held would be a bug of ours; the state is changed in single steps, so going on is better than failing for ever.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uncount(&self, chunks: &[CoveredChunk]) {
        if self.is_current() && !chunks.is_empty() {
            let retired = self.lock().uncount(&self.table, chunks);
            // Closing an exported fd can free memory and take its time; the lock is released by now.
            drop(retired);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let current = self.is_current();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if current {
            fork::remove_own_nonce(self.identity.nonce.0);
            drop(state.retire_range(&self.table, 0, u64::MAX));
        } else {
            // In a child: another thread of the parent's may have been half way through a change when it was forked. Nobody walks such a list.
            core::mem::forget(core::mem::take(state));
        }
    }
}

impl Identity {
    fn of_this_process() -> Result<Self, SyscallError> {
        let reached = |error: pidfd_sys::Error| SyscallError { call: error.step.name(), errno: error.errno.0 };
        let namespace = pidfd_sys::pid_namespace(None).map_err(reached)?;
        Ok(Self {
            token: fork::token()?,
            nonce: Nonce(fork::random_nonzero()?),
            pid: std::process::id(),
            // Namespace inodes are 32 bits wide in the kernel.
            pid_namespace: u32::try_from(namespace).map_err(|_| failed("stat(/proc/self/ns/pid)")(rustix::io::Errno::OVERFLOW))?,
            host: HostId::from_boot_id(pidfd_sys::boot_id().map_err(reached)?),
        })
    }
}

impl From<SyscallError> for Cause {
    fn from(error: SyscallError) -> Self {
        Self::Table { call: error.call, errno: error.errno }
    }
}
