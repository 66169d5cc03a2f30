//! The kinds of memory that a soak shares. A kind is a line in [`KINDS`] and a type that can be made and changed.

use core::ops::Range;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use cuda_ipc_core::table::GRANULE;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::gpu::{Buffer, Gpu, Pooled};
use crate::random::Random;

/// A part of shared memory that was written with one seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    /// As the exporter counts addresses.
    pub(super) address: u64,
    pub(super) len: u64,
    /// Of the pattern in it.
    pub(super) seed: u64,
}

/// What may happen to memory while it is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Change {
    /// It gets more at its end.
    Grow,
    /// It loses its last chunk.
    Shrink,
    /// One of its chunks is freed and another one takes its place.
    Replace,
}

/// Memory that is being shared.
pub(super) trait Memory {
    /// What is in it, without a gap and in order of address.
    fn parts(&self) -> Vec<Part>;

    /// Whether importers learn that it is gone.
    fn tells(&self) -> bool;

    /// The range that `change` would free, to be retired before; `None` where the kind cannot change so now. It is made after this was asked.
    fn frees(&self, change: Change, random: &mut Random) -> Option<Range<u64>>;

    /// Makes the change. `freed` is what [`Memory::frees`] said. Returns the parts that are new and have to be written.
    fn change(&mut self, change: Change, freed: Range<u64>, random: &mut Random) -> Result<Vec<Part>, Failure>;
}

type Make = for<'g> fn(&'g Gpu, &mut Random) -> Result<Box<dyn Memory + 'g>, Failure>;

/// A kind of memory, by its place in [`KINDS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Kind(usize);

/// All kinds: name, what it is, how it is made.
const KINDS: &[(&str, &str, Make)] = &[
    ("vmm", "chunks of cuMemCreate in a reservation", |gpu, random| Ok(Box::new(Vmm::new(gpu, random)?))),
    ("pool", "allocations of pools with POSIX_FD handles", |gpu, random| {
        Ok(Box::new(Fixed::new(Pooled::new(gpu, some(random))?, true, random)))
    }),
    ("malloc", "allocations of cuMemAlloc, by legacy handles", |gpu, random| {
        Ok(Box::new(Fixed::new(Buffer::new(gpu, some(random))?, false, random)))
    }),
];

/// Some length.
const fn some(random: &mut Random) -> u64 {
    (1 + random.below(4)) * GRANULE
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        KINDS.get(self.0).map_or("unknown", |&(name, ..)| name)
    }

    pub(super) fn make<'g>(self, gpu: &'g Gpu, random: &mut Random) -> Result<Box<dyn Memory + 'g>, Failure> {
        match KINDS.get(self.0) {
            Some((_, _, make)) => make(gpu, random),
            None => Err(Failure::new("making memory", format!("there is no kind number {}", self.0))),
        }
    }
}

impl ValueEnum for Kind {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Kind; KINDS.len()] = {
            let mut all = [Kind(0); KINDS.len()];
            let mut at = 0;
            while at < all.len() {
                all[at] = Kind(at);
                at += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        KINDS.get(self.0).map(|&(name, help, _)| PossibleValue::new(name).help(help))
    }
}

/// Chunks side by side from the start of a reservation.
struct Vmm<'g> {
    gpu: &'g Gpu,
    base: u64,
    chunks: Vec<Part>,
}

/// Room in a reservation.
const ROOM: u64 = 64 * GRANULE;
/// The largest chunk.
const LARGEST: u64 = 4;

impl<'g> Vmm<'g> {
    fn new(gpu: &'g Gpu, random: &mut Random) -> Result<Self, Failure> {
        let base = gpu.reserve(ROOM).map_err(gpu.at("reserving address space"))?;
        let mut memory = Self { gpu, base, chunks: Vec::new() };
        for _ in 0..=random.below(5) {
            memory.push(random)?;
        }
        Ok(memory)
    }

    fn end(&self) -> u64 {
        self.chunks.last().map_or(self.base, |chunk| chunk.address + chunk.len)
    }

    fn push(&mut self, random: &mut Random) -> Result<Part, Failure> {
        let part = Part { address: self.end(), len: (1 + random.below(LARGEST)) * GRANULE, seed: random.next() };
        self.map(part)?;
        self.chunks.push(part);
        Ok(part)
    }

