//! Memory pools: allocation from them, and sharing of pools that were made for it.
//!
//! A pool gives memory back to the device at once, as one with release threshold 0 does at its next synchronisation. A pool made with a handle type is
//! also a chunk without memory of the shared table, so that its exported fds are like all others. An imported pool hands out pointers by export
//! data only.

use std::collections::BTreeMap;

use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;
use cuda_driver_sys::{
    CUmemAccess_flags, CUmemAccessDesc_v1, CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation, CUmemPool_attribute,
    CUmemPoolHandle_st, CUmemPoolProps_v1, CUmemPoolPtrExportData_v1, CUmemoryPool, CUresult, CUstream_st,
};

use crate::abi::{Answer, Handle, INVALID, In, Out, handle};
use crate::blob::{self, Blob};
use crate::chunks::ChunkId;
use crate::export;
use crate::layout::ChunkKind;
use crate::process::{self, Process};
use crate::space::{Access, Kind};
use crate::stream::{StreamId, Work};
use crate::vmm::{self, POSIX_FD};

struct Pool {
    device: usize,
    types: u32,
    /// Where it is shared: made with a handle type, or imported.
    chunk: Option<ChunkId>,
    imported: bool,
    access: Access,
    attributes: BTreeMap<u32, u64>,
    used: u64,
    used_high: u64,
    /// Pointers imported into it: chunk to address.
    imports: BTreeMap<ChunkId, u64>,
    destroyed: bool,
}

/// All pools of the process.
pub(crate) struct Pools {
    live: BTreeMap<u64, Pool>,
    current: Vec<u64>,
    next: u64,
}

const FIRST: u64 = 0x9001_0000_0000;
const STEP: u64 = 0x100;

impl Pools {
    /// One default pool per device, which is also its current one.
    pub(crate) fn new(devices: usize) -> Self {
        let default = |device: usize| FIRST + device as u64 * STEP;
        let live = (0..devices).map(|device| (default(device), Pool::new(device, 0, None, false))).collect();
        Self { live, current: (0..devices).map(default).collect(), next: default(devices) }
    }

    /// Handle types of the pool.
    pub(crate) fn handle_types(&self, pool: u64) -> u32 {
        self.live.get(&pool).map_or(0, |pool| pool.types)
    }

    fn is_default(&self, pool: u64) -> bool {
        self.live.get(&pool).is_some_and(|found| pool == FIRST + found.device as u64 * STEP)
    }

    fn get(&mut self, pool: u64) -> Result<&mut Pool, CUresult> {
        self.live.get_mut(&pool).filter(|pool| !pool.destroyed).ok_or(INVALID)
    }

    fn add(&mut self, pool: Pool) -> u64 {
        let number = self.next;
        self.next += STEP;
        self.live.insert(number, pool);
        number
    }
}

impl Pool {
    fn new(device: usize, types: u32, chunk: Option<ChunkId>, imported: bool) -> Self {
        let mut access = Access::default();
        access.set(device, Access::READ | Access::WRITE);
        let attributes = BTreeMap::from([(1, 1), (2, 1), (3, 1), (4, 0)]);
        Self { device, types, chunk, imported, access, attributes, used: 0, used_high: 0, imports: BTreeMap::new(), destroyed: false }
    }
}

impl Process {
    /// Frees an allocation, and tells the pool if it is one's.
    pub(crate) fn free_from_anywhere(&mut self, base: u64) {
        let Some((_, mapping)) = self.space.mapping_at(base) else { return };
        let (kind, len) = (mapping.kind, mapping.len);
        self.free_allocation(base);
        match kind {
            Kind::Pooled { pool, .. } => {
                if let Some(found) = self.pools.live.get_mut(&pool) {
                    found.used -= len;
                    self.drop_pool_if_done(pool);
                }
            }
            Kind::PoolImport { pool, chunk } => {
                if let Some(found) = self.pools.live.get_mut(&pool) {
                    found.imports.remove(&chunk);
                    self.drop_pool_if_done(pool);
                }
            }
            _ => {}
        }
    }

