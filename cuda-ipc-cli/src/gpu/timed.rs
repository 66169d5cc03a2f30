//! A driver whose calls of export and import are led past a clock: the loaded table, with these functions in the place of the driver's.
//!
//! # Safety
//! Each function here has the signature of the table's field it takes the place of (the table would not take another), and passes its arguments on to the
//! function that was there.

#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the driver's names")]

use core::cell::Cell;
use core::ffi::{c_uint, c_void};
use std::sync::OnceLock;
use std::time::Instant;

use cuda_driver_sys::{
    CUdeviceptr, CUmemAccessDesc, CUmemAllocationHandleType, CUmemGenericAllocationHandle, CUpointer_attribute, CUresult,
    CUstreamCaptureMode, Driver,
};

use crate::bench::samples::micros;

/// All calls of one function since they were taken last, on this thread.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) us: f64,
}

static LOADED: OnceLock<Driver> = OnceLock::new();

macro_rules! timed {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        #[derive(Clone, Copy)]
        #[allow(non_camel_case_types, clippy::enum_variant_names, reason = "the driver's names")]
        enum Function { $($name),* }

        const NAMES: &[&str] = &[$(stringify!($name)),*];

        thread_local! {
            static TAKEN: [Cell<(u64, f64)>; NAMES.len()] = const { [const { Cell::new((0, 0.0)) }; NAMES.len()] };
        }

        mod functions {
            use super::*;
            $(
                pub(super) unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
                    // Only the timed table leads here, and it is made from this one.
                    let Some(loaded) = LOADED.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
                    let start = Instant::now();
                    // SAFETY: see the module's chapter.
                    let result = unsafe { (loaded.$name)($($argument),*) };
                    count(Function::$name, micros(start.elapsed()));
                    result
                }
            )*
        }

        /// The same driver, timed. All that is ever timed in a process is one driver.
        pub(super) fn timed(driver: &Driver) -> Driver {
            let loaded = *LOADED.get_or_init(|| *driver);
            Driver { $($name: functions::$name,)* ..loaded }
        }
    };
}

timed! {
    cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
    cuPointerGetAttributes(count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void, address: CUdeviceptr);
    cuMemGetAddressRange(base: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr);
    cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
    cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: u64);
    cuMemAddressReserve(address: *mut CUdeviceptr, size: usize, alignment: usize, wish: CUdeviceptr, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: CUmemAllocationHandleType);
    cuMemMap(address: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemSetAccess(address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
}

fn count(function: Function, us: f64) {
    TAKEN.with(|taken| {
        if let Some(cell) = taken.get(function as usize) {
            let (number, before) = cell.get();
            cell.set((number + 1, before + us));
        }
    });
}

/// The calls of this thread since this was asked last.
pub(crate) fn take_calls() -> Vec<Call> {
    TAKEN.with(|taken| {
        let calls = taken.iter().zip(NAMES).map(|(cell, &name)| {
            let (number, us) = cell.take();
            Call { name, number, us }
        });
        calls.filter(|call| call.number != 0).collect()
    })
}
