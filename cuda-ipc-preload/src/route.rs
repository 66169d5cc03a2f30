//! Where an interposed call goes on: to the driver, or, if it comes from UCX's CUDA modules, to our handler.
//!
//! [`route`] is on the path of every interposed call of the process, so it does as little as it can: load the driver's function, look whether the return address
//! is UCX's. It never fails: without a driver the target is a function that says so.

use core::ffi::c_void;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr};

use cuda_driver_sys::{CUresult, Library};

use crate::callers;
use crate::handlers::HANDLERS;
use crate::names::{COUNT, Name};

/// The driver's own functions, by number; null before the first call, and where the driver lacks one.
static REAL: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(core::ptr::null_mut()) }; COUNT];
static RESOLVED: AtomicBool = AtomicBool::new(false);

/// Answers a stub. `caller` is the return address of the interposed call, `index` a [`Name`].
pub(crate) extern "C" fn route(caller: usize, index: u32) -> *const c_void {
    if !RESOLVED.load(Acquire) {
        resolve();
    }
    let index = index as usize;
    let real = REAL.get(index).map_or(core::ptr::null_mut(), |slot| slot.load(Relaxed));
    if callers::is_ucx(caller)
        && let Some(handler) = HANDLERS.get(index).copied().flatten()
    {
        return handler.0;
    }
    if real.is_null() { absent as *const c_void } else { real }
}

/// The driver's own function; null if it has none.
pub(crate) fn real(name: Name) -> *mut c_void {
    if !RESOLVED.load(Acquire) {
        resolve();
    }
    REAL.get(name as usize).map_or(core::ptr::null_mut(), |slot| slot.load(Relaxed))
}

/// Looks all names up at once, at the first call of any: a later look-up could wait for another thread's constructors.
#[cold]
fn resolve() {
    // RTLD_NEXT would find nothing where libcuda was opened RTLD_LOCAL, as Python does. Several threads may do this at once, with the same outcome.
    if let Ok(library) = Library::open() {
        for (slot, name) in REAL.iter().zip(Name::ALL) {
            slot.store(library.symbol(name.symbol()), Relaxed);
        }
    }
    RESOLVED.store(true, Release);
}

/// Stands for a function that the driver does not have.
extern "C" fn absent() -> CUresult {
    CUresult::CUDA_ERROR_NOT_FOUND
}
