//! Virtual memory management: physical handles, and mapping them.
//!
//! A handle object stands for one creation or one import. It lives while the application has references to it (create, import and retain each give
//! one, release takes one) or something is mapped from it; while it lives, this process holds the chunk.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use core::sync::atomic::Ordering::Relaxed;
use cuda_driver_sys::{
    CUmemAccessDesc_v1, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp_v1, CUmemAllocationType,
    CUmemLocation, CUmemLocationType, CUresult, location_id,
};

use crate::abi::{Answer, INVALID, In, Out};
use crate::chunks::ChunkId;
use crate::layout::{ChunkKind, GRANULE};
use crate::process::{self, Process};
use crate::space::{Kind, Place};
use crate::{blob, export};

pub(crate) const POSIX_FD: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
pub(crate) const FABRIC: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;

/// One creation or import.
pub(crate) struct HandleObject {
    pub(crate) chunk: ChunkId,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    /// Handle types it may be exported as; none for an import.
    pub(crate) types: u32,
    /// Made for GPUDirect RDMA; false for an import.
    pub(crate) rdma: bool,
    /// References the application has.
    references: u64,
    mappings: u64,
}

/// All handle objects of the process.
#[derive(Default)]
pub(crate) struct Handles {
    objects: BTreeMap<u64, HandleObject>,
    last: u64,
}

impl Handles {
    /// The object, while it lives.
    pub(crate) fn object(&self, handle: u64) -> Option<&HandleObject> {
        self.objects.get(&handle)
    }

    fn add(&mut self, chunk: ChunkId, offset: u64, size: u64, types: u32, rdma: bool) -> u64 {
        // Values like the real driver's: small, even, and never used again.
        self.last += 0x10;
        self.objects.insert(self.last, HandleObject { chunk, offset, size, types, rdma, references: 1, mappings: 0 });
        self.last
    }

    /// The object; released by the application or not, a mapping keeps it working.
    fn live(&mut self, handle: u64) -> Result<&mut HandleObject, CUresult> {
        self.objects.get_mut(&handle).ok_or(INVALID)
    }
}

impl Process {
    /// Counts a handle reference of the application's up (or down) in the shared counters.
    fn count_handle(&self, gpu: usize, up: bool) {
        let counter = &self.registry.counters().handles[gpu];
        if up {
            counter.fetch_add(1, Relaxed)
        } else {
            counter.fetch_sub(1, Relaxed)
        };
    }

    fn drop_object_if_dead(&mut self, handle: u64) {
        if let Some(object) = self.handles.objects.get(&handle)
            && object.references == 0
            && object.mappings == 0
        {
            let chunk = object.chunk;
            self.handles.objects.remove(&handle);
            self.unhold(chunk);
        }
    }

    fn add_import(&mut self, chunk: ChunkId) -> Result<u64, CUresult> {
        let info = self.hold(chunk, ChunkKind::Vmm).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
        let handle = self.handles.add(chunk, info.offset, info.bytes, 0, false);
        self.count_handle(chunk.gpu, true);
        self.registry.counters().imports_made.fetch_add(1, Relaxed);
        Ok(handle)
    }

    /// Ends a VMM mapping.
    pub(crate) fn unmap_vmm(&mut self, base: u64) {
        let Some(mapping) = self.space.remove(base) else { return };
        self.retire_copies(base, mapping.len);
        if let Kind::Vmm { handle } = mapping.kind {
            if let Some(object) = self.handles.objects.get_mut(&handle) {
                object.mappings -= 1;
            }
            self.count_mapping(&mapping, false);
            self.drop_object_if_dead(handle);
        }
    }

    /// Counts a mapping up (or down) in the shared counters.
    pub(crate) fn count_mapping(&self, mapping: &crate::space::Mapping, up: bool) {
        if let Place::Arena { gpu, .. } = mapping.place {
            let counters = self.registry.counters();
            if up {
                counters.mappings[gpu].fetch_add(1, Relaxed);
                counters.mapped_bytes[gpu].fetch_add(mapping.len, Relaxed);
            } else {
                counters.mappings[gpu].fetch_sub(1, Relaxed);
                counters.mapped_bytes[gpu].fetch_sub(mapping.len, Relaxed);
            }
        }
    }

    fn count_reservations(&self) {
        let counters = self.registry.counters();
        let (number, bytes) = self.space.reserved_by_user();
        counters.reservations.store(number, Relaxed);
        counters.reserved_bytes.store(bytes, Relaxed);
    }

    /// Reserves addresses and keeps the counters right.
    pub(crate) fn reserve(&mut self, size: u64, alignment: u64, wish: u64, by_user: bool) -> Result<u64, CUresult> {
        let base = self.space.reserve(size, alignment, wish, by_user)?;
        self.count_reservations();
        Ok(base)
    }

