//! What cuda_ipc calls, in its order.

use core::ffi::CStr;

use cuda_driver_sys::*;

use super::Uct;

/// Length of a fabric handle, a pool's export data and a key of ours, in bytes.
pub const KEY_LEN: usize = 64;
const FABRIC: u64 = 8;
/// Bytes from the handle to the uuid in a key of UCX 1.22.
const UUID_AFTER_HANDLE: u64 = 168;
/// Stands for a function where cuda_ipc does not even ask for a key: memory without a fabric handle, as all of it is without the lane.
pub const NO_FABRIC: &str = "no fabric handle";

/// Where and by what a sequence was ended: the driver function and its answer.
pub type Stopped = (&'static str, CUresult);

/// What an exporting UCX puts into its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The fabric handle, or that of the pool.
    pub handle: [u8; KEY_LEN],
    /// Export data of a pool's pointer.
    pub pointer: [u8; KEY_LEN],
    /// First address of what UCX takes for the allocation.
    pub base: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its buffer id.
    pub buffer_id: u64,
}

/// A mapping that an importing UCX has made.
#[derive(Clone, Copy, Debug)]
pub struct Imported {
    /// Its address.
    pub address: u64,
    len: u64,
}

/// A pool that an importing UCX has opened; it keeps it for good.
#[derive(Clone, Copy, Debug)]
pub struct ImportedPool {
    pool: u64,
}

fn at<T>(value: &mut T) -> u64 {
    (&raw mut *value).expose_provenance() as u64
}

impl Uct {
    fn make(self, symbol: &'static CStr, arguments: &[u64]) -> Result<(), Stopped> {
        match self.call(symbol, arguments) {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => {
                let name = symbol.to_str().unwrap_or("?");
                Err((name.strip_suffix("_v2").unwrap_or(name), code))
            }
        }
    }

    fn facts(self, address: u64) -> Result<(Exported, u64), Stopped> {
        let (mut base, mut len, mut buffer_id): (u64, usize, u64) = (0, 0, 0);
        self.make(c"cuMemGetAddressRange_v2", &[at(&mut base), at(&mut len), address])?;
        let buffer_attribute = u64::from(CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID.0);
        self.make(c"cuPointerGetAttribute", &[at(&mut buffer_id), buffer_attribute, address])?;
        let (mut legacy, mut allowed, mut pool): (i32, u64, u64) = (0, 0, 0);
        let mut attributes = [
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        ];
        let mut values = [at(&mut legacy), at(&mut allowed), at(&mut pool)];
        self.make(c"cuPointerGetAttributes", &[3, at(&mut attributes), at(&mut values), address])?;
        if allowed & FABRIC == 0 {
            return Err((NO_FABRIC, CUresult::CUDA_SUCCESS));
        }
        let exported = Exported { handle: [0; KEY_LEN], pointer: [0; KEY_LEN], base, len: len as u64, buffer_id };
        Ok((exported, pool))
    }

    /// Exports what is at `address`, memory of `cuMemCreate`.
    pub fn export(self, address: u64) -> Result<Exported, Stopped> {
        let (mut exported, _) = self.facts(address)?;
        let mut handle: u64 = 0;
        self.make(c"cuMemRetainAllocationHandle", &[at(&mut handle), address])?;
        let made = self.make(c"cuMemExportToShareableHandle", &[at(&mut exported.handle), handle, FABRIC, 0]);
        self.release(handle);
        made?;
        self.pack(&exported)?;
        Ok(exported)
    }

    /// Exports what is at `address`, memory of a pool.
    pub fn export_pooled(self, address: u64) -> Result<Exported, Stopped> {
        let (mut exported, pool) = self.facts(address)?;
        self.make(c"cuMemPoolExportToShareableHandle", &[at(&mut exported.handle), pool, FABRIC, 0])?;
        self.make(c"cuMemPoolExportPointer", &[at(&mut exported.pointer), exported.base])?;
        self.pack(&exported)?;
        Ok(exported)
    }

