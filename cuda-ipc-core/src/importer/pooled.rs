//! One imported allocation of an exporter's pool, at the address that the driver has chosen.

use std::os::fd::AsFd;
use std::sync::Arc;

use cuda_driver_sys::CUdevice;

use super::error::{Deadline, ImportError, ImportErrorKind, ImportStep};
use super::peer::Peer;
use super::pools::Turn;
use crate::import::{Found, Step};
use crate::key::{Key, KeyKind};
use crate::sys::driver::{Cuda, DriverError};
use crate::sys::fork;
use crate::sys::process_fd::ProcessFd;
use crate::table::{ChunkId, ChunkKind, LookupError};

/// The step of an error.
fn at(step: Step) -> impl Fn(ImportErrorKind) -> (ImportStep, ImportErrorKind) {
    move |kind| (ImportStep::Chunk(step), kind)
}

/// An allocation of an exporter's pool, mapped here until this is dropped.
///
/// Imports of one allocation share one mapping, process-wide. Dropping gives the mapping back at once if this was its last user: work that uses it must be
/// complete. In a forked child, dropping does nothing.
#[derive(Debug)]
pub struct PooledImport {
    cuda: Cuda,
    peer: Arc<Peer>,
    found: Found,
    /// The mapping's address; `None` once it is given back.
    address: Option<u64>,
    token: u64,
}

impl Peer {
    /// The live pool allocation in `slot` of the table, which begins at `base` in the exporter and has `len` bytes: what a key of that kind names.
    ///
    /// Errors: [`LookupError::NoChunk`] where it was freed or replaced.
    pub fn lookup_pooled(&self, slot: u32, base: u64, len: u64) -> Result<Found, ImportError> {
        let fail = |kind| ImportError { step: ImportStep::Lookup, kind, pid: self.pid(), address: base, stuck_bytes: 0 };
        let table = self.table().ok_or(fail(ImportErrorKind::Forked))?;
        match table.chunk_in(slot).map_err(|error| fail(ImportErrorKind::Lookup(error)))? {
            Some(found) if matches!(found.1.kind, ChunkKind::PoolAllocation { .. }) && (found.1.address, found.1.len) == (base, len) => {
                Ok(found)
            }
            _ => Err(fail(ImportErrorKind::Lookup(LookupError::NoChunk(base)))),
        }
    }

    /// Imports a pool allocation that [`Peer::lookup_pooled`] has found, for these devices (ordinals of this process; at least one), to read and write.
    ///
    /// It was live under its identity, and so was its pool, after the pool's fd had been fetched; whether it still is, is the caller's to check before each use.
    /// Errors: [`ImportError`]; nothing is left behind. Source: pidfd_getfd(2), cuMemPoolImportFromShareableHandle, cuMemPoolSetAccess,
    /// cuMemPoolImportPointer.
    pub fn import_pooled(
        self: &Arc<Self>,
        cuda: &Cuda,
        found: &Found,
        devices: &[CUdevice],
        deadline: Deadline,
    ) -> Result<PooledImport, ImportError> {
        let fail = |(step, kind)| ImportError { step, kind, pid: self.pid(), address: found.1.address, stuck_bytes: 0 };
        let token = fork::token().map_err(|error| fail((ImportStep::Key, ImportErrorKind::Syscall(error))))?;
        let mut fd = None;
        let address = cuda.with_relaxed_capture(|| {
            loop {
                let pool = self.pool_entry(found)?;
                let mut turn = Turn::wait_for(self.nonce(), Some(deadline)).map_err(at(Step::Fetch))?;
                let imported = self.import_in_turn(cuda, &mut turn, found, &pool, devices, fd.take());
                if imported.is_err() {
                    turn.clear(cuda);
                }
                if let Some(address) = imported? {
                    return Ok(address);
                }
                // Not in turn: an exporter that lets this process wait lets nobody else wait.
                drop(turn);
                if deadline.is_over() {
                    return Err(at(Step::Fetch)(ImportErrorKind::DeadlineOver));
                }
                fd = Some(self.fd_of_pool(&pool, deadline).map_err(at(Step::Fetch))?);
            }
        });
        let address = Some(address.map_err(fail)?);
        Ok(PooledImport { cuda: *cuda, peer: self.clone(), found: *found, address, token })
    }