    fn drop_pool_if_done(&mut self, pool: u64) {
        if let Some(found) = self.pools.live.get(&pool)
            && found.destroyed
            && found.used == 0
            && found.imports.is_empty()
        {
            let chunk = found.chunk;
            self.pools.live.remove(&pool);
            self.registry.counters().pools.fetch_sub(1, Relaxed);
            if let Some(chunk) = chunk {
                self.unhold(chunk);
            }
        }
    }

    fn alloc_from(&mut self, number: u64, bytes: usize, _stream: StreamId) -> Result<u64, CUresult> {
        let pool = self.pools.get(number)?;
        if bytes == 0 || pool.imported {
            return Err(INVALID);
        }
        let (access, gpu, types) = (pool.access, pool.device, pool.types);
        let gpu = self.devices[gpu];
        let bytes = (bytes as u64).next_multiple_of(512);
        let (chunk, info) = self.create(gpu, bytes, ChunkKind::Pooled, types)?;
        match self.place_chunk(gpu, info.offset, bytes, access, Kind::Pooled { pool: number, chunk }) {
            Ok(base) => {
                let pool = self.pools.get(number)?;
                pool.used += bytes;
                pool.used_high = pool.used_high.max(pool.used);
                Ok(base)
            }
            Err(code) => {
                self.unhold(chunk);
                Err(code)
            }
        }
    }
}

/// `cuDeviceGetDefaultMemPool`.
pub(crate) fn default_pool(out: Out<CUmemoryPool>, device: i32) -> Answer {
    let device = process::lock()?.device(device)?;
    out.set(handle(FIRST + device as u64 * STEP))
}

/// `cuDeviceGetMemPool`.
pub(crate) fn device_pool(out: Out<CUmemoryPool>, device: i32) -> Answer {
    let process = process::lock()?;
    out.set(handle(process.pools.current[process.device(device)?]))
}

/// `cuDeviceSetMemPool`.
pub(crate) fn set_device_pool(device: i32, pool: Handle<CUmemPoolHandle_st>) -> Answer {
    let mut process = process::lock()?;
    let device = process.device(device)?;
    let number = pool.id();
    process.pools.get(number)?;
    process.pools.current[device] = number;
    Ok(())
}

/// `cuMemPoolCreate`.
pub(crate) fn create(out: Out<CUmemoryPool>, props: In<CUmemPoolProps_v1>) -> Answer {
    out.check()?;
    let props = props.get()?;
    let mut process = process::lock()?;
    let device = vmm::location(&process, &props.location)?;
    let types = props.handleTypes.0;
    if props.allocType != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(INVALID);
    }
    if types & vmm::FABRIC != 0 && !process.fabric {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    if types & !(POSIX_FD | vmm::FABRIC) != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let gpu = process.devices[device];
    let chunk = if types == 0 { None } else { Some(process.create(gpu, 0, ChunkKind::Pool, types)?.0) };
    let number = process.pools.add(Pool::new(device, types, chunk, false));
    process.registry.counters().pools.fetch_add(1, Relaxed);
    out.set(handle(number))
}

/// `cuMemPoolDestroy`: the pool goes when its last allocation does.
pub(crate) fn destroy(pool: Handle<CUmemPoolHandle_st>) -> Answer {
    let mut process = process::lock()?;
    let number = pool.id();
    if process.pools.is_default(number) {
        return Err(INVALID);
    }
    process.pools.get(number)?.destroyed = true;
    for device in 0..process.pools.current.len() {
        if process.pools.current[device] == number {
            process.pools.current[device] = FIRST + device as u64 * STEP;
        }
    }
    process.drop_pool_if_done(number);
    Ok(())
}

/// `cuMemPoolTrimTo`: the fake keeps nothing back.
pub(crate) fn trim(pool: Handle<CUmemPoolHandle_st>, _keep: usize) -> Answer {
    process::lock()?.pools.get(pool.id()).map(|_| ())
}

