//! Memory pools that are shared by POSIX fd, and pointers of them.
//!
//! # Safety
//! As in `driver.rs`: pointers are to live locals. A pool is a number to this process and a pointer to the driver: it is used only while memory of it is known
//! to live (exporter) or until it is destroyed here (importer), which the callers see to.

#![allow(unsafe_code)]

use core::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use cuda_driver_sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemPoolPtrExportData_v1, CUmemoryPool,
    CUresult, device_location,
};

use super::{Cuda, DriverError, released};

const POSIX_FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

/// A memory pool of this process, as the driver numbers it. Plain data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Pool(pub(super) usize);

impl Pool {
    /// The driver's number of it, which is `CUmemoryPool` as an integer. One that is destroyed leaves it to another.
    pub const fn number(self) -> u64 {
        self.0 as u64
    }

    const fn raw(self) -> CUmemoryPool {
        self.0 as CUmemoryPool
    }
}

impl Cuda {
    /// The default pool of a device.
    pub(crate) fn default_pool(&self, device: CUdevice) -> Result<Pool, DriverError> {
        let mut pool: CUmemoryPool = core::ptr::null_mut();
        call!(self, cuDeviceGetDefaultMemPool(&raw mut pool, device))?;
        Ok(Pool(pool as usize))
    }

    /// A new fd that stands for the pool. Only of a pool that was made with the POSIX_FD type: after another's refusal some drivers crash when it is
    /// destroyed (B37). To be registered at once: a forked child keeps what is not.
    pub(crate) fn export_pool(&self, pool: Pool) -> Result<OwnedFd, DriverError> {
        let mut fd: c_int = -1;
        call!(self, cuMemPoolExportToShareableHandle((&raw mut fd).cast(), pool.raw(), POSIX_FD, 0))?;
        // SAFETY: the driver has just opened this fd for the caller (cuMemPoolExportToShareableHandle); nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Tries whether a fabric handle of the pool can be exported. Only of a pool that was made with the FABRIC type.
    pub(crate) fn try_pool_fabric(&self, pool: Pool) -> Result<(), DriverError> {
        let mut bytes = [0_u8; 64];
        call!(self, cuMemPoolExportToShareableHandle((&raw mut bytes).cast(), pool.raw(), FABRIC, 0))
    }

    /// The export data of the pool's allocation that begins at `base`.
    pub(crate) fn export_pool_pointer(&self, base: u64) -> Result<[u8; 64], DriverError> {
        let mut data = CUmemPoolPtrExportData_v1 { reserved: [0; 64] };
        call!(self, cuMemPoolExportPointer(&raw mut data, base))?;
        Ok(data.reserved)
    }

    /// The pool that `fd` stands for. The fd stays the caller's.
    pub(crate) fn import_pool(&self, fd: impl AsFd) -> Result<Pool, DriverError> {
        let mut pool: CUmemoryPool = core::ptr::null_mut();
        let number = fd.as_fd().as_raw_fd();
        // The number travels in the pointer argument (cuMemPoolImportFromShareableHandle).
        call!(self, cuMemPoolImportFromShareableHandle(&raw mut pool, number as usize as *mut c_void, POSIX_FD, 0))?;
        Ok(Pool(pool as usize))
    }

    /// The address here of a pointer of an imported pool. Importing it twice gives the same address, and the first free unmaps both: see
    /// `importer/pools.rs`.
    pub(crate) fn import_pool_pointer(&self, pool: Pool, data: &[u8; 64]) -> Result<u64, DriverError> {
        let mut address: CUdeviceptr = 0;
        let mut data = CUmemPoolPtrExportData_v1 { reserved: *data };
        call!(self, cuMemPoolImportPointer(&raw mut address, pool.raw(), &raw mut data))?;
        Ok(address)
    }

    /// Lets a device access all memory of the pool, for reading and writing. A pool knows no other access than this and none.
    pub(crate) fn open_pool_to(&self, pool: Pool, device: CUdevice) -> Result<(), DriverError> {
        self.set_pool_access(pool, device, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    }

    /// Takes that back.
    pub(crate) fn close_pool_to(&self, pool: Pool, device: CUdevice) -> Result<(), DriverError> {
        self.set_pool_access(pool, device, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE)
    }

    fn set_pool_access(&self, pool: Pool, device: CUdevice, flags: CUmemAccess_flags) -> Result<(), DriverError> {
        let access = CUmemAccessDesc { location: device_location(device), flags };
        call!(self, cuMemPoolSetAccess(pool.raw(), &raw const access, 1))
    }

    /// Whether `device` can access memory of `peer`. Source: cuDeviceCanAccessPeer.
    pub(crate) fn can_access_peer(&self, device: CUdevice, peer: CUdevice) -> Result<bool, DriverError> {
        let mut can: c_int = 0;
        call!(self, cuDeviceCanAccessPeer(&raw mut can, device, peer))?;
        Ok(can != 0)
    }

    /// Unmaps an imported pointer of a pool on `home`: work that uses it must be complete. Tried twice: what stays pins the exporter's memory. Source: cuMemFree.
    pub(crate) fn free_pool_pointer(&self, home: CUdevice, address: u64) -> Result<(), DriverError> {
        let free = || self.with_context_if_needed(home, || call!(self, cuMemFree(address)));
        released(free().or_else(|_| free()))
    }

    /// Gives an imported pool back, after its last pointer. Tried twice, likewise.
    pub(crate) fn destroy_pool(&self, home: CUdevice, pool: Pool) -> Result<(), DriverError> {
        let destroy = || self.with_context_if_needed(home, || call!(self, cuMemPoolDestroy(pool.raw())));
        released(destroy().or_else(|_| destroy()))
    }
}