    /// Gives addresses back and keeps the counters right.
    pub(crate) fn unreserve(&mut self, base: u64) {
        self.space.unreserve(base);
        self.count_reservations();
    }
}

/// `cuMemGetAllocationGranularity`.
pub(crate) fn granularity(out: Out<usize>, prop: In<CUmemAllocationProp_v1>, _option: CUmemAllocationGranularity_flags) -> Answer {
    let process = process::lock()?;
    location(&process, &prop.get()?.location)?;
    out.set(usize::try_from(GRANULE).unwrap_or(0))
}

/// `cuMemCreate`.
pub(crate) fn create(out: Out<u64>, size: usize, prop: In<CUmemAllocationProp_v1>, flags: u64) -> Answer {
    out.check()?;
    let prop = prop.get()?;
    let mut process = process::lock()?;
    let size = size as u64;
    if flags != 0 || size == 0 || !size.is_multiple_of(GRANULE) || prop.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(INVALID);
    }
    let types = prop.requestedHandleTypes.0;
    if types & !(POSIX_FD | FABRIC) != 0 {
        return Err(INVALID);
    }
    let device = location(&process, &prop.location)?;
    if types & FABRIC != 0 && !process.fabric {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    let gpu = process.devices[device];
    let (chunk, info) = process.create(gpu, size, ChunkKind::Vmm, types)?;
    let handle = process.handles.add(chunk, info.offset, size, types, prop.allocFlags.gpuDirectRDMACapable != 0);
    process.count_handle(gpu, true);
    out.set(handle)
}

/// `cuMemRelease`.
pub(crate) fn release(handle: u64) -> Answer {
    let mut process = process::lock()?;
    let object = process.handles.live(handle)?;
    object.references = object.references.checked_sub(1).ok_or(INVALID)?;
    let gpu = object.chunk.gpu;
    process.count_handle(gpu, false);
    process.drop_object_if_dead(handle);
    Ok(())
}

/// `cuMemRetainAllocationHandle`: any address inside a VMM mapping will do.
pub(crate) fn retain(out: Out<u64>, address: Out<core::ffi::c_void>) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (_, mapping) = process.space.mapping_at(address.raw().addr() as u64).ok_or(INVALID)?;
    let Kind::Vmm { handle } = mapping.kind else { return Err(INVALID) };
    let object = process.handles.objects.get_mut(&handle).ok_or(INVALID)?;
    object.references += 1;
    let gpu = object.chunk.gpu;
    process.count_handle(gpu, true);
    out.set(handle)
}

/// `cuMemGetAllocationPropertiesFromHandle`.
pub(crate) fn properties(out: Out<CUmemAllocationProp_v1>, handle: u64) -> Answer {
    let mut process = process::lock()?;
    let object = process.handles.live(handle)?;
    let (types, rdma, gpu) = (object.types, object.rdma, object.chunk.gpu);
    let ordinal = process.ordinal(gpu).and_then(|ordinal| i32::try_from(ordinal).ok()).unwrap_or(-1);
    // SAFETY: plain C data for which all zeros is valid.
    let mut prop: CUmemAllocationProp_v1 = unsafe { core::mem::zeroed() };
    prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CUmemAllocationHandleType(types);
    prop.location = cuda_driver_sys::device_location(ordinal);
    prop.allocFlags.gpuDirectRDMACapable = u8::from(rdma);
    out.set(prop)
}

/// `cuMemExportToShareableHandle`.
pub(crate) fn export(out: Out<core::ffi::c_void>, handle: u64, kind: CUmemAllocationHandleType, flags: u64) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let registry = process.registry;
    let object = process.handles.live(handle)?;
    if flags != 0 || object.types & kind.0 == 0 || !kind.0.is_power_of_two() {
        return Err(INVALID);
    }
    let chunk = object.chunk;
    if kind.0 == POSIX_FD {
        export_fd(registry, out, chunk)
    } else {
        blob::write(out, &blob::Blob { what: blob::FABRIC, chunk, extra: [0; 3] })
    }
}

/// Makes an fd for a chunk this process holds and stores it.
pub(crate) fn export_fd(registry: &crate::registry::Registry, out: Out<core::ffi::c_void>, chunk: ChunkId) -> Answer {
    registry.lock().mark_exported(chunk);
    // The code is for want of a free fd, the only thing that goes wrong here.
    let fd: RawFd = export::make(registry, chunk).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
    registry.counters().exports_made.fetch_add(1, Relaxed);
    Out::<RawFd>::cast(out).set(fd)
}

