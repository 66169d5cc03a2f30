//! Driver calls with Rust arguments, for tests: each method is one call, and answers what the call answered. Long, as the list of calls is.
//!
//! # Safety
//! Out pointers are to live locals and host buffers are slices. Device addresses are numbers: the driver checks them, a test may pass wrong ones to see
//! the refusal. Handles (contexts, streams, events) must be live ones, which a test arranges by itself.

#![allow(clippy::not_unsafe_ptr_arg_deref, reason = "opaque handles, passed through; see Safety")]

use core::ffi::c_void;
use core::ptr::null_mut;

use cuda_driver_sys::*;

/// What a driver call gave, or its code.
pub type Answer<T = ()> = Result<T, CUresult>;

/// A loaded driver.
#[derive(Clone, Copy)]
pub struct Cuda {
    /// The entry points.
    pub raw: Driver,
}

macro_rules! call {
    ($function:expr $(, $argument:expr)*) => {{
        // SAFETY: see the module doc; every argument is of the C signature's type, which the table checks.
        match unsafe { $function($($argument),*) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(code),
        }
    }};
}

macro_rules! get {
    ($type:ty; $function:expr, out $(, $argument:expr)*) => {{
        // SAFETY: the types used here are plain C data, for which zeros are valid.
        let mut out: $type = unsafe { core::mem::zeroed() };
        call!($function, &raw mut out $(, $argument)*).map(|()| out)
    }};
}

#[allow(missing_docs, reason = "each method is the driver call of that name")]
impl Cuda {
    /// Loads the driver and calls `cuInit`. Panics without one.
    pub fn start() -> Self {
        let cuda = Self::load();
        cuda.init().expect("cuInit");
        cuda
    }

    /// Loads the driver. Panics without one.
    pub fn load() -> Self {
        Self { raw: Driver::load().expect("a CUDA driver") }
    }

    /// Makes the primary context of a device current on this thread.
    pub fn enter_primary(&self, device: CUdevice) -> CUcontext {
        let context = self.primary_retain(device).expect("cuDevicePrimaryCtxRetain");
        self.ctx_set_current(context).expect("cuCtxSetCurrent");
        context
    }

    pub fn init(&self) -> Answer {
        call!(self.raw.cuInit, 0)
    }
    pub fn driver_version(&self) -> Answer<i32> {
        get!(i32; self.raw.cuDriverGetVersion, out)
    }

    // devices and contexts
    pub fn device_count(&self) -> Answer<i32> {
        get!(i32; self.raw.cuDeviceGetCount, out)
    }
    pub fn device(&self, ordinal: i32) -> Answer<CUdevice> {
        get!(CUdevice; self.raw.cuDeviceGet, out, ordinal)
    }
    pub fn device_name(&self, device: CUdevice) -> Answer<String> {
        let mut name = [0; 96];
        call!(self.raw.cuDeviceGetName, name.as_mut_ptr(), 96, device)?;
        let bytes = name.map(core::ffi::c_char::cast_unsigned);
        Ok(String::from_utf8_lossy(bytes.split(|&byte| byte == 0).next().unwrap_or(&[])).into_owned())
    }
    pub fn device_attribute(&self, attribute: CUdevice_attribute, device: CUdevice) -> Answer<i32> {
        get!(i32; self.raw.cuDeviceGetAttribute, out, attribute, device)
    }
    pub fn device_uuid(&self, device: CUdevice) -> Answer<[u8; 16]> {
        get!(CUuuid; self.raw.cuDeviceGetUuid, out, device).map(|uuid| uuid.bytes.map(core::ffi::c_char::cast_unsigned))
    }
    pub fn primary_retain(&self, device: CUdevice) -> Answer<CUcontext> {
        get!(CUcontext; self.raw.cuDevicePrimaryCtxRetain, out, device)
    }
    pub fn primary_release(&self, device: CUdevice) -> Answer {
        call!(self.raw.cuDevicePrimaryCtxRelease, device)
    }
    pub fn ctx_create(&self, device: CUdevice) -> Answer<CUcontext> {
        get!(CUcontext; self.raw.cuCtxCreate, out, 0, device)
    }
    pub fn ctx_destroy(&self, context: CUcontext) -> Answer {
        call!(self.raw.cuCtxDestroy, context)
    }
    pub fn ctx_set_current(&self, context: CUcontext) -> Answer {
        call!(self.raw.cuCtxSetCurrent, context)
    }
    pub fn ctx_get_current(&self) -> Answer<CUcontext> {
        get!(CUcontext; self.raw.cuCtxGetCurrent, out)
    }
    pub fn ctx_push(&self, context: CUcontext) -> Answer {
        call!(self.raw.cuCtxPushCurrent, context)
    }
    pub fn ctx_pop(&self) -> Answer<CUcontext> {
        get!(CUcontext; self.raw.cuCtxPopCurrent, out)
    }
    pub fn ctx_synchronize(&self) -> Answer {
        call!(self.raw.cuCtxSynchronize)
    }
    /// Free and total bytes.
    pub fn mem_info(&self) -> Answer<(usize, usize)> {
        let mut total = 0;
        let free = get!(usize; self.raw.cuMemGetInfo, out, &raw mut total)?;
        Ok((free, total))
    }

