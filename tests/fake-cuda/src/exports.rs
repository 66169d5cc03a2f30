//! The exported functions: one row each, and everything that follows from the row.
//!
//! A row gives the phase in which the call is allowed, the exported symbol, NVIDIA's typedef where the bindings have it (the compiler then checks the
//! signature against it), base name and version for `cuGetProcAddress`, and the implementation with its arguments. The macro makes the `extern "C"`
//! function, which goes through [`call::enter`] and nothing else. A table: longer than a file should be.
//!
//! On x86-64 the exported symbol is a jump behind the usual first instructions of a function. UCX copies those elsewhere to put a hook in their place,
//! knows only some instructions, and works without its registration cache where it meets others, as it would in an optimised build of plain Rust.
//!
//! # Safety
//! The entry points take C callers' pointers on trust (`abi.rs`). Rows without a typedef follow the signature in the CUDA driver API manual.

use core::ffi::{c_char, c_int, c_void};

use cuda_driver_sys::*;

use crate::abi::{Answer, FromC, Handle, INVALID, In, List, Out};
use crate::call::{self, Phase};
use crate::{capture, context, copy, device, event, legacy, memory, names, pointer, pool, process, stream, vmm};

/// What a row says about a function.
pub(crate) struct CallInfo {
    pub(crate) symbol: &'static str,
    pub(crate) base: &'static str,
    pub(crate) version: i32,
    address: Address,
}

impl CallInfo {
    /// Whether rules and counters mean this function by the name.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.symbol == name || self.base == name
    }
}

struct Address(*const ());

// SAFETY: the address of a function; nobody writes through it.
unsafe impl Sync for Address {}

macro_rules! driver_calls {
    ($($phase:ident $symbol:ident $([$pfn:ident])? = ($base:literal, $version:literal) => $module:ident::$body:ident($($arg:ident: $ty:ty),*);)*) => {
        /// The functions, for counting and faults.
        #[derive(Clone, Copy)]
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "the names of the C API")]
        #[repr(u16)]
        pub(crate) enum Call { $($symbol),* }

        /// What the rows say, in the order of [`Call`].
        pub(crate) static CALLS: [CallInfo; [$(stringify!($symbol)),*].len()] = [
            $(CallInfo { symbol: stringify!($symbol), base: $base, version: $version, address: Address($symbol as *const ()) }),*
        ];

        $(
            #[allow(non_snake_case, reason = "the names of the C API")]
            mod $symbol {
                use super::*;

                pub(super) unsafe extern "C" fn call($($arg: <$ty as FromC>::C),*) -> CUresult {
                    call::enter(Call::$symbol, Phase::$phase, || {
                        $(
                            // SAFETY: the caller keeps the C contract for this argument (module doc).
                            let $arg = unsafe { <$ty as FromC>::from_c($arg) };
                        )*
                        $module::$body($($arg),*)
                    })
                }
            }

            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol($($arg: <$ty as FromC>::C),*) -> CUresult {
                core::arch::naked_asm!(
                    "push rbp",
                    "mov rbp, rsp",
                    "push r15",
                    "push r14",
                    "push r13",
                    "push r12",
                    "pop r12",
                    "pop r13",
                    "pop r14",
                    "pop r15",
                    "pop rbp",
                    "jmp {call}",
                    call = sym $symbol::call
                )
            }

            #[cfg(not(target_arch = "x86_64"))]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol($($arg: <$ty as FromC>::C),*) -> CUresult {
                // SAFETY: the same function, for the same caller.
                unsafe { $symbol::call($($arg),*) }
            }

            $(const _: $pfn = Some($symbol);)?
        )*
    };
}

