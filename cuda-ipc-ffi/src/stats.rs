//! Counts of a context.
//!
//! # Safety
//! The unsafe here is what a C function does with its caller's pointer, by way of `boundary.rs`, and its name.

#![allow(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use crate::boundary::{boundary, write_struct};
use crate::context::CONTEXTS;
use crate::export::EXPORTS;
use crate::handles::cuda_ipc_context_t;
use crate::status::cuda_ipc_status_t;
use crate::windows;

/// Counts and totals of a context, as of now. Set `size` before it is passed.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_stats_t {
    /// sizeof of this structure.
    pub size: usize,
    /// Exports that have not been released, of whatever type.
    pub exports: u64,
    /// Exports so far of memory that cannot be shared.
    pub no_ipc_exports: u64,
    /// Chunks that are exported now.
    pub exported_chunks: u64,
    /// Their bytes.
    pub exported_bytes: u64,
    /// File descriptors held for them.
    pub exported_fds: u64,
    /// Chunks exported so far.
    pub published_chunks: u64,
    /// Chunks withdrawn so far.
    pub retired_chunks: u64,
    /// Among these, chunks that were found freed.
    pub swept_chunks: u64,
    /// Imports so far that failed.
    pub failed_imports: u64,
    /// Windows that have not been released.
    pub windows: u64,
    /// Released windows of any context that wait for leases.
    pub closing_windows: u64,
    /// Exporters known now.
    pub peers: u64,
    /// Reservations that have address space here now.
    pub mirrored_windows: u64,
    /// Chunks mapped now.
    pub mapped_chunks: u64,
    /// Their bytes.
    pub mapped_bytes: u64,
    /// Among the chunks, those that wait for leases to end before they are unmapped.
    pub waiting_unmaps: u64,
    /// Bytes of address space reserved now.
    pub address_space: u64,
    /// Chunks leased so far; a lease of three chunks counts three.
    pub chunk_leases: u64,
    /// Leases so far that were no hits.
    pub misses: u64,
    /// Chunks imported so far.
    pub imported_chunks: u64,
    /// Chunks unmapped so far because their exporter has withdrawn them.
    pub unmapped_dead: u64,
    /// Chunks unmapped so far because another took their place.
    pub unmapped_replaced: u64,
    /// Chunks unmapped so far because of a limit, or because nothing idle is kept.
    pub unmapped_limit: u64,
    /// Chunks unmapped so far because their exporter has exited or was purged.
    pub unmapped_purged: u64,
    /// Contacts with exporters so far that failed.
    pub refused: u64,
    /// Keys so far that were answered by a refusal that was remembered.
    pub refused_again: u64,
    /// Passes of the importing side's thread.
    pub sweeps: u64,
    /// Legacy handles open now.
    pub legacy_handles: u64,
}

/// Says what a context has done and holds.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread; takes
/// locks that misses take, so it is not for every transfer.
///
/// # Safety
/// `stats` is null or points to a structure of the size that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_stats(context: cuda_ipc_context_t, stats: *mut cuda_ipc_stats_t) -> cuda_ipc_status_t {
    boundary!({
        let read = || {
            let context = CONTEXTS.get(context.id)?;
            let exporter = context.exporter().map(|exporter| exporter.stats()).unwrap_or_default();
            let cache = context.cache.stats();
            let (windows, closing_windows) = windows::count(&context);
            Ok(cuda_ipc_stats_t {
                size: size_of::<cuda_ipc_stats_t>(),
                exports: EXPORTS.count(|export| Arc::ptr_eq(export.context(), &context)),
                no_ipc_exports: context.no_ipc_exports.load(Relaxed),
                exported_chunks: exporter.chunks,
                exported_bytes: exporter.bytes,
                exported_fds: exporter.fds,
                published_chunks: exporter.published,
                retired_chunks: exporter.retired,
                swept_chunks: exporter.swept,
                failed_imports: context.failed_imports.load(Relaxed),
                windows,
                closing_windows,
                peers: cache.peers,
                mirrored_windows: cache.windows,
                mapped_chunks: cache.chunks,
                mapped_bytes: cache.bytes,
                waiting_unmaps: cache.waiting_unmaps,
                address_space: cache.address_space,
                chunk_leases: cache.chunk_leases,
                misses: cache.misses,
                imported_chunks: cache.imported_chunks,
                unmapped_dead: cache.unmapped_dead,
                unmapped_replaced: cache.unmapped_replaced,
                unmapped_limit: cache.unmapped_limit,
                unmapped_purged: cache.unmapped_purged,
                refused: cache.refused,
                refused_again: cache.refused_again,
                sweeps: cache.sweeps,
                legacy_handles: cache.legacy_handles,
            })
        };
        // SAFETY: the caller's promise.
        unsafe { write_struct(stats, read) }
    })
}
