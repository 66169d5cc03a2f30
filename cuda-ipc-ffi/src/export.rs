//! Exports: ranges of this process's memory that others may import, and the bytes that say so.
//!
//! Memory that cannot be shared is an export like any other, of type `CUDA_IPC_TYPE_NO_IPC`: nobody's registration or pack fails because of this library.
//!
//! # Safety
//! The unsafe here is what C functions do with their callers' pointers, by way of `boundary.rs`, and their names.

#![allow(unsafe_code)]

use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use cuda_ipc_core::exporter::Export;
use cuda_ipc_core::key::KEY_LEN;
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::rkey::{Payload, RKEY_LEN, Rkey};

use crate::boundary::{Buffer, Out, boundary, write_struct};
use crate::context::{CONTEXTS, Context, destroyed};
use crate::failure::{Fact, Failure};
use crate::handle::Kind;
use crate::handles::{cuda_ipc_context_t, cuda_ipc_export_t};
use crate::log::CUDA_IPC_LOG_DEBUG;
use crate::status::*;
use crate::table::Table;

/// Bytes of an rkey.
pub const CUDA_IPC_RKEY_LEN: usize = 108;
/// Bytes of a payload: as many as CUmemFabricHandle and CUipcMemHandle have.
pub const CUDA_IPC_PAYLOAD_LEN: usize = 64;

/// Handle type: the memory cannot be shared; the payload is zeros.
pub const CUDA_IPC_TYPE_NO_IPC: u32 = 0;
/// Handle type: the payload is a CUipcMemHandle.
pub const CUDA_IPC_TYPE_LEGACY: u32 = 1;
/// Handle type: the payload is a key of this library, of memory that travels as POSIX file descriptors.
pub const CUDA_IPC_TYPE_POSIX: u32 = 2;
/// Handle type: another one, of a later version.
pub const CUDA_IPC_TYPE_OTHER: u32 = u32::MAX;

const _: () = assert!(CUDA_IPC_RKEY_LEN == RKEY_LEN && CUDA_IPC_PAYLOAD_LEN == KEY_LEN);

/// What is known of an export. Set `size` before it is passed.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_export_info_t {
    /// sizeof of this structure.
    pub size: usize,
    /// `CUDA_IPC_TYPE_*`.
    pub handle_type: u32,
    /// `CUDA_IPC_OK`, or why the memory cannot be shared: `CUDA_IPC_REASON_*` mostly.
    pub reason: cuda_ipc_status_t,
    /// First address of the exported range; for `CUDA_IPC_TYPE_LEGACY` of the whole allocation, which is what an importer gets. A transport sends these two
    /// numbers with the payload.
    pub base: u64,
    /// Its length in bytes.
    pub length: u64,
    /// First address of the reservation that the payload names; 0 if it names none.
    pub reservation_base: u64,
    /// Its length in bytes.
    pub reservation_length: u64,
    /// Physical chunks that the range touches.
    pub chunks: u64,
    /// Identity of this process's exporter, in all its payloads; 0 if the payload has none.
    pub peer: u64,
    /// UUID of the GPU; zeros if it is not known.
    pub device_uuid: [u8; 16],
}

pub(crate) static EXPORTS: Table<Shared> = Table::new(Kind::Export);

/// What a handle of an export stands for.
#[derive(Debug)]
pub(crate) struct Shared {
    context: Arc<Context>,
    kind: Result<Export, Failure>,
    base: u64,
    len: u64,
}

impl Shared {
    pub(crate) const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn rkey(&self) -> Rkey {
        match &self.kind {
            Ok(export) => export.rkey(),
            Err(_) => Rkey { payload: Payload::NoIpc, base: self.base, len: self.len, device: [0; 16] },
        }
    }

    fn info(&self) -> cuda_ipc_export_info_t {
        let rkey = self.rkey();
        let (reservation, peer) = match rkey.payload {
            Payload::Posix(key) => ((key.base, key.len), key.nonce.0),
            _ => ((0, 0), 0),
        };
        cuda_ipc_export_info_t {
            size: size_of::<cuda_ipc_export_info_t>(),
            handle_type: split(&rkey.payload).0,
            reason: self.kind.as_ref().map_or_else(|failure| failure.status, |_| CUDA_IPC_OK),
            base: rkey.base,
            length: rkey.len,
            reservation_base: reservation.0,
            reservation_length: reservation.1,
            chunks: self.kind.as_ref().map_or(0, |export| export.chunks().len() as u64),
            peer,
            device_uuid: rkey.device,
        }
    }
}

/// A payload's type and bytes.
fn split(payload: &Payload) -> (u32, [u8; KEY_LEN]) {
    match payload {
        Payload::NoIpc => (CUDA_IPC_TYPE_NO_IPC, [0; KEY_LEN]),
        Payload::Legacy(handle) => (CUDA_IPC_TYPE_LEGACY, *handle),
        Payload::Posix(key) => (CUDA_IPC_TYPE_POSIX, key.encode()),
        _ => (CUDA_IPC_TYPE_OTHER, [0; KEY_LEN]),
    }
}

