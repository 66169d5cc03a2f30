//! The exporter's bookkeeping: which chunks are published where, who counts them, and which slots are free. Changed under the exporter's lock; makes no
//! driver call and closes no fd: what is retired is returned, to be dropped after the lock. One long file, because everything in it changes one structure whose parts
//! have to agree.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::Thread;

use super::{CoveredChunk, ExporterStats, Refused};
use crate::dispatch::Means;
use crate::export::ChunkFacts;
use crate::reason::NoIpc;
use crate::sys::driver::Pool;
use crate::sys::process_fd::{FdMark, ProcessFd};
use crate::sys::socket::Socket;
use crate::sys::table_file::OwnTable;
use crate::table::{Chunk, ChunkId, ChunkKind, Layout, PublishError, Writer};

/// A published chunk.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) facts: ChunkFacts,
    pub(super) id: ChunkId,
    pub(super) device: [u8; 16],
    /// Shared with answers of the broker on their way out.
    pub(super) fd: Option<Arc<ProcessFd>>,
    /// Exports that cover it.
    exports: u64,
    /// The pool that it is an allocation of.
    pool: Option<Pool>,
}

/// A published pool.
#[derive(Debug)]
struct PoolRecord {
    id: ChunkId,
    fd: Option<Arc<ProcessFd>>,
    /// First addresses of its published allocations; it is retired with the last one.
    allocations: BTreeSet<u64>,
}

/// A pool's allocation to be published.
#[derive(Debug)]
pub(super) struct PoolOffer {
    pub(super) pool: Pool,
    /// The pointer's export data.
    pub(super) data: [u8; 64],
    /// For a pool that is not published yet: its fd, or none past the budget.
    pub(super) fd: Option<Option<ProcessFd>>,
}

/// An export in progress, and what was retired since it last asked the driver about a chunk.
#[derive(Debug)]
struct PendingWalk {
    number: u64,
    retired: Vec<(u64, u64)>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Published chunks by address. They never overlap: what overlaps a new chunk is dead.
    chunks: BTreeMap<u64, Record>,
    /// Pools of published allocations.
    pools: BTreeMap<Pool, PoolRecord>,
    /// Where something was exported that is not any more, the last ones: what tells freed memory from what never was any.
    gone: VecDeque<(u64, u64)>,
    /// Refused exports by the name of their cause.
    refused: BTreeMap<&'static str, Refused>,
    /// What trials have told, by the ordinal of the device.
    means: BTreeMap<i32, Means>,
    free_slots: Vec<u32>,
    next_slot: u32,
    walks: Vec<PendingWalk>,
    next_walk: u64,
    /// The sweeping thread, while there is one.
    pub(super) sweeper: Option<Thread>,
    /// The bell of the broker's thread, while there is one.
    pub(super) broker: Option<Arc<Socket>>,
    /// Whether that thread looks by itself when nothing is published any more.
    pub(super) broker_is_idle: bool,
    stats: ExporterStats,
}

/// A chunk that was retired; dropping it closes the fd.
pub(super) type Retired = Vec<Option<Arc<ProcessFd>>>;

impl State {
    pub(super) const fn stats(&self) -> ExporterStats {
        self.stats
    }

    /// The published chunk around `address`.
    pub(super) fn find(&self, address: u64) -> Option<&Record> {
        let (_, record) = self.chunks.range(..=address).next_back()?;
        (address - record.facts.base < record.facts.len).then_some(record)
    }

    /// Counts one more export of the chunk, if it is still published as these facts say.
    pub(super) fn count(&mut self, facts: &ChunkFacts) -> Option<(ChunkId, [u8; 16])> {
        let record = self.chunks.get_mut(&facts.base).filter(|record| record.facts == *facts)?;
        record.exports += 1;
        Some((record.id, record.device))
    }