/// `cuMemImportFromShareableHandle`: the fd is passed by value, cast to a pointer.
pub(crate) fn import(out: Out<u64>, shareable: Out<core::ffi::c_void>, kind: CUmemAllocationHandleType) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let registry = process.registry;
    let chunk = match kind.0 {
        POSIX_FD => {
            let found = export::read(registry, export::fd_of_handle(shareable.raw().addr() as u64));
            registry.lock().of_fd(found, ChunkKind::Vmm)?
        }
        FABRIC if process.fabric => blob::read(shareable, blob::FABRIC).map(|blob| blob.chunk).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?,
        FABRIC => return Err(CUresult::CUDA_ERROR_NOT_PERMITTED),
        _ => return Err(INVALID),
    };
    // A GPU that CUDA_VISIBLE_DEVICES hides from this process cannot take part.
    if process.ordinal(chunk.gpu).is_none() {
        return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    }
    let handle = process.add_import(chunk)?;
    out.set(handle)
}

/// `cuMemAddressReserve`.
pub(crate) fn reserve(out: Out<u64>, size: usize, alignment: usize, address: u64, flags: u64) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (size, alignment) = (size as u64, alignment as u64);
    if flags != 0 || size == 0 || !size.is_multiple_of(GRANULE) || !(alignment == 0 || alignment.is_power_of_two()) {
        return Err(INVALID);
    }
    let base = process.reserve(size, alignment, address, true)?;
    out.set(base)
}

/// `cuMemAddressFree`: the whole of a reservation, with nothing mapped in it.
pub(crate) fn free(address: u64, size: usize) -> Answer {
    let mut process = process::lock()?;
    let size = size as u64;
    let whole = process.space.reservations.get(&address).is_some_and(|found| found.by_user && found.size == size);
    if !whole || process.space.is_mapped(address, size) {
        return Err(INVALID);
    }
    process.unreserve(address);
    Ok(())
}

/// `cuMemMap`: the whole of a chunk at free addresses.
pub(crate) fn map(address: u64, size: usize, offset: usize, handle: u64, flags: u64) -> Answer {
    let mut process = process::lock()?;
    let size = size as u64;
    let object = process.handles.live(handle)?;
    if offset != 0 || size != object.size {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let place = Place::Arena { gpu: object.chunk.gpu, offset: object.offset };
    if flags != 0 || !address.is_multiple_of(GRANULE) {
        return Err(INVALID);
    }
    process.space.insert_vmm(address, size, place, handle)?;
    process.handles.live(handle)?.mappings += 1;
    if let Some((_, mapping)) = process.space.mapping_at(address) {
        process.count_mapping(mapping, true);
    }
    Ok(())
}

/// `cuMemUnmap`: whole mappings, and nothing at all where nothing is mapped. Does not wait for copies.
pub(crate) fn unmap(address: u64, size: usize) -> Answer {
    let mut process = process::lock()?;
    for base in process.space.mappings_in(address, size as u64)?.0 {
        process.unmap_vmm(base);
    }
    process::notify();
    Ok(())
}

/// `cuMemSetAccess`: a range that is wholly mapped.
pub(crate) fn set_access(address: u64, size: usize, rights: In<CUmemAccessDesc_v1>, count: usize) -> Answer {
    let mut process = process::lock()?;
    if count == 0 {
        return Err(INVALID);
    }
    let (bases, mapped) = process.space.mappings_in(address, size as u64)?;
    if mapped != size as u64 {
        return Err(INVALID);
    }
    let rights: Vec<_> = (0..count).map(|index| rights.at(index)).collect::<Result<_, _>>()?;
    for right in &rights {
        if location(&process, &right.location).is_err() || !matches!(right.flags.0, 0 | 1 | 3) {
            return Err(INVALID);
        }
    }
    for right in &rights {
        let device = location(&process, &right.location)?;
        for &base in &bases {
            process.space.set_access(base, device, u64::from(right.flags.0));
        }
    }
    Ok(())
}

/// `cuMemGetAccess`.
pub(crate) fn get_access(out: Out<u64>, place: In<CUmemLocation>, address: u64) -> Answer {
    let process = process::lock()?;
    let device = location(&process, &place.get()?)?;
    let (_, mapping) = process.space.mapping_at(address).filter(|(_, mapping)| mapping.kind.is_device()).ok_or(INVALID)?;
    out.set(mapping.access.of(device))
}

/// The device index of a location; the fake has device memory only.
pub(crate) fn location(process: &Process, location: &CUmemLocation) -> Result<usize, CUresult> {
    match location.type_ {
        CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => process.device(location_id(location)),
        CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST | CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => {
            Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
        }
        _ => Err(INVALID),
    }
}
