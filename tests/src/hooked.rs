//! A driver whose calls are points: the loaded driver's table, with the functions that this project calls led by way of [`crate::points`].
//!
//! # Safety
//! Each function here has the signature of the table's field it takes the place of, and passes its arguments on to the function that was there.

#![allow(non_snake_case, reason = "the driver's names")]

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cuda_driver_sys::*;

use crate::points;

static LOADED: OnceLock<Driver> = OnceLock::new();

/// The loaded driver, hooked. Panics without a driver.
pub fn driver() -> Driver {
    hook(*LOADED.get_or_init(|| Driver::load().expect("a CUDA driver")))
}

macro_rules! hooked {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        mod functions {
            use super::*;
            $(
                pub(super) unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
                    if let Some(code) = points::at_driver_call(stringify!($name), true) {
                        return CUresult(code);
                    }
                    let real = LOADED.get().expect("only reached by the hooked table").$name;
                    // SAFETY: see the module's chapter.
                    let result = unsafe { real($($argument),*) };
                    points::at_driver_call(stringify!($name), false);
                    result
                }
            )*
        }

        fn hook(loaded: Driver) -> Driver {
            Driver { $($name: functions::$name,)* cuDeviceGetUuid_v2: None, ..loaded }
        }
    };
}

hooked! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease(device: CUdevice);
    cuCtxPushCurrent(context: CUcontext);
    cuCtxPopCurrent(context: *mut CUcontext);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemAddressReserve(address: *mut CUdeviceptr, size: usize, alignment: usize, wish: CUdeviceptr, flags: u64);
    cuMemAddressFree(address: CUdeviceptr, size: usize);
    cuMemMap(address: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
    cuMemUnmap(address: CUdeviceptr, size: usize);
    cuMemSetAccess(address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
    cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: CUmemAllocationHandleType);
    cuMemGetAddressRange(base: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr);
    cuMemFree(address: CUdeviceptr);
    cuIpcGetMemHandle(handle: *mut CUipcMemHandle_v1, address: CUdeviceptr);
    cuIpcOpenMemHandle(address: *mut CUdeviceptr, handle: CUipcMemHandle_v1, flags: c_uint);
    cuIpcCloseMemHandle(address: CUdeviceptr);
    cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    cuMemPoolDestroy(pool: CUmemoryPool);
    cuMemPoolSetAccess(pool: CUmemoryPool, access: *const CUmemAccessDesc_v1, count: usize);
    cuMemPoolExportToShareableHandle(shareable: *mut c_void, pool: CUmemoryPool, kind: CUmemAllocationHandleType, flags: u64);
    cuMemPoolImportFromShareableHandle(pool: *mut CUmemoryPool, shareable: *mut c_void, kind: CUmemAllocationHandleType, flags: u64);
    cuMemPoolExportPointer(data: *mut CUmemPoolPtrExportData_v1, address: CUdeviceptr);
    cuMemPoolImportPointer(address: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut CUmemPoolPtrExportData_v1);
    cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
    cuPointerGetAttributes(count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void, address: CUdeviceptr);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
}