/// Shares `[address, address + length)`, device memory of this process, with every process of this user that is given its key.
///
/// The range may begin and end anywhere and span any number of physical chunks of a reservation; or lie in one allocation of a POSIX_FD pool or of cuMemAlloc. Memory that cannot be shared is exported as `CUDA_IPC_TYPE_NO_IPC`: that is
/// `CUDA_IPC_OK` too, `cuda_ipc_export_info` says why, and its key tells the importer to take another way. Chunks that are shared already cost no export call.
/// A shared chunk stays in memory until it is withdrawn: by `cuda_ipc_retire`, by the release of its last export, or by the library's thread after its memory
/// was freed. The export in `*handle` is the caller's, who ends it with `cuda_ipc_export_release`.
///
/// Nothing here waits for work on the memory: before another process is told to read, wait for what was written (cuCtxSynchronize, or the stream or event of the
/// work; cuMemcpyHtoD from pageable memory returns before its bytes are there).
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_RANGE` for an empty range or one that wraps around,
/// `CUDA_IPC_ERR_TOO_MANY_HANDLES`, `CUDA_IPC_ERR_FORKED`. Usable from any thread; no context need be current.
///
/// # Safety
/// `handle` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_export(
    context: cuda_ipc_context_t,
    address: u64,
    length: u64,
    handle: *mut cuda_ipc_export_t,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(handle, "handle") }?;
        let context = CONTEXTS.get(context.id)?;
        if length == 0 || address.checked_add(length).is_none() {
            return Err(Failure::about(CUDA_IPC_ERR_RANGE, "length"));
        }
        let exported = context.make_exporter().map_err(no_table(address)).and_then(|exporter| Ok(exporter.export(address, length)?));
        match &exported {
            Ok(export) => {
                let chunks = export.chunks().len();
                context.log.say(CUDA_IPC_LOG_DEBUG, format_args!("exported {address:#x}+{length:#x}: {chunks} chunks"));
            }
            Err(failure) if failure.status == CUDA_IPC_ERR_FORKED => return Err(*failure),
            Err(failure) => {
                context.no_ipc_exports.fetch_add(1, Relaxed);
                context.log.lost(failure.status, format_args!("{failure}"));
            }
        }
        let shared = Arc::new(Shared { context, kind: exported, base: address, len: length });
        let id = EXPORTS.insert(shared.clone())?;
        if shared.context.is_destroyed() {
            // Its end may have passed by before this was there.
            drop(EXPORTS.remove(id));
            return Err(destroyed());
        }
        out.write(cuda_ipc_export_t { id });
        Ok(())
    })
}

/// That there is no table is a reason like others: the caller's registration does not fail for it.
fn no_table(address: u64) -> impl Fn(Failure) -> Failure {
    move |failure| match failure.fact {
        Fact::System(error) => {
            let cause = Cause::Table { call: error.call, errno: error.errno };
            cuda_ipc_core::reason::NoIpc { cause, address }.into()
        }
        _ => failure,
    }
}

/// Says what is known of an export.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `info` is null or points to a structure of the size that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_export_info(handle: cuda_ipc_export_t, info: *mut cuda_ipc_export_info_t) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        unsafe { write_struct(info, || Ok(EXPORTS.get(handle.id)?.info())) }
    })
}

/// Gives the handle type and the payload of `CUDA_IPC_PAYLOAD_LEN` bytes alone, for a transport that carries base and length of the range by itself.
///
/// The bytes are the same for every export of the same reservation. `capacity` is the room at `payload` in bytes.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_BUFFER`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`; nothing is written then.
/// Usable from any thread.
///
/// # Safety
/// `payload` is null or good for writing `capacity` bytes; `handle_type` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_export_payload(
    handle: cuda_ipc_export_t,
    payload: *mut c_void,
    capacity: usize,
    handle_type: *mut u32,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(handle_type, "handle_type") }?;
        if payload.is_null() {
            return Err(Failure::about(CUDA_IPC_ERR_NULL, "payload"));
        }
        let (kind, bytes) = split(&EXPORTS.get(handle.id)?.rkey().payload);
        // SAFETY: the caller's promise.
        unsafe { Buffer::new(payload.cast(), capacity) }.fill(&bytes)?;
        out.write(kind);
        Ok(())
    })
}

/// Gives the whole rkey: handle type, payload, range and GPU, for any channel to the importer, which passes it to `cuda_ipc_import`.
///
/// `capacity` is the room at `rkey` in bytes; `CUDA_IPC_RKEY_LEN` are enough for a library of this header's version. `*length` is how many bytes the rkey has, also
/// where they do not fit; with `rkey` null it is all that is asked for.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_BUFFER`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `rkey` is null or good for writing `capacity` bytes; `length` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_export_rkey(
    handle: cuda_ipc_export_t,
    rkey: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(length, "length") }?;
        let bytes = EXPORTS.get(handle.id)?.rkey().encode();
        out.write(bytes.len());
        if rkey.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { Buffer::new(rkey.cast(), capacity) }.fill(&bytes)
    })
}

/// Ends an export: chunks that no other export covers are withdrawn, and importers see them die. For memory that lives on; before it is freed,
/// `cuda_ipc_retire` does the same for all exports of a range.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_export_release(handle: cuda_ipc_export_t) -> cuda_ipc_status_t {
    boundary!({
        drop(EXPORTS.remove(handle.id)?);
        Ok(())
    })
}
