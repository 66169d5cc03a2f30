//! What this process has of the driver's objects, as only the fake driver counts them.
//!
//! # Safety
//! The unsafe here asks the loader for a function of the fake driver and calls it: `int fake_cuda_counters(counters *, size_t)`, which writes at most as many
//! bytes as it is told, all of them integers.

#![allow(unsafe_code)]

use core::ffi::{c_int, c_void};

use serde::{Deserialize, Serialize};

/// Objects that are alive in this process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LiveObjects {
    /// References to handles of chunks.
    pub(crate) handles: u64,
    /// Mappings.
    pub(crate) mappings: u64,
    /// Their bytes.
    pub(crate) mapped_bytes: u64,
    /// Reservations.
    pub(crate) reservations: u64,
    /// Their bytes.
    pub(crate) reserved_bytes: u64,
}

/// What is alive; `None` where the driver is not the fake one and keeps no such book.
pub(crate) fn live_objects() -> Option<LiveObjects> {
    // SAFETY: the name is a C string. The driver is loaded already, so this only finds it again and runs nothing.
    let handle = unsafe { libc::dlopen(cuda_driver_sys::LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: an open library that is never closed, and a C string.
    let symbol = unsafe { libc::dlsym(handle, c"fake_cuda_counters".as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the fake driver's function of this name, whose signature is in the module's chapter.
    let counters = unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut LiveObjects, usize) -> c_int>(symbol) };
    let mut live = LiveObjects::default();
    // SAFETY: a live local of this size, whose fields are the first of the fake driver's.
    let code = unsafe { counters(&raw mut live, size_of::<LiveObjects>()) };
    (code == 0).then_some(live)
}
