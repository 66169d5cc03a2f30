//! The GPU as the commands use it: make memory, move bytes, and the bare calls that the library is measured against.
//!
//! Memory that frees itself is in `gpu/memory.rs`, on top of the calls here. Addresses and handles are plain numbers: a wrong one is an error code of the
//! driver's.
//!
//! # Safety
//! The only unsafe code of the program, with `gpu/trials.rs`, `gpu/live.rs` and `gpu/timed.rs`. It calls the driver's C functions, whose signatures cuda-driver-sys has paired with their names. Every pointer passed
//! is to a live local or slice of the type and length the function is told, and none is kept after the call: copies between host and device are the
//! synchronous ones. The loader is asked for one symbol, whose address is compared with null and never called.

#![allow(unsafe_code)]

mod live;
mod memory;
mod timed;

use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt::{self, Display};
use core::ptr;
use core::time::Duration;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Instant;

use cuda_driver_sys::{
    CUcontext, CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp_v1, CUmemAllocationType,
    CUmemPoolProps_v1, CUmemoryPool, CUresult, CUstream, device_location,
};
use cuda_ipc_core::importer::{ImportError, ImportErrorKind};
use cuda_ipc_core::reason::{Cause, NoIpc};
use cuda_ipc_core::sys::driver::{Cuda, DriverError};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::hex;
pub(crate) use live::{LiveObjects, live_objects};
pub(crate) use memory::{Buffer, Chunks, Pooled};
pub(crate) use timed::{Call, take_calls};
pub(crate) use trials::Trials;

/// Whose driver this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DriverKind {
    /// The driver without a GPU that this project tests with.
    Fake,
    /// NVIDIA's.
    Cuda,
}

impl Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fake => "fake",
            Self::Cuda => "cuda",
        })
    }
}

/// What a report says about the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuFacts {
    pub(crate) driver: DriverKind,
    /// The device's name.
    pub(crate) gpu: String,
    /// Its UUID.
    pub(crate) gpu_uuid: String,
    /// The CUDA version that the driver implements.
    pub(crate) cuda_version: String,
    /// Version of the kernel module; of the real driver only.
    pub(crate) driver_version: Option<String>,
    /// The running kernel.
    pub(crate) kernel: String,
}

/// A device whose primary context is current on the thread that opened it. Not for other threads.
pub(crate) struct Gpu {
    cuda: Cuda,
    ordinal: CUdevice,
    /// What was current on this thread before. (A raw pointer: this type stays on its thread.)
    before: CUcontext,
}

macro_rules! call {
    ($cuda:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: see the module's chapter.
        let result = unsafe { ($cuda.api().$name)($($argument),*) };
        if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(DriverError { call: stringify!($name), code: result.0 }) }
    }};
}

mod trials;

/// Loads the driver and initialises it.
pub(crate) fn open_driver() -> Result<Cuda, Failure> {
    Cuda::open().map_err(|error| {
        Failure::new("opening the CUDA driver", error)
            .note("This command needs an NVIDIA GPU and its driver.")
            .note("Without one, `cargo xtask demo` in the source tree runs the demo on the fake driver, which it builds.")
    })
}

impl Gpu {
    /// Opens the device with this ordinal.
    pub(crate) fn open(ordinal: u32) -> Result<Self, Failure> {
        let cuda = open_driver()?;
        let count = cuda.device_count().map_err(at(&cuda, "counting devices"))?;
        match CUdevice::try_from(ordinal) {
            Ok(ordinal) if ordinal < count => Self::with(cuda, ordinal),
            _ => Err(Failure::new("choosing the device", format!("there is no device {ordinal}, the driver has {count}"))),
        }
    }

