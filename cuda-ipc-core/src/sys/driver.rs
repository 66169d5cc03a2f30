//! Calls of the CUDA driver, each as a safe function with a typed error.
//!
//! [`Cuda`] is a loaded, initialised driver. Handles, addresses and ordinals are plain numbers here; who owns them is the caller's knowledge. A wrong number
//! is an error code of the driver's, never undefined behaviour on the host: none of these functions reads or writes memory through a device address.
//! None needs a current context either (the conformance test asks), so importers and sweepers work in any thread and create none. The file is long because the
//! driver has many calls; each function is one of them.
//!
//! # Safety
//! The unsafe here is calling the driver's C functions. Every pointer passed is to a live local of the type the function expects, and none is kept by the
//! driver after the call. The functions themselves were paired with their signatures by cuda-driver-sys.

#![allow(unsafe_code)]

use core::ffi::{c_int, c_void};
use core::fmt;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use cuda_driver_sys::{
    CU_MEMORYTYPE_DEVICE, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationHandleType, CUmemGenericAllocationHandle, CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode, CUuuid, Driver,
    LoadError, device_location,
};

/// A driver call that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriverError {
    /// The driver function.
    pub call: &'static str,
    /// Its `CUresult`.
    pub code: u32,
}

impl DriverError {
    /// Whether the driver or its context is on its way out, so that everything in it counts as released already.
    pub const fn is_teardown(&self) -> bool {
        const DEINITIALIZED: u32 = CUresult::CUDA_ERROR_DEINITIALIZED.0;
        const DESTROYED: u32 = CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED.0;
        const INVALID: u32 = CUresult::CUDA_ERROR_INVALID_CONTEXT.0;
        matches!(self.code, DEINITIALIZED | DESTROYED | INVALID)
    }

    /// Whether the driver says that there is no such memory, rather than that it could not answer.
    pub const fn is_no_such_memory(&self) -> bool {
        const INVALID_VALUE: u32 = CUresult::CUDA_ERROR_INVALID_VALUE.0;
        self.code == INVALID_VALUE
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with CUresult {}", self.call, self.code)
    }
}

impl core::error::Error for DriverError {}

/// Why there is no usable driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// It could not be loaded.
    Load(LoadError),
    /// `cuInit` failed: no device, or a driver that does not fit its kernel module.
    Init(DriverError),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(error) => error.fmt(f),
            Self::Init(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for OpenError {}

/// What the driver says about a pointer, for dispatch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PointerFacts {
    /// Base of the VA range that holds it: a whole reservation for VMM memory. 0 for what the driver does not know.
    pub range_start: u64,
    /// Length of that range in bytes.
    pub range_len: u64,
    /// Bit mask of `CUmemAllocationHandleType` that the allocator asked for.
    pub handle_types: u64,
    /// Whether `cuIpcGetMemHandle` works on it.
    pub legacy: bool,
    /// The memory pool it belongs to.
    pub pool: Option<Pool>,
    /// Whether it is managed memory.
    pub managed: bool,
    /// Whether it is device memory (`CU_MEMORYTYPE_DEVICE`).
    pub device_memory: bool,
    /// Ordinal of its device in this process.
    pub device: CUdevice,
    /// Its `CU_POINTER_ATTRIBUTE_BUFFER_ID`; 0 where nothing is mapped.
    pub buffer_id: u64,
    /// First address of the chunk that holds it: of one `cuMemMap`. 0 for memory of another kind.
    pub mapping_base: u64,
    /// Length of that chunk in bytes.
    pub mapping_len: u64,
    /// The context that it was allocated in; `None` for VMM and pool memory.
    pub context: Option<Context>,
}

/// A retained or imported physical allocation. Plain data: releasing it is the holder's duty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Handle(CUmemGenericAllocationHandle);

/// A loaded and initialised CUDA driver. `Copy`: a table of function pointers that stay valid for the life of the process. Usable from any thread.
#[derive(Clone, Copy)]
pub struct Cuda {
    api: Driver,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cuda")
    }
}

/// Calls a driver function of the table and names it in the error.
macro_rules! call {
    ($cuda:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: see the module's chapter: pointers are to live locals of the right type and not kept.
        let result = unsafe { ($cuda.api.$name)($($argument),*) };
        if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(DriverError { call: stringify!($name), code: result.0 }) }
    }};
}

