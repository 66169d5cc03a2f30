//! Device memory that frees itself.

use core::time::Duration;
use std::time::Instant;

use cuda_driver_sys::CUresult;
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
        let len = sizes.iter().sum();
        let address = gpu.reserve(len).map_err(gpu.at("reserving address space"))?;
        let mut chunks = Self { gpu, address, len, mapped: 0 };
        for (at, &size) in sizes.iter().enumerate() {
            let handle = gpu.create(size).map_err(|error| {
                let failure = gpu.at(&format!("creating chunk {at} of {}", sizes.len()))(error);
                with_free_memory(gpu, failure, len)
            })?;
            let mapping = gpu.map(address + chunks.mapped, size, handle);
            // The mapping keeps the memory alive.
            let release = gpu.release(handle);
            mapping.map_err(gpu.at("mapping a chunk"))?;
            chunks.mapped += size;
            release.map_err(gpu.at("releasing a chunk's handle"))?;
        }
        gpu.set_access(address, len, true).map_err(gpu.at("giving access to the chunks"))?;
        Ok(chunks)
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
            let len = step.min(self.mapped);
            // From the end, so that what is left is still one piece.
            self.gpu.unmap(self.address + self.mapped - len, len).map_err(self.gpu.at("unmapping chunks"))?;
            self.mapped -= len;
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