    /// Opens the device with this UUID: an ordinal means nothing in another process.
    pub(crate) fn with_uuid(uuid: [u8; 16]) -> Result<Self, Failure> {
        let cuda = open_driver()?;
        let count = cuda.device_count().map_err(at(&cuda, "counting devices"))?;
        for ordinal in 0..count {
            if cuda.device_uuid(ordinal).map_err(at(&cuda, "asking for a device's UUID"))? == uuid {
                return Self::with(cuda, ordinal);
            }
        }
        Err(Failure::new("finding the exporter's GPU", format!("GPU {} is not visible to this process", hex::uuid(&uuid))))
    }

    fn with(cuda: Cuda, ordinal: CUdevice) -> Result<Self, Failure> {
        let (mut context, mut before): (CUcontext, CUcontext) = (ptr::null_mut(), ptr::null_mut());
        call!(cuda, cuCtxGetCurrent(&raw mut before)).map_err(at(&cuda, "asking for the current context"))?;
        call!(cuda, cuDevicePrimaryCtxRetain(&raw mut context, ordinal)).map_err(at(&cuda, "retaining the primary context"))?;
        let gpu = Self { cuda, ordinal, before };
        call!(cuda, cuCtxSetCurrent(context)).map_err(at(&cuda, "making the context current"))?;
        Ok(gpu)
    }

    /// The driver, for the library.
    pub(crate) const fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    pub(crate) const fn ordinal(&self) -> CUdevice {
        self.ordinal
    }

    /// The same device once more, by a driver whose calls of export and import are led past a clock; see [`take_calls`].
    pub(crate) fn timed(&self) -> Result<Self, Failure> {
        let cuda = Cuda::with(timed::timed(self.cuda.api())).map_err(Failure::at("initialising the driver behind a clock"))?;
        Self::with(cuda, self.ordinal)
    }

    /// Makes the failure of `step` from an error of the driver's or of the library's, with the code's name.
    pub(crate) fn at<E: Display + MayHaveCode>(&self, step: &str) -> impl Fn(E) -> Failure {
        at(&self.cuda, step)
    }

    pub(crate) fn facts(&self) -> Result<GpuFacts, Failure> {
        let version = self.cuda.version().map_err(self.at("asking for the driver's version"))?;
        let uuid = self.cuda.device_uuid(self.ordinal).map_err(self.at("asking for the device's UUID"))?;
        let driver = driver_kind();
        let line = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        Ok(GpuFacts {
            driver,
            gpu: self.name().map_err(self.at("asking for the device's name"))?,
            gpu_uuid: hex::uuid(&uuid),
            cuda_version: format!("{}.{}", version / 1000, version % 1000 / 10),
            driver_version: line("/sys/module/nvidia/version").filter(|_| driver == DriverKind::Cuda),
            kernel: line("/proc/sys/kernel/osrelease").unwrap_or_default(),
        })
    }

