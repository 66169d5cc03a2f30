//! Runs the export machine against the driver and the exporter's state.

use std::sync::Arc;

use super::{CoveredChunk, Shared};
use crate::dispatch::{FdFrom, Lane, fd_from};
use crate::export::{Action, ChunkFacts, Event, Walk};
use crate::reason::Cause;
use crate::sys::driver::{DriverError, Handle, PointerFacts};
use crate::sys::process_fd::ProcessFd;
use crate::table::PublishError;

/// What a walk leaves behind.
pub(super) struct Run {
    /// Chunks counted or published, in order of address; empty after a failure.
    pub(super) covered: Vec<CoveredChunk>,
    /// UUID of the GPU that holds them.
    pub(super) device: [u8; 16],
}

/// The walk's hands: what it holds between two actions.
struct Runner<'a> {
    shared: &'a Arc<Shared>,
    walk: u64,
    handle: Option<Handle>,
    fd: Option<ProcessFd>,
    /// Device of the chunk at hand.
    ordinal: i32,
    /// UUIDs asked for so far, by ordinal.
    uuids: Vec<(i32, [u8; 16])>,
    /// How many fds the exporter may hold, asked for with the first chunk that needs one.
    budget: Option<u64>,
    device: Option<[u8; 16]>,
    covered: Vec<CoveredChunk>,
}

impl Shared {
    /// Runs `walk` to its end.
    pub(super) fn run(self: &Arc<Self>, walk: &mut Walk) -> Run {
        if !self.is_current() {
            if walk.next() != Action::Finished {
                walk.report(Event::Refused(Cause::Forked));
                walk.report(Event::Done);
            }
            return Run { covered: Vec::new(), device: [0; 16] };
        }
        let number = self.lock().begin_walk();
        let mut runner = Runner {
            shared: self,
            walk: number,
            handle: None,
            fd: None,
            ordinal: 0,
            uuids: Vec::new(),
            budget: None,
            device: None,
            covered: Vec::new(),
        };
        self.cuda.with_relaxed_capture(|| {
            loop {
                match walk.next() {
                    Action::Finished => break,
                    action => walk.report(runner.act(action).unwrap_or_else(Event::Refused)),
                }
            }
        });
        self.lock().end_walk(number);
        Run { covered: runner.covered, device: runner.device.unwrap_or_default() }
    }
}

impl Shared {
    /// How many fds may be held as the limit is now.
    pub(super) fn fd_budget(&self) -> u64 {
        file_limit().saturating_sub(self.options.fd_reserve)
    }

    /// Whether a budget has room for one more fd.
    pub(super) fn fds_left(&self, budget: u64) -> bool {
        self.lock().stats().fds < budget
    }
}

