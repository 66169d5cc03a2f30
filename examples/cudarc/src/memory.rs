//! Memory of `cuMemCreate` that cudarc can use: chunks side by side in one reservation, exportable as POSIX fds.

use core::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};

/// A reservation with chunks in it.
pub(crate) struct Chunks {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    reserved: usize,
    /// What is mapped, from the address on.
    len: usize,
}

impl Chunks {
    /// Reserves room for `count` chunks of `chunk` bytes, a multiple of the granularity (2 MiB), and maps them one behind the other.
    pub(crate) fn allocate(context: &Arc<CudaContext>, count: usize, chunk: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.cu_device() };
        // SAFETY: a structure of integers, pointers and enums that have a 0.
        let mut properties: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        properties.location = location;
        let len = count * chunk;
        let mut address = 0;
        // SAFETY: the output is a live local.
        unsafe { sys::cuMemAddressReserve(&raw mut address, len, 0, 0, 0) }.result()?;
        // From here on dropping it gives back what there is.
        let mut memory = Self { context: context.clone(), address, reserved: len, len: 0 };
        for start in (0..len).step_by(chunk) {
            let mut handle = 0;
            // SAFETY: output and properties are live locals.
            unsafe { sys::cuMemCreate(&raw mut handle, chunk, &raw const properties, 0) }.result()?;
            // SAFETY: the range lies in our reservation, and nothing is mapped there.
            let mapped = unsafe { sys::cuMemMap(address + start as u64, chunk, 0, handle, 0) }.result();
            // SAFETY: the handle is ours and not used again; a mapping keeps the memory.
            unsafe { sys::cuMemRelease(handle) }.result()?;
            mapped?;
            memory.len += chunk;
        }
        let access = sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: all of the range is mapped, by us.
        unsafe { sys::cuMemSetAccess(address, len, &raw const access, 1) }.result()?;
        Ok(memory)
    }

    /// First address.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Lets `body` use the memory as a slice of cudarc's.
    pub(crate) fn as_slice<T>(&self, body: impl FnOnce(&Arc<CudaStream>, &mut CudaSlice<u8>) -> T) -> T {
        borrowed(&self.context.default_stream(), self.address, self.len, body)
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        // An example has nobody to tell.
        let _ = self.context.bind_to_thread();
        let _ = self.context.synchronize();
        if self.len != 0 {
            // SAFETY: mapped by us, and no work uses it any more.
            let _ = unsafe { sys::cuMemUnmap(self.address, self.len) };
        }
        // SAFETY: reserved by us in this length, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.reserved) };
    }
}

/// Lets `body` use `len` bytes at `address`, memory that cudarc did not allocate, as a slice of its own.
///
/// The address is that of a lease or of [`Chunks`], which the caller holds for longer.
pub(crate) fn borrowed<T>(
    stream: &Arc<CudaStream>,
    address: u64,
    len: usize,
    body: impl FnOnce(&Arc<CudaStream>, &mut CudaSlice<u8>) -> T,
) -> T {
    // SAFETY: the caller's memory is mapped for `len` bytes while it holds it. Below the slice is leaked, so cudarc never frees what is not its own.
    let mut slice = unsafe { stream.upgrade_device_ptr::<u8>(address, len) };
    let result = body(stream, &mut slice);
    let _ = slice.leak();
    result
}
