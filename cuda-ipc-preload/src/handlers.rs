//! The answers to UCX's CUDA modules, one function for each interposed name that has an answer of ours.
//!
//! Each asks the exporting or importing side; where that has nothing to say, or anything goes wrong in it, the driver's own function is called with the caller's
//! arguments. No panic leaves a handler, and no lock of ours is held while the driver runs. The file is long because there are many names; each function is short.
//!
//! # Safety
//! The unsafe here is reading and writing through the pointers that UCX passes, as the driver itself would: a handler only touches what the function's contract
//! lets the driver touch, plus the key bytes behind a handle pointer (64, the size of a fabric handle) and, for cuDeviceGetUuid, bytes of the caller's
//! own buffer in front of the output, see there. And calling the driver's functions with the signatures that cuda-driver-sys has for their names.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation, reason = "lengths of this 64-bit process")]
#![allow(non_snake_case, reason = "the driver's names")]

use core::ffi::{c_int, c_ulonglong, c_void};
use core::panic::AssertUnwindSafe;
use core::sync::atomic::Ordering::Relaxed;
use std::panic::catch_unwind;

use cuda_driver_sys::*;
use cuda_ipc_core::importer::Witness;
use cuda_ipc_core::key::{KEY_LEN, Key};

use crate::copy_handlers::*;
use crate::exporting::{FABRIC, Seen};
use crate::names::{COUNT, Name};
use crate::notes::{RangeNote, notes};
use crate::pool_handlers::*;
use crate::state::{State, state};
use crate::uuid;
use crate::{bypass, explain, report};

/// A handler's address.
#[derive(Clone, Copy)]
pub(crate) struct Handler(pub(crate) *const c_void);

// SAFETY: the address of a function.
unsafe impl Sync for Handler {}

macro_rules! handlers {
    ($($name:ident)*) => {
        /// The handlers by number.
        pub(crate) static HANDLERS: [Option<Handler>; COUNT] = {
            let mut table = [None; COUNT];
            $(table[Name::$name as usize] = Some(Handler($name as *const c_void));)*
            table
        };
    };
}

handlers! {
    cuMemGetAddressRange_v2 cuPointerGetAttribute cuPointerGetAttributes cuMemRetainAllocationHandle cuMemGetAllocationPropertiesFromHandle
    cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemSetAccess
    cuMemUnmap cuMemFree_v2 cuMemFreeAsync cuMemPoolExportToShareableHandle cuMemPoolExportPointer cuMemPoolImportFromShareableHandle
    cuMemPoolImportPointer cuMemPoolSetAccess cuMemPoolDestroy cuDeviceGetUuid cuDeviceGetUuid_v2 cuStreamDestroy_v2 cuMemcpyDtoDAsync_v2
    cuMemcpyAsync cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
}

/// Calls the driver's own function; `CUDA_ERROR_NOT_FOUND` if it has none.
macro_rules! real {
    ($name:ident: $pfn:ty, $($argument:expr),*) => {{
        // SAFETY: the address is the driver's function of this name, whose signature is the typedef's.
        let function = unsafe { <$pfn as Nullable>::from_address(crate::route::real(crate::names::Name::$name)) };
        match function {
            // SAFETY: the caller's own arguments.
            Some(function) => unsafe { function($($argument),*) },
            None => CUresult::CUDA_ERROR_NOT_FOUND,
        }
    }};
}
pub(crate) use real;

/// What our side has to say; `None` if nothing, or if it panicked.
pub(crate) fn ours<T>(answer: impl FnOnce(&'static State) -> Option<T>) -> Option<T> {
    catch_unwind(AssertUnwindSafe(|| state().and_then(answer))).ok().flatten()
}

/// Clears the mark that cuda_copy leaves: any call but the two that it makes ends it.
pub(crate) fn not_cuda_copy() {
    notes(|notes| notes.properties.set(None));
}

unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr) -> CUresult {
    let for_cuda_copy = notes(|notes| {
        notes.range.set(None);
        notes.properties.take() == Some(address)
    });
    let seen = if for_cuda_copy { None } else { ours(|state| state.exporting.look(address)) };
    let Some(Seen::Reservation { base: start, len }) = seen else {
        let result = real!(cuMemGetAddressRange_v2: PFN_cuMemGetAddressRange_v3020, base, size, address);
        if let Some(Seen::Pooled { pool, buffer_id }) = seen
            && result == CUresult::CUDA_SUCCESS
            && !base.is_null()
            && !size.is_null()
        {
            // SAFETY: not null, so an output of the caller's that the driver has just written.
            let base = unsafe { *base };
            // SAFETY: as above.
            let len = unsafe { *size } as u64;
            notes(|notes| notes.range.set(Some(RangeNote { address, base, len, pool: Some((pool, buffer_id)) })));
        }
        return result;
    };
    if !base.is_null() {
        // SAFETY: not null, so an output of the caller's.
        unsafe { *base = start };
    }
    if !size.is_null() {
        // SAFETY: as above.
        unsafe { *size = len as usize };
    }
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr) -> CUresult {
    not_cuda_copy();
    if attribute == CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID
        && !data.is_null()
        && let Some(id) = ours(|state| state.exporting.buffer_id(address))
    {
        // SAFETY: the attribute's value is 64 bits wide, and the caller's output is not null; it may be unaligned inside a packed key.
        unsafe { data.cast::<c_ulonglong>().write_unaligned(id) };
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuPointerGetAttribute: PFN_cuPointerGetAttribute_v4000, data, attribute, address)
}