impl Runner<'_> {
    fn act(&mut self, action: Action) -> Result<Event, Cause> {
        let cuda = &self.shared.cuda;
        Ok(match action {
            Action::QueryReservation(address) => {
                let facts = self.shareable(address)?;
                Event::Reservation(facts.range_start, facts.range_len)
            }
            Action::Find(address) => Event::Known(self.shared.lock().find(address).map(|record| record.facts)),
            Action::QueryId(address) => Event::Id(cuda.buffer_id(address)?),
            Action::Count(facts) => {
                let counted = self.shared.lock().count(&facts);
                match counted {
                    Some((id, device)) => {
                        self.covered.push(CoveredChunk { address: facts.base, id });
                        self.same_device(device)?;
                        Event::Done
                    }
                    None => Event::Gone,
                }
            }
            Action::Retire(facts) => {
                let retired = self.shared.lock().retire_range(&self.shared.table, facts.base, facts.len);
                drop(retired);
                Event::Done
            }
            Action::QueryChunk(address) => Event::Chunk(self.describe(address)?),
            Action::Retain(facts) => {
                self.handle = Some(cuda.retain(facts.base)?);
                Event::Done
            }
            Action::ExportHandle(_) => {
                self.fd = self.export_handle()?;
                Event::Done
            }
            Action::ReleaseHandle(_) => {
                if let Some(handle) = self.handle.take() {
                    cuda.release(handle)?;
                }
                Event::Done
            }
            Action::Publish(facts) => self.publish(facts)?,
            Action::CloseFd => {
                self.fd = None;
                Event::Done
            }
            Action::Uncount => {
                self.shared.uncount(&core::mem::take(&mut self.covered));
                Event::Done
            }
            Action::Finished => Event::Done,
        })
    }

    fn describe(&mut self, address: u64) -> Result<Option<ChunkFacts>, Cause> {
        self.shared.lock().restart_walk(self.walk);
        let facts = match self.shareable(address) {
            // Inside a reservation, nothing is a hole, whatever the driver says of unmapped addresses.
            Err(Cause::Hole | Cause::NotDeviceMemory) => return Ok(None),
            other => other?,
        };
        self.ordinal = facts.device;
        Ok(Some(ChunkFacts { base: facts.mapping_base, len: facts.mapping_len, buffer_id: facts.buffer_id }))
    }

    /// What the driver says about `address`, if the memory there has a POSIX fd of its own.
    fn shareable(&self, address: u64) -> Result<PointerFacts, Cause> {
        let facts = self.shared.cuda.pointer_facts(address)?;
        match self.shared.lane(address, &facts)? {
            Lane::Chunks(_) => Ok(facts),
            // Where the range begins with it, it has a lane of its own: see `exporter.rs`.
            Lane::Pool(_) => Err(Cause::PosixPool),
            Lane::Legacy => Err(Cause::Legacy),
        }
    }

    fn export_handle(&mut self) -> Result<Option<ProcessFd>, Cause> {
        let Some(handle) = self.handle else { return Err(Cause::KeptChanging) };
        let refused = |error| out_of_files().unwrap_or_else(|| self.shared.no_fd(self.ordinal, error));
        let fd = self.shared.cuda.export_fd(handle).map_err(refused)?;
        let fd = ProcessFd::new(fd)?;
        if fd.took_over() {
            self.shared.retire_taken();
        }
        // Past the budget the entry is published without an fd: the export has shown that one can be made, which is what a broker does on demand.
        let budget = *self.budget.get_or_insert_with(|| self.shared.fd_budget());
        Ok(match fd_from(self.shared.fds_left(budget)) {
            FdFrom::Held => Some(fd),
            FdFrom::OnDemand => None,
        })
    }

    fn publish(&mut self, facts: ChunkFacts) -> Result<Event, Cause> {
        let device = self.uuid(self.ordinal)?;
        self.same_device(device)?;
        let fd = self.fd.take();
        let mut state = self.shared.lock();
        if state.is_cancelled(self.walk, &facts) {
            drop(state);
            return Ok(Event::Gone);
        }
        // Another thread may have published it meanwhile.
        if let Some((id, _)) = state.count(&facts) {
            drop(state);
            self.covered.push(CoveredChunk { address: facts.base, id });
            return Ok(Event::Done);
        }
        let outcome = state.publish(&self.shared.table, facts, device, fd);
        self.shared.ensure_sweeper(&mut state);
        drop(state);
        match outcome {
            Ok((id, _retired)) => {
                self.covered.push(CoveredChunk { address: facts.base, id });
                Ok(Event::Done)
            }
            Err((PublishError::Range { len, .. }, _)) => Err(Cause::Unaligned { len }),
            Err(_) => Err(Cause::TableFull),
        }
    }

    fn uuid(&mut self, ordinal: i32) -> Result<[u8; 16], Cause> {
        if let Some(&(_, uuid)) = self.uuids.iter().find(|(known, _)| *known == ordinal) {
            return Ok(uuid);
        }
        let uuid = self.shared.cuda.device_uuid(ordinal)?;
        self.uuids.push((ordinal, uuid));
        Ok(uuid)
    }

    fn same_device(&mut self, device: [u8; 16]) -> Result<(), Cause> {
        if *self.device.get_or_insert(device) == device { Ok(()) } else { Err(Cause::SeveralDevices) }
    }
}

/// Whether the process has no fd number left, which the driver does not say clearly.
pub(super) fn out_of_files() -> Option<Cause> {
    let probe = rustix::fs::memfd_create("cuda-ipc-probe", rustix::fs::MemfdFlags::CLOEXEC);
    matches!(probe, Err(rustix::io::Errno::MFILE)).then(|| Cause::TooManyFiles { limit: file_limit() })
}

/// The soft RLIMIT_NOFILE.
pub(super) fn file_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

impl From<DriverError> for Cause {
    fn from(error: DriverError) -> Self {
        Self::Driver { call: error.call, code: error.code }
    }
}
