//! How many driver calls and system calls each operation makes: no more than its budget, and no fewer than it, for then the budget has to come down.
//!
//! The budgets are in `budgets/calls.txt`. Calls are counted as in the fault sweeps: driver calls by a hooked table, calls of the C library by the shim, on the
//! thread that works. So a change that costs a call for each chunk fails here, on any machine and without a clock.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "budgets/table.rs"]
mod table;

use core::cell::RefCell;
use std::collections::BTreeMap;

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::{ConnectOptions, Deadline, Route};
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::{Importer, LONG, key};
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::points::Watch;
use cuda_ipc_tests::{hooked, shim};

use table::{CHUNKS, Counts, Table};

const CHUNK: u64 = 2 << 20;
/// Operations of each test, as in `calls.txt`.
const EXPORTS: [&str; 4] =
    ["export of N unknown chunks", "its release", "registration of one of N known chunks", "registration of all of N known chunks"];
const IMPORTS: [&str; 4] = [
    "first contact with a peer of N chunks",
    "first import of N chunks of a peer",
    "import of N chunks of a known peer",
    "end of that import",
];
const LEASES: [&str; 5] = [
    "lease of N chunks, none mapped",
    "lease of N chunks, all mapped",
    "one more chunk after N",
    "trim with nothing dead",
    "end of a cache with N chunks mapped",
];
const BROKERED: [&str; 2] = ["first contact with the broker of N chunks", "import of N chunks of a known peer by its broker"];

/// Enters a test in a process with the shim and a hooked driver.
fn enter(test: &str) -> Option<(Inside, Importer, Counter)> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        "main" => me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {
            let mut importer = Importer::start();
            importer.core = driver::Cuda::with(hooked::driver()).unwrap();
            return Some((me, importer, Counter { watch: Watch::new(), found: RefCell::default() }));
        }
    }
    None
}

/// Counts calls by operation.
struct Counter {
    watch: Watch,
    found: RefCell<BTreeMap<&'static str, Counts>>,
}

impl Counter {
    /// Does it and counts, for the column `at`.
    fn count<T>(&self, operation: &'static str, at: usize, body: impl FnOnce() -> T) -> T {
        let (value, points) = self.watch.list(body);
        let mut found = self.found.borrow_mut();
        let counts = found.entry(operation).or_default();
        // The standard library's own look at each fd that it closes, in builds with debug assertions only.
        for point in points.iter().filter(|point| point.name != "fcntl(F_GETFD)") {
            counts.entry(point.name.to_owned()).or_default()[at] += 1;
        }
        value
    }

    /// Panics with every difference from the budgets.
    fn check(self, operations: &[&str]) {
        let found = self.found.into_inner();
        let mut names: Vec<&str> = operations.to_vec();
        names.sort_unstable();
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), names, "what was counted");
        let table = Table::read();
        let differences: String = found.iter().map(|(operation, counts)| table.differences(operation, counts)).collect();
        assert!(differences.is_empty(), "calls that tests/tests/budgets/calls.txt does not allow:\n{differences}");
    }
}

/// Memory of N chunks in the exporter's process, all of it exported.
fn remote_memory(remote: &mut Remote, chunks: usize) -> RemoteMemory {
    let list: Vec<(u64, u64)> = (0..chunks as u64).map(|seed| (CHUNK, seed)).collect();
    remote.marked_memory_at((chunks as u64 + 1) * CHUNK, 0, &list)
}

#[test]
fn every_budget_is_measured() {
    let table = Table::read();
    let mut measured: Vec<&str> = [&EXPORTS[..], &IMPORTS, &LEASES, &BROKERED].concat();
    measured.sort_unstable();
    assert_eq!(table.operations().collect::<Vec<_>>(), measured);
}

#[test]
fn exports_keep_their_budgets() {
    let Some((_, importer, counter)) = enter("exports_keep_their_budgets") else { return };
    // Its thread would now and then be the last to hold something, and then the end of it is not this thread's to count.
    let mut options = exporter::without_broker();
    options.sweep_interval = None;
    for (at, chunks) in CHUNKS.into_iter().enumerate() {
        let mut memory = Memory::reserve(importer.cuda, (chunks as u64) * CHUNK, 0).unwrap();
        for chunk in 0..chunks as u64 {
            memory.mark(chunk * CHUNK, CHUNK, chunk).unwrap();
        }
        let exporter = Exporter::new(importer.core, options.clone()).unwrap();
        let (base, len) = (memory.base(), chunks as u64 * CHUNK);
        // What an exporter does once is not an export's.
        drop(exporter.export(base, len).unwrap());
        let [unknown, release, one, all] = EXPORTS;
        let whole = counter.count(unknown, at, || exporter.export(base, len).unwrap());
        assert_eq!((whole.chunks().len(), exporter.stats().fds), (chunks, chunks as u64));
        let part = counter.count(one, at, || exporter.export(base + CHUNK / 4, CHUNK / 2).unwrap());
        assert_eq!(part.chunks().len(), 1);
        drop(counter.count(all, at, || exporter.export(base, len).unwrap()));
        drop(part);
        counter.count(release, at, || drop(whole));
        assert_eq!(exporter.stats().fds, 0);
    }
    counter.check(&EXPORTS);
}

