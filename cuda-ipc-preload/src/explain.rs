//! The report at a process's end: what was shared, imported and refused, if CUDA_IPC_EXPLAIN asks for it.
//!
//! It is made in the library's termination function, after the handlers that the application and UCX have registered. That function frees nothing, makes no
//! driver call and takes nothing for granted: a forked child says nothing of what was its parent's, and a process without UCX's CUDA module nothing at all, unless
//! it is the one that `cuda-ipc run --explain` became. A process that ends by `_exit` or by a signal makes no report.
//!
//! # Safety
//! The unsafe here is placing a function pointer in `.fini_array`, which the loader calls once, when the process exits; the function is of the right type.

#![allow(unsafe_code)]

use core::fmt::Write;
use core::panic::AssertUnwindSafe;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::panic::catch_unwind;
use std::sync::OnceLock;

use cuda_ipc_core::sys::ProcessLife;

use crate::state::{State, made};
use crate::{bypass, callers, report};

/// Counted besides what exporter and cache count: keys given to UCX, keys taken from it, ranges of copies leased with and without a look at the table, and their
/// bytes.
pub(crate) static EXPORTED: AtomicU64 = AtomicU64::new(0);
pub(crate) static IMPORTED: AtomicU64 = AtomicU64::new(0);
pub(crate) static HITS: AtomicU64 = AtomicU64::new(0);
pub(crate) static MISSES: AtomicU64 = AtomicU64::new(0);
pub(crate) static BYTES: AtomicU64 = AtomicU64::new(0);

/// The life that the state was made in; `None` inside if that cannot be told.
static LIFE: OnceLock<Option<ProcessLife>> = OnceLock::new();

/// The state has been made: from now on there is something to report.
pub(crate) fn begin() {
    let _ = LIFE.set(ProcessLife::current().ok());
}

#[used]
// SAFETY: see the module's chapter.
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

extern "C" fn at_exit() {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let is_inherited = LIFE.get().is_some_and(|life| life.is_some_and(|life| !life.is_current()));
        if is_inherited {
            return;
        }
        let wish = std::env::var("CUDA_IPC_EXPLAIN").unwrap_or_default();
        let is_wanted = !wish.is_empty() && wish != "0";
        if callers::is_loaded() {
            if let Some(found) = bypass::look() {
                report::warn(report::Cause::Bypassed, &format_args!("the lane is lost: {found}"));
            }
            if is_wanted {
                report::say(&format_args!("{}", text(made())));
            }
        } else if is_wanted && wish == std::process::id().to_string() {
            report::say(&format_args!("EXPLAIN process {wish} never loaded UCX's CUDA module, so there was nothing to do"));
        }
    }));
}

fn text(state: Option<&State>) -> String {
    let mut text = format!("EXPLAIN process {}", std::process::id());
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    // Writing to a string does not fail.
    let mut line = |arguments: core::fmt::Arguments<'_>| {
        let _ = text.write_fmt(arguments);
    };
    let Some(state) = state else {
        let why = if LIFE.get().is_some() { "the driver could not be used" } else { "no call of it came here" };
        line(format_args!("\n  UCX's CUDA module was loaded, and {why}"));
        lost(&mut line);
        return text;
    };
    match state.exporting.stats() {
        Some(stats) => line(format_args!(
            "\n  exported: {} keys; {} chunks of {} bytes and {} fds now, {} published in all, {} retired ({} of them found by sweeps)",
            count(&EXPORTED),
            stats.chunks,
            stats.bytes,
            stats.fds,
            stats.published,
            stats.retired,
            stats.swept
        )),
        None => line(format_args!("\n  exported: nothing")),
    }
    match state.importing.stats() {
        Some(stats) => line(format_args!(
            "\n  imported: {} keys; {} chunks of {} bytes in {} windows of {} peers now, {} chunks in all, {} unmapped",
            count(&IMPORTED),
            stats.chunks,
            stats.bytes,
            stats.windows,
            stats.peers,
            stats.imported_chunks,
            stats.unmapped_dead + stats.unmapped_replaced + stats.unmapped_limit + stats.unmapped_purged
        )),
        None => line(format_args!("\n  imported: nothing")),
    }
    let (hits, misses) = (count(&HITS), count(&MISSES));
    line(format_args!("\n  copied by the lane: {} ranges, {} bytes; {hits} hits, {misses} misses", hits + misses, count(&BYTES)));
    lost(&mut line);
    text
}

fn lost(line: &mut impl FnMut(core::fmt::Arguments<'_>)) {
    let mut is_empty = true;
    for (count, first) in report::lost() {
        is_empty = false;
        line(format_args!("\n  refused {count} times, first: {first}"));
    }
    if is_empty {
        line(format_args!("\n  refused: nothing"));
    }
}