    /// Takes one export off each chunk that is still the one it was, and retires those without any.
    pub(super) fn uncount(&mut self, table: &OwnTable, chunks: &[CoveredChunk]) -> Retired {
        let mut unused = Vec::new();
        for chunk in chunks {
            if let Some(record) = self.chunks.get_mut(&chunk.address).filter(|record| record.id == chunk.id) {
                record.exports = record.exports.saturating_sub(1);
                if record.exports == 0 {
                    unused.push(chunk.address);
                }
            }
        }
        self.retire_at(table, &unused)
    }

    /// Publishes a chunk with one export. What overlaps it is retired first: two things cannot be mapped at one address.
    pub(super) fn publish(
        &mut self,
        table: &OwnTable,
        facts: ChunkFacts,
        device: [u8; 16],
        fd: Option<ProcessFd>,
    ) -> Result<(ChunkId, Retired), (PublishError, Retired)> {
        let mut retired = self.retire_range(table, facts.base, facts.len);
        let chunk = Chunk {
            kind: ChunkKind::Vmm,
            fd: fd.as_ref().map(ProcessFd::number),
            address: facts.base,
            len: facts.len,
            buffer_id: facts.buffer_id,
            device,
        };
        match self.publish_entry(table, &chunk) {
            Ok(id) => {
                self.stats.fds += u64::from(fd.is_some());
                self.add(Record { facts, id, device, fd: fd.map(Arc::new), exports: 1, pool: None });
                Ok((id, retired))
            }
            Err(error) => {
                retired.push(fd.map(Arc::new));
                Err((error, retired))
            }
        }
    }

    /// Publishes an allocation of a pool with one export, and the pool if it is not published. `None` if it is not and there is no fd of it at hand.
    #[allow(clippy::type_complexity, reason = "what is retired comes along in either case")]
    pub(super) fn publish_pooled(
        &mut self,
        table: &OwnTable,
        facts: ChunkFacts,
        device: [u8; 16],
        offer: PoolOffer,
    ) -> Result<(Option<ChunkId>, Retired), (PublishError, Retired)> {
        let mut retired = self.retire_range(table, facts.base, facts.len);
        let PoolOffer { pool, data, fd } = offer;
        if !self.pools.contains_key(&pool) {
            let Some(fd) = fd else { return Ok((None, retired)) };
            let number = fd.as_ref().map(ProcessFd::number);
            let entry = Chunk { kind: ChunkKind::Pool, fd: number, address: 0, len: 0, buffer_id: 0, device };
            let fd = fd.map(Arc::new);
            match self.publish_entry(table, &entry) {
                Ok(id) => {
                    self.stats.fds += u64::from(fd.is_some());
                    self.stats.pools += 1;
                    self.pools.insert(pool, PoolRecord { id, fd, allocations: BTreeSet::new() });
                }
                Err(error) => {
                    retired.push(fd);
                    return Err((error, retired));
                }
            }
        } else if let Some(fd) = fd {
            // Another thread was faster.
            retired.push(fd.map(Arc::new));
        }
        let Some(record) = self.pools.get_mut(&pool) else { return Ok((None, retired)) };
        record.allocations.insert(facts.base);
        let kind = ChunkKind::PoolAllocation { pool: record.id.slot, blob: data };
        let entry = Chunk { kind, fd: None, address: facts.base, len: facts.len, buffer_id: facts.buffer_id, device };
        match self.publish_entry(table, &entry) {
            Ok(id) => {
                self.add(Record { facts, id, device, fd: None, exports: 1, pool: Some(pool) });
                Ok((Some(id), retired))
            }
            Err(error) => {
                retired.push(self.leave_pool(table, pool, facts.base));
                Err((error, retired))
            }
        }
    }

    fn add(&mut self, record: Record) {
        self.stats.chunks += 1;
        self.stats.published += 1;
        self.stats.bytes += record.facts.len;
        self.chunks.insert(record.facts.base, record);
    }