    /// Whether `device` could use this pool allocation, before anything is imported.
    ///
    /// Errors: [`ImportErrorKind::DeviceNotVisible`], [`ImportErrorKind::NoPeerAccess`], or the driver's. Source: cuDeviceCanAccessPeer.
    pub fn may_use_pooled(&self, cuda: &Cuda, found: &Found, device: CUdevice) -> Result<(), ImportError> {
        let uuid = found.1.device;
        let fail = |kind| ImportError { step: ImportStep::Key, kind, pid: self.pid(), address: found.1.address, stuck_bytes: 0 };
        let driver = |error| fail(ImportErrorKind::Driver(error));
        let home = cuda.device_with_uuid(uuid).map_err(driver)?.ok_or(fail(ImportErrorKind::DeviceNotVisible { uuid }))?;
        if device == home || cuda.can_access_peer(device, home).map_err(driver)? {
            return Ok(());
        }
        Err(fail(ImportErrorKind::NoPeerAccess { device, home }))
    }

    /// The pool's entry of an allocation's.
    fn pool_entry(&self, (id, chunk): &Found) -> Result<Found, (ImportStep, ImportErrorKind)> {
        let ChunkKind::PoolAllocation { pool: slot, .. } = chunk.kind else { return Err((ImportStep::Key, ImportErrorKind::KeyKind)) };
        let table = self.table().ok_or((ImportStep::Lookup, ImportErrorKind::Forked))?;
        let lookup = |error| (ImportStep::Lookup, ImportErrorKind::Lookup(error));
        match table.chunk_in(slot).map_err(lookup)? {
            Some(pool) if pool.1.kind == ChunkKind::Pool && pool.1.device == chunk.device => Ok(pool),
            _ if table.is_live(*id) => Err(lookup(LookupError::Inconsistent { address: chunk.address, slot })),
            _ => Err(at(Step::Recheck)(ImportErrorKind::Retired)),
        }
    }

    /// `None` if the pool's fd is needed.
    fn import_in_turn(
        &self,
        cuda: &Cuda,
        turn: &mut Turn,
        (id, chunk): &Found,
        pool: &Found,
        devices: &[CUdevice],
        fd: Option<ProcessFd>,
    ) -> Result<Option<u64>, (ImportStep, ImportErrorKind)> {
        let ChunkKind::PoolAllocation { blob, .. } = chunk.kind else { return Err((ImportStep::Key, ImportErrorKind::KeyKind)) };
        if turn.is_in_use(*id, &blob) {
            return Err(at(Step::Map)(ImportErrorKind::StillInUse));
        }
        let missing = !turn.has_pool(pool.0);
        if missing && fd.is_none() {
            return Ok(None);
        }
        // The memory was live after the fetch, and its pool is the one that it has had all the time.
        self.recheck_pooled(*id, pool.0).map_err(at(Step::Recheck))?;
        if let (true, Some(fd)) = (missing, fd) {
            let home = cuda.device_with_uuid(chunk.device).map_err(|error| at(Step::Import)(ImportErrorKind::Driver(error)))?;
            let home = home.ok_or_else(|| at(Step::Import)(ImportErrorKind::DeviceNotVisible { uuid: chunk.device }))?;
            let imported =
                cuda.import_pool(fd.as_fd()).map_err(|error| at(Step::Import)(ImportErrorKind::of_import(error, chunk.device)))?;
            turn.add_pool(pool.0, imported, home);
        }
        turn.open_to(cuda, pool.0, devices).map_err(at(Step::SetAccess))?;
        let address = turn.pointer(cuda, pool.0, *id, &blob).map_err(at(Step::Map))?;
        if let Err(kind) = reaches(cuda, devices.first().copied().unwrap_or(0), address, chunk.len) {
            let _ = turn.release(cuda, address);
            return Err(at(Step::Map)(kind));
        }
        Ok(Some(address))
    }

    /// Fetches the pool's fd, or asks the exporter's broker for it.
    fn fd_of_pool(&self, pool: &Found, deadline: Deadline) -> Result<ProcessFd, ImportErrorKind> {
        if let Some((pidfd, number)) = self.pidfd().zip(pool.1.fd) {
            match pidfd_sys::pidfd_getfd(pidfd, number.cast_signed()) {
                Ok(fd) => return Ok(self.brief(fd)),
                Err(error) => {
                    let error = if self.is_gone() {
                        ImportErrorKind::ExporterGone
                    } else if self.table().is_some_and(|table| !table.is_live(pool.0)) {
                        ImportErrorKind::Retired
                    } else {
                        ImportErrorKind::Pidfd(error)
                    };
                    if !self.may_ask() || !error.other_route_may_work() {
                        return Err(error);
                    }
                }
            }
        }
        if !self.may_ask() {
            return Err(ImportErrorKind::NoFd);
        }
        self.ask_for(core::slice::from_ref(pool), deadline)?.pop().ok_or(ImportErrorKind::NoFd)
    }

