//! The answers to UCX's CUDA modules about pools, as `handlers.rs` has them about everything else.
//!
//! cuda_ipc knows fabric pools: it exports the pool and the pointer, imports the pool once and each pointer, and frees pointers. Keys of ours take the place of
//! both exports, and aliases that of both imports.
//!
//! # Safety
//! As in `handlers.rs`: reading and writing through the pointers that UCX passes where the function's contract lets the driver do so, a pool's and a pointer's
//! export data being 64 bytes each; and calling the driver's functions with the signatures that cuda-driver-sys has for their names.

#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the driver's names")]

use core::ffi::{c_ulonglong, c_void};
use core::sync::atomic::Ordering::Relaxed;

use cuda_driver_sys::*;
use cuda_ipc_core::importer::Witness;
use cuda_ipc_core::key::{KEY_LEN, Key};

use crate::handlers::{not_cuda_copy, ours, real, values};
use crate::notes::notes;
use crate::pooled::PoolError;
use crate::{bypass, explain, report};

const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

pub(crate) unsafe extern "C" fn cuMemPoolExportToShareableHandle(
    shareable: *mut c_void,
    pool: CUmemoryPool,
    handle_type: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    not_cuda_copy();
    notes(|notes| notes.pooled.set(None));
    if handle_type == FABRIC
        && !shareable.is_null()
        && let Some(exported) = ours(|state| state.exporting.export_pooled(pool as u64).transpose())
    {
        return match exported {
            Ok((of_pool, allocation)) => {
                notes(|notes| notes.pooled.set(Some(allocation)));
                explain::EXPORTED.fetch_add(1, Relaxed);
                report::debug(&format_args!("exported {:#x}+{:#x} of a pool", allocation.base, allocation.len));
                // SAFETY: not null, and the output of a fabric export is 64 bytes of the caller's.
                unsafe { shareable.cast::<[u8; KEY_LEN]>().write_unaligned(of_pool.encode()) };
                CUresult::CUDA_SUCCESS
            }
            Err(no_ipc) => {
                let found = ours(|_| Witness::default().explain_export(&no_ipc));
                report::warn_found(report::Cause::NotExported, &format_args!("the lane is lost: {no_ipc}"), found.as_ref());
                CUresult::CUDA_ERROR_NOT_SUPPORTED
            }
        };
    }
    real!(cuMemPoolExportToShareableHandle: PFN_cuMemPoolExportToShareableHandle_v11020, shareable, pool, handle_type, flags)
}

pub(crate) unsafe extern "C" fn cuMemPoolExportPointer(data: *mut CUmemPoolPtrExportData_v1, address: CUdeviceptr) -> CUresult {
    not_cuda_copy();
    if let Some(key) = notes(|notes| notes.pooled.take()).filter(|key| key.base == address)
        && !data.is_null()
    {
        // SAFETY: not null, and the output is 64 bytes of the caller's.
        unsafe { data.cast::<[u8; KEY_LEN]>().write_unaligned(key.encode()) };
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemPoolExportPointer: PFN_cuMemPoolExportPointer_v11020, data, address)
}

pub(crate) unsafe extern "C" fn cuMemPoolImportFromShareableHandle(
    pool: *mut CUmemoryPool,
    shareable: *mut c_void,
    handle_type: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    not_cuda_copy();
    if handle_type == FABRIC && !shareable.is_null() && !pool.is_null() {
        // SAFETY: a fabric handle is 64 bytes of the caller's, at any alignment.
        let bytes = unsafe { shareable.cast::<[u8; KEY_LEN]>().read_unaligned() };
        if let Ok(key) = Key::decode(&bytes) {
            if let Some(found) = bypass::look() {
                // Its next calls would bring our alias to the driver.
                report::warn(report::Cause::Bypassed, &format_args!("the lane to process {} is lost: {found}", key.pid));
                return CUresult::CUDA_ERROR_INVALID_VALUE;
            }
            // Bytes of ours are none of the driver's.
            let Some(alias) = ours(|state| state.importing.import_pool(&key)) else { return CUresult::CUDA_ERROR_INVALID_VALUE };
            // SAFETY: not null, so an output of the caller's.
            unsafe { *pool = alias as CUmemoryPool };
            return CUresult::CUDA_SUCCESS;
        }
    }
    real!(cuMemPoolImportFromShareableHandle: PFN_cuMemPoolImportFromShareableHandle_v11020, pool, shareable, handle_type, flags)
}

