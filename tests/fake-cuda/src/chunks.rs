//! The shared table of physical chunks: made, held by processes, orphaned behind an exported fd, given back.
//!
//! A chunk is in use while a process holds it (a bit per process; how many handles and mappings are behind the bit is the process's own business) or
//! while an exported fd of it is open anywhere (`export.rs`). The second is asked of the kernel only when it matters: a chunk that was exported and
//! lost its last holder waits in the list of orphans. Everything but the entries themselves can be rebuilt from them ([`Locked::rebuild`]).

use cuda_driver_sys::CUresult;

use crate::export;
use crate::layout::{Chunk, ChunkKind, EXPORTED, GRANULE, Gpu, MAX_CHUNKS, NIL, ORPHAN};
use crate::registry::Locked;

/// Names a chunk of the fake machine for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChunkId {
    /// Physical device.
    pub(crate) gpu: usize,
    pub(crate) slot: u32,
    pub(crate) generation: u64,
}

/// What the table says of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkInfo {
    /// Offset in the arena.
    pub(crate) offset: u64,
    /// Bytes asked for at creation.
    pub(crate) bytes: u64,
}

impl Locked<'_> {
    /// Makes a chunk that this process holds; `None` if memory is short even after sweeping.
    pub(crate) fn create(&mut self, gpu: usize, bytes: u64, kind: ChunkKind, handle_types: u32) -> Option<ChunkId> {
        let granules = bytes.div_ceil(GRANULE);
        if self.gpus[gpu].used_bytes + granules * GRANULE > self.memory {
            self.sweep();
        }
        if self.gpus[gpu].used_bytes + granules * GRANULE > self.memory {
            return None;
        }
        let limit = self.registry.arenas.granules();
        let count = usize::try_from(granules).ok()?;
        let slot = self.gpus[gpu].take_slot()?;
        let Some(granule) = self.gpus[gpu].find_run(count, limit) else {
            self.gpus[gpu].give_slot(slot);
            return None;
        };
        let generation = self.registry.next_generation();
        let holder = self.registry.slot;
        let table = &mut self.gpus[gpu];
        table.mark(granule, count, true);
        table.used_bytes += granules * GRANULE;
        let chunk = &mut table.chunks[slot as usize];
        chunk.flags = 0;
        chunk.handle_types = handle_types;
        chunk.generation = generation;
        chunk.granule = u32::try_from(granule).unwrap_or(0);
        chunk.granules = u32::try_from(count).unwrap_or(0);
        chunk.bytes = bytes;
        chunk.holders = [0; 4];
        chunk.holders[holder / 64] |= 1 << (holder % 64);
        chunk.kind = kind as u16;
        Some(ChunkId { gpu, slot, generation })
    }

    /// Makes this process a holder of a chunk that came in from outside; `None` if there is no such chunk of this kind.
    pub(crate) fn hold(&mut self, id: ChunkId, kind: ChunkKind) -> Option<ChunkInfo> {
        let holder = self.registry.slot;
        let chunk = self.find_mut(id).filter(|chunk| chunk.kind == kind as u16)?;
        chunk.holders[holder / 64] |= 1 << (holder % 64);
        Some(ChunkInfo { offset: u64::from(chunk.granule) * GRANULE, bytes: chunk.bytes })
    }

    /// The chunk of this kind that an exported fd names, as [`export::read`] found it.
    pub(crate) fn of_fd(&mut self, found: Option<(usize, u32, u64)>, kind: ChunkKind) -> Result<ChunkId, CUresult> {
        let (gpu, slot, low) = found.ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
        let chunk = self.gpus.get(gpu).and_then(|gpu| gpu.chunks.get(slot as usize)).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
        if chunk.kind == 0 || !export::same_generation(low, chunk.generation) {
            return Err(CUresult::CUDA_ERROR_UNKNOWN);
        }
        if chunk.kind != kind as u16 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        Ok(ChunkId { gpu, slot, generation: chunk.generation })
    }

    /// What the table says of a live chunk.
    pub(crate) fn info(&mut self, id: ChunkId) -> Option<ChunkInfo> {
        self.find_mut(id).map(|chunk| ChunkInfo { offset: u64::from(chunk.granule) * GRANULE, bytes: chunk.bytes })
    }

    /// This process no longer holds the chunk.
    pub(crate) fn drop_hold(&mut self, id: ChunkId) {
        let holder = self.registry.slot;
        if self.find_mut(id).is_some() {
            self.drop_holder(id.gpu, id.slot, holder);
        }
    }

    /// The chunk has fds outside from now on.
    pub(crate) fn mark_exported(&mut self, id: ChunkId) {
        if let Some(chunk) = self.find_mut(id) {
            chunk.flags |= EXPORTED;
        }
    }

    /// Frees orphans of this device whose last exported fd is closed.
    pub(crate) fn sweep_orphans(&mut self, gpu: usize) {
        let mut slot = core::mem::replace(&mut self.gpus[gpu].orphans, NIL);
        if slot == NIL {
            return;
        }
        let Some(probe) = export::Probe::open(self.registry, gpu) else {
            self.gpus[gpu].orphans = slot;
            return;
        };
        while slot != NIL {
            let chunk = &mut self.gpus[gpu].chunks[slot as usize];
            let next = core::mem::replace(&mut chunk.next, NIL);
            chunk.flags &= !ORPHAN;
            if !chunk.is_held() {
                if probe.is_open(slot) { self.gpus[gpu].push_orphan(slot) } else { self.free(gpu, slot) }
            }
            slot = next;
        }
    }

    /// How many chunks of the device only an exported fd keeps.
    pub(crate) fn orphans(&self, gpu: usize) -> u64 {
        let table = &self.gpus[gpu];
        let next = |&slot: &u32| Some(table.chunks[slot as usize].next).filter(|&slot| slot != NIL);
        let slots = core::iter::successors(Some(table.orphans).filter(|&slot| slot != NIL), next);
        slots.filter(|&slot| !table.chunks[slot as usize].is_held()).count() as u64
    }

    /// A process is dead: it holds nothing.
    pub(crate) fn drop_holder_everywhere(&mut self, gpu: usize, holder: usize) {
        for slot in 1..=self.gpus[gpu].high_water {
            if self.gpus[gpu].chunks[slot as usize].kind != 0 {
                self.drop_holder(gpu, slot, holder);
            }
        }
    }

    /// Computes everything that follows from the chunk entries anew.
    pub(crate) fn rebuild(&mut self) {
        let registry = self.registry;
        let limit = registry.arenas.granules();
        for gpu in 0..self.devices as usize {
            let table = &mut self.gpus[gpu];
            (table.used_bytes, table.free, table.orphans, table.cursor) = (0, NIL, NIL, 0);
            table.granules[..limit.div_ceil(64)].fill(0);
            table.high_water = table.high_water.min(u32::try_from(MAX_CHUNKS - 1).unwrap_or(0));
            for slot in 1..=table.high_water {
                let chunk = &mut table.chunks[slot as usize];
                chunk.flags &= !ORPHAN;
                let (kind, held, exported, first, count) =
                    (chunk.kind, chunk.is_held(), chunk.flags & EXPORTED != 0, chunk.granule as usize, chunk.granules as usize);
                if kind == 0 {
                    table.give_slot(slot);
                    continue;
                }
                table.mark(first, count, true);
                table.used_bytes += count as u64 * GRANULE;
                if !held && exported {
                    table.push_orphan(slot);
                } else if !held {
                    registry.arenas.clear(gpu, u32::try_from(first).unwrap_or(0), u32::try_from(count).unwrap_or(0));
                    table.release(slot);
                }
            }
        }
    }

    fn find_mut(&mut self, id: ChunkId) -> Option<&mut Chunk> {
        let chunk = self.gpus.get_mut(id.gpu)?.chunks.get_mut(id.slot as usize)?;
        (chunk.kind != 0 && chunk.generation == id.generation).then_some(chunk)
    }

    fn drop_holder(&mut self, gpu: usize, slot: u32, holder: usize) {
        let chunk = &mut self.gpus[gpu].chunks[slot as usize];
        let bit = 1 << (holder % 64);
        if chunk.holders[holder / 64] & bit == 0 {
            return;
        }
        chunk.holders[holder / 64] &= !bit;
        if chunk.is_held() || chunk.flags & ORPHAN != 0 {
            return;
        }
        if chunk.flags & EXPORTED != 0 {
            self.gpus[gpu].push_orphan(slot);
        } else {
            self.free(gpu, slot);
        }
    }

    fn free(&mut self, gpu: usize, slot: u32) {
        let chunk = &self.gpus[gpu].chunks[slot as usize];
        self.registry.arenas.clear(gpu, chunk.granule, chunk.granules);
        self.gpus[gpu].release(slot);
    }
}

