//! Answers about chunks: which of them are live, and an fd for each.
//!
//! Where the exporter holds an fd it is sent as it is. Where it holds none (past its budget) one is made by the driver and closed after sending. Nothing is
//! believed of the request but which entries it names: each must be live under that identity, the driver must still have that memory at its address, and the
//! entry must be live after that. (What dies later the importer notices itself, after it has received the fd.)

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::broker::{BATCH_MAX, Outcome};
use crate::export::ChunkFacts;
use crate::exporter::Shared;
use crate::exporter::walk::out_of_files;
use crate::sys::driver::DriverError;
use crate::sys::process_fd::ProcessFd;
use crate::table::{ChunkId, ChunkKind, Layout, Reader};

/// Fds made for one answer. Each takes the driver some 50 us, during which others wait; and each needs a free number.
const MOST_MADE: usize = 32;

/// An answer.
#[derive(Debug, Default)]
pub(super) struct Served {
    pub(super) outcomes: Vec<Outcome>,
    /// Of the chunks that are given.
    pub(super) fds: Vec<Arc<ProcessFd>>,
    made: usize,
}

impl Served {
    pub(super) fn borrowed(&self) -> Vec<BorrowedFd<'_>> {
        self.fds.iter().map(|fd| fd.as_fd()).collect()
    }
}

/// Looks for fds of these chunks, at most `room` of them but one at least. After the first chunk that has to wait, all do: the importer takes what comes in
/// front and asks for the rest.
pub(super) fn chunks(shared: &Shared, ids: impl Iterator<Item = ChunkId>, room: usize) -> Served {
    let mut served = Served::default();
    let room = room.clamp(1, BATCH_MAX);
    shared.cuda.with_relaxed_capture(|| {
        let mut full = None;
        for id in ids {
            if full.is_none() && served.fds.len() >= room {
                full = Some(0);
            }
            let outcome = match full {
                Some(_) => Outcome::Later(0),
                None => shared.chunk(id, &mut served),
            };
            if let Outcome::Later(errno) = outcome {
                full = Some(errno);
            }
            served.outcomes.push(outcome);
        }
    });
    served
}

impl Shared {
    fn chunk(&self, id: ChunkId, served: &mut Served) -> Outcome {
        match self.kind_of(id) {
            Some(ChunkKind::Vmm) => {}
            Some(ChunkKind::Pool) => return self.pool(id, served),
            // Its fd is its pool's.
            Some(ChunkKind::PoolAllocation { .. }) | None => return Outcome::Dead,
        }
        let Some((facts, held)) = self.published(id) else { return Outcome::Dead };
        let fd = match held {
            Some(fd) if fd.mark().is_lost() => {
                // Closed under us: the number is somebody else's.
                self.retire_lost(id, &facts);
                return Outcome::Dead;
            }
            Some(fd) => match self.confirm(id, &facts) {
                Ok(()) => fd,
                Err(outcome) => return outcome,
            },
            None if served.made >= MOST_MADE => return Outcome::Later(0),
            None => {
                served.made += 1;
                match self.make_fd(id, &facts) {
                    Ok(fd) => Arc::new(fd),
                    Err(outcome) => return outcome,
                }
            }
        };
        self.give(id, fd, served)
    }

    /// Gives an fd, if what it is of is live still.
    fn give(&self, id: ChunkId, fd: Arc<ProcessFd>, served: &mut Served) -> Outcome {
        let live = Reader::resume(self.table.words(), Layout::STANDARD).is_some_and(|table| table.is_live(id));
        if !live {
            return Outcome::Dead;
        }
        served.fds.push(fd);
        Outcome::Given
    }

    /// As `chunk`, of a pool. That it is the published one, memory of it says that is published and there.
    fn pool(&self, id: ChunkId, served: &mut Served) -> Outcome {
        let Some((pool, held)) = self.lock().pool_with(id) else { return Outcome::Dead };
        if held.as_ref().is_some_and(|fd| fd.mark().is_lost()) {
            let retired = self.lock().retire_pool(&self.table, pool);
            drop(retired);
            return Outcome::Dead;
        }
        let vouched = || match self.vouches(pool) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Outcome::Dead),
            Err(error) => Err(Outcome::Driver(error.code)),
        };
        let fd = match held {
            Some(fd) => vouched().map(|()| fd),
            None if served.made >= MOST_MADE => Err(Outcome::Later(0)),
            None => {
                served.made += 1;
                // Before the export, since it is of a pool that may be gone; and after it, since what was exported must be that pool.
                vouched().and_then(|()| self.registered(self.cuda.export_pool(pool))).and_then(|fd| vouched().map(|()| Arc::new(fd)))
            }
        };
        match fd {
            Ok(fd) => self.give(id, fd, served),
            Err(outcome) => outcome,
        }
    }

    /// An fd that the driver has just made, registered at once: a child forked meanwhile must not keep it.
    fn registered(&self, made: Result<OwnedFd, DriverError>) -> Result<ProcessFd, Outcome> {
        let fd = made.map_err(|error| match out_of_files() {
            Some(_) => Outcome::Later(libc::EMFILE.cast_unsigned()),
            None => Outcome::Driver(error.code),
        })?;
        let fd = ProcessFd::new(fd).map_err(|error| Outcome::Later(error.errno.cast_unsigned()))?;
        if fd.took_over() {
            self.retire_taken();
        }
        Ok(fd)
    }

    /// What is published under this identity, as the table says.
    fn kind_of(&self, id: ChunkId) -> Option<ChunkKind> {
        let table = Reader::resume(self.table.words(), Layout::STANDARD)?;
        table.chunk_in(id.slot).ok().flatten().filter(|(found, _)| *found == id).map(|(_, chunk)| chunk.kind)
    }

    /// What is published under this identity, and the fd that is held for it.
    fn published(&self, id: ChunkId) -> Option<(ChunkFacts, Option<Arc<ProcessFd>>)> {
        // The table says where; the exporter's own list decides.
        let table = Reader::resume(self.table.words(), Layout::STANDARD)?;
        let (_, chunk) = table.chunk_in(id.slot).ok().flatten()?;
        let state = self.lock();
        let record = state.find(chunk.address).filter(|record| record.id == id)?;
        Some((record.facts, record.fd.clone()))
    }

    /// Asks the driver whether the memory is still what it was when it was published. As in a sweep, only an answer can say that it is not.
    fn confirm(&self, id: ChunkId, facts: &ChunkFacts) -> Result<(), Outcome> {
        match self.cuda.buffer_id(facts.base) {
            Ok(Some(found)) if found == facts.buffer_id => Ok(()),
            Ok(_) => {
                self.retire_lost(id, facts);
                Err(Outcome::Dead)
            }
            Err(error) => Err(Outcome::Driver(error.code)),
        }
    }

    /// A new fd of the chunk.
    fn make_fd(&self, id: ChunkId, facts: &ChunkFacts) -> Result<ProcessFd, Outcome> {
        let handle = self.cuda.retain(facts.base).map_err(|error| {
            // Nothing there any more is an answer about the chunk, the rest is about the driver.
            self.confirm(id, facts).err().unwrap_or(Outcome::Driver(error.code))
        })?;
        // After the memory is held: what the driver says now is said of what will be exported.
        let made = self.confirm(id, facts).and_then(|()| self.registered(self.cuda.export_fd(handle)));
        let _ = self.cuda.release(handle);
        made
    }

    fn retire_lost(&self, id: ChunkId, facts: &ChunkFacts) {
        let retired = self.lock().retire_swept(&self.table, facts.base, id);
        drop(retired);
    }
}