pub(crate) unsafe extern "C" fn cuMemPoolImportPointer(
    address: *mut CUdeviceptr,
    pool: CUmemoryPool,
    data: *mut CUmemPoolPtrExportData_v1,
) -> CUresult {
    not_cuda_copy();
    if !is_alias(pool) {
        return real!(cuMemPoolImportPointer: PFN_cuMemPoolImportPointer_v11020, address, pool, data);
    }
    if address.is_null() || data.is_null() {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, and a pointer's export data is 64 bytes of the caller's, at any alignment.
    let bytes = unsafe { data.cast::<[u8; KEY_LEN]>().read_unaligned() };
    let Ok(key) = Key::decode(&bytes) else { return CUresult::CUDA_ERROR_INVALID_VALUE };
    match ours(|state| Some(state.importing.import_pointer(pool as u64, &key))) {
        Some(Ok((stand, is_another))) => {
            if is_another {
                explain::IMPORTED.fetch_add(1, Relaxed);
                report::debug(&format_args!("imported {:#x}+{:#x} of a pool of process {}", key.base, key.len, key.pid));
            }
            // SAFETY: not null, so an output of the caller's.
            unsafe { *address = stand };
            CUresult::CUDA_SUCCESS
        }
        Some(Err(error)) => {
            let import = if let PoolError::Cache(error) = &error { error.import() } else { None };
            let found = ours(|_| Witness::default().explain(import?, &key));
            report::warn_found(
                report::Cause::NotImported,
                &format_args!("the lane is lost, and UCX will not ask for this peer again: {error}"),
                found.as_ref(),
            );
            CUresult::CUDA_ERROR_INVALID_VALUE
        }
        None => CUresult::CUDA_ERROR_INVALID_VALUE,
    }
}

pub(crate) unsafe extern "C" fn cuMemPoolSetAccess(pool: CUmemoryPool, descriptors: *const CUmemAccessDesc, count: usize) -> CUresult {
    not_cuda_copy();
    if !is_alias(pool) {
        return real!(cuMemPoolSetAccess: PFN_cuMemPoolSetAccess_v11020, pool, descriptors, count);
    }
    // SAFETY: the caller passes `count` descriptors.
    for descriptor in unsafe { values(descriptors, count) } {
        let device = location_id(&descriptor.location);
        if let Some(Err(error)) = ours(|state| Some(state.importing.pooled().set_access(pool as u64, device))) {
            report::warn(report::Cause::NotImported, &format_args!("no access for device {device}: {error}"));
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
    }
    CUresult::CUDA_SUCCESS
}

pub(crate) unsafe extern "C" fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    not_cuda_copy();
    if is_alias(pool) {
        ours(|state| state.importing.pooled().destroy(pool as u64).then_some(()));
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemPoolDestroy: PFN_cuMemPoolDestroy_v11020, pool)
}

pub(crate) unsafe extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> CUresult {
    not_cuda_copy();
    if ours(|state| state.importing.pooled().free(address).then_some(())).is_some() {
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemFree_v2: PFN_cuMemFree_v3020, address)
}

pub(crate) unsafe extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult {
    not_cuda_copy();
    if ours(|state| state.importing.pooled().free(address).then_some(())).is_some() {
        return CUresult::CUDA_SUCCESS;
    }
    real!(cuMemFreeAsync: PFN_cuMemFreeAsync_v11020, address, stream)
}

/// Whether UCX's pool is one of ours, or was: such a number never reaches the driver.
fn is_alias(pool: CUmemoryPool) -> bool {
    crate::importing::looks_like_alias(pool as u64)
}