/// `cuMemPoolSetAttribute`.
pub(crate) fn set_attribute(pool: Handle<CUmemPoolHandle_st>, attribute: CUmemPool_attribute, value: Out<c_void>) -> Answer {
    let mut process = process::lock()?;
    let pool = process.pools.get(pool.id())?;
    let value = match attribute.0 {
        1..=3 => u64::from(Out::<u32>::cast(value).get()?),
        4 | 6 | 8 => Out::<u64>::cast(value).get()?,
        _ => return Err(INVALID),
    };
    if attribute.0 == 8 {
        pool.used_high = pool.used;
    } else {
        pool.attributes.insert(attribute.0, value);
    }
    Ok(())
}

/// `cuMemPoolGetAttribute`.
pub(crate) fn attribute(pool: Handle<CUmemPoolHandle_st>, attribute: CUmemPool_attribute, value: Out<c_void>) -> Answer {
    let mut process = process::lock()?;
    let pool = process.pools.get(pool.id())?;
    let stored = pool.attributes.get(&attribute.0).copied().unwrap_or(0);
    match attribute.0 {
        1..=3 => Out::<u32>::cast(value).set(u32::from(stored != 0)),
        4 => Out::<u64>::cast(value).set(stored),
        5 | 7 => Out::<u64>::cast(value).set(pool.used),
        6 | 8 => Out::<u64>::cast(value).set(pool.used_high),
        _ => Err(INVALID),
    }
}

/// `cuMemPoolSetAccess`: for what is allocated and for what comes. Of a device that cannot reach the pool's it is granted without effect, as some drivers do.
pub(crate) fn set_access(pool: Handle<CUmemPoolHandle_st>, rights: In<CUmemAccessDesc_v1>, count: usize) -> Answer {
    let mut process = process::lock()?;
    let number = pool.id();
    process.pools.get(number)?;
    for index in 0..count {
        let right = rights.at(index)?;
        let device = vmm::location(&process, &right.location)?;
        let bits = u64::from(right.flags.0);
        if !process.peers && process.pools.get(number)?.device != device {
            continue;
        }
        process.pools.get(number)?.access.set(device, bits);
        process.space.set_access_of(
            device,
            bits,
            |kind| matches!(kind, Kind::Pooled { pool, .. } | Kind::PoolImport { pool, .. } if pool == number),
        );
    }
    Ok(())
}

/// `cuMemPoolGetAccess`.
pub(crate) fn access(out: Out<CUmemAccess_flags>, pool: Handle<CUmemPoolHandle_st>, place: Out<CUmemLocation>) -> Answer {
    let mut process = process::lock()?;
    let device = vmm::location(&process, &place.get()?)?;
    let rights = process.pools.get(pool.id())?.access.of(device);
    out.set(CUmemAccess_flags(u32::try_from(rights).unwrap_or(0)))
}

/// `cuMemPoolExportToShareableHandle`.
pub(crate) fn export_pool(out: Out<c_void>, pool: Handle<CUmemPoolHandle_st>, kind: CUmemAllocationHandleType, flags: u64) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (registry, fabric) = (process.registry, process.fabric);
    let pool = process.pools.get(pool.id())?;
    match pool.chunk {
        Some(chunk) if fabric && flags == 0 && !pool.imported && kind.0 == vmm::FABRIC && pool.types & vmm::FABRIC != 0 => {
            blob::write(out, &Blob { what: blob::FABRIC, chunk, extra: [0; 3] })
        }
        Some(chunk) if flags == 0 && !pool.imported && kind.0 == POSIX_FD && pool.types & POSIX_FD != 0 => {
            vmm::export_fd(registry, out, chunk)
        }
        _ => Err(INVALID),
    }
}

/// `cuMemPoolImportFromShareableHandle`.
pub(crate) fn import_pool(out: Out<CUmemoryPool>, shareable: Out<c_void>, kind: CUmemAllocationHandleType, flags: u64) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let registry = process.registry;
    if flags != 0 {
        return Err(INVALID);
    }
    let chunk = match kind.0 {
        POSIX_FD => {
            let found = export::read(registry, export::fd_of_handle(shareable.raw().addr() as u64));
            registry.lock().of_fd(found, ChunkKind::Pool)?
        }
        vmm::FABRIC if process.fabric => blob::read(shareable, blob::FABRIC).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?.chunk,
        _ => return Err(INVALID),
    };
    let device = process.ordinal(chunk.gpu).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    process.hold(chunk, ChunkKind::Pool).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
    let number = process.pools.add(Pool::new(device, kind.0, Some(chunk), true));
    registry.counters().pools.fetch_add(1, Relaxed);
    out.set(handle(number))
}