unsafe extern "C" fn cuPointerGetAttributes(
    count: core::ffi::c_uint,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    address: CUdeviceptr,
) -> CUresult {
    not_cuda_copy();
    let result = real!(cuPointerGetAttributes: PFN_cuPointerGetAttributes_v7000, count, attributes, data, address);
    if result != CUresult::CUDA_SUCCESS || notes(|notes| notes.range.get()).is_none_or(|note| note.address != address) {
        return result;
    }
    // SAFETY: the driver has just read `count` attributes from there.
    let attributes = unsafe { values(attributes, count as usize) };
    // SAFETY: and as many outputs from there.
    let data = unsafe { values(data, count as usize) };
    for (attribute, &value) in attributes.iter().zip(data) {
        if *attribute == CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES {
            let value = value.cast::<u8>();
            // SAFETY: the driver has just written 8 bytes there. Only the low byte is changed: UCX 1.18 passes an int.
            unsafe { *value |= FABRIC as u8 };
        }
    }
    result
}

unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut c_ulonglong, address: *mut c_void) -> CUresult {
    not_cuda_copy();
    let result = real!(cuMemRetainAllocationHandle: PFN_cuMemRetainAllocationHandle_v11000, handle, address);
    if result == CUresult::CUDA_SUCCESS && !handle.is_null() {
        // SAFETY: the driver has just written it.
        let retained = unsafe { *handle };
        notes(|notes| notes.retained.set(Some((retained, address as u64))));
    }
    result
}

unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(properties: *mut CUmemAllocationProp_v1, handle: c_ulonglong) -> CUresult {
    let address = notes(|notes| notes.retained.get()).filter(|(retained, _)| *retained == handle).map(|(_, address)| address);
    notes(|notes| notes.properties.set(address));
    real!(cuMemGetAllocationPropertiesFromHandle: PFN_cuMemGetAllocationPropertiesFromHandle_v10020, properties, handle)
}

unsafe extern "C" fn cuMemExportToShareableHandle(
    shareable: *mut c_void,
    handle: c_ulonglong,
    handle_type: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    not_cuda_copy();
    let retained = notes(|notes| notes.retained.get()).filter(|(retained, _)| *retained == handle);
    if handle_type == CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC
        && let Some((_, address)) = retained
        && let Some(exported) = ours(|state| state.exporting.export(address).transpose())
    {
        return match exported {
            Ok(key) => {
                explain::EXPORTED.fetch_add(1, Relaxed);
                report::debug(&format_args!("exported {:#x}+{:#x}, asked for {address:#x}", key.base, key.len));
                // SAFETY: the output of a fabric export is 64 bytes of the caller's.
                unsafe { shareable.cast::<[u8; KEY_LEN]>().write_unaligned(key.encode()) };
                CUresult::CUDA_SUCCESS
            }
            Err(no_ipc) => {
                let found = ours(|_| Witness::default().explain_export(&no_ipc));
                report::warn_found(report::Cause::NotExported, &format_args!("the lane is lost: {no_ipc}"), found.as_ref());
                CUresult::CUDA_ERROR_NOT_SUPPORTED
            }
        };
    }
    real!(cuMemExportToShareableHandle: PFN_cuMemExportToShareableHandle_v10020, shareable, handle, handle_type, flags)
}

unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut c_ulonglong,
    shareable: *mut c_void,
    handle_type: CUmemAllocationHandleType,
) -> CUresult {
    not_cuda_copy();
    if handle_type == CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC && !shareable.is_null() && !handle.is_null() {
        // SAFETY: a fabric handle is 64 bytes of the caller's, at any alignment.
        let bytes = unsafe { shareable.cast::<[u8; KEY_LEN]>().read_unaligned() };
        if let Ok(key) = Key::decode(&bytes)
            && let Some(found) = bypass::look()
        {
            // Its next calls would bring our handle to the driver.
            report::warn(report::Cause::Bypassed, &format_args!("the lane to process {} is lost: {found}", key.pid));
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        if let Ok(key) = Key::decode(&bytes)
            && let Some(imported) = ours(|state| Some(state.importing.import(&key)))
        {
            return match imported {
                Ok(alias) => {
                    explain::IMPORTED.fetch_add(1, Relaxed);
                    report::debug(&format_args!("imported {:#x}+{:#x} of process {}", key.base, key.len, key.pid));
                    // SAFETY: not null, so an output of the caller's.
                    unsafe { *handle = alias };
                    CUresult::CUDA_SUCCESS
                }
                Err(error) => {
                    let found = ours(|_| Witness::default().explain(error.import()?, &key));
                    report::warn_found(
                        report::Cause::NotImported,
                        &format_args!("the lane is lost, and UCX will not ask for this peer again: {error}"),
                        found.as_ref(),
                    );
                    CUresult::CUDA_ERROR_INVALID_VALUE
                }
            };
        }
    }
    real!(cuMemImportFromShareableHandle: PFN_cuMemImportFromShareableHandle_v10020, handle, shareable, handle_type)
}

unsafe extern "C" fn cuMemRelease(handle: c_ulonglong) -> CUresult {
    // Does not end cuda_copy's mark: it releases between the two calls that the mark is for.
    if ours(|state| state.importing.release(handle).then_some(())).is_some() {
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemRelease: PFN_cuMemRelease_v10020, handle)
}

unsafe extern "C" fn cuMemAddressReserve(
    address: *mut CUdeviceptr,
    size: usize,
    alignment: usize,
    wished: CUdeviceptr,
    flags: c_ulonglong,
) -> CUresult {
    not_cuda_copy();
    if !address.is_null()
        && let Some(reserved) = ours(|state| state.importing.reserve(size as u64))
    {
        return match reserved {
            Ok(base) => {
                // SAFETY: not null, so an output of the caller's.
                unsafe { *address = base };
                CUresult::CUDA_SUCCESS
            }
            Err(error) => {
                report::warn(report::Cause::NotImported, &format_args!("the lane is lost: no address for what was imported: {error}"));
                CUresult::CUDA_ERROR_INVALID_VALUE
            }
        };
    }
    real!(cuMemAddressReserve: PFN_cuMemAddressReserve_v10020, address, size, alignment, wished, flags)
}

unsafe extern "C" fn cuMemAddressFree(address: CUdeviceptr, size: usize) -> CUresult {
    not_cuda_copy();
    if ours(|state| state.importing.free(address).then_some(())).is_some() {
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemAddressFree: PFN_cuMemAddressFree_v10020, address, size)
}

unsafe extern "C" fn cuMemMap(address: CUdeviceptr, size: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong) -> CUresult {
    not_cuda_copy();
    if ours(|state| state.importing.is_alias(handle).then_some(())).is_some() {
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemMap: PFN_cuMemMap_v10020, address, size, offset, handle, flags)
}

unsafe extern "C" fn cuMemSetAccess(address: CUdeviceptr, size: usize, descriptors: *const CUmemAccessDesc, count: usize) -> CUresult {
    not_cuda_copy();
    if ours(|state| state.importing.owns(address).then_some(())).is_some() {
        // SAFETY: the caller passes `count` descriptors.
        let descriptors = unsafe { values(descriptors, count) };
        for descriptor in descriptors {
            let device = location_id(&descriptor.location);
            let added = ours(|state| Some(state.importing.add_device(address, device)));
            if let Some(Err(error)) = added {
                report::warn(report::Cause::NotImported, &format_args!("no access for device {device}: {error}"));
                return CUresult::CUDA_ERROR_INVALID_VALUE;
            }
        }
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemSetAccess: PFN_cuMemSetAccess_v10020, address, size, descriptors, count)
}

unsafe extern "C" fn cuMemUnmap(address: CUdeviceptr, size: usize) -> CUresult {
    not_cuda_copy();
    // The window unmaps what is dead by itself, and nothing that another region of UCX still uses.
    if ours(|state| state.importing.owns(address).then_some(())).is_some() {
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemUnmap: PFN_cuMemUnmap_v10020, address, size)
}

unsafe extern "C" fn cuDeviceGetUuid(out: *mut CUuuid, device: c_int) -> CUresult {
    not_cuda_copy();
    let result = real!(cuDeviceGetUuid: PFN_cuDeviceGetUuid_v9020, out, device);
    after_uuid(out, result)
}

unsafe extern "C" fn cuDeviceGetUuid_v2(out: *mut CUuuid, device: c_int) -> CUresult {
    not_cuda_copy();
    let result = real!(cuDeviceGetUuid_v2: PFN_cuDeviceGetUuid_v11040, out, device);
    after_uuid(out, result)
}

/// Makes the uuid that stands in a key of ours one of its process, so that UCX's verdict on a peer is on that peer alone, and takes note that it is packed.
fn after_uuid(out: *mut CUuuid, result: CUresult) -> CUresult {
    if result == CUresult::CUDA_SUCCESS && !out.is_null() {
        ours(|state| {
            let nonce = state.exporting.nonce()?;
            let key = uuid::mix_in_key(out, nonce)?;
            state.exporting.packed(&key);
            Some(())
        });
    }
    result
}

unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    not_cuda_copy();
    ours(|state| {
        state.importing.stream_destroyed(stream.into());
        Some(())
    });
    real!(cuStreamDestroy_v2: PFN_cuStreamDestroy_v4000, stream)
}

/// The values of a caller's array; none if there is no array.
///
/// # Safety
/// `array` is to `count` values that stay for `'a`, or is null.
pub(crate) unsafe fn values<'a, T>(array: *const T, count: usize) -> &'a [T] {
    if array.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: by the function's contract.
    unsafe { core::slice::from_raw_parts(array, count) }
}
