//! The table of driver entry points: one row a function, `required` or `optional`.
//!
//! A row names the base name and version that `cuGetProcAddress_v2` wants, and the suffixed symbol for `dlsym`. Rows that every driver since
//! CUDA 11.2 has are required: a driver without one is refused by name. Later functions are optional; their absence is `None` and doubles as a
//! capability bit. How a row is looked up is [`crate::load`]'s business.

use crate::bindings::*;
use crate::compat::PFN_cuMemcpyBatchAsync_v13000;
use crate::load::{LoadError, Lookup};

/// The plain function pointer inside a nullable `PFN_…` typedef.
pub trait Nullable {
    /// The function pointer type without the `Option`.
    type Fn;
    /// Turns a symbol address into the function pointer; `None` for null.
    ///
    /// # Safety
    /// `address` is null or the address of a function of exactly this C signature that lives as long as the process.
    unsafe fn from_address(address: *mut core::ffi::c_void) -> Option<Self::Fn>;
}

impl<F: Copy> Nullable for Option<F> {
    type Fn = F;

    unsafe fn from_address(address: *mut core::ffi::c_void) -> Option<F> {
        const { assert!(size_of::<Option<F>>() == size_of::<*mut core::ffi::c_void>()) };
        // SAFETY: the sizes are equal (checked above) and an `Option` of a function pointer is null-represented, so every address, null
        // included, is a valid value. The caller vouches for the signature; a wrong one would be called with the wrong ABI.
        unsafe { core::mem::transmute_copy(&address) }
    }
}

macro_rules! field_type {
    (required $pfn:ty) => { <$pfn as Nullable>::Fn };
    (optional $pfn:ty) => { Option<<$pfn as Nullable>::Fn> };
}

macro_rules! resolve {
    (required $pfn:ty, $lookup:ident, $row:expr) => {
        match $lookup.find::<$pfn>(&$row) {
            Some(function) => function,
            None => return Err(LoadError::MissingEntryPoint($row.symbol)),
        }
    };
    (optional $pfn:ty, $lookup:ident, $row:expr) => {
        $lookup.find::<$pfn>(&$row)
    };
}

macro_rules! entry_points {
    ($($need:ident $name:ident: $pfn:ty = ($base:literal, $version:literal, $symbol:literal);)*) => {
        /// The resolved entry points of one loaded driver.
        ///
        /// Field names are the CUDA driver API's. Calling one is unsafe as the C function is; the table itself is plain data, `Copy`, and may be
        /// used from any thread. The library is never unloaded, so the pointers stay valid for the life of the process.
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        pub struct Driver {
            $(#[doc = concat!("`", $symbol, "` (CUDA driver API)")] pub $name: field_type!($need $pfn),)*
        }

        impl Driver {
            pub(crate) fn resolve(lookup: &Lookup) -> Result<Self, LoadError> {
                Ok(Self { $($name: resolve!($need $pfn, lookup, EntryPoint { base: $base, version: $version, symbol: $symbol, required: entry_points!(@required $need) }),)* })
            }
        }

        /// Every row of the table, in the order of the fields of [`Driver`].
        pub const ENTRY_POINTS: &[EntryPoint] = &[$(EntryPoint { base: $base, version: $version, symbol: $symbol, required: entry_points!(@required $need) },)*];
    };
    (@required required) => { true };
    (@required optional) => { false };
}

/// One row: how a driver function is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// Base name for `cuGetProcAddress_v2`, without a version suffix.
    pub base: &'static str,
    /// Version number for `cuGetProcAddress_v2`: the suffix of the `PFN_` typedef.
    pub version: i32,
    /// Exported symbol for `dlsym`, with its `_v2` suffix where it has one.
    pub symbol: &'static str,
    /// Whether a driver without it is refused.
    pub required: bool,
}