/// `cuMemPoolExportPointer`.
pub(crate) fn export_pointer(out: Out<CUmemPoolPtrExportData_v1>, address: u64) -> Answer {
    let process = process::lock()?;
    let (_, mapping) = process.space.mapping_at(address).ok_or(INVALID)?;
    let Kind::Pooled { pool, chunk } = mapping.kind else { return Err(INVALID) };
    let pool = process.pools.live.get(&pool).and_then(|pool| pool.chunk).ok_or(INVALID)?;
    let extra = [u64::from(pool.slot), pool.generation, mapping.len];
    out.set(CUmemPoolPtrExportData_v1 { reserved: Blob { what: blob::POOL_POINTER, chunk, extra }.to_bytes() })
}

/// `cuMemPoolImportPointer`: importing one pointer twice gives the same address, and the first free ends both, as on the real driver.
pub(crate) fn import_pointer(out: Out<u64>, pool: Handle<CUmemPoolHandle_st>, data: Out<CUmemPoolPtrExportData_v1>) -> Answer {
    out.check()?;
    let number = pool.id();
    let data = data.get()?;
    let mut process = process::lock()?;
    let pool = process.pools.get(number)?;
    let blob = Blob::from_bytes(&data.reserved, blob::POOL_POINTER).ok_or(INVALID)?;
    let of_pool =
        |chunk: ChunkId| chunk.gpu == blob.chunk.gpu && u64::from(chunk.slot) == blob.extra[0] && chunk.generation == blob.extra[1];
    if !pool.imported || !pool.chunk.is_some_and(of_pool) {
        return Err(INVALID);
    }
    if let Some(&address) = pool.imports.get(&blob.chunk) {
        return out.set(address);
    }
    let access = pool.access;
    let info = process.hold(blob.chunk, ChunkKind::Pooled).ok_or(INVALID)?;
    let kind = Kind::PoolImport { pool: number, chunk: blob.chunk };
    match process.place_chunk(blob.chunk.gpu, info.offset, info.bytes, access, kind) {
        Ok(base) => {
            process.pools.get(number)?.imports.insert(blob.chunk, base);
            out.set(base)
        }
        Err(code) => {
            process.unhold(blob.chunk);
            Err(code)
        }
    }
}

/// `cuMemAllocAsync`.
pub(crate) fn alloc_async(out: Out<u64>, bytes: usize, stream: Handle<CUstream_st>) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let stream = process.stream(stream.id())?;
    let device = process.streams.live.get(&stream).map_or(0, |stream| stream.device);
    let pool = process.pools.current[device];
    let base = process.alloc_from(pool, bytes, stream)?;
    out.set(base)
}

/// `cuMemAllocFromPoolAsync`.
pub(crate) fn alloc_from_pool_async(out: Out<u64>, bytes: usize, pool: Handle<CUmemPoolHandle_st>, stream: Handle<CUstream_st>) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let stream = process.stream(stream.id())?;
    let base = process.alloc_from(pool.id(), bytes, stream)?;
    out.set(base)
}

/// `cuMemFreeAsync`.
pub(crate) fn free_async(address: u64, stream: Handle<CUstream_st>) -> Answer {
    let mut process = process::lock()?;
    let stream = process.stream(stream.id())?;
    match process.space.mapping_at(address) {
        Some((base, mapping))
            if base == address && matches!(mapping.kind, Kind::Plain { .. } | Kind::Pooled { .. } | Kind::PoolImport { .. }) =>
        {
            Process::submit(process, stream, Work::Free(base))
        }
        _ => Err(INVALID),
    }
}