    /// Writes an entry into a free slot.
    fn publish_entry(&mut self, table: &OwnTable, chunk: &Chunk) -> Result<ChunkId, PublishError> {
        let fresh = self.free_slots.is_empty();
        let slot = self.free_slots.pop().unwrap_or(self.next_slot);
        let published = match Writer::resume(table.words(), Layout::STANDARD) {
            Some(mut writer) => writer.publish(slot, chunk),
            None => Err(PublishError::Slot(slot)),
        };
        match published {
            Ok(_) => self.next_slot += u32::from(fresh),
            Err(_) if !fresh => self.free_slots.push(slot),
            Err(_) => {}
        }
        published
    }

    /// Takes an allocation off its pool; retires the pool with the last one, and gives its fd.
    fn leave_pool(&mut self, table: &OwnTable, pool: Pool, base: u64) -> Option<Arc<ProcessFd>> {
        let record = self.pools.get_mut(&pool)?;
        record.allocations.remove(&base);
        if !record.allocations.is_empty() {
            return None;
        }
        let record = self.pools.remove(&pool)?;
        Writer::resume(table.words(), Layout::STANDARD)?.retire(record.id);
        self.free_slots.push(record.id.slot);
        self.stats.pools -= 1;
        self.stats.fds -= u64::from(record.fd.is_some());
        record.fd
    }

    /// A published allocation of a pool.
    pub(super) fn witness(&self, pool: Pool) -> Option<(ChunkFacts, ChunkId)> {
        let base = self.pools.get(&pool)?.allocations.first()?;
        self.chunks.get(base).map(|record| (record.facts, record.id))
    }

    /// The pool that is published under this identity, and the fd that is held for it.
    pub(super) fn pool_with(&self, id: ChunkId) -> Option<(Pool, Option<Arc<ProcessFd>>)> {
        self.pools.iter().find(|(_, record)| record.id == id).map(|(&pool, record)| (pool, record.fd.clone()))
    }

    /// Retires all of a pool's allocations, and with them the pool.
    pub(super) fn retire_pool(&mut self, table: &OwnTable, pool: Pool) -> Retired {
        let bases: Vec<u64> = self.pools.get(&pool).map(|record| record.allocations.iter().copied().collect()).unwrap_or_default();
        self.stats.swept += bases.len() as u64;
        self.retire_at(table, &bases)
    }

    /// What is known of a device's handle types.
    pub(super) fn means(&self, device: i32) -> Means {
        self.means.get(&device).copied().unwrap_or_default()
    }

    pub(super) fn remember(&mut self, device: i32, means: Means) {
        self.means.insert(device, means);
    }

    /// The fd by which importers get at a chunk.
    fn fd_of<'a>(&'a self, record: &'a Record) -> Option<&'a Arc<ProcessFd>> {
        match record.pool {
            Some(pool) => self.pools.get(&pool)?.fd.as_ref(),
            None => record.fd.as_ref(),
        }
    }

    /// Retires every chunk that touches `[address, address + len)`.
    pub(super) fn retire_range(&mut self, table: &OwnTable, address: u64, len: u64) -> Retired {
        let end = address.saturating_add(len);
        let first = self.find(address).map_or(address, |record| record.facts.base);
        let touched: Vec<u64> = self.chunks.range(first..end).map(|(&base, _)| base).collect();
        self.retire_at(table, &touched)
    }

    /// Retires the chunk at `id`, if it is still published.
    pub(super) fn retire_swept(&mut self, table: &OwnTable, base: u64, id: ChunkId) -> Retired {
        if self.chunks.get(&base).is_none_or(|record| record.id != id) {
            return Vec::new();
        }
        self.stats.swept += 1;
        self.retire_at(table, &[base])
    }

    /// Retires every chunk whose fd number another fd of ours has: somebody has closed it under us, and importers would fetch the other one.
    pub(super) fn retire_taken(&mut self, table: &OwnTable) -> Retired {
        let taken = |record: &Record| self.fd_of(record).is_some_and(|fd| fd.mark().is_taken());
        let bases: Vec<u64> = self.chunks.values().filter(|record| taken(record)).map(|record| record.facts.base).collect();
        self.stats.swept += bases.len() as u64;
        self.retire_at(table, &bases)
    }