    /// cuda_ipc does not look at the answer. A second try keeps what the driver refused from looking like something that the preload library has left.
    fn release(self, handle: u64) {
        let _ = self.make(c"cuMemRelease", &[handle]).or_else(|_| self.make(c"cuMemRelease", &[handle]));
    }

    /// Packs a key: the GPU's uuid is asked for with the handle at its place in front of it.
    fn pack(self, exported: &Exported) -> Result<(), Stopped> {
        let mut key = [0_u8; 192];
        key[8..8 + KEY_LEN].copy_from_slice(&exported.handle);
        self.make(c"cuDeviceGetUuid", &[at(&mut key) + 8 + UUID_AFTER_HANDLE, 0])
    }

    /// Imports and maps what a fabric handle names, `len` bytes.
    pub fn import(self, key: &[u8; KEY_LEN], len: u64) -> Result<Imported, Stopped> {
        let mut bytes = *key;
        let (mut handle, mut address): (u64, u64) = (0, 0);
        self.make(c"cuMemImportFromShareableHandle", &[at(&mut handle), at(&mut bytes), FABRIC])?;
        let mapped = self.make(c"cuMemAddressReserve", &[at(&mut address), len, 0, 0, 0]).and_then(|()| {
            let mapped = self.make(c"cuMemMap", &[address, len, 0, handle, 0]).and_then(|()| {
                let set = self.set_access(address, len);
                if set.is_err() {
                    let _ = self.make(c"cuMemUnmap", &[address, len]);
                }
                set
            });
            if mapped.is_err() {
                let _ = self.make(c"cuMemAddressFree", &[address, len]);
            }
            mapped
        });
        self.release(handle);
        mapped.map(|()| Imported { address, len })
    }

    fn set_access(self, address: u64, len: u64) -> Result<(), Stopped> {
        let mut access = access();
        self.make(c"cuMemSetAccess", &[address, len, at(&mut access), 1])
    }

    /// Unmaps it.
    pub fn close(self, imported: Imported) -> Result<(), Stopped> {
        self.make(c"cuMemUnmap", &[imported.address, imported.len])?;
        self.make(c"cuMemAddressFree", &[imported.address, imported.len])
    }

    /// Imports a pool, with its first pointer as a trial, as cuda_ipc does it for each new pool.
    pub fn import_pool(self, key: &[u8; KEY_LEN], pointer: &[u8; KEY_LEN]) -> Result<ImportedPool, Stopped> {
        let (mut bytes, mut pool, mut first) = (*key, 0_u64, 0_u64);
        self.make(c"cuMemPoolImportFromShareableHandle", &[at(&mut pool), at(&mut bytes), FABRIC, 0])?;
        let mut data = *pointer;
        let opened = self.make(c"cuMemPoolImportPointer", &[at(&mut first), pool, at(&mut data)]).and_then(|()| {
            let mut access = access();
            self.make(c"cuMemPoolSetAccess", &[pool, at(&mut access), 1])
        });
        if opened.is_err() {
            let _ = self.make(c"cuMemPoolDestroy", &[pool]);
        }
        opened.map(|()| ImportedPool { pool })
    }

    /// Imports an allocation of an imported pool: its address.
    pub fn import_pointer(self, pool: ImportedPool, pointer: &[u8; KEY_LEN]) -> Result<u64, Stopped> {
        let (mut data, mut address) = (*pointer, 0_u64);
        self.make(c"cuMemPoolImportPointer", &[at(&mut address), pool.pool, at(&mut data)])?;
        Ok(address)
    }

    /// Gives it back.
    pub fn free_pointer(self, address: u64) -> Result<(), Stopped> {
        self.make(c"cuMemFree_v2", &[address])
    }

    /// Submits a copy to the null stream.
    pub fn copy(self, to: u64, from: u64, len: u64) -> Result<(), Stopped> {
        self.make(c"cuMemcpyDtoDAsync_v2", &[to, from, len, 0])
    }
}

fn access() -> CUmemAccessDesc {
    // SAFETY: plain C data, for which zeros are valid.
    let mut access: CUmemAccessDesc = unsafe { core::mem::zeroed() };
    access.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access
}
