//! Probes: whether a pointer can be shared, by what, and why not. Nothing is published for the answer.
//!
//! # Safety
//! The unsafe here is what C functions do with their callers' pointers, by way of `boundary.rs`, and their names.

#![allow(unsafe_code)]

use core::ffi::c_char;
use core::fmt;
use std::ffi::CString;

use cuda_ipc_core::dispatch::Lane;
use cuda_ipc_core::reason::NoIpc;
use cuda_ipc_core::sys::driver::PointerFacts;

use crate::boundary::{Buffer, Out, boundary, write_struct};
use crate::context::{CONTEXTS, Context};
use crate::export::{CUDA_IPC_TYPE_LEGACY, CUDA_IPC_TYPE_NO_IPC, CUDA_IPC_TYPE_POSIX};
use crate::failure::Failure;
use crate::handles::cuda_ipc_context_t;
use crate::status::*;

/// The memory belongs to a memory pool (cudaMallocAsync).
pub const CUDA_IPC_MEMORY_POOL: u32 = 1;
/// It is managed memory.
pub const CUDA_IPC_MEMORY_MANAGED: u32 = 2;
/// cuIpcGetMemHandle works on it.
pub const CUDA_IPC_MEMORY_LEGACY: u32 = 4;
/// It is device memory.
pub const CUDA_IPC_MEMORY_DEVICE: u32 = 8;

/// What is known of a pointer. Set `size` before it is passed.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_probe_t {
    /// sizeof of this structure.
    pub size: usize,
    /// 1 if an export of the chunk at the pointer would be no `CUDA_IPC_TYPE_NO_IPC`, as far as can be seen without one.
    pub shareable: i32,
    /// `CUDA_IPC_TYPE_*` of such an export.
    pub handle_type: u32,
    /// `CUDA_IPC_OK`, or why not: `CUDA_IPC_REASON_*`.
    pub reason: cuda_ipc_status_t,
    /// `CUDA_IPC_MEMORY_*`, added.
    pub memory: u32,
    /// Handle types that the allocator asked for, as CUmemAllocationHandleType numbers them, added: 1 POSIX_FD, 8 FABRIC.
    pub allowed_handle_types: u64,
    /// First address of the reservation or allocation that holds it; 0 if the driver knows none.
    pub reservation_base: u64,
    /// Its length in bytes.
    pub reservation_length: u64,
    /// First address of the physical chunk at the pointer; 0 for memory without one.
    pub chunk_base: u64,
    /// Its length in bytes.
    pub chunk_length: u64,
    /// The driver's CU_POINTER_ATTRIBUTE_BUFFER_ID; 0 where nothing is mapped.
    pub buffer_id: u64,
    /// Ordinal of the device, in this process.
    pub device: i32,
    /// 0.
    pub reserved: u32,
    /// UUID of the device; zeros if it is not known.
    pub device_uuid: [u8; 16],
}

/// Says what is known of the pointer `address`, an address of this process. A few driver calls; nothing is exported.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_DRIVER` if the driver does not answer,
/// `CUDA_IPC_ERR_FORKED`. An address of nothing is no error but a `reason`. Usable from any thread.
///
/// # Safety
/// `probe` is null or points to a structure of the size that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_probe(context: cuda_ipc_context_t, address: u64, probe: *mut cuda_ipc_probe_t) -> cuda_ipc_status_t {
    boundary!({
        let find = || {
            let context = CONTEXTS.get(context.id)?;
            let (facts, lane) = look(&context, address)?;
            let known = facts.buffer_id != 0 || facts.range_len != 0;
            let flag = |is: bool, flag: u32| if is { flag } else { 0 };
            Ok(cuda_ipc_probe_t {
                size: size_of::<cuda_ipc_probe_t>(),
                shareable: i32::from(lane.is_ok()),
                handle_type: lane.map_or(CUDA_IPC_TYPE_NO_IPC, handle_type),
                reason: lane.map_or_else(|reason| Failure::from(reason).status, |_| CUDA_IPC_OK),
                memory: flag(facts.pool.is_some(), CUDA_IPC_MEMORY_POOL)
                    | flag(facts.managed, CUDA_IPC_MEMORY_MANAGED)
                    | flag(facts.legacy, CUDA_IPC_MEMORY_LEGACY)
                    | flag(facts.device_memory, CUDA_IPC_MEMORY_DEVICE),
                allowed_handle_types: facts.handle_types,
                reservation_base: facts.range_start,
                reservation_length: facts.range_len,
                chunk_base: facts.mapping_base,
                chunk_length: facts.mapping_len,
                buffer_id: facts.buffer_id,
                device: facts.device,
                reserved: 0,
                device_uuid: if known { context.cuda.device_uuid(facts.device).unwrap_or_default() } else { [0; 16] },
            })
        };
        // SAFETY: the caller's promise.
        unsafe { write_struct(probe, find) }
    })
}

/// Says the same in lines of English, for people.
///
/// `text` has room for `capacity` bytes, with the 0 at the end. `*length`, if `length` is not null, is how many bytes all of it has without that 0, also where it does not
/// fit; with `text` null it is all that is asked for.
///
/// Errors: as `cuda_ipc_probe`, and `CUDA_IPC_ERR_BUFFER`. Usable from any thread.
///
/// # Safety
/// `text` is null or good for writing `capacity` bytes; `length` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_probe_text(
    context: cuda_ipc_context_t,
    address: u64,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> cuda_ipc_status_t {
    boundary!({
        if text.is_null() && length.is_null() {
            return Err(Failure::about(CUDA_IPC_ERR_NULL, "text"));
        }
        let context = CONTEXTS.get(context.id)?;
        let (facts, lane) = look(&context, address)?;
        // The text has no 0 inside.
        let line = CString::new(Report { address, facts, lane }.to_string()).unwrap_or_default();
        // SAFETY: the caller's promise.
        if let Some(out) = unsafe { Out::optional(length) } {
            out.write(line.as_bytes().len());
        }
        if text.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { Buffer::new(text.cast(), capacity) }.fill(line.as_bytes_with_nul())
    })
}

fn look(context: &Context, address: u64) -> Result<(PointerFacts, Result<Lane, NoIpc>), Failure> {
    let (facts, lane) = context.make_exporter()?.probe(address)?;
    Ok((facts, lane.map_err(|cause| NoIpc { cause, address })))
}

fn handle_type(lane: Lane) -> u32 {
    match lane {
        Lane::Legacy => CUDA_IPC_TYPE_LEGACY,
        Lane::Chunks(_) | Lane::Pool(_) => CUDA_IPC_TYPE_POSIX,
    }
}

struct Report {
    address: u64,
    facts: PointerFacts,
    lane: Result<Lane, NoIpc>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, facts, lane } = self;
        match lane {
            Ok(Lane::Legacy) => writeln!(f, "memory at {address:#x} can be shared, by its legacy handle")?,
            Ok(_) => writeln!(f, "memory at {address:#x} can be shared, by POSIX file descriptors")?,
            Err(reason) => writeln!(f, "{reason}")?,
        }
        if facts.range_len != 0 {
            writeln!(f, "reservation: {:#x}+{:#x}, device {}", facts.range_start, facts.range_len, facts.device)?;
        }
        if facts.mapping_len != 0 {
            writeln!(f, "chunk: {:#x}+{:#x}, buffer id {}", facts.mapping_base, facts.mapping_len, facts.buffer_id)?;
        }
        write!(
            f,
            "handle types asked for: {:#x}, legacy: {}, pool: {}, managed: {}",
            facts.handle_types,
            facts.legacy,
            facts.pool.is_some(),
            facts.managed
        )
    }
}
