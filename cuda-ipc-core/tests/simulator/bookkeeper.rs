//! What the exporter in the process keeps: its records, its retirements, and the hands of its walks.

use std::collections::BTreeMap;

use cuda_ipc_core::export::{Action, ChunkFacts, Event, Walk};
use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, Writer};

use crate::exporter::{BASE, LEN, World};
use crate::kernel::{LAYOUT, Mapping, Object, Physical, Words};

/// A walk and its hands.
pub(crate) struct WalkRun {
    pub(crate) walk: Walk,
    pub(crate) handle: Option<Physical>,
    pub(crate) fd: Option<(u32, Physical)>,
    /// Memory that was retired since the walk last asked the driver about a chunk.
    pub(crate) cancelled: Vec<(u64, u64)>,
    pub(crate) counted: Vec<ChunkId>,
}

#[derive(Clone, Copy)]
pub(crate) struct Record {
    pub(crate) facts: ChunkFacts,
    pub(crate) id: ChunkId,
    pub(crate) fd: Option<(u32, Physical)>,
}

/// The exporter of one program: a table and who is in it.
pub(crate) struct Exporter {
    pub(crate) words: Words,
    pub(crate) nonce: Nonce,
    pub(crate) table_fd: u32,
    pub(crate) records: BTreeMap<u64, Record>,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) next_slot: u32,
}

impl World {
    /// Retires what touches `[from, to)` and returns the fds to close.
    pub(crate) fn mark_dead(&mut self, from: u64, to: u64) -> Vec<(u32, Physical)> {
        for run in self.tasks.iter_mut().filter_map(|task| task.walk.as_mut()) {
            run.cancelled.push((from, to));
        }
        let Some(exporter) = &mut self.exporter else { return Vec::new() };
        let touched = |record: &Record| record.facts.base < to && from < record.facts.base + record.facts.len;
        let bases: Vec<u64> = exporter.records.values().filter(|record| touched(record)).map(|record| record.facts.base).collect();
        let records: Vec<Record> = bases.iter().filter_map(|base| exporter.records.remove(base)).collect();
        for record in &records {
            assert!(Writer::resume(exporter.words, LAYOUT).expect("a table").retire(record.id));
            exporter.free_slots.push(record.id.slot);
        }
        records.into_iter().filter_map(|record| record.fd).collect()
    }

    /// Closes a number if it is still what we opened; the application may have closed it under us.
    pub(crate) fn close(&mut self, (number, physical): (u32, Physical)) {
        if matches!(self.process.fds.get(&number), Some(Object::Memory(found)) if *found == physical) {
            self.process.fds.remove(&number);
        }
    }

    pub(crate) fn sweep(&mut self) -> Vec<(u32, Physical)> {
        let Some(exporter) = &self.exporter else { return Vec::new() };
        let same = |record: &Record| self.memory.get(&record.facts.base).is_some_and(|mapping| mapping.buffer_id == record.facts.buffer_id);
        let held = |(number, physical): (u32, Physical)| matches!(self.process.fds.get(&number), Some(Object::Memory(found)) if *found == physical);
        let gone: Vec<u64> =
            exporter.records.values().filter(|r| !same(r) || r.fd.is_some_and(|fd| !held(fd))).map(|r| r.facts.base).collect();
        gone.into_iter().flat_map(|base| self.mark_dead(base, base + 1)).collect()
    }

    /// One action of a walk.
    pub(crate) fn walk(&mut self, mut run: WalkRun) -> Option<WalkRun> {
        let action = run.walk.next();
        if action == Action::Finished {
            assert!(run.handle.is_none() && run.fd.is_none(), "a walk leaves nothing behind");
            return None;
        }
        let event = self.answer(action, &mut run);
        run.walk.report(event);
        Some(run)
    }