driver_calls! {
    // loader, errors, start
    Any cuInit [PFN_cuInit_v2000] = ("cuInit", 2000) => process::init(flags: u32);
    Pure cuDriverGetVersion [PFN_cuDriverGetVersion_v2020] = ("cuDriverGetVersion", 2020) => device::version(out: Out<c_int>);
    Pure cuGetErrorName [PFN_cuGetErrorName_v6000] = ("cuGetErrorName", 6000) => names::name(code: CUresult, out: Out<*const c_char>);
    Pure cuGetErrorString [PFN_cuGetErrorString_v6000] = ("cuGetErrorString", 6000) => names::text(code: CUresult, out: Out<*const c_char>);
    Pure cuGetProcAddress_v2 [PFN_cuGetProcAddress_v12000] = ("cuGetProcAddress", 12000) => lookup::v2(symbol: In<c_char>, out: Out<*mut c_void>, version: c_int, flags: u64, status: Out<CUdriverProcAddressQueryResult>);
    Pure cuGetProcAddress = ("cuGetProcAddress", 11030) => lookup::v1(symbol: In<c_char>, out: Out<*mut c_void>, version: c_int, flags: u64);

    // devices
    Ready cuDeviceGet [PFN_cuDeviceGet_v2000] = ("cuDeviceGet", 2000) => device::get(out: Out<c_int>, ordinal: c_int);
    Ready cuDeviceGetCount [PFN_cuDeviceGetCount_v2000] = ("cuDeviceGetCount", 2000) => device::count(out: Out<c_int>);
    Ready cuDeviceGetName [PFN_cuDeviceGetName_v2000] = ("cuDeviceGetName", 2000) => device::name(out: Out<c_char>, len: c_int, device: c_int);
    Ready cuDeviceGetUuid [PFN_cuDeviceGetUuid_v9020] = ("cuDeviceGetUuid", 9020) => device::uuid(out: Out<CUuuid>, device: c_int);
    Ready cuDeviceGetUuid_v2 [PFN_cuDeviceGetUuid_v11040] = ("cuDeviceGetUuid", 11040) => device::uuid(out: Out<CUuuid>, device: c_int);
    Ready cuDeviceGetAttribute [PFN_cuDeviceGetAttribute_v2000] = ("cuDeviceGetAttribute", 2000) => device::attribute(out: Out<c_int>, attribute: CUdevice_attribute, device: c_int);
    Ready cuDeviceTotalMem_v2 [PFN_cuDeviceTotalMem_v3020] = ("cuDeviceTotalMem", 3020) => device::total_memory(out: Out<usize>, device: c_int);
    Ready cuDeviceCanAccessPeer [PFN_cuDeviceCanAccessPeer_v4000] = ("cuDeviceCanAccessPeer", 4000) => device::can_access_peer(out: Out<c_int>, device: c_int, peer: c_int);
    Ready cuDeviceGetPCIBusId [PFN_cuDeviceGetPCIBusId_v4010] = ("cuDeviceGetPCIBusId", 4010) => device::pci_bus_id(out: Out<c_char>, len: c_int, device: c_int);
    Ready cuDeviceGetByPCIBusId = ("cuDeviceGetByPCIBusId", 4010) => device::by_pci_bus_id(out: Out<c_int>, id: In<c_char>);
    Ready cuDeviceComputeCapability = ("cuDeviceComputeCapability", 2000) => device::compute_capability(major: Out<c_int>, minor: Out<c_int>, device: c_int);

    // contexts
    Ready cuDevicePrimaryCtxRetain [PFN_cuDevicePrimaryCtxRetain_v7000] = ("cuDevicePrimaryCtxRetain", 7000) => context::primary_retain(out: Out<CUcontext>, device: c_int);
    Ready cuDevicePrimaryCtxRelease_v2 [PFN_cuDevicePrimaryCtxRelease_v11000] = ("cuDevicePrimaryCtxRelease", 11000) => context::primary_release(device: c_int);
    Ready cuDevicePrimaryCtxReset_v2 = ("cuDevicePrimaryCtxReset", 11000) => context::primary_reset(device: c_int);
    Ready cuDevicePrimaryCtxGetState [PFN_cuDevicePrimaryCtxGetState_v7000] = ("cuDevicePrimaryCtxGetState", 7000) => context::primary_state(device: c_int, flags: Out<u32>, active: Out<c_int>);
    Ready cuDevicePrimaryCtxSetFlags_v2 = ("cuDevicePrimaryCtxSetFlags", 11000) => context::primary_set_flags(device: c_int, flags: u32);
    Ready cuCtxCreate_v2 [PFN_cuCtxCreate_v3020] = ("cuCtxCreate", 3020) => context::create(out: Out<CUcontext>, flags: u32, device: c_int);
    Ready cuCtxDestroy_v2 [PFN_cuCtxDestroy_v4000] = ("cuCtxDestroy", 4000) => context::destroy(context: Handle<CUctx_st>);
    Ready cuCtxPushCurrent_v2 [PFN_cuCtxPushCurrent_v4000] = ("cuCtxPushCurrent", 4000) => context::push(context: Handle<CUctx_st>);
    Ready cuCtxPopCurrent_v2 [PFN_cuCtxPopCurrent_v4000] = ("cuCtxPopCurrent", 4000) => context::pop(out: Out<CUcontext>);
    Ready cuCtxSetCurrent [PFN_cuCtxSetCurrent_v4000] = ("cuCtxSetCurrent", 4000) => context::set_current(context: Handle<CUctx_st>);
    Ready cuCtxGetCurrent [PFN_cuCtxGetCurrent_v4000] = ("cuCtxGetCurrent", 4000) => context::current(out: Out<CUcontext>);
    Ready cuCtxGetDevice [PFN_cuCtxGetDevice_v2000] = ("cuCtxGetDevice", 2000) => context::device(out: Out<c_int>);
    Ready cuCtxGetId [PFN_cuCtxGetId_v12000] = ("cuCtxGetId", 12000) => context::id(context: Handle<CUctx_st>, out: Out<u64>);
    Ready cuCtxGetFlags = ("cuCtxGetFlags", 7000) => context::flags(out: Out<u32>);
    Ready cuCtxGetApiVersion = ("cuCtxGetApiVersion", 3020) => context::api_version(context: Handle<CUctx_st>, out: Out<u32>);
    Ready cuCtxGetStreamPriorityRange = ("cuCtxGetStreamPriorityRange", 5050) => context::priority_range(least: Out<c_int>, greatest: Out<c_int>);
    Ready cuCtxSynchronize [PFN_cuCtxSynchronize_v2000] = ("cuCtxSynchronize", 2000) => stream::synchronize_context();
    Ready cuCtxEnablePeerAccess [PFN_cuCtxEnablePeerAccess_v4000] = ("cuCtxEnablePeerAccess", 4000) => context::enable_peer(context: Handle<CUctx_st>, flags: u32);

    // virtual memory management
    Ready cuMemGetAllocationGranularity [PFN_cuMemGetAllocationGranularity_v10020] = ("cuMemGetAllocationGranularity", 10020) => vmm::granularity(out: Out<usize>, prop: In<CUmemAllocationProp_v1>, option: CUmemAllocationGranularity_flags);
    Ready cuMemCreate [PFN_cuMemCreate_v10020] = ("cuMemCreate", 10020) => vmm::create(out: Out<u64>, size: usize, prop: In<CUmemAllocationProp_v1>, flags: u64);
    Ready cuMemRelease [PFN_cuMemRelease_v10020] = ("cuMemRelease", 10020) => vmm::release(handle: u64);
    Ready cuMemAddressReserve [PFN_cuMemAddressReserve_v10020] = ("cuMemAddressReserve", 10020) => vmm::reserve(out: Out<u64>, size: usize, alignment: usize, address: u64, flags: u64);
    Ready cuMemAddressFree [PFN_cuMemAddressFree_v10020] = ("cuMemAddressFree", 10020) => vmm::free(address: u64, size: usize);
    Ready cuMemMap [PFN_cuMemMap_v10020] = ("cuMemMap", 10020) => vmm::map(address: u64, size: usize, offset: usize, handle: u64, flags: u64);
    Ready cuMemUnmap [PFN_cuMemUnmap_v10020] = ("cuMemUnmap", 10020) => vmm::unmap(address: u64, size: usize);
    Ready cuMemSetAccess [PFN_cuMemSetAccess_v10020] = ("cuMemSetAccess", 10020) => vmm::set_access(address: u64, size: usize, rights: In<CUmemAccessDesc_v1>, count: usize);
    Ready cuMemGetAccess [PFN_cuMemGetAccess_v10020] = ("cuMemGetAccess", 10020) => vmm::get_access(out: Out<u64>, place: In<CUmemLocation>, address: u64);
    Ready cuMemRetainAllocationHandle [PFN_cuMemRetainAllocationHandle_v11000] = ("cuMemRetainAllocationHandle", 11000) => vmm::retain(out: Out<u64>, address: Out<c_void>);
    Ready cuMemGetAllocationPropertiesFromHandle [PFN_cuMemGetAllocationPropertiesFromHandle_v10020] = ("cuMemGetAllocationPropertiesFromHandle", 10020) => vmm::properties(out: Out<CUmemAllocationProp_v1>, handle: u64);
    Ready cuMemExportToShareableHandle [PFN_cuMemExportToShareableHandle_v10020] = ("cuMemExportToShareableHandle", 10020) => vmm::export(out: Out<c_void>, handle: u64, kind: CUmemAllocationHandleType, flags: u64);
    Ready cuMemImportFromShareableHandle [PFN_cuMemImportFromShareableHandle_v10020] = ("cuMemImportFromShareableHandle", 10020) => vmm::import(out: Out<u64>, shareable: Out<c_void>, kind: CUmemAllocationHandleType);

    // classification
    Ready cuMemGetAddressRange_v2 [PFN_cuMemGetAddressRange_v3020] = ("cuMemGetAddressRange", 3020) => pointer::address_range(base: Out<u64>, size: Out<usize>, address: u64);
    Ready cuPointerGetAttribute [PFN_cuPointerGetAttribute_v4000] = ("cuPointerGetAttribute", 4000) => pointer::attribute(out: Out<c_void>, attribute: CUpointer_attribute, address: u64);
    Ready cuPointerGetAttributes [PFN_cuPointerGetAttributes_v7000] = ("cuPointerGetAttributes", 7000) => pointer::attributes(count: u32, attributes: List<CUpointer_attribute>, outs: List<*mut c_void>, address: u64);
    Ready cuPointerSetAttribute [PFN_cuPointerSetAttribute_v6000] = ("cuPointerSetAttribute", 6000) => pointer::set_attribute(value: In<c_void>, attribute: CUpointer_attribute, address: u64);
    Ready cuMemRangeGetAttribute [PFN_cuMemRangeGetAttribute_v8000] = ("cuMemRangeGetAttribute", 8000) => pointer::range_attribute(out: Out<c_void>, bytes: usize, attribute: CUmem_range_attribute, address: u64, count: usize);

    // plain, managed and host memory; legacy IPC
    Ready cuMemGetInfo_v2 [PFN_cuMemGetInfo_v3020] = ("cuMemGetInfo", 3020) => device::memory_info(free: Out<usize>, total: Out<usize>);
    Unsafe cuMemAlloc_v2 [PFN_cuMemAlloc_v3020] = ("cuMemAlloc", 3020) => memory::alloc(out: Out<u64>, bytes: usize);
    Unsafe cuMemAllocPitch_v2 = ("cuMemAllocPitch", 3020) => memory::alloc_pitch(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32);
    Unsafe cuMemFree_v2 [PFN_cuMemFree_v3020] = ("cuMemFree", 3020) => memory::free(address: u64);
    Unsafe cuMemAllocManaged [PFN_cuMemAllocManaged_v6000] = ("cuMemAllocManaged", 6000) => memory::alloc_managed(out: Out<u64>, bytes: usize, flags: u32);
    Unsafe cuMemHostAlloc [PFN_cuMemHostAlloc_v2020] = ("cuMemHostAlloc", 2020) => memory::host_alloc(out: Out<*mut c_void>, bytes: usize, flags: u32);
    Unsafe cuMemAllocHost_v2 = ("cuMemAllocHost", 3020) => memory::alloc_host(out: Out<*mut c_void>, bytes: usize);
    Unsafe cuMemFreeHost [PFN_cuMemFreeHost_v2000] = ("cuMemFreeHost", 2000) => memory::free_host(address: Out<c_void>);
    Unsafe cuMemHostRegister_v2 [PFN_cuMemHostRegister_v6050] = ("cuMemHostRegister", 6050) => memory::host_register(address: Out<c_void>, bytes: usize, flags: u32);
    Unsafe cuMemHostUnregister [PFN_cuMemHostUnregister_v4000] = ("cuMemHostUnregister", 4000) => memory::host_unregister(address: Out<c_void>);
    Ready cuMemHostGetDevicePointer_v2 = ("cuMemHostGetDevicePointer", 3020) => memory::host_device_pointer(out: Out<u64>, address: Out<c_void>, flags: u32);
    Ready cuMemHostGetFlags = ("cuMemHostGetFlags", 2030) => memory::host_flags(out: Out<u32>, address: Out<c_void>);
    Ready cuIpcGetMemHandle [PFN_cuIpcGetMemHandle_v4010] = ("cuIpcGetMemHandle", 4010) => legacy::get(out: Out<CUipcMemHandle_v1>, address: u64);
    Unsafe cuIpcOpenMemHandle_v2 [PFN_cuIpcOpenMemHandle_v11000] = ("cuIpcOpenMemHandle", 11000) => legacy::open(out: Out<u64>, handle: CUipcMemHandle_v1, flags: u32);
    Unsafe cuIpcCloseMemHandle [PFN_cuIpcCloseMemHandle_v4010] = ("cuIpcCloseMemHandle", 4010) => legacy::close(address: u64);

    // pools
    Ready cuDeviceGetDefaultMemPool [PFN_cuDeviceGetDefaultMemPool_v11020] = ("cuDeviceGetDefaultMemPool", 11020) => pool::default_pool(out: Out<CUmemoryPool>, device: c_int);
    Ready cuDeviceGetMemPool [PFN_cuDeviceGetMemPool_v11020] = ("cuDeviceGetMemPool", 11020) => pool::device_pool(out: Out<CUmemoryPool>, device: c_int);
    Ready cuDeviceSetMemPool = ("cuDeviceSetMemPool", 11020) => pool::set_device_pool(device: c_int, pool: Handle<CUmemPoolHandle_st>);
    Ready cuMemPoolCreate [PFN_cuMemPoolCreate_v11020] = ("cuMemPoolCreate", 11020) => pool::create(out: Out<CUmemoryPool>, props: In<CUmemPoolProps_v1>);
    Ready cuMemPoolDestroy [PFN_cuMemPoolDestroy_v11020] = ("cuMemPoolDestroy", 11020) => pool::destroy(pool: Handle<CUmemPoolHandle_st>);
    Ready cuMemPoolSetAttribute [PFN_cuMemPoolSetAttribute_v11020] = ("cuMemPoolSetAttribute", 11020) => pool::set_attribute(pool: Handle<CUmemPoolHandle_st>, attribute: CUmemPool_attribute, value: Out<c_void>);
    Ready cuMemPoolGetAttribute [PFN_cuMemPoolGetAttribute_v11020] = ("cuMemPoolGetAttribute", 11020) => pool::attribute(pool: Handle<CUmemPoolHandle_st>, attribute: CUmemPool_attribute, value: Out<c_void>);
    Ready cuMemPoolTrimTo [PFN_cuMemPoolTrimTo_v11020] = ("cuMemPoolTrimTo", 11020) => pool::trim(pool: Handle<CUmemPoolHandle_st>, keep: usize);
    Ready cuMemPoolSetAccess [PFN_cuMemPoolSetAccess_v11020] = ("cuMemPoolSetAccess", 11020) => pool::set_access(pool: Handle<CUmemPoolHandle_st>, rights: In<CUmemAccessDesc_v1>, count: usize);
    Ready cuMemPoolGetAccess [PFN_cuMemPoolGetAccess_v11020] = ("cuMemPoolGetAccess", 11020) => pool::access(out: Out<CUmemAccess_flags>, pool: Handle<CUmemPoolHandle_st>, place: Out<CUmemLocation>);
    Ready cuMemPoolExportToShareableHandle [PFN_cuMemPoolExportToShareableHandle_v11020] = ("cuMemPoolExportToShareableHandle", 11020) => pool::export_pool(out: Out<c_void>, pool: Handle<CUmemPoolHandle_st>, kind: CUmemAllocationHandleType, flags: u64);
    Ready cuMemPoolImportFromShareableHandle [PFN_cuMemPoolImportFromShareableHandle_v11020] = ("cuMemPoolImportFromShareableHandle", 11020) => pool::import_pool(out: Out<CUmemoryPool>, shareable: Out<c_void>, kind: CUmemAllocationHandleType, flags: u64);
    Ready cuMemPoolExportPointer [PFN_cuMemPoolExportPointer_v11020] = ("cuMemPoolExportPointer", 11020) => pool::export_pointer(out: Out<CUmemPoolPtrExportData_v1>, address: u64);
    Ready cuMemPoolImportPointer [PFN_cuMemPoolImportPointer_v11020] = ("cuMemPoolImportPointer", 11020) => pool::import_pointer(out: Out<u64>, pool: Handle<CUmemPoolHandle_st>, data: Out<CUmemPoolPtrExportData_v1>);
    Ready cuMemAllocAsync [PFN_cuMemAllocAsync_v11020] = ("cuMemAllocAsync", 11020) => pool::alloc_async(out: Out<u64>, bytes: usize, stream: Handle<CUstream_st>);
    Ready cuMemAllocFromPoolAsync [PFN_cuMemAllocFromPoolAsync_v11020] = ("cuMemAllocFromPoolAsync", 11020) => pool::alloc_from_pool_async(out: Out<u64>, bytes: usize, pool: Handle<CUmemPoolHandle_st>, stream: Handle<CUstream_st>);
    Ready cuMemFreeAsync [PFN_cuMemFreeAsync_v11020] = ("cuMemFreeAsync", 11020) => pool::free_async(address: u64, stream: Handle<CUstream_st>);

    // copies
    Ready cuMemcpy [PFN_cuMemcpy_v4000] = ("cuMemcpy", 4000) => copy::any(to: u64, from: u64, len: usize);
    Ready cuMemcpyAsync [PFN_cuMemcpyAsync_v4000] = ("cuMemcpyAsync", 4000) => copy::any_async(to: u64, from: u64, len: usize, stream: Handle<CUstream_st>);
    Ready cuMemcpyHtoD_v2 [PFN_cuMemcpyHtoD_v3020] = ("cuMemcpyHtoD", 3020) => copy::host_to_device(to: u64, from: In<c_void>, len: usize);
    Ready cuMemcpyDtoH_v2 [PFN_cuMemcpyDtoH_v3020] = ("cuMemcpyDtoH", 3020) => copy::device_to_host(to: Out<c_void>, from: u64, len: usize);
    Ready cuMemcpyDtoD_v2 [PFN_cuMemcpyDtoD_v3020] = ("cuMemcpyDtoD", 3020) => copy::device_to_device(to: u64, from: u64, len: usize);
    Ready cuMemcpyHtoDAsync_v2 [PFN_cuMemcpyHtoDAsync_v3020] = ("cuMemcpyHtoDAsync", 3020) => copy::host_to_device_async(to: u64, from: In<c_void>, len: usize, stream: Handle<CUstream_st>);
    Ready cuMemcpyDtoHAsync_v2 [PFN_cuMemcpyDtoHAsync_v3020] = ("cuMemcpyDtoHAsync", 3020) => copy::device_to_host_async(to: Out<c_void>, from: u64, len: usize, stream: Handle<CUstream_st>);
    Ready cuMemcpyDtoDAsync_v2 [PFN_cuMemcpyDtoDAsync_v3020] = ("cuMemcpyDtoDAsync", 3020) => copy::device_to_device_async(to: u64, from: u64, len: usize, stream: Handle<CUstream_st>);
    Ready cuMemcpyBatchAsync [PFN_cuMemcpyBatchAsync_v12080] = ("cuMemcpyBatchAsync", 12080) => copy::batch_async(to: List<u64>, from: List<u64>, sizes: List<usize>, count: usize, attributes: List<CUmemcpyAttributes_v1>, indices: List<usize>, attribute_count: usize, failed: Out<usize>, stream: Handle<CUstream_st>);
    Ready cuMemcpyBatchAsync_v2 = ("cuMemcpyBatchAsync", 13000) => copy::batch_async_v2(to: List<u64>, from: List<u64>, sizes: List<usize>, count: usize, attributes: List<CUmemcpyAttributes_v1>, indices: List<usize>, attribute_count: usize, stream: Handle<CUstream_st>);
    Ready cuMemsetD8_v2 [PFN_cuMemsetD8_v3020] = ("cuMemsetD8", 3020) => copy::set8(to: u64, value: u8, count: usize);
    Ready cuMemsetD32_v2 [PFN_cuMemsetD32_v3020] = ("cuMemsetD32", 3020) => copy::set32(to: u64, value: u32, count: usize);
    Ready cuMemsetD8Async [PFN_cuMemsetD8Async_v3020] = ("cuMemsetD8Async", 3020) => copy::set8_async(to: u64, value: u8, count: usize, stream: Handle<CUstream_st>);
    Ready cuMemsetD32Async = ("cuMemsetD32Async", 3020) => copy::set32_async(to: u64, value: u32, count: usize, stream: Handle<CUstream_st>);

    // streams, events, capture
    Ready cuStreamCreate [PFN_cuStreamCreate_v2000] = ("cuStreamCreate", 2000) => stream::create(out: Out<CUstream>, flags: u32);
    Ready cuStreamCreateWithPriority = ("cuStreamCreateWithPriority", 5050) => stream::create_with_priority(out: Out<CUstream>, flags: u32, priority: c_int);
    Ready cuStreamDestroy_v2 [PFN_cuStreamDestroy_v4000] = ("cuStreamDestroy", 4000) => stream::destroy(stream: Handle<CUstream_st>);
    Ready cuStreamSynchronize [PFN_cuStreamSynchronize_v2000] = ("cuStreamSynchronize", 2000) => stream::synchronize(stream: Handle<CUstream_st>);
    Ready cuStreamQuery [PFN_cuStreamQuery_v2000] = ("cuStreamQuery", 2000) => stream::query(stream: Handle<CUstream_st>);
    Ready cuStreamWaitEvent [PFN_cuStreamWaitEvent_v3020] = ("cuStreamWaitEvent", 3020) => event::wait(stream: Handle<CUstream_st>, event: Handle<CUevent_st>, flags: u32);
    Ready cuStreamAddCallback [PFN_cuStreamAddCallback_v5000] = ("cuStreamAddCallback", 5000) => stream::add_callback(stream: Handle<CUstream_st>, function: CUstreamCallback, data: Out<c_void>, flags: u32);
    Ready cuLaunchHostFunc [PFN_cuLaunchHostFunc_v10000] = ("cuLaunchHostFunc", 10000) => stream::launch_host(stream: Handle<CUstream_st>, function: CUhostFn, data: Out<c_void>);
    Ready cuStreamGetCtx = ("cuStreamGetCtx", 9020) => stream::context(stream: Handle<CUstream_st>, out: Out<CUcontext>);
    Ready cuStreamGetFlags = ("cuStreamGetFlags", 5050) => stream::flags(stream: Handle<CUstream_st>, out: Out<u32>);
    Ready cuStreamGetId = ("cuStreamGetId", 12000) => stream::id(stream: Handle<CUstream_st>, out: Out<u64>);
    Ready cuStreamBeginCapture_v2 [PFN_cuStreamBeginCapture_v10010] = ("cuStreamBeginCapture", 10010) => capture::begin(stream: Handle<CUstream_st>, mode: CUstreamCaptureMode);
    Ready cuStreamEndCapture [PFN_cuStreamEndCapture_v10000] = ("cuStreamEndCapture", 10000) => capture::end(stream: Handle<CUstream_st>, graph: Out<CUgraph>);
    Ready cuStreamIsCapturing [PFN_cuStreamIsCapturing_v10000] = ("cuStreamIsCapturing", 10000) => capture::is_capturing(stream: Handle<CUstream_st>, out: Out<CUstreamCaptureStatus>);
    Ready cuThreadExchangeStreamCaptureMode [PFN_cuThreadExchangeStreamCaptureMode_v10010] = ("cuThreadExchangeStreamCaptureMode", 10010) => capture::exchange_mode(mode: Out<CUstreamCaptureMode>);
    Ready cuGraphDestroy [PFN_cuGraphDestroy_v10000] = ("cuGraphDestroy", 10000) => capture::graph_destroy(graph: Handle<CUgraph_st>);
    Ready cuEventCreate [PFN_cuEventCreate_v2000] = ("cuEventCreate", 2000) => event::create(out: Out<CUevent>, flags: u32);
    Ready cuEventRecord [PFN_cuEventRecord_v2000] = ("cuEventRecord", 2000) => event::record(event: Handle<CUevent_st>, stream: Handle<CUstream_st>);
    Ready cuEventQuery [PFN_cuEventQuery_v2000] = ("cuEventQuery", 2000) => event::query(event: Handle<CUevent_st>);
    Ready cuEventSynchronize [PFN_cuEventSynchronize_v2000] = ("cuEventSynchronize", 2000) => event::synchronize(event: Handle<CUevent_st>);
    Ready cuEventElapsedTime = ("cuEventElapsedTime", 2000) => event::elapsed(out: Out<f32>, start: Handle<CUevent_st>, end: Handle<CUevent_st>);
    Ready cuEventDestroy_v2 [PFN_cuEventDestroy_v4000] = ("cuEventDestroy", 4000) => event::destroy(event: Handle<CUevent_st>);
}