    fn map(&self, part: Part) -> Result<(), Failure> {
        let gpu = self.gpu;
        let handle = gpu.create(part.len).map_err(gpu.at("creating a chunk"))?;
        let mapped = gpu.map(part.address, part.len, handle);
        // The mapping keeps the memory alive.
        let released = gpu.release(handle);
        mapped.map_err(gpu.at("mapping a chunk"))?;
        released.map_err(gpu.at("releasing a chunk's handle"))?;
        gpu.set_access(part.address, part.len, true).map_err(gpu.at("giving access to a chunk"))
    }

    fn unmap(&self, part: Part) -> Result<(), Failure> {
        self.gpu.unmap(part.address, part.len).map_err(self.gpu.at("unmapping a chunk"))
    }
}

impl Memory for Vmm<'_> {
    fn tells(&self) -> bool {
        true
    }

    fn parts(&self) -> Vec<Part> {
        self.chunks.clone()
    }

    fn frees(&self, change: Change, random: &mut Random) -> Option<Range<u64>> {
        let range = |chunk: &Part| chunk.address..chunk.address + chunk.len;
        match change {
            Change::Grow => (self.end() + LARGEST * GRANULE <= self.base + ROOM).then(|| self.end()..self.end()),
            Change::Shrink => self.chunks.last().filter(|_| self.chunks.len() > 1).map(range),
            Change::Replace => {
                let at = usize::try_from(random.below(self.chunks.len() as u64)).ok()?;
                self.chunks.get(at).map(range)
            }
        }
    }

    fn change(&mut self, change: Change, freed: Range<u64>, random: &mut Random) -> Result<Vec<Part>, Failure> {
        match change {
            Change::Grow => Ok(vec![self.push(random)?]),
            Change::Shrink => {
                if let Some(last) = self.chunks.pop() {
                    self.unmap(last)?;
                }
                Ok(Vec::new())
            }
            Change::Replace => {
                let Some(at) = self.chunks.iter().position(|chunk| chunk.address == freed.start) else { return Ok(Vec::new()) };
                let old = self.chunks[at];
                self.unmap(old)?;
                // In the old one's place one of its size, or several smaller ones.
                let mut made = Vec::new();
                let (mut address, end) = (old.address, old.address + old.len);
                while address < end {
                    let granules = (end - address) / GRANULE;
                    let len = if random.below(2) == 0 { end - address } else { (1 + random.below(granules)) * GRANULE };
                    made.push(Part { address, len, seed: random.next() });
                    address += len;
                }
                for &part in &made {
                    self.map(part)?;
                }
                self.chunks.splice(at..=at, made.iter().copied());
                Ok(made)
            }
        }
    }
}

impl Drop for Vmm<'_> {
    fn drop(&mut self) {
        let unmapped = self.chunks.iter().try_for_each(|&chunk| self.unmap(chunk));
        if unmapped.is_ok() {
            let _ = self.gpu.free_reservation(self.base, ROOM);
        }
    }
}

/// An allocation that is as it is until it is freed.
struct Fixed<A> {
    /// Kept.
    _allocation: A,
    part: Part,
    tells: bool,
}

/// What has a range and frees itself.
trait Allocation {
    fn range(&self) -> (u64, u64);
}

impl Allocation for Pooled<'_> {
    fn range(&self) -> (u64, u64) {
        (self.address(), self.len())
    }
}

impl Allocation for Buffer<'_> {
    fn range(&self) -> (u64, u64) {
        (self.address(), self.len())
    }
}

impl<A: Allocation> Fixed<A> {
    fn new(allocation: A, tells: bool, random: &mut Random) -> Self {
        let (address, len) = allocation.range();
        Self { _allocation: allocation, part: Part { address, len, seed: random.next() }, tells }
    }
}

impl<A> Memory for Fixed<A> {
    fn tells(&self) -> bool {
        self.tells
    }

    fn parts(&self) -> Vec<Part> {
        vec![self.part]
    }

    fn frees(&self, _change: Change, _random: &mut Random) -> Option<Range<u64>> {
        None
    }

    fn change(&mut self, _change: Change, _freed: Range<u64>, _random: &mut Random) -> Result<Vec<Part>, Failure> {
        Ok(Vec::new())
    }
}
