//! A module with a name like that of UCX's CUDA module, `libuct_cuda_stand_in.so`, for tests of the preload library without UCX: the preload library answers calls
//! that come from such a module, and this one calls what a test tells it to call. `tests/src/uct.rs` is the only user.
//!
//! # Safety
//! The unsafe here is the call of a function that the test has found, with the test's arguments.

use core::ffi::c_void;

/// Integer arguments that are passed; what a function does not take is ignored.
pub const ARGUMENTS: usize = 9;

type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64) -> u32;

/// Calls `function`, which takes integers and pointers and answers an `int`.
///
/// # Safety
/// `function` is such a function of the C ABI, `arguments` is to [`ARGUMENTS`] values that keep its contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uct_cuda_stand_in_call(function: *const c_void, arguments: *const u64) -> u32 {
    // SAFETY: by the function's contract.
    let function = unsafe { core::mem::transmute::<*const c_void, Function>(function) };
    // SAFETY: as above.
    let &[a, b, c, d, e, f, g, h, i] = unsafe { &*arguments.cast::<[u64; ARGUMENTS]>() };
    // SAFETY: as above. Arguments on the stack keep this from becoming a jump, and so the call's return address is in this module.
    unsafe { function(a, b, c, d, e, f, g, h, i) }
}