    /// Published chunks, for a sweep.
    pub(super) fn snapshot(&self) -> Vec<Published> {
        self.chunks
            .values()
            .map(|record| Published { facts: record.facts, id: record.id, fd: self.fd_of(record).map(|fd| fd.mark()) })
            .collect()
    }

    /// Marks the chunks dead, then wakes those who wait for deaths, once.
    fn retire_at(&mut self, table: &OwnTable, bases: &[u64]) -> Retired {
        let Some(mut writer) = Writer::resume(table.words(), Layout::STANDARD) else { return Vec::new() };
        let mut retired = Vec::with_capacity(bases.len());
        for base in bases {
            let Some(record) = self.chunks.remove(base) else { continue };
            self.remember_place(record.facts.base, record.facts.len);
            writer.retire(record.id);
            self.free_slots.push(record.id.slot);
            self.stats.chunks -= 1;
            self.stats.retired += 1;
            self.stats.bytes -= record.facts.len;
            self.stats.fds -= u64::from(record.fd.is_some());
            // The pool after its memory: an importer that finds an allocation live finds its pool's entry the right one.
            retired.push(record.pool.and_then(|pool| self.leave_pool(table, pool, *base)).or(record.fd));
        }
        if !retired.is_empty() {
            table.wake_epoch();
        }
        if self.chunks.is_empty() {
            if let Some(sweeper) = &self.sweeper {
                sweeper.unpark();
            }
            if let Some(broker) = self.broker.as_ref().filter(|_| !self.broker_is_idle) {
                self.broker_is_idle = true;
                broker.ring();
            }
        }
        retired
    }

    pub(super) fn count_refusal(&mut self, refused: &NoIpc) {
        self.stats.refused += 1;
        self.refused.entry(refused.cause.name()).or_insert(Refused { first: *refused, times: 0 }).times += 1;
    }

    pub(super) fn refusals(&self) -> Vec<Refused> {
        self.refused.values().copied().collect()
    }

    /// Remembers that something was exported there.
    pub(super) fn remember_place(&mut self, address: u64, len: u64) {
        const MOST: usize = 1024;
        if self.gone.len() >= MOST {
            self.gone.pop_front();
        }
        self.gone.push_back((address, len));
    }

    /// Whether something was exported at `address` some time. (What is published still may be gone without a word.)
    pub(super) fn was_exported(&self, address: u64) -> bool {
        self.find(address).is_some() || self.gone.iter().any(|&(base, len)| address.checked_sub(base).is_some_and(|offset| offset < len))
    }

    /// Registers an export that is about to begin.
    pub(super) fn begin_walk(&mut self) -> u64 {
        self.next_walk += 1;
        self.walks.push(PendingWalk { number: self.next_walk, retired: Vec::new() });
        self.next_walk
    }

    /// The walk is about to ask the driver about a chunk: what was retired before cannot make that answer wrong.
    pub(super) fn restart_walk(&mut self, number: u64) {
        if let Some(walk) = self.walks.iter_mut().find(|walk| walk.number == number) {
            walk.retired.clear();
        }
    }

    pub(super) fn end_walk(&mut self, number: u64) {
        self.walks.retain(|walk| walk.number != number);
    }

    /// Tells exports in progress that memory in `[address, address + len)` is going away.
    pub(super) fn cancel_walks(&mut self, address: u64, len: u64) {
        let end = address.saturating_add(len);
        for walk in &mut self.walks {
            walk.retired.push((address, end));
        }
    }

    /// Whether memory of this chunk went away since the walk asked the driver about it.
    pub(super) fn is_cancelled(&self, number: u64, facts: &ChunkFacts) -> bool {
        let end = facts.base.saturating_add(facts.len);
        let walk = self.walks.iter().find(|walk| walk.number == number);
        walk.is_some_and(|walk| walk.retired.iter().any(|&(from, to)| from < end && facts.base < to))
    }
}

/// A published chunk as a sweep sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Published {
    pub(super) facts: ChunkFacts,
    pub(super) id: ChunkId,
    pub(super) fd: Option<FdMark>,
}