mod contexts;
mod legacy;
mod pools;

pub(crate) use contexts::HeldContext;
pub use pools::Pool;

impl Cuda {
    /// Loads `libcuda.so.1` and initialises it.
    ///
    /// Errors: [`OpenError`]. Source: cuInit.
    pub fn open() -> Result<Self, OpenError> {
        Self::with(Driver::load().map_err(OpenError::Load)?)
    }

    /// Initialises an already loaded driver.
    pub fn with(api: Driver) -> Result<Self, OpenError> {
        let cuda = Self { api };
        call!(cuda, cuInit(0)).map_err(OpenError::Init)?;
        Ok(cuda)
    }

    /// The raw entry points.
    pub const fn api(&self) -> &Driver {
        &self.api
    }

    /// The driver's version, as `1000 * major + 10 * minor`.
    pub fn version(&self) -> Result<i32, DriverError> {
        let mut version = 0;
        call!(self, cuDriverGetVersion(&raw mut version))?;
        Ok(version)
    }

    /// Number of devices visible to this process.
    pub fn device_count(&self) -> Result<i32, DriverError> {
        let mut count = 0;
        call!(self, cuDeviceGetCount(&raw mut count))?;
        Ok(count)
    }

    /// Ordinal of the device of this thread's current context.
    pub fn current_device(&self) -> Result<CUdevice, DriverError> {
        let mut device = 0;
        call!(self, cuCtxGetDevice(&raw mut device))?;
        Ok(device)
    }

    /// The device's UUID, its identity across processes; of a MIG instance where there is one.
    pub fn device_uuid(&self, device: CUdevice) -> Result<[u8; 16], DriverError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        if let Some(get) = self.api.cuDeviceGetUuid_v2 {
            // SAFETY: as in `call!`.
            let result = unsafe { get(&raw mut uuid, device) };
            if result != CUresult::CUDA_SUCCESS {
                return Err(DriverError { call: "cuDeviceGetUuid_v2", code: result.0 });
            }
        } else {
            call!(self, cuDeviceGetUuid(&raw mut uuid, device))?;
        }
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// What the driver says about `address`, in one call that needs no context; a foreign address gives zeros.
    ///
    /// Source: cuPointerGetAttributes; the mapping attributes need a driver of CUDA 11.7 or later.
    pub fn pointer_facts(&self, address: u64) -> Result<PointerFacts, DriverError> {
        let (mut start, mut len, mut handle_types, mut buffer_id): (CUdeviceptr, usize, u64, u64) = (0, 0, 0, 0);
        let (mut mapping_base, mut mapping_len): (CUdeviceptr, usize) = (0, 0);
        let (mut legacy, mut managed, mut memory_type, mut device): (c_int, c_int, u32, c_int) = (0, 0, 0, 0);
        let (mut pool, mut context): (*mut c_void, CUcontext) = (core::ptr::null_mut(), core::ptr::null_mut());
        let mut attributes = [
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        ];
        let mut values: [*mut c_void; 12] = [
            (&raw mut start).cast(),
            (&raw mut len).cast(),
            (&raw mut handle_types).cast(),
            (&raw mut legacy).cast(),
            (&raw mut pool).cast(),
            (&raw mut managed).cast(),
            (&raw mut memory_type).cast(),
            (&raw mut device).cast(),
            (&raw mut buffer_id).cast(),
            (&raw mut mapping_base).cast(),
            (&raw mut mapping_len).cast(),
            (&raw mut context).cast(),
        ];
        call!(self, cuPointerGetAttributes(12, attributes.as_mut_ptr(), values.as_mut_ptr(), address))?;
        Ok(PointerFacts {
            range_start: start,
            range_len: len as u64,
            handle_types,
            legacy: legacy & 0xff != 0,
            pool: (!pool.is_null()).then_some(Pool(pool as usize)),
            managed: managed & 0xff != 0,
            device_memory: memory_type == CU_MEMORYTYPE_DEVICE,
            device,
            buffer_id,
            mapping_base,
            mapping_len: mapping_len as u64,
            context: (!context.is_null()).then_some(Context(context as usize)),
        })
    }