    /// Whether allocation and pool are what they were, in a table that is its exporter's still.
    fn recheck_pooled(&self, allocation: ChunkId, pool: ChunkId) -> Result<(), ImportErrorKind> {
        let table = self.table().ok_or(ImportErrorKind::Forked)?;
        if !table.is_live(allocation) || !table.is_live(pool) {
            return Err(ImportErrorKind::Retired);
        }
        match self.has_other_table() {
            Ok(false) => Ok(()),
            Ok(true) => Err(ImportErrorKind::ExporterGone),
            Err(ImportErrorKind::Pidfd(_)) if self.is_gone() => Err(ImportErrorKind::ExporterGone),
            Err(other) => Err(other),
        }
    }
}

/// Whether a mapping that the driver has placed is as long as its exporter says: what lies behind it is other memory of this process.
///
/// The range attributes need no context; only where they say that it is too short, the call that does is asked too, in one of `device`.
pub(super) fn reaches(cuda: &Cuda, device: CUdevice, address: u64, len: u64) -> Result<(), ImportErrorKind> {
    let from_here = |base: u64, len: u64| base.saturating_add(len).saturating_sub(address);
    let facts = cuda.pointer_facts(address).map_err(ImportErrorKind::Driver)?;
    if from_here(facts.range_start, facts.range_len) >= len {
        return Ok(());
    }
    let (base, all) = cuda.with_context_of(device, || cuda.allocation(address)).map_err(ImportErrorKind::Driver)?;
    let mapped = from_here(base, all);
    if mapped < len { Err(ImportErrorKind::TooShort { mapped }) } else { Ok(()) }
}

impl PooledImport {
    /// Imports what `key` names, from a known peer. See [`Peer::import_pooled`].
    pub fn new(cuda: &Cuda, peer: &Arc<Peer>, key: &Key, devices: &[CUdevice], deadline: Deadline) -> Result<Self, ImportError> {
        let other = ImportError { step: ImportStep::Key, kind: ImportErrorKind::KeyKind, pid: key.pid, address: key.base, stuck_bytes: 0 };
        let (KeyKind::PoolAllocation { slot }, true) = (key.kind, key.nonce == peer.nonce()) else { return Err(other) };
        peer.import_pooled(cuda, &peer.lookup_pooled(slot, key.base, key.len)?, devices, deadline)
    }

    /// Address here of the allocation's first byte; 0 once it was given back.
    pub fn address(&self) -> u64 {
        self.address.unwrap_or(0)
    }

    /// Length of the allocation in bytes.
    pub const fn len(&self) -> u64 {
        self.found.1.len
    }

    /// Never: an allocation has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// The table entry that it was imported by.
    pub const fn found(&self) -> &Found {
        &self.found
    }

    /// Whether the allocation is still the exporter's. If not, this shows memory that the exporter has given up.
    pub fn is_current(&self) -> bool {
        self.peer.table().is_some_and(|table| table.is_live(self.found.0))
    }

    /// Gives more devices access to it, and to all other memory of its pool.
    pub fn open_to(&self, devices: &[CUdevice], deadline: Deadline) -> Result<(), ImportError> {
        let fail = |kind| ImportError {
            step: ImportStep::Chunk(Step::SetAccess),
            kind,
            pid: self.peer.pid(),
            address: self.found.1.address,
            stuck_bytes: 0,
        };
        let Some(address) = self.address.filter(|_| fork::is_current(self.token)) else { return Err(fail(ImportErrorKind::Forked)) };
        let mut turn = Turn::wait_for(self.peer.nonce(), Some(deadline)).map_err(fail)?;
        let pool = turn.pool_of(address).ok_or(fail(ImportErrorKind::Retired))?;
        self.cuda.with_relaxed_capture(|| turn.open_to(&self.cuda, pool, devices)).map_err(fail)
    }

    /// Gives it back and says how it went; what dropping does silently. Errors: the driver's; then it is kept for another try.
    pub fn close(&mut self) -> Result<(), DriverError> {
        let Some(address) = self.address.filter(|_| fork::is_current(self.token)) else { return Ok(()) };
        // Without a turn there is no process life that could have anything.
        let Ok(mut turn) = Turn::wait_for(self.peer.nonce(), None) else { return Ok(()) };
        self.cuda.with_relaxed_capture(|| {
            turn.release(&self.cuda, address)?;
            self.address = None;
            turn.clear(&self.cuda);
            Ok(())
        })
    }
}

impl Drop for PooledImport {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