    // virtual memory management
    /// Properties for pinned device memory with these handle types.
    pub fn prop(device: CUdevice, handle_types: u32) -> CUmemAllocationProp_v1 {
        // SAFETY: plain C data, for which zeros are valid.
        let mut prop: CUmemAllocationProp_v1 = unsafe { core::mem::zeroed() };
        prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = CUmemAllocationHandleType(handle_types);
        prop.location = device_location(device);
        prop
    }
    pub fn granularity(&self, device: CUdevice) -> Answer<usize> {
        let prop = Self::prop(device, 1);
        get!(usize; self.raw.cuMemGetAllocationGranularity, out, &raw const prop, CUmemAllocationGranularity_flags(0))
    }
    pub fn mem_create(&self, size: usize, device: CUdevice, handle_types: u32) -> Answer<u64> {
        let prop = Self::prop(device, handle_types);
        get!(u64; self.raw.cuMemCreate, out, size, &raw const prop, 0)
    }
    pub fn mem_release(&self, handle: u64) -> Answer {
        call!(self.raw.cuMemRelease, handle)
    }
    pub fn mem_reserve(&self, size: usize) -> Answer<CUdeviceptr> {
        self.mem_reserve_at(size, 0)
    }
    pub fn mem_reserve_at(&self, size: usize, address: CUdeviceptr) -> Answer<CUdeviceptr> {
        get!(CUdeviceptr; self.raw.cuMemAddressReserve, out, size, 0, address, 0)
    }
    pub fn mem_address_free(&self, address: CUdeviceptr, size: usize) -> Answer {
        call!(self.raw.cuMemAddressFree, address, size)
    }
    pub fn mem_map(&self, address: CUdeviceptr, size: usize, offset: usize, handle: u64) -> Answer {
        call!(self.raw.cuMemMap, address, size, offset, handle, 0)
    }
    pub fn mem_unmap(&self, address: CUdeviceptr, size: usize) -> Answer {
        call!(self.raw.cuMemUnmap, address, size)
    }
    /// `rights`: 0 none, 1 read, 3 read and write.
    pub fn mem_set_access(&self, address: CUdeviceptr, size: usize, device: CUdevice, rights: u32) -> Answer {
        let access = CUmemAccessDesc_v1 { location: device_location(device), flags: CUmemAccess_flags(rights) };
        call!(self.raw.cuMemSetAccess, address, size, &raw const access, 1)
    }
    pub fn mem_get_access(&self, address: CUdeviceptr, device: CUdevice) -> Answer<u64> {
        let location = device_location(device);
        get!(u64; self.raw.cuMemGetAccess, out, &raw const location, address)
    }
    pub fn mem_retain(&self, address: CUdeviceptr) -> Answer<u64> {
        let pointer = core::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
        get!(u64; self.raw.cuMemRetainAllocationHandle, out, pointer)
    }
    pub fn mem_properties(&self, handle: u64) -> Answer<CUmemAllocationProp_v1> {
        get!(CUmemAllocationProp_v1; self.raw.cuMemGetAllocationPropertiesFromHandle, out, handle)
    }
    pub fn mem_export_fd(&self, handle: u64) -> Answer<i32> {
        let mut fd = -1_i32;
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        call!(self.raw.cuMemExportToShareableHandle, (&raw mut fd).cast::<c_void>(), handle, kind, 0)?;
        Ok(fd)
    }
    pub fn mem_import_fd(&self, fd: i32) -> Answer<u64> {
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        get!(u64; self.raw.cuMemImportFromShareableHandle, out, fd_as_pointer(fd), kind)
    }
    /// A chunk, mapped readable and writable at a reservation of its own: handle and address.
    pub fn mem_chunk(&self, size: usize, device: CUdevice, handle_types: u32) -> Answer<(u64, CUdeviceptr)> {
        let handle = self.mem_create(size, device, handle_types)?;
        let address = self.mem_reserve(size)?;
        self.mem_map(address, size, 0, handle)?;
        self.mem_set_access(address, size, device, 3)?;
        Ok((handle, address))
    }
    /// Undoes [`Cuda::mem_chunk`].
    pub fn mem_drop_chunk(&self, size: usize, (handle, address): (u64, CUdeviceptr)) -> Answer {
        self.mem_unmap(address, size)?;
        self.mem_address_free(address, size)?;
        self.mem_release(handle)
    }