    fn name(&self) -> Result<String, DriverError> {
        let mut name = [0_u8; 128];
        call!(self.cuda, cuDeviceGetName(name.as_mut_ptr().cast(), 128, self.ordinal))?;
        Ok(CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default())
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(u64, u64), DriverError> {
        let (mut free, mut total) = (0, 0);
        call!(self.cuda, cuMemGetInfo(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    /// Copies `bytes` to the device; they are there when it returns, for other processes too.
    pub(crate) fn upload(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError> {
        call!(self.cuda, cuMemcpyHtoD(address, bytes.as_ptr().cast(), bytes.len()))?;
        // From pageable memory that call returns once the bytes are staged. Within this process everything waits for the rest; another process does not.
        call!(self.cuda, cuStreamSynchronize(ptr::null_mut()))
    }

    /// Fills `bytes` from the device.
    pub(crate) fn download(&self, bytes: &mut [u8], address: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemcpyDtoH(bytes.as_mut_ptr().cast(), address, bytes.len()))
    }

    /// How long `count` copies of `len` bytes to `to` take, from the first call until all are complete, by this machine's clock.
    ///
    /// Where `to` is shorter, each copy goes in parts, each to the beginning of `to`.
    pub(crate) fn time_copies(&self, to: &Buffer<'_>, from: u64, len: u64, count: u32) -> Result<Duration, DriverError> {
        let mut stream: CUstream = ptr::null_mut();
        /// `CU_STREAM_NON_BLOCKING`.
        const NON_BLOCKING: u32 = 1;
        call!(self.cuda, cuStreamCreate(&raw mut stream, NON_BLOCKING))?;
        let start = Instant::now();
        let copies = (0..count).try_for_each(|_| {
            let mut done = 0;
            while done < len {
                let part = to.len().min(len - done);
                call!(self.cuda, cuMemcpyDtoDAsync(to.address(), from + done, size(part), stream))?;
                done += part;
            }
            Ok(())
        });
        // Also after an error: what was queued must be complete before the memory may go.
        let complete = call!(self.cuda, cuStreamSynchronize(stream));
        let elapsed = start.elapsed();
        let destroyed = call!(self.cuda, cuStreamDestroy(stream));
        copies.and(complete).and(destroyed).map(|()| elapsed)
    }

    // The bare calls.

    pub(crate) fn create(&self, len: u64) -> Result<u64, DriverError> {
        // SAFETY: a C struct of integers and a pointer, for which zero is a value (cuMemCreate).
        let mut properties: CUmemAllocationProp_v1 = unsafe { core::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = POSIX_FD;
        properties.location = device_location(self.ordinal);
        let mut handle = 0;
        call!(self.cuda, cuMemCreate(&raw mut handle, size(len), &raw const properties, 0)).map(|()| handle)
    }

    pub(crate) fn reserve(&self, len: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        call!(self.cuda, cuMemAddressReserve(&raw mut address, size(len), 0, 0, 0)).map(|()| address)
    }

    pub(crate) fn free_reservation(&self, address: u64, len: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemAddressFree(address, size(len)))
    }

    pub(crate) fn map(&self, address: u64, len: u64, handle: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemMap(address, size(len), 0, handle, 0))
    }

    pub(crate) fn unmap(&self, address: u64, len: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemUnmap(address, size(len)))
    }

    pub(crate) fn set_access(&self, address: u64, len: u64, writable: bool) -> Result<(), DriverError> {
        let flags =
            if writable { CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE } else { CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ };
        let access = CUmemAccessDesc { location: device_location(self.ordinal), flags };
        call!(self.cuda, cuMemSetAccess(address, size(len), &raw const access, 1))
    }

    pub(crate) fn retain(&self, address: u64) -> Result<u64, DriverError> {
        let mut handle = 0;
        call!(self.cuda, cuMemRetainAllocationHandle(&raw mut handle, address as *mut c_void)).map(|()| handle)
    }

    pub(crate) fn release(&self, handle: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemRelease(handle))
    }

    pub(crate) fn export_fd(&self, handle: u64) -> Result<OwnedFd, DriverError> {
        let mut fd: c_int = -1;
        call!(self.cuda, cuMemExportToShareableHandle((&raw mut fd).cast(), handle, POSIX_FD, 0))?;
        // SAFETY: the driver has just opened this fd for the caller; nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(crate) fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<u64, DriverError> {
        let mut handle = 0;
        // The number travels in the pointer argument (cuMemImportFromShareableHandle).
        let number = fd.as_raw_fd() as usize as *mut c_void;
        call!(self.cuda, cuMemImportFromShareableHandle(&raw mut handle, number, POSIX_FD)).map(|()| handle)
    }

    /// A new pool of this device, of which POSIX fds can be exported.
    fn create_pool(&self) -> Result<CUmemoryPool, DriverError> {
        // SAFETY: a C struct of integers and a pointer, for which zero is a value (cuMemPoolCreate).
        let mut properties: CUmemPoolProps_v1 = unsafe { core::mem::zeroed() };
        properties.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.handleTypes = POSIX_FD;
        properties.location = device_location(self.ordinal);
        let mut pool = ptr::null_mut();
        call!(self.cuda, cuMemPoolCreate(&raw mut pool, &raw const properties)).map(|()| pool)
    }

    /// Memory of the pool, there for work of any stream when this returns.
    fn alloc_from(&self, pool: CUmemoryPool, len: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        call!(self.cuda, cuMemAllocFromPoolAsync(&raw mut address, size(len), pool, ptr::null_mut()))?;
        match call!(self.cuda, cuStreamSynchronize(ptr::null_mut())) {
            Ok(()) => Ok(address),
            Err(error) => {
                let _ = self.free_pooled(address);
                Err(error)
            }
        }
    }

    /// Gives it back to its pool. Work that uses it must be complete.
    fn free_pooled(&self, address: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemFreeAsync(address, ptr::null_mut()))?;
        call!(self.cuda, cuStreamSynchronize(ptr::null_mut()))
    }

