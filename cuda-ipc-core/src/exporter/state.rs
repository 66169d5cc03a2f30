//! The exporter's bookkeeping: which chunks are published where, who counts them, and which slots are free. Changed under the exporter's lock; makes no
//! driver call and closes no fd: what is retired is returned, to be dropped after the lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::Thread;

use super::{CoveredChunk, ExporterStats};
use crate::export::ChunkFacts;
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
        let fresh = self.free_slots.is_empty();
        let slot = self.free_slots.pop().unwrap_or(self.next_slot);
        let published = match Writer::resume(table.words(), Layout::STANDARD) {
            Some(mut writer) => writer.publish(slot, &chunk),
            None => Err(PublishError::Slot(slot)),
        };
        match published {
            Ok(id) => {
                self.next_slot += u32::from(fresh);
                self.stats.chunks += 1;
                self.stats.published += 1;
                self.stats.bytes += facts.len;
                self.stats.fds += u64::from(fd.is_some());
                self.chunks.insert(facts.base, Record { facts, id, device, fd: fd.map(Arc::new), exports: 1 });
                Ok((id, retired))
            }
            Err(error) => {
                if !fresh {
                    self.free_slots.push(slot);
                }
                retired.push(fd.map(Arc::new));
                Err((error, retired))
            }
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
        let taken = |record: &Record| record.fd.as_ref().is_some_and(|fd| fd.mark().is_taken());
        let bases: Vec<u64> = self.chunks.values().filter(|record| taken(record)).map(|record| record.facts.base).collect();
        self.stats.swept += bases.len() as u64;
        self.retire_at(table, &bases)
    }

    /// Published chunks, for a sweep.
    pub(super) fn snapshot(&self) -> Vec<Published> {
        self.chunks
            .values()
            .map(|record| Published { facts: record.facts, id: record.id, fd: record.fd.as_deref().map(ProcessFd::mark) })
            .collect()
    }

    /// Marks the chunks dead, then wakes those who wait for deaths, once.
    fn retire_at(&mut self, table: &OwnTable, bases: &[u64]) -> Retired {
        let Some(mut writer) = Writer::resume(table.words(), Layout::STANDARD) else { return Vec::new() };
        let mut retired = Vec::with_capacity(bases.len());
        for record in bases.iter().filter_map(|base| self.chunks.remove(base)) {
            writer.retire(record.id);
            self.free_slots.push(record.id.slot);
            self.stats.chunks -= 1;
            self.stats.retired += 1;
            self.stats.bytes -= record.facts.len;
            self.stats.fds -= u64::from(record.fd.is_some());
            retired.push(record.fd);
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
