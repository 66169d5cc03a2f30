//! Exports that nobody gives back, as the preload library makes them: what they leave behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::alloc::System;

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::memory::Memory;

const CHUNK: u64 = 2 << 20;

/// Counts the bytes that are allocated in this process and not freed.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's word, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_kept_export_holds_no_memory_and_its_chunks_stay_published() {
    let Some(_me) = Inside::enter("a_kept_export_holds_no_memory_and_its_chunks_stay_published", &FakeConfig::default()) else { return };
    let importer = Importer::start();
    let mut options = ExporterOptions::default();
    (options.sweep_interval, options.broker) = (None, false);
    let exporter = Exporter::new(importer.core, options).unwrap();
    let mut memory = Memory::reserve(importer.cuda, 4 * CHUNK, 0).unwrap();
    for offset in (0..4).map(|at| at * CHUNK) {
        memory.mark(offset, CHUNK, 1).unwrap();
    }
    let keep = |times: usize| (0..times).for_each(|_| exporter.export(memory.base(), 4 * CHUNK).unwrap().keep_published());
    keep(3);
    let before = LIVE.load(Relaxed);
    keep(1000);
    assert_eq!(LIVE.load(Relaxed), before, "bytes in use");

    // One that is given back takes none of them along, and their memory's end does.
    drop(exporter.export(memory.base(), 4 * CHUNK).unwrap());
    assert_eq!((exporter.stats().chunks, exporter.stats().retired), (4, 0));
    assert_eq!(exporter.retire(memory.base(), 4 * CHUNK), 4);
    assert_eq!(exporter.stats().chunks, 0);
}