    /// The buffer id of the memory at `address`, unique per allocation in the life of this process; `None` if there is none.
    pub fn buffer_id(&self, address: u64) -> Result<Option<u64>, DriverError> {
        let mut id = 0_u64;
        match call!(self, cuPointerGetAttribute((&raw mut id).cast(), CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address)) {
            Ok(()) => Ok(Some(id)),
            Err(error) if error.is_no_such_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ordinal of the visible device with this UUID; `None` if this process sees no such device.
    ///
    /// Ordinals mean nothing in another process: CUDA_VISIBLE_DEVICES may hide and reorder devices there.
    pub fn device_with_uuid(&self, uuid: [u8; 16]) -> Result<Option<CUdevice>, DriverError> {
        for device in 0..self.device_count()? {
            if self.device_uuid(device)? == uuid {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Whether the driver says that POSIX fds can be exported on the device. Asked only to explain a refusal: attributes promise, trials tell.
    pub(crate) fn claims_posix_fds(&self, device: CUdevice) -> Result<bool, DriverError> {
        let mut value: c_int = 0;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        call!(self, cuDeviceGetAttribute(&raw mut value, attribute, device))?;
        Ok(value != 0)
    }

    /// One more reference to the physical allocation mapped at `address`.
    pub(crate) fn retain(&self, address: u64) -> Result<Handle, DriverError> {
        let mut handle = 0;
        call!(self, cuMemRetainAllocationHandle(&raw mut handle, address as *mut c_void))?;
        Ok(Handle(handle))
    }

    /// Gives a reference back. Tried twice: a reference that stays pins the memory.
    pub(crate) fn release(&self, handle: Handle) -> Result<(), DriverError> {
        released(call!(self, cuMemRelease(handle.0)).or_else(|_| call!(self, cuMemRelease(handle.0))))
    }

    /// A new fd that stands for the physical allocation and keeps it alive. To be registered at once: a forked child keeps what is not.
    pub(crate) fn export_fd(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        let mut fd: c_int = -1;
        const POSIX_FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        call!(self, cuMemExportToShareableHandle((&raw mut fd).cast(), handle.0, POSIX_FD, 0))?;
        // SAFETY: the driver has just opened this fd for the caller (cuMemExportToShareableHandle); nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Tries whether a fabric handle can be exported. A trial leaves nothing behind: the handle is bytes.
    pub(crate) fn try_fabric(&self, handle: Handle) -> Result<(), DriverError> {
        let mut bytes = [0_u8; 64];
        const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
        call!(self, cuMemExportToShareableHandle((&raw mut bytes).cast(), handle.0, FABRIC, 0))
    }

    /// A reference to the physical allocation that `fd` stands for. The fd stays the caller's.
    pub(crate) fn import_fd(&self, fd: impl AsFd) -> Result<Handle, DriverError> {
        let mut handle = 0;
        let number = fd.as_fd().as_raw_fd();
        const POSIX_FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // The number travels in the pointer argument (cuMemImportFromShareableHandle).
        call!(self, cuMemImportFromShareableHandle(&raw mut handle, number as usize as *mut c_void, POSIX_FD))?;
        Ok(Handle(handle))
    }

    /// Reserves `len` bytes of address space, a multiple of the granularity.
    pub fn reserve(&self, len: u64) -> Result<u64, DriverError> {
        let mut address: CUdeviceptr = 0;
        let size =
            usize::try_from(len).map_err(|_| DriverError { call: "cuMemAddressReserve", code: CUresult::CUDA_ERROR_INVALID_VALUE.0 })?;
        call!(self, cuMemAddressReserve(&raw mut address, size, 0, 0, 0))?;
        Ok(address)
    }

    /// Frees a reservation in which nothing is mapped. Tried twice.
    pub fn free_reservation(&self, address: u64, len: u64) -> Result<(), DriverError> {
        let free = || call!(self, cuMemAddressFree(address, size(len)));
        released(free().or_else(|_| free()))
    }

    /// Maps `handle` at `address`, all of its `len` bytes, without access yet.
    pub(crate) fn map(&self, address: u64, len: u64, handle: Handle) -> Result<(), DriverError> {
        call!(self, cuMemMap(address, size(len), 0, handle.0, 0))
    }

    /// Unmaps the chunks that fill `[address, address + len)`. Tried twice: a mapping that stays pins the exporter's memory.
    pub fn unmap(&self, address: u64, len: u64) -> Result<(), DriverError> {
        let unmap = || call!(self, cuMemUnmap(address, size(len)));
        released(unmap().or_else(|_| unmap()))
    }

    /// Lets `devices` access `[address, address + len)`, which must be mapped wholly.
    pub fn set_access(&self, address: u64, len: u64, devices: &[CUdevice], writable: bool) -> Result<(), DriverError> {
        let flags =
            if writable { CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE } else { CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ };
        let descriptor = |&device: &CUdevice| CUmemAccessDesc { location: device_location(device), flags };
        if let [device] = devices {
            let one = descriptor(device);
            return call!(self, cuMemSetAccess(address, size(len), &raw const one, 1));
        }
        let many: Vec<CUmemAccessDesc> = devices.iter().map(descriptor).collect();
        call!(self, cuMemSetAccess(address, size(len), many.as_ptr(), many.len()))
    }

    /// Runs `body` with this thread's stream-capture mode relaxed, so that it neither fails because of a capture elsewhere nor breaks one.
    pub fn with_relaxed_capture<T>(&self, body: impl FnOnce() -> T) -> T {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let exchanged = call!(self, cuThreadExchangeStreamCaptureMode(&raw mut mode));
        let value = body();
        if exchanged.is_ok() {
            // `mode` is the thread's own from before; putting it back cannot fail where the exchange has worked.
            let _ = call!(self, cuThreadExchangeStreamCaptureMode(&raw mut mode));
        }
        value
    }
}

/// A context, as the driver numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Context(usize);

/// A stream, as the driver numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream(usize);

impl From<cuda_driver_sys::CUstream> for Stream {
    fn from(stream: cuda_driver_sys::CUstream) -> Self {
        Self(stream as usize)
    }
}

/// An event of ours. Plain data: destroying it is the holder's duty.
#[derive(PartialEq, Eq, Debug)]
pub struct Event(usize);

/// Waiting for work of others.
impl Cuda {
    /// This thread's current context, if it has one.
    pub fn current_context(&self) -> Result<Option<Context>, DriverError> {
        let mut context: CUcontext = core::ptr::null_mut();
        call!(self, cuCtxGetCurrent(&raw mut context))?;
        Ok((!context.is_null()).then_some(Context(context as usize)))
    }

    /// A new event that is complete when all work submitted to `stream` so far is.
    pub fn record_event(&self, context: Context, stream: Stream) -> Result<Event, DriverError> {
        const DISABLE_TIMING: u32 = 2;
        self.in_context(context, || {
            let mut event: CUevent = core::ptr::null_mut();
            call!(self, cuEventCreate(&raw mut event, DISABLE_TIMING))?;
            match call!(self, cuEventRecord(event, stream.0 as CUstream)) {
                Ok(()) => Ok(Event(event as usize)),
                Err(error) => {
                    let _ = call!(self, cuEventDestroy(event));
                    Err(error)
                }
            }
        })
    }

    /// Whether an event is complete. A context that is broken or gone has no running work.
    pub fn is_event_complete(&self, context: Context, event: &Event) -> bool {
        const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY.0;
        let asked = self.in_context(context, || call!(self, cuEventQuery(event.0 as CUevent)));
        asked.map_or_else(|error| error.code != NOT_READY, |()| true)
    }

    /// Gives an event back.
    pub fn destroy_event(&self, context: Context, event: Event) {
        let _ = self.in_context(context, || call!(self, cuEventDestroy(event.0 as CUevent)));
    }

    fn in_context<T>(&self, context: Context, body: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        call!(self, cuCtxPushCurrent(context.0 as CUcontext))?;
        let value = body();
        let mut popped: CUcontext = core::ptr::null_mut();
        let mut pop = || call!(self, cuCtxPopCurrent(&raw mut popped));
        // Tried twice: what stays current would be the context of the caller's next call.
        let _ = pop().or_else(|_| pop());
        value
    }
}

/// Counts a release as done when the driver is going down anyway.
fn released(result: Result<(), DriverError>) -> Result<(), DriverError> {
    match result {
        Err(error) if error.is_teardown() => Ok(()),
        other => other,
    }
}

/// A length as the driver takes it.
#[allow(clippy::cast_possible_truncation, reason = "checked just below")]
const fn size(len: u64) -> usize {
    const { assert!(usize::BITS == 64, "CUDA unified addressing needs a 64-bit process") };
    len as usize
}