impl Chunk {
    fn is_held(&self) -> bool {
        self.holders.iter().any(|&bits| bits != 0)
    }
}

impl Gpu {
    fn take_slot(&mut self) -> Option<u32> {
        if self.free != NIL {
            let slot = self.free;
            self.free = core::mem::replace(&mut self.chunks[slot as usize].next, NIL);
            return Some(slot);
        }
        if self.high_water as usize + 1 >= MAX_CHUNKS {
            return None;
        }
        self.high_water += 1;
        Some(self.high_water)
    }

    fn give_slot(&mut self, slot: u32) {
        self.chunks[slot as usize].next = self.free;
        self.free = slot;
    }

    fn push_orphan(&mut self, slot: u32) {
        let head = core::mem::replace(&mut self.orphans, slot);
        let chunk = &mut self.chunks[slot as usize];
        chunk.next = head;
        chunk.flags |= ORPHAN;
    }

    fn release(&mut self, slot: u32) {
        let chunk = &mut self.chunks[slot as usize];
        let (granule, granules) = (chunk.granule as usize, chunk.granules as usize);
        chunk.kind = 0;
        self.mark(granule, granules, false);
        self.used_bytes -= granules as u64 * GRANULE;
        self.give_slot(slot);
    }

    fn mark(&mut self, first: usize, count: usize, used: bool) {
        let mut at = first;
        while at < first + count {
            let (word, bit) = (at / 64, at % 64);
            let bits = (64 - bit).min(first + count - at);
            let mask = (u64::MAX >> (64 - bits)) << bit;
            if used {
                self.granules[word] |= mask
            } else {
                self.granules[word] &= !mask
            }
            at += bits;
        }
    }

    /// The next run of `count` free granules, searched from where the last search ended.
    fn find_run(&mut self, count: usize, limit: usize) -> Option<usize> {
        let start = (self.cursor as usize).min(limit);
        let found = self.search(start, limit, count).or_else(|| self.search(0, limit.min(start + count), count))?;
        self.cursor = u32::try_from(found + count).unwrap_or(0);
        Some(found)
    }

    fn search(&self, from: usize, to: usize, count: usize) -> Option<usize> {
        let (mut at, mut run) = (from, 0);
        while at < to {
            if run == count {
                break;
            }
            let (word, bit) = (self.granules[at / 64], at % 64);
            if word == 0 && bit == 0 && at + 64 <= to {
                let step = 64.min(count - run);
                (at, run) = (at + step, run + step);
            } else if word >> bit & 1 == 0 {
                (at, run) = (at + 1, run + 1);
            } else {
                // Past the run of used granules that starts here.
                let used = ((word >> bit).trailing_ones() as usize).min(64 - bit);
                (at, run) = (at + used, 0);
            }
        }
        (run == count).then(|| at - count)
    }
}
