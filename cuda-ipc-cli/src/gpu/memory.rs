//! Device memory that frees itself.

use core::time::Duration;
use std::time::Instant;

use cuda_driver_sys::{CUmemoryPool, CUresult};
use cuda_ipc_core::table::GRANULE;

use super::Gpu;
use crate::failure::Failure;
use crate::size;

/// Chunks side by side in a reservation of exactly their length, readable and writable here.
pub(crate) struct Chunks<'g> {
    gpu: &'g Gpu,
    address: u64,
    len: u64,
    mapped: u64,
}

impl<'g> Chunks<'g> {
    /// Makes chunks of these sizes. A POSIX fd can be had for each.
    pub(crate) fn new(gpu: &'g Gpu, sizes: &[u64]) -> Result<Self, Failure> {
        Self::with_room(gpu, sizes, 0)
    }

    /// The same in a reservation that has `room` for more at its end.
    pub(crate) fn with_room(gpu: &'g Gpu, sizes: &[u64], room: u64) -> Result<Self, Failure> {
        let filled = sizes.iter().sum();
        let len = filled + room;
        let address = gpu.reserve(len).map_err(gpu.at("reserving address space"))?;
        let mut chunks = Self { gpu, address, len, mapped: 0 };
        for (at, &size) in sizes.iter().enumerate() {
            chunks.map(size, || format!("chunk {at} of {}", sizes.len()), len)?;
        }
        gpu.set_access(address, filled, true).map_err(gpu.at("giving access to the chunks"))?;
        Ok(chunks)
    }

    /// Adds a chunk at the end of what is mapped.
    pub(crate) fn push(&mut self, size: u64) -> Result<(), Failure> {
        let at = self.address + self.mapped;
        self.map(size, || "one more chunk".to_owned(), size)?;
        self.gpu.set_access(at, size, true).map_err(self.gpu.at("giving access to one more chunk"))
    }

    /// Unmaps the last chunk, of this size.
    pub(crate) fn pop(&mut self, size: u64) -> Result<(), Failure> {
        self.gpu.unmap(self.address + self.mapped - size, size).map_err(self.gpu.at("unmapping a chunk"))?;
        self.mapped -= size;
        Ok(())
    }

    /// Creates a chunk and maps it at the end of what is mapped.
    fn map(&mut self, size: u64, name: impl Fn() -> String, wanted: u64) -> Result<(), Failure> {
        let gpu = self.gpu;
        let handle = gpu.create(size).map_err(|error| with_free_memory(gpu, gpu.at(&format!("creating {}", name()))(error), wanted))?;
        let mapping = gpu.map(self.address + self.mapped, size, handle);
        // The mapping keeps the memory alive.
        let release = gpu.release(handle);
        mapping.map_err(gpu.at("mapping a chunk"))?;
        self.mapped += size;
        release.map_err(gpu.at("releasing a chunk's handle"))
    }

    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// Unmaps all, `step` bytes by a call, which have to be whole chunks, and gives the reservation back; says how long the unmapping took.
    pub(crate) fn free(mut self, step: u64) -> Result<Duration, Failure> {
        let start = Instant::now();
        while self.mapped != 0 {
            // From the end, so that what is left is still one piece.
            self.pop(step.min(self.mapped))?;
        }
        Ok(start.elapsed())
    }
}

impl Drop for Chunks<'_> {
    fn drop(&mut self) {
        if self.mapped == 0 || self.gpu.unmap(self.address, self.mapped).is_ok() {
            let _ = self.gpu.free_reservation(self.address, self.len);
        }
    }
}

/// One allocation of a pool of its own, of which POSIX fds can be exported.
pub(crate) struct Pooled<'g> {
    gpu: &'g Gpu,
    pool: CUmemoryPool,
    address: u64,
    len: u64,
}

impl<'g> Pooled<'g> {
    pub(crate) fn new(gpu: &'g Gpu, len: u64) -> Result<Self, Failure> {
        let pool = gpu.create_pool().map_err(gpu.at("creating a memory pool with POSIX_FD handles"))?;
        match gpu.alloc_from(pool, len) {
            Ok(address) => Ok(Self { gpu, pool, address, len }),
            Err(error) => {
                let _ = gpu.destroy_pool(pool);
                Err(with_free_memory(gpu, gpu.at("allocating from the pool")(error), len))
            }
        }
    }

    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    pub(crate) const fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Pooled<'_> {
    fn drop(&mut self) {
        let _ = self.gpu.free_pooled(self.address);
        let _ = self.gpu.destroy_pool(self.pool);
    }
}

/// Memory of `cuMemAlloc`.
pub(crate) struct Buffer<'g> {
    gpu: &'g Gpu,
    address: u64,
    len: u64,
}

impl<'g> Buffer<'g> {
    pub(crate) fn new(gpu: &'g Gpu, len: u64) -> Result<Self, Failure> {
        let address = gpu.alloc(len).map_err(|error| with_free_memory(gpu, gpu.at("allocating local memory to copy to")(error), len))?;
        Ok(Self { gpu, address, len })
    }

    /// A buffer of `len` bytes, or where the device has no room for it, of half of what is free.
    pub(crate) fn at_most(gpu: &'g Gpu, len: u64) -> Result<Self, Failure> {
        match gpu.alloc(len) {
            Ok(address) => Ok(Self { gpu, address, len }),
            Err(error) if error.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY.0 => {
                let (free, _) = gpu.memory().map_err(gpu.at("asking for the free memory"))?;
                Self::new(gpu, (free / 2 / GRANULE * GRANULE).clamp(GRANULE, len.max(GRANULE)))
            }
            Err(error) => Err(gpu.at("allocating local memory to copy to")(error)),
        }
    }

    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let _ = self.gpu.free(self.address);
    }
}

/// Adds how much memory was wanted and how much there is.
fn with_free_memory(gpu: &Gpu, failure: Failure, wanted: u64) -> Failure {
    match gpu.memory() {
        Ok((free, total)) => failure.note(format!(
            "wanted are {}; free on the device are {} of {}",
            size::human(wanted),
            size::human(free),
            size::human(total)
        )),
        Err(_) => failure,
    }
}
