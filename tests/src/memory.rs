//! A reservation with chunks in it, as an expandable allocator has one; made with plain driver calls.

use std::collections::BTreeMap;

use cuda_driver_sys::CUresult;

use crate::driver::{Answer, Cuda};
use crate::pattern;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const POSIX_FD: u32 = 1;

/// An address that address space randomisation leaves free in every process: for memory that is to be at one address in two of them.
pub const STABLE: u64 = 0x2000_0000_0000;

/// Mapped chunks of a reservation, by offset.
#[derive(Debug)]
pub struct Memory {
    cuda: Cuda,
    base: u64,
    len: u64,
    /// Length in bytes of the chunk at each offset.
    chunks: BTreeMap<u64, u64>,
}

fn size(len: u64) -> usize {
    usize::try_from(len).expect("a length of this process")
}

impl Memory {
    /// Reserves `len` bytes; at `wish`, if that is not 0 and free.
    pub fn reserve(cuda: Cuda, len: u64, wish: u64) -> Answer<Self> {
        let base = cuda.mem_reserve_at(size(len), wish)?;
        Ok(Self { cuda, base, len, chunks: BTreeMap::new() })
    }

    /// First address of the reservation.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Makes a chunk at `offset` and fills it with the bytes of `seed`.
    pub fn map(&mut self, offset: u64, len: u64, seed: u64) -> Answer {
        self.map_types(offset, len, POSIX_FD)?;
        pattern::fill(&self.cuda, self.base + offset, len, seed)
    }

    /// Makes a chunk at `offset` with the bytes of `seed` at the start of each granule only: enough to tell which one it is, and fast.
    pub fn mark(&mut self, offset: u64, len: u64, seed: u64) -> Answer {
        self.map_types(offset, len, POSIX_FD)?;
        pattern::mark(&self.cuda, self.base + offset, len, seed)
    }

    /// Makes a chunk of these handle types at `offset`.
    pub fn map_types(&mut self, offset: u64, len: u64, types: u32) -> Answer {
        self.map_on(0, offset, len, types)
    }

    /// As [`Memory::map_types`], of another device's memory; the first device has access.
    pub fn map_on(&mut self, device: i32, offset: u64, len: u64, types: u32) -> Answer {
        let handle = self.cuda.mem_create(size(len), device, types)?;
        let mapped = self.cuda.mem_map(self.base + offset, size(len), 0, handle);
        self.cuda.mem_release(handle)?;
        mapped?;
        self.cuda.mem_set_access(self.base + offset, size(len), 0, 3)?;
        self.chunks.insert(offset, len);
        Ok(())
    }

    /// Length in bytes of the chunk at `offset`, if one begins there.
    pub fn len_at(&self, offset: u64) -> Option<u64> {
        self.chunks.get(&offset).copied()
    }

    /// Unmaps the chunk at `offset`; that was its last reference, unless it was exported.
    pub fn unmap(&mut self, offset: u64) -> Answer {
        let len = self.chunks.remove(&offset).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        self.cuda.mem_unmap(self.base + offset, size(len))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let offsets: Vec<u64> = self.chunks.keys().copied().collect();
        let unmapped = offsets.into_iter().try_for_each(|offset| self.unmap(offset));
        // In a panic or at the driver's end there is nobody to tell.
        let _ = unmapped.and_then(|()| self.cuda.mem_address_free(self.base, size(self.len)));
    }
}
