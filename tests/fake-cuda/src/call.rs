//! What every driver call goes through: counting, faults, a test's hook, the fork rule, initialisation, stream capture, and a guard against panics.

use core::cell::Cell;
use core::ffi::c_int;
use core::panic::AssertUnwindSafe;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cuda_driver_sys::CUresult;

use crate::abi::Answer;
use crate::exports::{CALLS, Call};
use crate::{capture, fault, fork, process, registry};

/// When a call is allowed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Always, in a forked child too: it touches no state.
    Pure,
    /// Before `cuInit` too.
    Any,
    /// After `cuInit`.
    Ready,
    /// After `cuInit`, and not while a stream capture forbids it. Allocating and freeing are so; that legacy IPC and
    /// registering are too, nobody has asked a GPU.
    Unsafe,
}

/// Asked before a call, with the function's base name and its length, and told after it, with 0. What it answers before a call that it wants to fail is the
/// call's answer; 0 lets it through.
pub(crate) type Hook = extern "C" fn(name: *const u8, len: usize, before: c_int) -> c_int;

thread_local! {
    static HOOK: Cell<Option<Hook>> = const { Cell::new(None) };
}

/// Calls per function, in the order of [`CALLS`].
static COUNTS: [AtomicU64; CALLS.len()] = [const { AtomicU64::new(0) }; CALLS.len()];

/// Runs the body of an entry point.
pub(crate) fn enter(call: Call, phase: Phase, body: impl FnOnce() -> Answer) -> CUresult {
    let guarded = std::panic::catch_unwind(AssertUnwindSafe(|| run(call, phase, body)));
    match guarded {
        Ok(Ok(())) => CUresult::CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            // The panic hook has printed where. The caller gets the code for what should not happen.
            if let Some(registry) = registry::get() {
                registry.counters().internal_errors.fetch_add(1, Relaxed);
            }
            CUresult::CUDA_ERROR_UNKNOWN
        }
    }
}

fn run(call: Call, phase: Phase, body: impl FnOnce() -> Answer) -> Answer {
    COUNTS[call as usize].fetch_add(1, Relaxed);
    let registry = registry::get();
    if phase == Phase::Pure {
        return body();
    }
    if fork::in_child() {
        if let Some(registry) = registry {
            registry.count_call_after_fork();
        }
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    if let Some(registry) = registry {
        registry.counters().driver_calls.fetch_add(1, Relaxed);
    }
    if let Some(code) = fault::check(call) {
        return Err(code);
    }
    if phase != Phase::Any && !process::is_initialised() {
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    if phase == Phase::Unsafe {
        capture::check_unsafe_call()?;
    }
    let Some(hook) = HOOK.get() else { return body() };
    // What the hook itself does is not hooked.
    let ask = |before| {
        HOOK.set(None);
        let name = CALLS[call as usize].base;
        let answer = hook(name.as_ptr(), name.len(), before);
        HOOK.set(Some(hook));
        answer
    };
    match u32::try_from(ask(1)) {
        Ok(0) | Err(_) => {}
        Ok(code) => return Err(CUresult(code)),
    }
    let answer = body();
    ask(0);
    answer
}

/// Sets or takes away the hook of this thread.
pub(crate) fn set_hook(hook: Option<Hook>) {
    HOOK.set(hook);
}

/// Calls of the function with this symbol or base name.
pub(crate) fn count(name: &str) -> u64 {
    CALLS.iter().zip(&COUNTS).filter(|(info, _)| info.is_called(name)).map(|(_, count)| count.load(Relaxed)).sum()
}

/// Calls of all functions.
pub(crate) fn total() -> u64 {
    COUNTS.iter().map(|count| count.load(Relaxed)).sum()
}
