//! Memory that is allocated and mapped in one step: plain device memory, managed memory, pinned and registered host memory.

use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;

use cuda_driver_sys::CUresult;

use crate::abi::{Answer, INVALID, Out};
use crate::file;
use crate::layout::{ChunkKind, GRANULE};
use crate::process::{self, Process};
use crate::space::{Access, Kind, Place};

impl Process {
    /// Puts a chunk this process holds at new addresses.
    pub(crate) fn place_chunk(&mut self, gpu: usize, offset: u64, bytes: u64, access: Access, kind: Kind) -> Result<u64, CUresult> {
        let base = self.reserve(bytes.next_multiple_of(GRANULE), 0, 0, false)?;
        self.space.insert(base, bytes, Place::Arena { gpu, offset }, access, kind);
        if let Some((_, mapping)) = self.space.mapping_at(base) {
            self.count_mapping(mapping, true);
        }
        Ok(base)
    }

    /// Frees whatever a call of this file, a pool or a legacy handle put at this address.
    pub(crate) fn free_allocation(&mut self, base: u64) {
        let Some(mapping) = self.space.remove(base) else { return };
        self.retire_copies(base, mapping.len);
        self.count_mapping(&mapping, false);
        match mapping.kind {
            Kind::Plain { chunk, .. } | Kind::Pooled { chunk, .. } | Kind::PoolImport { chunk, .. } | Kind::Legacy { chunk, .. } => {
                self.unreserve(base);
                self.unhold(chunk);
            }
            Kind::Managed { .. } | Kind::HostAlloc { .. } => {
                file::unmap(usize::try_from(base).unwrap_or(0), mapping.len.next_multiple_of(4096));
            }
            Kind::HostRegistered { .. } => {}
            // Never ours to free: its addresses belong to a reservation of the application's.
            Kind::Vmm { .. } => {}
        }
    }

    /// Copies that use these addresses have lost their memory.
    pub(crate) fn retire_copies(&mut self, base: u64, len: u64) {
        let hit = self.copies.retire(base, len);
        self.registry.counters().copies_into_dead_mappings.fetch_add(hit, Relaxed);
    }
}

/// `cuMemAlloc_v2`.
pub(crate) fn alloc(out: Out<u64>, bytes: usize) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (context, device) = process.working()?;
    if bytes == 0 {
        return Err(INVALID);
    }
    let gpu = process.devices[device];
    let (chunk, info) = process.create(gpu, bytes as u64, ChunkKind::Plain, 0)?;
    match process.place_chunk(gpu, info.offset, bytes as u64, Access::ALL, Kind::Plain { context, chunk }) {
        Ok(base) => out.set(base),
        Err(code) => {
            process.unhold(chunk);
            Err(code)
        }
    }
}

/// `cuMemAllocPitch_v2`.
pub(crate) fn alloc_pitch(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, _element: u32) -> Answer {
    pitch.check()?;
    let row = width.next_multiple_of(512);
    alloc(out, row.checked_mul(height).ok_or(INVALID)?)?;
    pitch.set(row)
}

/// `cuMemFree_v2`: waits for all work, as the real one does.
pub(crate) fn free(address: u64) -> Answer {
    let mut process = process::lock()?;
    if address == 0 {
        return Ok(());
    }
    if let Ok((context, _)) = process.current() {
        process.check_context(context)?;
    }
    let freeable = |kind: Kind| matches!(kind, Kind::Plain { .. } | Kind::Pooled { .. } | Kind::PoolImport { .. } | Kind::Managed { .. });
    let check =
        |process: &Process| process.space.mapping_at(address).is_some_and(|(base, mapping)| base == address && freeable(mapping.kind));
    if !check(&process) {
        return Err(INVALID);
    }
    let all = process.streams.last();
    process = Process::finish(process, all);
    if !check(&process) {
        return Err(INVALID);
    }
    process.free_from_anywhere(address);
    Ok(())
}

/// `cuMemAllocManaged`.
pub(crate) fn alloc_managed(out: Out<u64>, bytes: usize, flags: u32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    if bytes == 0 || !matches!(flags, 1 | 2) {
        return Err(INVALID);
    }
    let base = host_memory(&mut process, bytes, Kind::Managed { context })?;
    out.set(base)
}

/// `cuMemHostAlloc`, `cuMemAllocHost_v2`.
pub(crate) fn host_alloc(out: Out<*mut c_void>, bytes: usize, _flags: u32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    if bytes == 0 {
        return Err(INVALID);
    }
    let base = host_memory(&mut process, bytes, Kind::HostAlloc { context })?;
    out.set(core::ptr::with_exposed_provenance_mut(usize::try_from(base).unwrap_or(0)))
}

/// `cuMemAllocHost_v2`.
pub(crate) fn alloc_host(out: Out<*mut c_void>, bytes: usize) -> Answer {
    host_alloc(out, bytes, 0)
}

/// `cuMemFreeHost`.
pub(crate) fn free_host(address: Out<c_void>) -> Answer {
    let mut process = process::lock()?;
    let base = address.raw().addr() as u64;
    match process.space.mapping_at(base) {
        Some((start, mapping)) if start == base && matches!(mapping.kind, Kind::HostAlloc { .. }) => {
            process.free_allocation(base);
            Ok(())
        }
        _ => Err(INVALID),
    }
}

/// `cuMemHostRegister_v2`.
pub(crate) fn host_register(address: Out<c_void>, bytes: usize, _flags: u32) -> Answer {
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    let base = address.raw().addr() as u64;
    if base == 0 || bytes == 0 {
        return Err(INVALID);
    }
    if process.space.is_mapped(base, bytes as u64) {
        return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    process.space.insert(base, bytes as u64, Place::Here, Access::ALL, Kind::HostRegistered { context });
    Ok(())
}

/// `cuMemHostUnregister`.
pub(crate) fn host_unregister(address: Out<c_void>) -> Answer {
    let mut process = process::lock()?;
    let base = address.raw().addr() as u64;
    match process.space.mapping_at(base) {
        Some((start, mapping)) if start == base && matches!(mapping.kind, Kind::HostRegistered { .. }) => {
            process.free_allocation(base);
            Ok(())
        }
        _ => Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    }
}

/// `cuMemHostGetDevicePointer_v2`: one address for both, as with unified addressing.
pub(crate) fn host_device_pointer(out: Out<u64>, address: Out<c_void>, _flags: u32) -> Answer {
    let process = process::lock()?;
    let address = address.raw().addr() as u64;
    match process.space.mapping_at(address) {
        Some((_, mapping)) if !mapping.kind.is_device() => out.set(address),
        _ => Err(INVALID),
    }
}

/// `cuMemHostGetFlags`.
pub(crate) fn host_flags(out: Out<u32>, address: Out<c_void>) -> Answer {
    let process = process::lock()?;
    match process.space.mapping_at(address.raw().addr() as u64) {
        Some((_, mapping)) if !mapping.kind.is_device() => out.set(0),
        _ => Err(INVALID),
    }
}

fn host_memory(process: &mut Process, bytes: usize, kind: Kind) -> Result<u64, CUresult> {
    let len = (bytes as u64).next_multiple_of(4096);
    let base = file::map_private(len).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)? as u64;
    process.space.insert(base, bytes as u64, Place::Here, Access::ALL, kind);
    Ok(base)
}