    fn answer(&mut self, action: Action, run: &mut WalkRun) -> Event {
        let Some(exporter) = &mut self.exporter else { return Event::Refused(Cause::Forked) };
        let mapped = |address: u64| {
            let (base, mapping) = self.memory.range(..=address).next_back()?;
            (address < base + mapping.len).then_some((*base, *mapping))
        };
        match action {
            Action::QueryReservation(_) => Event::Reservation(BASE, LEN),
            Action::Find(address) => {
                let record = exporter.records.range(..=address).next_back().map(|(_, record)| record.facts);
                Event::Known(record.filter(|facts| address < facts.base + facts.len))
            }
            Action::QueryId(address) => Event::Id(mapped(address).map(|(_, mapping)| mapping.buffer_id)),
            Action::Count(facts) => match exporter.records.get(&facts.base).filter(|record| record.facts == facts) {
                Some(record) => {
                    run.counted.push(record.id);
                    Event::Done
                }
                None => Event::Gone,
            },
            Action::Retire(facts) => {
                let fds = self.mark_dead(facts.base, facts.base + facts.len);
                fds.into_iter().for_each(|fd| self.close(fd));
                Event::Done
            }
            Action::QueryChunk(address) => {
                run.cancelled.clear();
                Event::Chunk(mapped(address).map(|(base, Mapping { len, buffer_id, .. })| ChunkFacts { base, len, buffer_id }))
            }
            Action::Retain(facts) => match mapped(facts.base) {
                Some((_, mapping)) => {
                    run.handle = Some(mapping.physical);
                    Event::Done
                }
                None => Event::Refused(Cause::Hole),
            },
            Action::ExportHandle(_) => {
                let physical = run.handle.expect("a handle");
                if exporter.records.values().filter(|record| record.fd.is_some()).count() < self.budget {
                    run.fd = Some((self.process.install(Object::Memory(physical)), physical));
                }
                Event::Done
            }
            Action::ReleaseHandle(_) => {
                run.handle = None;
                Event::Done
            }
            Action::Publish(facts) => self.publish(facts, run),
            Action::CloseFd => {
                run.fd.take().into_iter().for_each(|fd| self.close(fd));
                Event::Done
            }
            Action::Uncount | Action::Finished => {
                run.counted.clear();
                Event::Done
            }
        }
    }

    fn publish(&mut self, facts: ChunkFacts, run: &mut WalkRun) -> Event {
        let fd = run.fd.take();
        let end = facts.base + facts.len;
        let known =
            self.exporter.as_ref().and_then(|exporter| exporter.records.get(&facts.base).copied()).filter(|known| known.facts == facts);
        if known.is_some() || run.cancelled.iter().any(|(from, to)| *from < end && facts.base < *to) {
            fd.into_iter().for_each(|fd| self.close(fd));
            return if known.is_some() { Event::Done } else { Event::Gone };
        }
        let memory = self.memory_of[&facts.buffer_id];
        if let Some((_, physical)) = fd
            && physical != memory
        {
            self.errors.push(format!("the walk publishes {facts:?} with the fd of other memory"));
        }
        let overlapped = self.mark_dead(facts.base, end);
        overlapped.into_iter().for_each(|fd| self.close(fd));
        let exporter = self.exporter.as_mut().expect("checked by the caller");
        let fresh = exporter.free_slots.is_empty();
        let slot = exporter.free_slots.pop().unwrap_or(exporter.next_slot);
        let number = fd.map(|(number, _)| number);
        let chunk =
            Chunk { kind: ChunkKind::Vmm, fd: number, address: facts.base, len: facts.len, buffer_id: facts.buffer_id, device: [7; 16] };
        match Writer::resume(exporter.words, LAYOUT).expect("a table").publish(slot, &chunk) {
            Ok(id) => {
                exporter.next_slot += u32::from(fresh);
                exporter.records.insert(facts.base, Record { facts, id, fd });
                if self.truth.insert((exporter.nonce, id), memory).is_some() {
                    self.errors.push(format!("{id:?} was given out twice"));
                }
                run.counted.push(id);
                Event::Done
            }
            Err(_) => {
                if !fresh {
                    exporter.free_slots.push(slot);
                }
                fd.into_iter().for_each(|fd| self.close(fd));
                Event::Refused(Cause::TableFull)
            }
        }
    }
}
