//! The control functions of the fake driver: faults, counters, asynchrony. `control.rs` and `fault.rs` of the fake say what they mean.

use core::ffi::{CStr, c_char, c_int};
use std::ffi::CString;

use cuda_driver_sys::Nullable;

/// Counters of one process, as the fake driver's `control.rs` describes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakeCounters {
    /// VMM handle references not released.
    pub handles: u64,
    /// Mappings of device memory.
    pub mappings: u64,
    /// Their bytes.
    pub mapped_bytes: u64,
    /// Reservations by `cuMemAddressReserve`.
    pub reservations: u64,
    /// Their bytes.
    pub reserved_bytes: u64,
    /// Exported fds made.
    pub exports_made: u64,
    /// Shareable handles imported.
    pub imports_made: u64,
    /// Driver calls.
    pub driver_calls: u64,
    /// Driver calls of forked children of this process.
    pub calls_after_fork: u64,
    /// Copies and fills begun.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Copies whose memory was unmapped or freed while they ran.
    pub copies_into_dead_mappings: u64,
    /// Bugs of the fake.
    pub internal_errors: u64,
    /// Pools made or imported and not gone; without the devices' default ones.
    pub pools: u64,
    /// Retains of primary contexts that were not released.
    pub primary_retains: u64,
}

/// What all processes have of one physical device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakeDevice {
    /// Physical memory in bytes.
    pub memory_bytes: u64,
    /// In use.
    pub used_bytes: u64,
    /// VMM handle references.
    pub handles: u64,
    /// Mappings.
    pub mappings: u64,
    /// Their bytes.
    pub mapped_bytes: u64,
    /// Processes attached.
    pub processes: u64,
    /// Driver calls of forked children, of anyone.
    pub calls_after_fork: u64,
    /// Chunks that only an exported fd keeps.
    pub orphans: u64,
}

/// The control functions of the fake driver that this process has loaded.
#[derive(Clone, Copy)]
pub struct Fake {
    add_fault: unsafe extern "C" fn(*const c_char) -> c_int,
    clear_faults: extern "C" fn(),
    calls: unsafe extern "C" fn(*const c_char) -> u64,
    counters: unsafe extern "C" fn(*mut FakeCounters, usize) -> c_int,
    device: unsafe extern "C" fn(u32, *mut FakeDevice, usize) -> c_int,
    set_async: extern "C" fn(i64) -> c_int,
    release_queue: extern "C" fn() -> c_int,
    set_hook: extern "C" fn(Option<FakeHook>),
}

/// Asked before each driver call of a thread, with the function's base name and its length, and told after it. `call.rs` of the fake has the rules.
pub type FakeHook = extern "C" fn(name: *const u8, len: usize, before: c_int) -> c_int;

impl Fake {
    /// The fake driver's control functions; `None` where the driver is a real one, or there is none.
    pub fn find() -> Option<Self> {
        // SAFETY: a C string; loading the driver is what every test here does anyway. Never closed.
        let library = unsafe { libc::dlopen(cuda_driver_sys::LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return None;
        }
        Some(Self {
            add_fault: symbol(library, c"fake_cuda_add_fault")?,
            clear_faults: symbol(library, c"fake_cuda_clear_faults")?,
            calls: symbol(library, c"fake_cuda_calls")?,
            counters: symbol(library, c"fake_cuda_counters")?,
            device: symbol(library, c"fake_cuda_device")?,
            set_async: symbol(library, c"fake_cuda_set_async")?,
            release_queue: symbol(library, c"fake_cuda_release_queue")?,
            set_hook: symbol(library, c"fake_cuda_set_hook")?,
        })
    }

    /// As [`Fake::find`]; prints why `what` is skipped where there is no fake driver.
    pub fn require(what: &str) -> Option<Self> {
        let found = Self::find();
        if found.is_none() {
            println!("skipped: {what} needs the fake driver's control functions, and this driver has none");
        }
        found
    }

    /// Adds fault rules, such as `cuMemMap#3=2;cuMemMap#*~5ms`. Panics if the driver does not understand them.
    pub fn add_fault(&self, rules: &str) {
        let text = CString::new(rules).expect("rules without NUL");
        // SAFETY: a C string that lives for the call.
        let rc = unsafe { (self.add_fault)(text.as_ptr()) };
        assert_eq!(rc, 0, "the fake driver does not understand {rules}");
    }

    /// Removes all fault rules; calls are numbered anew.
    pub fn clear_faults(&self) {
        (self.clear_faults)();
    }

    /// Sets the hook of this thread, or takes it away.
    pub fn set_hook(&self, hook: Option<FakeHook>) {
        (self.set_hook)(hook);
    }

    /// Calls of one driver function so far, by symbol or base name.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).expect("a name without NUL");
        // SAFETY: a C string that lives for the call.
        unsafe { (self.calls)(name.as_ptr()) }
    }

    /// Calls of all driver functions so far.
    pub fn total_calls(&self) -> u64 {
        // SAFETY: null means all functions.
        unsafe { (self.calls)(core::ptr::null()) }
    }

    /// This process's counters; all zero before `cuInit`.
    pub fn counters(&self) -> FakeCounters {
        let mut counters = FakeCounters::default();
        // SAFETY: the structure and its size.
        unsafe { (self.counters)(&raw mut counters, size_of::<FakeCounters>()) };
        counters
    }

    /// What everybody has of a physical device; all zero before `cuInit`.
    pub fn device(&self, gpu: u32) -> FakeDevice {
        let mut device = FakeDevice::default();
        // SAFETY: the structure and its size.
        unsafe { (self.device)(gpu, &raw mut device, size_of::<FakeDevice>()) };
        device
    }

    /// Asynchronous work completes after `micros`; at once for 0; on hold, until synchronised with or released, for `None`.
    pub fn set_async(&self, micros: Option<u32>) {
        (self.set_async)(micros.map_or(-1, i64::from));
    }

    /// Lets what is queued now complete.
    pub fn release_queue(&self) {
        (self.release_queue)();
    }
}

impl core::fmt::Debug for Fake {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Fake")
    }
}

fn symbol<F: Copy>(library: *mut core::ffi::c_void, name: &CStr) -> Option<F>
where
    Option<F>: Nullable<Fn = F>,
{
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: null, or the fake driver's function of this name, whose signature the field of `Fake` repeats from its `control.rs`.
    unsafe { Option::<F>::from_address(address) }
}