    fn destroy_pool(&self, pool: CUmemoryPool) -> Result<(), DriverError> {
        call!(self.cuda, cuMemPoolDestroy(pool))
    }

    fn alloc(&self, len: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        call!(self.cuda, cuMemAlloc(&raw mut address, size(len))).map(|()| address)
    }

    fn free(&self, address: u64) -> Result<(), DriverError> {
        call!(self.cuda, cuMemFree(address))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = call!(self.cuda, cuCtxSetCurrent(self.before));
        let _ = call!(self.cuda, cuDevicePrimaryCtxRelease(self.ordinal));
    }
}

const POSIX_FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A length as the driver takes it.
#[allow(clippy::cast_possible_truncation, reason = "checked just below")]
const fn size(len: u64) -> usize {
    const { assert!(usize::BITS == 64, "CUDA unified addressing needs a 64-bit process") };
    len as usize
}

/// Whether the loaded driver has the fake one's own functions, which no other driver has.
fn driver_kind() -> DriverKind {
    // SAFETY: the name is a C string. The driver is loaded already, so this only finds it again and runs nothing.
    let handle = unsafe { libc::dlopen(cuda_driver_sys::LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return DriverKind::Cuda;
    }
    // SAFETY: an open library that is never closed, and a C string.
    let symbol = unsafe { libc::dlsym(handle, c"fake_cuda_version".as_ptr()) };
    if symbol.is_null() { DriverKind::Cuda } else { DriverKind::Fake }
}

/// An error that a driver call may be behind.
pub(crate) trait MayHaveCode {
    /// Its `CUresult`.
    fn code(&self) -> Option<u32>;
}

impl MayHaveCode for DriverError {
    fn code(&self) -> Option<u32> {
        Some(self.code)
    }
}

impl MayHaveCode for ImportError {
    fn code(&self) -> Option<u32> {
        if let ImportErrorKind::Driver(error) = self.kind { Some(error.code) } else { None }
    }
}

impl MayHaveCode for NoIpc {
    fn code(&self) -> Option<u32> {
        if let Cause::Driver { code, .. } = self.cause { Some(code) } else { None }
    }
}

fn at<E: Display + MayHaveCode>(cuda: &Cuda, step: &str) -> impl Fn(E) -> Failure {
    let (cuda, step) = (*cuda, step.to_owned());
    move |error| match error.code().and_then(|code| code_name(&cuda, code)) {
        Some(name) => Failure::new(step.as_str(), format!("{error} ({name})")),
        None => Failure::new(step.as_str(), error),
    }
}

/// The driver's name for a result code.
fn code_name(cuda: &Cuda, code: u32) -> Option<String> {
    let mut name: *const c_char = ptr::null();
    call!(cuda, cuGetErrorName(CUresult(code), &raw mut name)).ok()?;
    // SAFETY: on success the driver gives a C string that lives as long as the driver (cuGetErrorName); null is handled.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}
