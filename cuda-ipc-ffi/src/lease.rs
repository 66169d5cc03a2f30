//! Leases: the calls that a transport makes for each transfer.
//!
//! A hit makes no lock, system call, driver call or allocation, but for the place of a thread's first lease: it takes a place (`leases.rs`), finds the window (`windows.rs`) and takes the cache's lease.
//! The clock is read only by a miss.
//!
//! # Safety
//! The unsafe here is what C functions do with their callers' pointers, by way of `boundary.rs`, and their names.

#![allow(unsafe_code)]

use core::mem::ManuallyDrop;

use cuda_ipc_cache::{Lease, LeaseParts, Window};

use crate::boundary::{Bytes, Out, boundary};
use crate::failure::Failure;
use crate::handles::{cuda_ipc_lease_t, cuda_ipc_window_t};
use crate::import::deadline;
use crate::leases;
use crate::status::*;
use crate::windows::{self, View};

/// Leases `[address, address + length)`, addresses of the exporter: the memory that is there now, mapped here until the lease ends.
///
/// The range may be any part of the reservation that the window's key names, also memory that the exporter has added later. `*local_address` is where it is in this
/// process. A hit costs some tens of nanoseconds: no lock, system call, driver call or allocation (but where a thread takes its first lease, or more are held at a
/// time than ever before). Where chunks are not mapped yet, or were replaced, they are imported by the calling thread; `timeout_ns` is how long that may take
/// in all, in nanoseconds. With 0 nothing is imported and nobody waited for: a hit, or `CUDA_IPC_WOULD_BLOCK`. End the lease when the work that uses the address is complete, not when it was submitted.
///
/// Errors: `CUDA_IPC_WOULD_BLOCK`; `CUDA_IPC_ERR_NO_CHUNK` if there is no live memory at an address of the range (other ranges go on working);
/// `CUDA_IPC_ERR_RANGE`, `CUDA_IPC_ERR_WINDOW_CLOSED`, `CUDA_IPC_ERR_KEPT_CHANGING` and others from -100 to -199; `CUDA_IPC_ERR_NULL`,
/// `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_TOO_MANY_HANDLES`, `CUDA_IPC_ERR_DRIVER`, `CUDA_IPC_ERR_SYSTEM`, `CUDA_IPC_ERR_FORKED`.
/// Usable from any thread.
///
/// # Safety
/// `lease` and `local_address` are null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_lease(
    window: cuda_ipc_window_t,
    address: u64,
    length: u64,
    timeout_ns: u64,
    lease: *mut cuda_ipc_lease_t,
    local_address: *mut u64,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(lease, "lease") }?;
        // SAFETY: the caller's promise.
        let local = unsafe { Out::new(local_address, "local_address") }?;
        let id = window.decode()?;
        let claim = leases::claim(id.place)?;
        let parts = match windows::view(&claim, id)? {
            View::Mirror(window) => match window.try_lease(address, length) {
                Some(lease) => lease.into_parts(),
                None => miss(window, address, length, timeout_ns, &[])?,
            },
            View::Fixed { base, len, local } => fixed(address.wrapping_sub(base), len, length, local)?,
        };
        local.write(parts.address);
        out.write(cuda_ipc_lease_t { id: claim.publish(parts) });
        Ok(())
    })
}

/// As `cuda_ipc_lease`, for a caller that holds `count` leases at `holding`: where a replaced chunk is in use by one of them, the answer is `CUDA_IPC_WOULD_BLOCK`
/// at once, since the caller would wait for itself. They may have been taken with other handles of the same memory: a context has one window for each reservation of
/// an exporter and each kind of access, however often it was opened. Handles in `holding` that are of no live lease of it do not matter.
///
/// Errors: as `cuda_ipc_lease`; `CUDA_IPC_ERR_ARGUMENT` for more than 65536 leases.
///
/// # Safety
/// `holding` is good for reading `count` handles; the rest as for `cuda_ipc_lease`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_lease_holding(
    window: cuda_ipc_window_t,
    address: u64,
    length: u64,
    timeout_ns: u64,
    holding: *const cuda_ipc_lease_t,
    count: usize,
    lease: *mut cuda_ipc_lease_t,
    local_address: *mut u64,
) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(lease, "lease") }?;
        // SAFETY: the caller's promise.
        let local = unsafe { Out::new(local_address, "local_address") }?;
        // SAFETY: the caller's promise.
        let holding = unsafe { Bytes::values(holding, count, "holding") }?;
        let id = window.decode()?;
        let claim = leases::claim(id.place)?;
        let parts = match windows::view(&claim, id)? {
            View::Mirror(window) => {
                let held = |lease: &cuda_ipc_lease_t| leases::peek(lease.decode().ok()?, |at| windows::shows(at, window));
                match window.try_lease(address, length) {
                    Some(lease) => lease.into_parts(),
                    None => miss(window, address, length, timeout_ns, &holding.iter().filter_map(held).collect::<Vec<_>>())?,
                }
            }
            View::Fixed { base, len, local } => fixed(address.wrapping_sub(base), len, length, local)?,
        };
        local.write(parts.address);
        out.write(cuda_ipc_lease_t { id: claim.publish(parts) });
        Ok(())
    })
}

/// Ends a lease: its memory may be unmapped from here on. Any thread may end it.
///
/// Errors: `CUDA_IPC_ERR_STALE_HANDLE` if it has ended before, which hurts nobody; `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_lease_end(lease: cuda_ipc_lease_t) -> cuda_ipc_status_t {
    boundary!({
        let (claim, parts) = leases::end(lease.decode()?)?;
        if let Some(window) = windows::of_lease(&claim) {
            drop(Lease::from_parts(window, parts));
        }
        let closed = windows::is_closed(&claim);
        drop(claim);
        if closed {
            windows::clear();
        }
        Ok(())
    })
}

#[cold]
fn miss(window: &Window, address: u64, len: u64, timeout_ns: u64, held: &[LeaseParts]) -> Result<LeaseParts, Failure> {
    if timeout_ns == 0 {
        return Err(Failure::plain(CUDA_IPC_WOULD_BLOCK));
    }
    // Views of leases that are others' to end.
    let held: Vec<ManuallyDrop<Lease<'_>>> = held.iter().map(|parts| ManuallyDrop::new(Lease::from_parts(window, *parts))).collect();
    let held: Vec<&Lease<'_>> = held.iter().map(|lease| &**lease).collect();
    Ok(window.lease_holding(address, len, deadline(timeout_ns), &held)?.into_parts())
}

/// A lease of memory that stays where it is: `offset` and `len` are bytes of the `all` that begin at `local` here.
fn fixed(offset: u64, all: u64, len: u64, local: u64) -> Result<LeaseParts, Failure> {
    if len == 0 || offset >= all || len > all - offset {
        return Err(Failure::about(CUDA_IPC_ERR_RANGE, "address"));
    }
    Ok(LeaseParts::from_words([local + offset, 0]))
}
