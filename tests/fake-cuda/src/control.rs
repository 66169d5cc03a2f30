//! The functions a real driver does not have: `fake_cuda_*`, for tests.
//!
//! A test asks `dlsym` for [`fake_cuda_version`] to learn whether the driver is this one. Counters are of this process unless they say otherwise.
//! Structures grow at the end; callers pass the size they know.
//!
//! # Safety
//! As with the driver's own functions, pointers are the caller's word: valid for the size passed, or null.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::config::Asynchronous;
use crate::layout::{Counters, MAX_DEVICES};
use crate::{call, fault, process, registry};

/// What one process has and has done.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct FakeCudaCounters {
    /// References to VMM handles that were not released.
    pub(crate) handles: u64,
    /// Mappings of device memory: VMM, plain, pool, imports.
    pub(crate) mappings: u64,
    /// Their bytes.
    pub(crate) mapped_bytes: u64,
    /// Reservations by `cuMemAddressReserve`.
    pub(crate) reservations: u64,
    /// Their bytes.
    pub(crate) reserved_bytes: u64,
    /// Exported fds made; how many are open somewhere is in [`FakeCudaDevice`].
    pub(crate) exports_made: u64,
    /// Shareable handles imported.
    pub(crate) imports_made: u64,
    /// Driver calls.
    pub(crate) driver_calls: u64,
    /// Driver calls of forked children of this process.
    pub(crate) calls_after_fork: u64,
    /// Copies and fills begun.
    pub(crate) copies: u64,
    /// Their bytes.
    pub(crate) copied_bytes: u64,
    /// Copies whose memory was unmapped or freed while they ran.
    pub(crate) copies_into_dead_mappings: u64,
    /// Panics caught at the boundary: bugs of the fake.
    pub(crate) internal_errors: u64,
    /// Pools made or imported and not destroyed, or with memory still; without the devices' default ones.
    pub(crate) pools: u64,
    /// Retains of primary contexts that were not released.
    pub(crate) primary_retains: u64,
}

/// What all living processes together have of one physical device.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct FakeCudaDevice {
    /// Physical memory.
    pub(crate) memory: u64,
    /// Bytes of it in use.
    pub(crate) used_bytes: u64,
    /// References to VMM handles.
    pub(crate) handles: u64,
    /// Mappings.
    pub(crate) mappings: u64,
    /// Their bytes.
    pub(crate) mapped_bytes: u64,
    /// Processes attached.
    pub(crate) processes: u64,
    /// Driver calls of forked children, of anyone, ever since the directory was made.
    pub(crate) calls_after_fork: u64,
    /// Chunks that only an exported fd keeps.
    pub(crate) orphans: u64,
}

/// Version of this interface.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_version() -> u32 {
    1
}

/// Adds fault rules as `FAKE_CUDA_FAULT` has them; 0, or -1 if the text is not understood.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_add_fault(rules: *const c_char) -> c_int {
    guarded(|| match text(rules) {
        Some(rules) if fault::add(rules) => 0,
        _ => -1,
    })
}

/// Removes all fault rules; calls are numbered anew.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_clear_faults() {
    guarded(|| {
        fault::clear();
        0
    });
}

/// Sets the hook of the calling thread, see `call.rs`; null takes it away.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_set_hook(hook: Option<call::Hook>) {
    call::set_hook(hook);
}

/// Calls of one function, by symbol or base name; of all functions for null.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_calls(name: *const c_char) -> u64 {
    if name.is_null() { call::total() } else { text(name).map_or(0, call::count) }
}

/// Fills in this process's counters; 0, or -1 before `cuInit`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_counters(out: *mut FakeCudaCounters, size: usize) -> c_int {
    guarded(|| {
        let Some(registry) = registry::get() else { return -1 };
        store(out, size, &FakeCudaCounters::of(registry.counters()))
    })
}

/// Fills in what all processes have of a physical device; 0, or -1 before `cuInit` or without such a device.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_device(gpu: u32, out: *mut FakeCudaDevice, size: usize) -> c_int {
    guarded(|| {
        let gpu = gpu as usize;
        let Some(registry) = registry::get().filter(|registry| gpu < registry.exports.len()) else { return -1 };
        let mut locked = registry.lock();
        locked.sweep();
        let (used_bytes, memory) = (locked.gpus[gpu].used_bytes, locked.memory);
        let processes = locked.processes.iter().filter(|process| process.used != 0).count() as u64;
        let orphans = locked.orphans(gpu);
        drop(locked);
        let sum =
            |of: fn(&Counters) -> &[AtomicU64; MAX_DEVICES]| registry.all_counters().iter().map(|one| of(one)[gpu].load(Relaxed)).sum();
        let device = FakeCudaDevice {
            memory,
            used_bytes,
            handles: sum(|one| &one.handles),
            mappings: sum(|one| &one.mappings),
            mapped_bytes: sum(|one| &one.mapped_bytes),
            processes,
            calls_after_fork: registry.calls_after_fork(),
            orphans,
        };
        store(out, size, &device)
    })
}

/// Sets when asynchronous work completes: -1 on hold, 0 at once, else after so many microseconds. 0, or -1 before `cuInit`.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_set_async(micros: i64) -> c_int {
    guarded(|| {
        let Ok(mut process) = process::lock() else { return -1 };
        process.asynchronous = match u64::try_from(micros) {
            Ok(0) => Asynchronous::Off,
            Ok(micros) => Asynchronous::After(micros),
            Err(_) => Asynchronous::Hold,
        };
        process::notify();
        0
    })
}

/// Lets everything that is queued now complete. 0, or -1 before `cuInit`.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_release_queue() -> c_int {
    guarded(|| {
        let Ok(mut process) = process::lock() else { return -1 };
        process.release_queue();
        0
    })
}

impl FakeCudaCounters {
    fn of(counters: &Counters) -> Self {
        let sum = |per_gpu: &[AtomicU64; MAX_DEVICES]| per_gpu.iter().map(|one| one.load(Relaxed)).sum();
        Self {
            handles: sum(&counters.handles),
            mappings: sum(&counters.mappings),
            mapped_bytes: sum(&counters.mapped_bytes),
            reservations: counters.reservations.load(Relaxed),
            reserved_bytes: counters.reserved_bytes.load(Relaxed),
            exports_made: counters.exports_made.load(Relaxed),
            imports_made: counters.imports_made.load(Relaxed),
            driver_calls: counters.driver_calls.load(Relaxed),
            calls_after_fork: counters.calls_after_fork.load(Relaxed),
            copies: counters.copies.load(Relaxed),
            copied_bytes: counters.copied_bytes.load(Relaxed),
            copies_into_dead_mappings: counters.copies_into_dead_mappings.load(Relaxed),
            internal_errors: counters.internal_errors.load(Relaxed),
            pools: counters.pools.load(Relaxed),
            primary_retains: counters.primary_retains.load(Relaxed),
        }
    }
}

fn guarded(body: impl FnOnce() -> c_int) -> c_int {
    std::panic::catch_unwind(core::panic::AssertUnwindSafe(body)).unwrap_or(-1)
}

fn text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so a C string that lives for the call by the caller's word; the result does not outlive the call.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

fn store<T>(out: *mut T, size: usize, value: &T) -> c_int {
    if out.is_null() {
        return -1;
    }
    let source: *const T = value;
    // SAFETY: `out` has room for `size` bytes by the caller's word, `value` for `size_of::<T>()`; the smaller of both is copied.
    unsafe { core::ptr::copy_nonoverlapping(source.cast::<u8>(), out.cast::<u8>(), size.min(size_of::<T>())) };
    0
}
