//! UCM's word that memory is about to be freed, or was mapped.
//!
//! Where UCX hooks the driver, it tells its own registration caches before memory is unmapped. We listen too: the exporter's chunks leave the table and their
//! fds close before the allocator goes on, so that an allocator that frees and at once asks for all free memory gets it. Where UCM tells nothing, the
//! exporter's sweep finds out. Memory that comes where some was published is published at once: an allocator may give its memory back and take it again at its
//! old addresses under registrations that live on.
//!
//! # Safety
//! The unsafe here is calling `ucm_set_event_handler` with its documented signature, and reading the event that UCM hands to the callback for the time of the
//! callback. The values are UCM's public ones (ucm.h), the same from UCX 1.18 on. The callback runs inside the driver's patched functions, outside of the driver:
//! before memory is freed it makes no driver call, and after it was mapped none that is patched.

#![allow(unsafe_code)]

use core::ffi::{c_int, c_void};
use core::time::Duration;
use std::panic::catch_unwind;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::callers;
use crate::state::made;

/// `UCM_EVENT_MEM_TYPE_ALLOC`: after memory was made.
const MEM_TYPE_ALLOC: c_int = 1 << 20;
/// `UCM_EVENT_MEM_TYPE_FREE`: before memory is freed.
const MEM_TYPE_FREE: c_int = 1 << 21;
/// `UCM_EVENT_FLAG_NO_INSTALL`: listen, but do not hook what nobody else wants hooked.
const NO_INSTALL: c_int = 1 << 24;
/// Among UCX's own handlers; the order does not matter, as all run before the memory goes.
const PRIORITY: c_int = 1000;

/// The beginning of the event's record for memory that is made or freed.
#[repr(C)]
struct MemTypeEvent {
    address: *mut c_void,
    size: usize,
}

type Callback = unsafe extern "C" fn(event_type: c_int, event: *mut MemTypeEvent, argument: *mut c_void);
type SetEventHandler = unsafe extern "C" fn(events: c_int, priority: c_int, callback: Callback, argument: *mut c_void) -> c_int;

/// Whether UCM has been asked, or there is none to ask.
static ASKED: Mutex<bool> = Mutex::new(false);
static NOW_ASKED: Condvar = Condvar::new();
/// How long an export waits for that.
const PATIENCE: Duration = Duration::from_millis(100);

/// Asks UCM to tell. Does nothing where it is not loaded.
pub(crate) fn listen() {
    ask();
    do_not_wait();
}

/// Nobody need wait any more: UCM has been asked, or never will be.
pub(crate) fn do_not_wait() {
    *ASKED.lock().unwrap_or_else(PoisonError::into_inner) = true;
    NOW_ASKED.notify_all();
}

/// Waits until UCM has been asked: what is exported from then on is reported when it is freed. Not to be called from inside a callback of UCM's, which the
/// thread that asks may be waiting for.
pub(crate) fn wait_until_asked() {
    let asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    // Where that takes longer the sweep finds what is freed meanwhile.
    drop(NOW_ASKED.wait_timeout_while(asked, PATIENCE, |asked| !*asked));
}

fn ask() {
    let address = callers::symbol_of(b"libucm", c"ucm_set_event_handler");
    if address.is_null() {
        return;
    }
    // SAFETY: the public function of UCM with this name has this signature (ucm.h).
    let set = unsafe { core::mem::transmute::<*mut c_void, SetEventHandler>(address) };
    // SAFETY: the callback stays loaded as long as the process, and takes no argument.
    unsafe { set(MEM_TYPE_ALLOC | MEM_TYPE_FREE | NO_INSTALL, PRIORITY, changed, core::ptr::null_mut()) };
}

unsafe extern "C" fn changed(event_type: c_int, event: *mut MemTypeEvent, _: *mut c_void) {
    if event_type & (MEM_TYPE_ALLOC | MEM_TYPE_FREE) == 0 || event.is_null() {
        return;
    }
    // SAFETY: UCM passes a record of this event for the time of the call.
    let event = unsafe { &*event };
    let (address, size) = (event.address as u64, event.size as u64);
    let _ = catch_unwind(|| match made() {
        Some(state) if event_type & MEM_TYPE_FREE != 0 => state.exporting.retire(address, size),
        Some(state) => state.exporting.mapped(address, size),
        None => {}
    });
}
