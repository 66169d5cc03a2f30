//! Windows: keys become something from which leases can be taken.
//!
//! A key of this very process becomes a window whose addresses are the memory's own.
//!
//! # Safety
//! The unsafe here is what C functions do with their callers' pointers, by way of `boundary.rs`, and their names.

#![allow(unsafe_code)]

use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use std::sync::Arc;

use cuda_ipc_cache::Opened;
use cuda_ipc_core::importer::{Deadline, Route};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::rkey::{Payload, Rkey, RkeyError};

use crate::boundary::{Bytes, Out, boundary, read_struct, write_struct};
use crate::config::{CUDA_IPC_ROUTE_BROKER, CUDA_IPC_ROUTE_PIDFD};
use crate::context::{CONTEXTS, Context};
use crate::export::*;
use crate::failure::{Fact, Failure};
use crate::handles::{cuda_ipc_context_t, cuda_ipc_window_t};
use crate::leases;
use crate::log::CUDA_IPC_LOG_DEBUG;
use crate::status::*;
use crate::windows::{self, Entry};

/// A time limit that is none.
pub const CUDA_IPC_FOREVER: u64 = u64::MAX;

/// The GPU may write through the window, too.
pub const CUDA_IPC_IMPORT_WRITABLE: u32 = 1;
/// Access is for the device of the calling thread's current context; `device` is not looked at.
pub const CUDA_IPC_IMPORT_CURRENT_DEVICE: u32 = 2;

/// How something is to be imported. Zero it and set `size`, then what is to differ. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_import_options_t {
    /// sizeof of this structure.
    pub size: usize,
    /// `CUDA_IPC_IMPORT_*`, added.
    pub flags: u32,
    /// Ordinal of the device that gets access, as this process numbers them.
    pub device: i32,
}

/// What is known of a window. Set `size` before it is passed.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_window_info_t {
    /// sizeof of this structure.
    pub size: usize,
    /// First address of the range of its key, in the exporter.
    pub base: u64,
    /// Its length in bytes.
    pub length: u64,
    /// First address of the reservation of which leases can be taken, in the exporter.
    pub reservation_base: u64,
    /// Its length in bytes.
    pub reservation_length: u64,
    /// Where the reservation begins here; 0 while it has no address space here. Changes only while nothing of it is leased.
    pub local_base: u64,
    /// Identity of the exporter, for `cuda_ipc_purge_peer`; 0 for a legacy handle, which does not say.
    pub peer: u64,
    /// Pid of the exporter, in its own PID namespace; 0 for a legacy handle.
    pub pid: u32,
    /// `CUDA_IPC_ROUTE_PIDFD` or `CUDA_IPC_ROUTE_BROKER`: how the exporter was reached; 0 for memory of this process and for a legacy handle.
    pub route: u32,
    /// 1 for memory of this process, whose addresses are its own; otherwise 0.
    pub own_process: i32,
    /// 1 if the GPU may write through it.
    pub writable: i32,
}

/// Opens a window on the memory that an rkey names. One exporter's reservation has one window in a context for each kind of access, however often it is opened.
///
/// `rkey` are the `length` bytes that `cuda_ipc_export_rkey` gave. `options` may be null: the device of the calling thread's current context, reading only. The first key
/// of an exporter costs a contact of some tens of microseconds; nothing is mapped yet, unless the context maps eagerly: then the whole range is mapped before
/// this returns. `timeout_ns` limits all that, in nanoseconds from now; `CUDA_IPC_FOREVER` does not. A refusal is remembered for each exporter, answered at once
/// for a while (`CUDA_IPC_ERR_REFUSED_BEFORE`), and then tried again. The window in `*window` is the caller's, who ends it with `cuda_ipc_window_release`.
///
/// Errors: `CUDA_IPC_ERR_NO_IPC` if the exporter says that the memory cannot be shared; the codes from -100 to -199; `CUDA_IPC_ERR_NULL`,
/// `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_ARGUMENT`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_WOULD_BLOCK`, `CUDA_IPC_ERR_DRIVER`,
/// `CUDA_IPC_ERR_SYSTEM`, `CUDA_IPC_ERR_TOO_MANY_FILES`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `rkey` is null or good for reading `length` bytes; `options` is null or points to a structure of the size that it says; `window` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_import(
    context: cuda_ipc_context_t,
    rkey: *const c_void,
    length: usize,
    options: *const cuda_ipc_import_options_t,
    timeout_ns: u64,
    window: *mut cuda_ipc_window_t,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(window, "window") }?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { Bytes::of(rkey, length, "rkey") }?;
        // SAFETY: the caller's promise.
        let options = unsafe { read_struct(options) }?;
        let context = CONTEXTS.get(context.id)?;
        out.write(import(context, Rkey::decode(bytes)?, options, timeout_ns)?);
        Ok(())
    })
}