entry_points! {
    // loader, errors, start
    required cuInit: PFN_cuInit_v2000 = ("cuInit", 2000, "cuInit");
    required cuDriverGetVersion: PFN_cuDriverGetVersion_v2020 = ("cuDriverGetVersion", 2020, "cuDriverGetVersion");
    required cuGetErrorName: PFN_cuGetErrorName_v6000 = ("cuGetErrorName", 6000, "cuGetErrorName");
    required cuGetErrorString: PFN_cuGetErrorString_v6000 = ("cuGetErrorString", 6000, "cuGetErrorString");

    // devices: identity by UUID, never by ordinal
    required cuDeviceGet: PFN_cuDeviceGet_v2000 = ("cuDeviceGet", 2000, "cuDeviceGet");
    required cuDeviceGetCount: PFN_cuDeviceGetCount_v2000 = ("cuDeviceGetCount", 2000, "cuDeviceGetCount");
    required cuDeviceGetName: PFN_cuDeviceGetName_v2000 = ("cuDeviceGetName", 2000, "cuDeviceGetName");
    required cuDeviceGetUuid: PFN_cuDeviceGetUuid_v9020 = ("cuDeviceGetUuid", 9020, "cuDeviceGetUuid");
    optional cuDeviceGetUuid_v2: PFN_cuDeviceGetUuid_v11040 = ("cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2");
    required cuDeviceGetAttribute: PFN_cuDeviceGetAttribute_v2000 = ("cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute");
    required cuDeviceTotalMem: PFN_cuDeviceTotalMem_v3020 = ("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2");
    required cuDeviceCanAccessPeer: PFN_cuDeviceCanAccessPeer_v4000 = ("cuDeviceCanAccessPeer", 4000, "cuDeviceCanAccessPeer");
    required cuDeviceGetPCIBusId: PFN_cuDeviceGetPCIBusId_v4010 = ("cuDeviceGetPCIBusId", 4010, "cuDeviceGetPCIBusId");

    // contexts
    required cuDevicePrimaryCtxRetain: PFN_cuDevicePrimaryCtxRetain_v7000 = ("cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain");
    required cuDevicePrimaryCtxRelease: PFN_cuDevicePrimaryCtxRelease_v11000 = ("cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2");
    required cuDevicePrimaryCtxGetState: PFN_cuDevicePrimaryCtxGetState_v7000 = ("cuDevicePrimaryCtxGetState", 7000, "cuDevicePrimaryCtxGetState");
    required cuCtxCreate: PFN_cuCtxCreate_v3020 = ("cuCtxCreate", 3020, "cuCtxCreate_v2");
    required cuCtxDestroy: PFN_cuCtxDestroy_v4000 = ("cuCtxDestroy", 4000, "cuCtxDestroy_v2");
    required cuCtxPushCurrent: PFN_cuCtxPushCurrent_v4000 = ("cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2");
    required cuCtxPopCurrent: PFN_cuCtxPopCurrent_v4000 = ("cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2");
    required cuCtxSetCurrent: PFN_cuCtxSetCurrent_v4000 = ("cuCtxSetCurrent", 4000, "cuCtxSetCurrent");
    required cuCtxGetCurrent: PFN_cuCtxGetCurrent_v4000 = ("cuCtxGetCurrent", 4000, "cuCtxGetCurrent");
    required cuCtxGetDevice: PFN_cuCtxGetDevice_v2000 = ("cuCtxGetDevice", 2000, "cuCtxGetDevice");
    optional cuCtxGetId: PFN_cuCtxGetId_v12000 = ("cuCtxGetId", 12000, "cuCtxGetId");
    required cuCtxSynchronize: PFN_cuCtxSynchronize_v2000 = ("cuCtxSynchronize", 2000, "cuCtxSynchronize");
    required cuCtxEnablePeerAccess: PFN_cuCtxEnablePeerAccess_v4000 = ("cuCtxEnablePeerAccess", 4000, "cuCtxEnablePeerAccess");

    // virtual memory management
    required cuMemGetAllocationGranularity: PFN_cuMemGetAllocationGranularity_v10020 = ("cuMemGetAllocationGranularity", 10020, "cuMemGetAllocationGranularity");
    required cuMemCreate: PFN_cuMemCreate_v10020 = ("cuMemCreate", 10020, "cuMemCreate");
    required cuMemRelease: PFN_cuMemRelease_v10020 = ("cuMemRelease", 10020, "cuMemRelease");
    required cuMemAddressReserve: PFN_cuMemAddressReserve_v10020 = ("cuMemAddressReserve", 10020, "cuMemAddressReserve");
    required cuMemAddressFree: PFN_cuMemAddressFree_v10020 = ("cuMemAddressFree", 10020, "cuMemAddressFree");
    required cuMemMap: PFN_cuMemMap_v10020 = ("cuMemMap", 10020, "cuMemMap");
    required cuMemUnmap: PFN_cuMemUnmap_v10020 = ("cuMemUnmap", 10020, "cuMemUnmap");
    required cuMemSetAccess: PFN_cuMemSetAccess_v10020 = ("cuMemSetAccess", 10020, "cuMemSetAccess");
    required cuMemGetAccess: PFN_cuMemGetAccess_v10020 = ("cuMemGetAccess", 10020, "cuMemGetAccess");
    required cuMemRetainAllocationHandle: PFN_cuMemRetainAllocationHandle_v11000 = ("cuMemRetainAllocationHandle", 11000, "cuMemRetainAllocationHandle");
    required cuMemGetAllocationPropertiesFromHandle: PFN_cuMemGetAllocationPropertiesFromHandle_v10020 = ("cuMemGetAllocationPropertiesFromHandle", 10020, "cuMemGetAllocationPropertiesFromHandle");
    required cuMemExportToShareableHandle: PFN_cuMemExportToShareableHandle_v10020 = ("cuMemExportToShareableHandle", 10020, "cuMemExportToShareableHandle");
    required cuMemImportFromShareableHandle: PFN_cuMemImportFromShareableHandle_v10020 = ("cuMemImportFromShareableHandle", 10020, "cuMemImportFromShareableHandle");

    // classification
    required cuMemGetAddressRange: PFN_cuMemGetAddressRange_v3020 = ("cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2");
    required cuPointerGetAttribute: PFN_cuPointerGetAttribute_v4000 = ("cuPointerGetAttribute", 4000, "cuPointerGetAttribute");
    required cuPointerGetAttributes: PFN_cuPointerGetAttributes_v7000 = ("cuPointerGetAttributes", 7000, "cuPointerGetAttributes");
    required cuPointerSetAttribute: PFN_cuPointerSetAttribute_v6000 = ("cuPointerSetAttribute", 6000, "cuPointerSetAttribute");
    required cuMemRangeGetAttribute: PFN_cuMemRangeGetAttribute_v8000 = ("cuMemRangeGetAttribute", 8000, "cuMemRangeGetAttribute");

    // plain, managed and host memory; legacy IPC
    required cuMemGetInfo: PFN_cuMemGetInfo_v3020 = ("cuMemGetInfo", 3020, "cuMemGetInfo_v2");
    required cuMemAlloc: PFN_cuMemAlloc_v3020 = ("cuMemAlloc", 3020, "cuMemAlloc_v2");
    required cuMemFree: PFN_cuMemFree_v3020 = ("cuMemFree", 3020, "cuMemFree_v2");
    required cuMemAllocManaged: PFN_cuMemAllocManaged_v6000 = ("cuMemAllocManaged", 6000, "cuMemAllocManaged");
    required cuMemHostAlloc: PFN_cuMemHostAlloc_v2020 = ("cuMemHostAlloc", 2020, "cuMemHostAlloc");
    required cuMemFreeHost: PFN_cuMemFreeHost_v2000 = ("cuMemFreeHost", 2000, "cuMemFreeHost");
    required cuMemHostRegister: PFN_cuMemHostRegister_v6050 = ("cuMemHostRegister", 6050, "cuMemHostRegister_v2");
    required cuMemHostUnregister: PFN_cuMemHostUnregister_v4000 = ("cuMemHostUnregister", 4000, "cuMemHostUnregister");
    required cuIpcGetMemHandle: PFN_cuIpcGetMemHandle_v4010 = ("cuIpcGetMemHandle", 4010, "cuIpcGetMemHandle");
    required cuIpcOpenMemHandle: PFN_cuIpcOpenMemHandle_v11000 = ("cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2");
    required cuIpcCloseMemHandle: PFN_cuIpcCloseMemHandle_v4010 = ("cuIpcCloseMemHandle", 4010, "cuIpcCloseMemHandle");

    // pools
    required cuDeviceGetDefaultMemPool: PFN_cuDeviceGetDefaultMemPool_v11020 = ("cuDeviceGetDefaultMemPool", 11020, "cuDeviceGetDefaultMemPool");
    required cuDeviceGetMemPool: PFN_cuDeviceGetMemPool_v11020 = ("cuDeviceGetMemPool", 11020, "cuDeviceGetMemPool");
    required cuMemPoolCreate: PFN_cuMemPoolCreate_v11020 = ("cuMemPoolCreate", 11020, "cuMemPoolCreate");
    required cuMemPoolDestroy: PFN_cuMemPoolDestroy_v11020 = ("cuMemPoolDestroy", 11020, "cuMemPoolDestroy");
    required cuMemPoolSetAttribute: PFN_cuMemPoolSetAttribute_v11020 = ("cuMemPoolSetAttribute", 11020, "cuMemPoolSetAttribute");
    required cuMemPoolGetAttribute: PFN_cuMemPoolGetAttribute_v11020 = ("cuMemPoolGetAttribute", 11020, "cuMemPoolGetAttribute");
    required cuMemPoolTrimTo: PFN_cuMemPoolTrimTo_v11020 = ("cuMemPoolTrimTo", 11020, "cuMemPoolTrimTo");
    required cuMemPoolSetAccess: PFN_cuMemPoolSetAccess_v11020 = ("cuMemPoolSetAccess", 11020, "cuMemPoolSetAccess");
    required cuMemPoolGetAccess: PFN_cuMemPoolGetAccess_v11020 = ("cuMemPoolGetAccess", 11020, "cuMemPoolGetAccess");
    required cuMemPoolExportToShareableHandle: PFN_cuMemPoolExportToShareableHandle_v11020 = ("cuMemPoolExportToShareableHandle", 11020, "cuMemPoolExportToShareableHandle");
    required cuMemPoolImportFromShareableHandle: PFN_cuMemPoolImportFromShareableHandle_v11020 = ("cuMemPoolImportFromShareableHandle", 11020, "cuMemPoolImportFromShareableHandle");
    required cuMemPoolExportPointer: PFN_cuMemPoolExportPointer_v11020 = ("cuMemPoolExportPointer", 11020, "cuMemPoolExportPointer");
    required cuMemPoolImportPointer: PFN_cuMemPoolImportPointer_v11020 = ("cuMemPoolImportPointer", 11020, "cuMemPoolImportPointer");
    required cuMemAllocAsync: PFN_cuMemAllocAsync_v11020 = ("cuMemAllocAsync", 11020, "cuMemAllocAsync");
    required cuMemAllocFromPoolAsync: PFN_cuMemAllocFromPoolAsync_v11020 = ("cuMemAllocFromPoolAsync", 11020, "cuMemAllocFromPoolAsync");
    required cuMemFreeAsync: PFN_cuMemFreeAsync_v11020 = ("cuMemFreeAsync", 11020, "cuMemFreeAsync");

    // copies
    required cuMemcpy: PFN_cuMemcpy_v4000 = ("cuMemcpy", 4000, "cuMemcpy");
    required cuMemcpyAsync: PFN_cuMemcpyAsync_v4000 = ("cuMemcpyAsync", 4000, "cuMemcpyAsync");
    required cuMemcpyHtoD: PFN_cuMemcpyHtoD_v3020 = ("cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2");
    required cuMemcpyDtoH: PFN_cuMemcpyDtoH_v3020 = ("cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2");
    required cuMemcpyDtoD: PFN_cuMemcpyDtoD_v3020 = ("cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2");
    required cuMemcpyHtoDAsync: PFN_cuMemcpyHtoDAsync_v3020 = ("cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2");
    required cuMemcpyDtoHAsync: PFN_cuMemcpyDtoHAsync_v3020 = ("cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2");
    required cuMemcpyDtoDAsync: PFN_cuMemcpyDtoDAsync_v3020 = ("cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2");
    optional cuMemcpyBatchAsync: PFN_cuMemcpyBatchAsync_v12080 = ("cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync");
    optional cuMemcpyBatchAsync_v13: PFN_cuMemcpyBatchAsync_v13000 = ("cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2");
    required cuMemsetD8: PFN_cuMemsetD8_v3020 = ("cuMemsetD8", 3020, "cuMemsetD8_v2");
    required cuMemsetD32: PFN_cuMemsetD32_v3020 = ("cuMemsetD32", 3020, "cuMemsetD32_v2");
    required cuMemsetD8Async: PFN_cuMemsetD8Async_v3020 = ("cuMemsetD8Async", 3020, "cuMemsetD8Async");

    // streams, events, capture
    required cuStreamCreate: PFN_cuStreamCreate_v2000 = ("cuStreamCreate", 2000, "cuStreamCreate");
    required cuStreamDestroy: PFN_cuStreamDestroy_v4000 = ("cuStreamDestroy", 4000, "cuStreamDestroy_v2");
    required cuStreamSynchronize: PFN_cuStreamSynchronize_v2000 = ("cuStreamSynchronize", 2000, "cuStreamSynchronize");
    required cuStreamQuery: PFN_cuStreamQuery_v2000 = ("cuStreamQuery", 2000, "cuStreamQuery");
    required cuStreamWaitEvent: PFN_cuStreamWaitEvent_v3020 = ("cuStreamWaitEvent", 3020, "cuStreamWaitEvent");
    required cuStreamAddCallback: PFN_cuStreamAddCallback_v5000 = ("cuStreamAddCallback", 5000, "cuStreamAddCallback");
    required cuLaunchHostFunc: PFN_cuLaunchHostFunc_v10000 = ("cuLaunchHostFunc", 10000, "cuLaunchHostFunc");
    required cuStreamBeginCapture: PFN_cuStreamBeginCapture_v10010 = ("cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2");
    required cuStreamEndCapture: PFN_cuStreamEndCapture_v10000 = ("cuStreamEndCapture", 10000, "cuStreamEndCapture");
    required cuStreamIsCapturing: PFN_cuStreamIsCapturing_v10000 = ("cuStreamIsCapturing", 10000, "cuStreamIsCapturing");
    required cuThreadExchangeStreamCaptureMode: PFN_cuThreadExchangeStreamCaptureMode_v10010 = ("cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode");
    required cuGraphDestroy: PFN_cuGraphDestroy_v10000 = ("cuGraphDestroy", 10000, "cuGraphDestroy");
    required cuEventCreate: PFN_cuEventCreate_v2000 = ("cuEventCreate", 2000, "cuEventCreate");
    required cuEventRecord: PFN_cuEventRecord_v2000 = ("cuEventRecord", 2000, "cuEventRecord");
    required cuEventQuery: PFN_cuEventQuery_v2000 = ("cuEventQuery", 2000, "cuEventQuery");
    required cuEventSynchronize: PFN_cuEventSynchronize_v2000 = ("cuEventSynchronize", 2000, "cuEventSynchronize");
    required cuEventDestroy: PFN_cuEventDestroy_v4000 = ("cuEventDestroy", 4000, "cuEventDestroy_v2");
}