#[test]
fn imports_keep_their_budgets() {
    let Some((me, importer, counter)) = enter("imports_keep_their_budgets") else { return };
    for (at, chunks) in CHUNKS.into_iter().enumerate() {
        let mut remote = Remote::start(&me);
        let memory = remote_memory(&mut remote, chunks);
        let (_, rkey) = remote.export(&memory, 0, memory.mapped_len());
        // What a process does once is not an import's.
        drop(importer.import(&rkey).unwrap());
        let [contact, first, known, end] = IMPORTS;
        let peer = counter.count(contact, at, || importer.connect(&rkey).unwrap());
        let import = counter.count(first, at, || importer.import_from(&peer, &rkey).unwrap());
        assert_eq!(import.chunks().len(), chunks);
        drop(import);
        let import = counter.count(known, at, || importer.import_from(&peer, &rkey).unwrap());
        memory.spot_check(&importer.cuda, import.address(), 0, memory.mapped_len()).unwrap();
        counter.count(end, at, || import.close().unwrap());
        drop(peer);
        remote.finish();
    }
    counter.check(&IMPORTS);
}

#[test]
fn leases_keep_their_budgets() {
    let Some((me, importer, counter)) = enter("leases_keep_their_budgets") else { return };
    for (at, chunks) in CHUNKS.into_iter().enumerate() {
        let mut remote = Remote::start(&me);
        let mut memory = remote_memory(&mut remote, chunks);
        let len = memory.mapped_len();
        let (_, rkey) = remote.export(&memory, 0, len);
        let mut options = CacheOptions::default();
        options.sweep = false;
        options.connect = ConnectOptions::default().with_route(Route::Pidfd);
        let cache = Cache::new(importer.core, options);
        let window = cache.window(&key(&rkey), 0, false, Deadline::after(LONG)).unwrap();
        window.peer().lookup(rkey.base, len).unwrap();
        let [miss, hit, more, trim, end] = LEASES;
        let lease = |at: u64, len: u64| drop(window.lease(rkey.base + at, len, Deadline::after(LONG)).unwrap());
        counter.count(miss, at, || lease(0, len));
        counter.count(hit, at, || lease(0, len));
        assert_eq!(cache.stats().imported_chunks, chunks as u64);
        memory.map(&mut remote, len, CHUNK, 1000);
        let _more = remote.export(&memory, len, CHUNK);
        counter.count(more, at, || lease(0, len + CHUNK));
        assert_eq!(cache.stats().imported_chunks, chunks as u64 + 1);
        counter.count(trim, at, || assert_eq!(cache.trim(), 0));
        counter.count(end, at, || drop((window, cache)));
        remote.finish();
    }
    counter.check(&LEASES);
}

#[test]
fn imports_by_the_broker_keep_their_budgets() {
    let Some((me, importer, counter)) = enter("imports_by_the_broker_keep_their_budgets") else { return };
    for (at, chunks) in CHUNKS.into_iter().enumerate() {
        let mut remote = Remote::start(&me);
        // With the broker; the exporter of tests has none unless asked.
        remote.ask("exporter_with");
        let memory = remote_memory(&mut remote, chunks);
        let (_, rkey) = remote.export(&memory, 0, memory.mapped_len());
        let options = ConnectOptions::default().with_route(Route::Broker);
        drop(importer.connect_with(&rkey, &options).unwrap());
        let [contact, import] = BROKERED;
        let peer = counter.count(contact, at, || importer.connect_with(&rkey, &options).unwrap());
        drop(importer.import_from(&peer, &rkey).unwrap());
        let import = counter.count(import, at, || importer.import_from(&peer, &rkey).unwrap());
        memory.spot_check(&importer.cuda, import.address(), 0, memory.mapped_len()).unwrap();
        drop((import, peer));
        remote.finish();
    }
    counter.check(&BROKERED);
}