/// As `cuda_ipc_import`, for a transport that carries the range by itself: of what `cuda_ipc_export_payload` gave, and the range of that export.
///
/// `payload` has `payload_length` bytes of type `handle_type`; `base` and `length` are the exported range, in the exporter.
///
/// Errors: as `cuda_ipc_import`; `CUDA_IPC_ERR_RANGE` if the range is not inside what the payload names.
///
/// # Safety
/// `payload` is null or good for reading `payload_length` bytes; the rest as for `cuda_ipc_import`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_import_payload(
    context: cuda_ipc_context_t,
    handle_type: u32,
    payload: *const c_void,
    payload_length: usize,
    base: u64,
    length: u64,
    options: *const cuda_ipc_import_options_t,
    timeout_ns: u64,
    window: *mut cuda_ipc_window_t,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(window, "window") }?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { Bytes::of(payload, payload_length, "payload") }?;
        // SAFETY: the caller's promise.
        let options = unsafe { read_struct(options) }?;
        let context = CONTEXTS.get(context.id)?;
        let payload = match handle_type {
            CUDA_IPC_TYPE_NO_IPC => Payload::NoIpc,
            CUDA_IPC_TYPE_LEGACY => Payload::Legacy(bytes.try_into().map_err(|_| RkeyError::Length(bytes.len()))?),
            CUDA_IPC_TYPE_POSIX => Payload::Posix(Key::decode(bytes)?),
            _ => return Err(Failure::about(CUDA_IPC_ERR_HANDLE_TYPE, "handle_type")),
        };
        if length == 0 || base.checked_add(length).is_none() {
            return Err(Failure::about(CUDA_IPC_ERR_RANGE, "length"));
        }
        if let Payload::Posix(key) = payload
            && !key.covers(base, length)
        {
            return Err(Failure { status: CUDA_IPC_ERR_RANGE, fact: Fact::Rkey(RkeyError::OutsideReservation { base, len: length }) });
        }
        out.write(import(context, Rkey { payload, base, len: length, device: [0; 16] }, options, timeout_ns)?);
        Ok(())
    })
}

/// Opens the window of a decoded rkey.
fn import(
    context: Arc<Context>,
    rkey: Rkey,
    options: Option<cuda_ipc_import_options_t>,
    timeout_ns: u64,
) -> Result<cuda_ipc_window_t, Failure> {
    let flags = options.map_or(CUDA_IPC_IMPORT_CURRENT_DEVICE, |options| options.flags);
    if flags & !(CUDA_IPC_IMPORT_WRITABLE | CUDA_IPC_IMPORT_CURRENT_DEVICE) != 0 {
        return Err(Failure::about(CUDA_IPC_ERR_ARGUMENT, "flags"));
    }
    let device = match options {
        Some(options) if flags & CUDA_IPC_IMPORT_CURRENT_DEVICE == 0 => options.device,
        _ => context.cuda.current_device()?,
    };
    if device < 0 || device >= context.cuda.device_count()? {
        return Err(Failure::about(CUDA_IPC_ERR_ARGUMENT, "device"));
    }
    let writable = flags & CUDA_IPC_IMPORT_WRITABLE != 0;
    let opened = open(&context, &rkey, device, writable, deadline(timeout_ns));
    if let Err(failure) = &opened {
        context.failed_imports.fetch_add(1, Relaxed);
        match failure.status {
            // Nothing is lost: it is the caller's time, or was said before.
            CUDA_IPC_WOULD_BLOCK | CUDA_IPC_ERR_REFUSED_BEFORE => context.log.say(CUDA_IPC_LOG_DEBUG, format_args!("{failure}")),
            cause => context.log.lost(cause, format_args!("{failure}")),
        }
    }
    let opened = opened?;
    context.log.say(CUDA_IPC_LOG_DEBUG, format_args!("opened a window on {:#x}+{:#x}", rkey.base, rkey.len));
    let id = windows::open(Entry { context, opened, rkey })?;
    Ok(cuda_ipc_window_t { id })
}

/// Opens what the rkey names, and maps it if the context does so at once.
fn open(context: &Context, rkey: &Rkey, device: i32, writable: bool, deadline: Deadline) -> Result<Opened, Failure> {
    let opened = context.cache.open(rkey, device, writable, deadline)?;
    if context.eager {
        drop(opened.lease(rkey.base, rkey.len, deadline)?);
    }
    Ok(opened)
}

/// That many nanoseconds from now.
pub(crate) fn deadline(timeout_ns: u64) -> Deadline {
    Deadline::after(if timeout_ns == CUDA_IPC_FOREVER { Duration::MAX } else { Duration::from_nanos(timeout_ns) })
}

/// Says what is known of a window.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `info` is null or points to a structure of the size that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_window_info(window: cuda_ipc_window_t, info: *mut cuda_ipc_window_info_t) -> cuda_ipc_status_t {
    boundary!({
        let describe = || {
            let id = window.decode()?;
            let claim = leases::claim(id.place)?;
            Ok(describe(windows::get(&claim, id)?))
        };
        // SAFETY: the caller's promise.
        unsafe { write_struct(info, describe) }
    })
}

fn describe(entry: &Entry) -> cuda_ipc_window_info_t {
    let mut info = cuda_ipc_window_info_t {
        size: size_of::<cuda_ipc_window_info_t>(),
        base: entry.rkey.base,
        length: entry.rkey.len,
        reservation_base: 0,
        reservation_length: 0,
        local_base: 0,
        peer: 0,
        pid: 0,
        route: 0,
        own_process: 0,
        writable: 1,
    };
    if let Payload::Posix(key) = entry.rkey.payload {
        info.peer = key.nonce.0;
        info.pid = key.pid;
    }
    if let Some(window) = entry.opened.window() {
        info.reservation_base = window.base();
        info.reservation_length = window.len();
        info.local_base = window.local_address().unwrap_or(0);
        info.route = if window.peer().route() == Route::Pidfd { CUDA_IPC_ROUTE_PIDFD } else { CUDA_IPC_ROUTE_BROKER };
        info.writable = i32::from(window.writable());
    } else if let Some((base, len, local)) = entry.opened.fixed() {
        info.reservation_base = base;
        info.reservation_length = len;
        info.local_base = local;
    }
    if let Opened::Own { .. } = entry.opened {
        info.pid = std::process::id();
        info.own_process = 1;
    }
    info
}

/// Ends a window: its handle is stale. Leases of it go on; what is mapped stays under the context's limits, for the next import of the same reservation.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_window_release(window: cuda_ipc_window_t) -> cuda_ipc_status_t {
    boundary!({ windows::close(window.decode()?) })
}
