//! Export of memory of a POSIX_FD pool: one fd of the pool for all of its memory, and export data for each allocation.
//!
//! A pool is a pointer to the driver, and an address that a destroyed pool leaves may be the next one's. What vouches for a published pool is memory of it that
//! is published and that the driver still has under its buffer id: a pool outlives its memory. So before a published pool's fd is given to new memory, or a
//! new fd is made of it, one such allocation is looked for; without any the pool is retired.

use std::sync::Arc;

use super::state::PoolOffer;
use super::walk::out_of_files;
use super::{CoveredChunk, Shared};
use crate::dispatch::{FdFrom, Lane, fd_from};
use crate::export::ChunkFacts;
use crate::reason::Cause;
use crate::sys::driver::{DriverError, Pool};
use crate::sys::process_fd::ProcessFd;
use crate::table::PublishError;

/// How often an allocation is looked at anew while it is freed and replaced.
const ATTEMPTS: u32 = 4;

/// A published allocation of a pool.
pub(super) struct Pooled {
    /// It, counted once more.
    pub(super) covered: CoveredChunk,
    /// Length of the allocation in bytes.
    pub(super) len: u64,
    /// UUID of its GPU.
    pub(super) device: [u8; 16],
}

impl Shared {
    /// Publishes the allocation that `[address, address + len)` lies in, if it is not, and counts one more export of it.
    pub(super) fn export_pooled(self: &Arc<Self>, address: u64, len: u64) -> Result<Pooled, Cause> {
        let walk = self.lock().begin_walk();
        let outcome = self.cuda.with_relaxed_capture(|| {
            for _ in 0..ATTEMPTS {
                if let Some(pooled) = self.try_pooled(walk, address, len)? {
                    return Ok(pooled);
                }
            }
            Err(Cause::KeptChanging)
        });
        self.lock().end_walk(walk);
        outcome
    }

    /// `None` if it has changed meanwhile.
    fn try_pooled(self: &Arc<Self>, walk: u64, address: u64, len: u64) -> Result<Option<Pooled>, Cause> {
        self.lock().restart_walk(walk);
        let facts = self.cuda.pointer_facts(address)?;
        let (Lane::Pool(_), Some(pool)) = (self.lane(address, &facts)?, facts.pool) else { return Ok(None) };
        let (base, allocation_len) = self.cuda.with_context_of(facts.device, || self.cuda.allocation(address))?;
        if address.checked_sub(base).is_none_or(|offset| offset > allocation_len || len > allocation_len - offset) {
            return Err(Cause::LeavesAllocation { base, len: allocation_len });
        }
        let chunk = ChunkFacts { base, len: allocation_len, buffer_id: facts.buffer_id };
        let pooled = |(id, device)| Some(Pooled { covered: CoveredChunk { address: base, id }, len: allocation_len, device });
        if let Some(counted) = self.lock().count(&chunk) {
            return Ok(pooled(counted));
        }
        let device = self.cuda.device_uuid(facts.device)?;
        let fd = if self.vouches(pool)? { None } else { Some(self.fd_of_pool(pool, facts.device)?) };
        let data = self.cuda.with_context_if_needed(facts.device, || self.cuda.export_pool_pointer(base))?;
        // The data is of the memory that was described only if that is there still.
        if self.cuda.buffer_id(base)? != Some(facts.buffer_id) {
            return Ok(None);
        }
        let mut state = self.lock();
        if state.is_cancelled(walk, &chunk) {
            return Ok(None);
        }
        if let Some(counted) = state.count(&chunk) {
            return Ok(pooled(counted));
        }
        let published = state.publish_pooled(&self.table, chunk, device, PoolOffer { pool, data, fd });
        self.ensure_sweeper(&mut state);
        // Before what was retired, or the fd that was not needed, is closed.
        drop(state);
        match published {
            Ok((Some(id), _retired)) => Ok(pooled((id, device))),
            Ok((None, _retired)) => Ok(None),
            Err((PublishError::Range { len, .. }, _)) => Err(Cause::Unaligned { len }),
            Err(_) => Err(Cause::TableFull),
        }
    }

    /// Whether memory of the pool is published and there, so that the pool is the published one. Retires what is not there, and with the last of it the pool.
    pub(super) fn vouches(&self, pool: Pool) -> Result<bool, DriverError> {
        loop {
            let witness = self.lock().witness(pool);
            let Some((facts, id)) = witness else { return Ok(false) };
            if self.cuda.buffer_id(facts.base)? == Some(facts.buffer_id) {
                return Ok(true);
            }
            // One less each time.
            let retired = self.lock().retire_swept(&self.table, facts.base, id);
            drop(retired);
        }
    }

    /// A new fd of the pool, or none where the budget has no room: the export has shown that one can be made, which is what a broker does on demand.
    fn fd_of_pool(&self, pool: Pool, device: i32) -> Result<Option<ProcessFd>, Cause> {
        let exported = self.cuda.with_context_if_needed(device, || self.cuda.export_pool(pool));
        let fd = exported.map_err(|error| out_of_files().unwrap_or_else(|| self.no_fd(device, error)))?;
        let fd = ProcessFd::new(fd)?;
        if fd.took_over() {
            self.retire_taken();
        }
        Ok(match fd_from(self.fds_left(self.fd_budget())) {
            FdFrom::Held => Some(fd),
            FdFrom::OnDemand => None,
        })
    }
}
