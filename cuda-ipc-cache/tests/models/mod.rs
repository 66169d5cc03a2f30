//! What the models share: how they are run, memory that must not be touched when it is not there, and an export table of loom's words.

#![allow(dead_code, reason = "each model uses a part of it")]

use core::sync::atomic::Ordering;
use core::time::Duration;

use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE, Layout, Reader, Word, Writer};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, fence};

/// Explores `body`: all interleavings with at most three preemptions, unless LOOM_MAX_PREEMPTIONS says otherwise. Prints how many there were: a model
/// that is explored once has not been explored.
pub(crate) fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    let runs = Counted::default();
    let count = runs.0.clone();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        body();
    });
}

#[derive(Default)]
struct Counted(std::sync::Arc<core::sync::atomic::AtomicU64>);

impl Drop for Counted {
    fn drop(&mut self) {
        println!("{} interleavings", self.0.load(Ordering::Relaxed));
    }
}

/// Never over: loom's waits do not time out.
pub(crate) fn never() -> Deadline {
    Deadline::after(Duration::MAX)
}

/// The memory behind one granule of a window: what is mapped there, as a number; 0 where nothing is. Loom fails a model in which a use of it is not ordered
/// before and after every change.
pub(crate) struct Mapping(UnsafeCell<u64>);

impl Mapping {
    pub(crate) fn new(what: u64) -> Self {
        Self(UnsafeCell::new(what))
    }

    /// What a kernel or a copy under a lease does.
    pub(crate) fn read(&self) -> u64 {
        // SAFETY: loom checks that no change is concurrent.
        self.0.with(|what| unsafe { *what })
    }

    /// What the driver does when it maps or unmaps.
    pub(crate) fn set(&self, what: u64) {
        // SAFETY: as above.
        self.0.with_mut(|cell| unsafe { *cell = what });
    }
}

/// A word of a table, as its writer or a reader has it.
#[derive(Debug)]
pub(crate) struct Cell {
    word: std::sync::Arc<AtomicU64>,
    writer: bool,
}

impl Word for Cell {
    fn load(&self, order: Ordering) -> u64 {
        if self.writer {
            // A thread's load before its store hides, from loom 0.7, that others have loaded the same word before: it would not try the store before them.
            // SAFETY: there is one writer, so nobody else stores. Loom checks that.
            return unsafe { self.word.unsync_load() };
        }
        self.word.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.word.store(value, order);
    }

    fn fence(order: Ordering) {
        fence(order);
    }
}

const LAYOUT: Layout = Layout { entries: 2, root: 1, leaves: 1, leaf_len: 4 };

/// A table that one exporter writes.
#[derive(Clone)]
pub(crate) struct Table {
    read: std::sync::Arc<[Cell]>,
    written: std::sync::Arc<[Cell]>,
}

impl Table {
    pub(crate) fn new() -> Self {
        let words: Vec<_> = (0..LAYOUT.words()).map(|_| std::sync::Arc::new(AtomicU64::new(0))).collect();
        let cells = |writer| words.iter().map(|word| Cell { word: word.clone(), writer }).collect();
        let table = Self { read: cells(false), written: cells(true) };
        Writer::create(&table.written, LAYOUT, Nonce(1)).expect("long enough");
        table
    }

    pub(crate) fn reader(&self) -> Reader<'_, Cell> {
        Reader::resume(&self.read, LAYOUT).expect("long enough")
    }

    /// Publishes a chunk of one granule in this slot, at the granule after it.
    pub(crate) fn publish(&self, slot: u32) -> ChunkId {
        let address = u64::from(slot + 1) * GRANULE;
        let chunk = Chunk { kind: ChunkKind::Vmm, fd: Some(3), address, len: GRANULE, buffer_id: 1, device: [0; 16] };
        self.writer().publish(slot, &chunk).expect("a free slot")
    }

    pub(crate) fn retire(&self, id: ChunkId) {
        assert!(self.writer().retire(id));
    }

    fn writer(&self) -> Writer<'_, Cell> {
        Writer::resume(&self.written, LAYOUT).expect("long enough")
    }
}