/// `cuGetProcAddress`: the newest version of a base name that is not newer than asked for, from this very table.
mod lookup {
    use super::*;

    pub(super) fn v2(
        symbol: In<c_char>,
        out: Out<*mut c_void>,
        version: c_int,
        _flags: u64,
        status: Out<CUdriverProcAddressQueryResult>,
    ) -> Answer {
        out.check()?;
        let mut name = Vec::new();
        while let byte @ 1.. = symbol.at(name.len())?.cast_unsigned() {
            name.push(byte);
        }
        let name = core::str::from_utf8(&name).map_err(|_| INVALID)?;
        let rows = || CALLS.iter().filter(|info| info.base == name);
        let found = rows().filter(|info| info.version <= version).max_by_key(|info| info.version);
        status.set_if_given(match found {
            Some(_) => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS,
            None if rows().next().is_some() => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
            None => CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
        });
        out.set(found.map_or(core::ptr::null_mut(), |info| info.address.0.cast_mut().cast()))
    }

    pub(super) fn v1(symbol: In<c_char>, out: Out<*mut c_void>, version: c_int, flags: u64) -> Answer {
        v2(symbol, out, version, flags, Out::none())?;
        if out.get()?.is_null() { Err(CUresult::CUDA_ERROR_NOT_FOUND) } else { Ok(()) }
    }
}
