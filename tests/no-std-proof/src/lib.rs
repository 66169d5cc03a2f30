//! Calls what cuda-ipc-core, cuda-driver-sys and pidfd-sys offer without std and without an allocator.
//!
//! The proof is that this links: std would bring a second panic handler, and alloc wants an allocator that nothing here defines. That it also runs
//! shows that the linker did not just throw everything away. Each check that fails adds one to the exit status.
//!
//! To extend it, add a function and a line in `main`.

#![no_std]

mod core_crate;
mod driver_crate;
mod pidfd_crate;
mod text;

use core::ffi::{c_char, c_int};

/// The C library's entry point calls this. The number of failed checks is the exit status.
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    let checks = [
        core_crate::key(),
        core_crate::lanes(),
        core_crate::rkey(),
        core_crate::table(),
        core_crate::broker(),
        core_crate::diagnosis(),
        core_crate::export_machine(),
        core_crate::import_machine(),
        core_crate::texts(),
        driver_crate::missing_library(),
        driver_crate::table(),
        pidfd_crate::calls(),
        pidfd_crate::texts(),
    ];
    checks.iter().map(|&passed| c_int::from(!passed)).sum()
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: abort has no precondition and does not return; the C library is linked. No check's status can be mistaken for its signal.
    unsafe { abort() }
}

unsafe extern "C" {
    fn abort() -> !;
}