    // classification
    /// Base and size.
    pub fn address_range(&self, address: CUdeviceptr) -> Answer<(CUdeviceptr, usize)> {
        let mut size = 0;
        let base = get!(CUdeviceptr; self.raw.cuMemGetAddressRange, out, &raw mut size, address)?;
        Ok((base, size))
    }
    /// An attribute, as the little-endian number of the first eight bytes of what was written into zeros.
    pub fn attribute(&self, attribute: CUpointer_attribute, address: CUdeviceptr) -> Answer<u64> {
        let mut value = [0_u64; 4];
        call!(self.raw.cuPointerGetAttribute, value.as_mut_ptr().cast::<c_void>(), attribute, address)?;
        Ok(value[0])
    }
    /// An attribute by the plural call.
    pub fn attribute_plural(&self, attribute: CUpointer_attribute, address: CUdeviceptr) -> Answer<u64> {
        let (mut attribute, mut value) = (attribute, [0_u64; 4]);
        let mut data = value.as_mut_ptr().cast::<c_void>();
        call!(self.raw.cuPointerGetAttributes, 1, &raw mut attribute, &raw mut data, address)?;
        Ok(value[0])
    }
    pub fn buffer_id(&self, address: CUdeviceptr) -> Answer<u64> {
        self.attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address)
    }

    // other memory
    pub fn mem_alloc(&self, size: usize) -> Answer<CUdeviceptr> {
        get!(CUdeviceptr; self.raw.cuMemAlloc, out, size)
    }
    pub fn mem_free(&self, address: CUdeviceptr) -> Answer {
        call!(self.raw.cuMemFree, address)
    }
    pub fn mem_alloc_managed(&self, size: usize) -> Answer<CUdeviceptr> {
        get!(CUdeviceptr; self.raw.cuMemAllocManaged, out, size, 1)
    }
    pub fn mem_host_alloc(&self, size: usize) -> Answer<*mut c_void> {
        get!(*mut c_void; self.raw.cuMemHostAlloc, out, size, 0)
    }
    pub fn mem_free_host(&self, address: *mut c_void) -> Answer {
        call!(self.raw.cuMemFreeHost, address)
    }
    pub fn ipc_get(&self, address: CUdeviceptr) -> Answer<CUipcMemHandle_v1> {
        get!(CUipcMemHandle_v1; self.raw.cuIpcGetMemHandle, out, address)
    }
    pub fn ipc_open(&self, handle: CUipcMemHandle_v1) -> Answer<CUdeviceptr> {
        get!(CUdeviceptr; self.raw.cuIpcOpenMemHandle, out, handle, 1)
    }
    pub fn ipc_close(&self, address: CUdeviceptr) -> Answer {
        call!(self.raw.cuIpcCloseMemHandle, address)
    }

    // pools
    pub fn default_pool(&self, device: CUdevice) -> Answer<CUmemoryPool> {
        get!(CUmemoryPool; self.raw.cuDeviceGetDefaultMemPool, out, device)
    }
    pub fn pool_create(&self, device: CUdevice, handle_types: u32) -> Answer<CUmemoryPool> {
        // SAFETY: plain C data, for which zeros are valid.
        let mut props: CUmemPoolProps_v1 = unsafe { core::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.handleTypes = CUmemAllocationHandleType(handle_types);
        props.location = device_location(device);
        get!(CUmemoryPool; self.raw.cuMemPoolCreate, out, &raw const props)
    }
    pub fn pool_destroy(&self, pool: CUmemoryPool) -> Answer {
        call!(self.raw.cuMemPoolDestroy, pool)
    }
    pub fn pool_set_access(&self, pool: CUmemoryPool, device: CUdevice, rights: u32) -> Answer {
        let access = CUmemAccessDesc_v1 { location: device_location(device), flags: CUmemAccess_flags(rights) };
        call!(self.raw.cuMemPoolSetAccess, pool, &raw const access, 1)
    }
    pub fn pool_export_fd(&self, pool: CUmemoryPool) -> Answer<i32> {
        let mut fd = -1_i32;
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        call!(self.raw.cuMemPoolExportToShareableHandle, (&raw mut fd).cast::<c_void>(), pool, kind, 0)?;
        Ok(fd)
    }
    pub fn pool_import_fd(&self, fd: i32) -> Answer<CUmemoryPool> {
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        get!(CUmemoryPool; self.raw.cuMemPoolImportFromShareableHandle, out, fd_as_pointer(fd), kind, 0)
    }
    pub fn pool_export_pointer(&self, address: CUdeviceptr) -> Answer<[u8; 64]> {
        get!(CUmemPoolPtrExportData_v1; self.raw.cuMemPoolExportPointer, out, address).map(|data| data.reserved)
    }
    pub fn pool_import_pointer(&self, pool: CUmemoryPool, data: [u8; 64]) -> Answer<CUdeviceptr> {
        let mut data = CUmemPoolPtrExportData_v1 { reserved: data };
        get!(CUdeviceptr; self.raw.cuMemPoolImportPointer, out, pool, &raw mut data)
    }
    pub fn alloc_async(&self, size: usize, stream: CUstream) -> Answer<CUdeviceptr> {
        get!(CUdeviceptr; self.raw.cuMemAllocAsync, out, size, stream)
    }
    pub fn alloc_from_pool(&self, size: usize, pool: CUmemoryPool, stream: CUstream) -> Answer<CUdeviceptr> {
        get!(CUdeviceptr; self.raw.cuMemAllocFromPoolAsync, out, size, pool, stream)
    }
    pub fn free_async(&self, address: CUdeviceptr, stream: CUstream) -> Answer {
        call!(self.raw.cuMemFreeAsync, address, stream)
    }

    // copies
    pub fn write(&self, to: CUdeviceptr, bytes: &[u8]) -> Answer {
        call!(self.raw.cuMemcpyHtoD, to, bytes.as_ptr().cast::<c_void>(), bytes.len())
    }
    pub fn read(&self, bytes: &mut [u8], from: CUdeviceptr) -> Answer {
        call!(self.raw.cuMemcpyDtoH, bytes.as_mut_ptr().cast::<c_void>(), from, bytes.len())
    }
    pub fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, len: usize) -> Answer {
        call!(self.raw.cuMemcpyDtoD, to, from, len)
    }
    pub fn copy_async(&self, to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) -> Answer {
        call!(self.raw.cuMemcpyDtoDAsync, to, from, len, stream)
    }
    pub fn fill(&self, to: CUdeviceptr, value: u8, len: usize) -> Answer {
        call!(self.raw.cuMemsetD8, to, value, len)
    }
    pub fn fill_async(&self, to: CUdeviceptr, value: u8, len: usize, stream: CUstream) -> Answer {
        call!(self.raw.cuMemsetD8Async, to, value, len, stream)
    }
    /// Whether the `len` bytes from there are all `value`; reads them.
    pub fn is_filled(&self, from: CUdeviceptr, value: u8, len: usize) -> Answer<bool> {
        let mut bytes = vec![!value; len];
        self.read(&mut bytes, from)?;
        // One comparison of memory, which is fast in test builds too.
        Ok(bytes == vec![value; len])
    }

    // streams, events, capture
    pub fn stream_create(&self, flags: u32) -> Answer<CUstream> {
        get!(CUstream; self.raw.cuStreamCreate, out, flags)
    }
    pub fn stream_destroy(&self, stream: CUstream) -> Answer {
        call!(self.raw.cuStreamDestroy, stream)
    }
    pub fn stream_synchronize(&self, stream: CUstream) -> Answer {
        call!(self.raw.cuStreamSynchronize, stream)
    }
    pub fn stream_query(&self, stream: CUstream) -> Answer {
        call!(self.raw.cuStreamQuery, stream)
    }
    pub fn capture_begin(&self, stream: CUstream, mode: u32) -> Answer {
        call!(self.raw.cuStreamBeginCapture, stream, CUstreamCaptureMode(mode))
    }
    pub fn capture_end(&self, stream: CUstream) -> Answer<CUgraph> {
        let mut graph = null_mut();
        call!(self.raw.cuStreamEndCapture, stream, &raw mut graph)?;
        Ok(graph)
    }
    pub fn capture_status(&self, stream: CUstream) -> Answer<u32> {
        let mut status = CUstreamCaptureStatus(0);
        call!(self.raw.cuStreamIsCapturing, stream, &raw mut status)?;
        Ok(status.0)
    }
    /// Sets this thread's mode and returns the one before.
    pub fn capture_mode(&self, mode: u32) -> Answer<u32> {
        let mut mode = CUstreamCaptureMode(mode);
        call!(self.raw.cuThreadExchangeStreamCaptureMode, &raw mut mode)?;
        Ok(mode.0)
    }
    pub fn graph_destroy(&self, graph: CUgraph) -> Answer {
        call!(self.raw.cuGraphDestroy, graph)
    }
    /// Queues a call of `function`, which gets `data` on a thread of the driver's.
    ///
    /// # Safety
    /// Both live until the stream has passed the call, and `data` is what `function` expects.
    pub unsafe fn launch_host(&self, stream: CUstream, function: CUhostFn, data: *mut c_void) -> Answer {
        call!(self.raw.cuLaunchHostFunc, stream, function, data)
    }
    pub fn event_create(&self) -> Answer<CUevent> {
        get!(CUevent; self.raw.cuEventCreate, out, 2)
    }
    pub fn event_record(&self, event: CUevent, stream: CUstream) -> Answer {
        call!(self.raw.cuEventRecord, event, stream)
    }
    pub fn event_query(&self, event: CUevent) -> Answer {
        call!(self.raw.cuEventQuery, event)
    }
    pub fn event_synchronize(&self, event: CUevent) -> Answer {
        call!(self.raw.cuEventSynchronize, event)
    }
    pub fn event_destroy(&self, event: CUevent) -> Answer {
        call!(self.raw.cuEventDestroy, event)
    }
}

impl core::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Cuda")
    }
}

/// How the import calls want an fd: its value, as a pointer.
fn fd_as_pointer(fd: i32) -> *mut c_void {
    core::ptr::without_provenance_mut(isize::try_from(fd).unwrap_or(-1).cast_unsigned())
}
