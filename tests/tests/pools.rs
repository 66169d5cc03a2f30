//! Memory of POSIX_FD pools between separately executed processes: every byte, one import for all who ask, and nothing left behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use cuda_ipc_core::importer::{ConnectOptions, Deadline, ImportErrorKind, LegacyImport, Peer, PooledImport, Route};
use cuda_ipc_core::key::KeyKind;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::table::LookupError;
use cuda_ipc_tests::driver::FakeConfig;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::importer::{Importer, LONG, enter, enter_with, key};
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::snapshot::Snapshot;

const MIB: u64 = 1 << 20;

fn soon() -> Deadline {
    Deadline::after(LONG)
}

fn import(importer: &Importer, peer: &Arc<Peer>, rkey: &Rkey) -> PooledImport {
    PooledImport::new(&importer.core, peer, &key(rkey), &[0], soon()).expect("an import")
}

/// Compares every byte of the range that `rkey` says, which is at `offset` in its allocation.
#[track_caller]
fn verify(importer: &Importer, import: &PooledImport, rkey: &Rkey, seed: u64) {
    let offset = rkey.base - key(rkey).base;
    pattern::check(&importer.cuda, import.address() + offset, offset, rkey.len, seed).expect("the exporter's bytes");
}

#[test]
fn allocations_of_a_pool_are_shared_byte_by_byte() {
    let Some((me, importer)) = enter("allocations_of_a_pool_are_shared_byte_by_byte") else { return };
    let start = Snapshot::take(&importer.fake);
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    let pool = remote.number("pool 0 1");
    // Sizes as they come, and ranges that begin and end inside.
    let sizes = [5 * MIB, 512, 3 * MIB + 1536, 20 * MIB];
    let addresses: Vec<u64> = sizes.iter().enumerate().map(|(at, len)| remote.number(&format!("pool_alloc {pool} {len} {at}"))).collect();
    let mut exports = Vec::new();
    for (&address, &len) in addresses.iter().zip(&sizes) {
        exports.push(remote.export_at(address, len));
        exports.push(remote.export_at(address + len / 3, len / 2));
    }
    let stats = remote.stats();
    assert_eq!((stats.chunks, stats.fds, remote.number("pools")), (4, 1, 1), "one fd for the whole pool");
    assert_eq!(remote.number("calls cuMemPoolExportToShareableHandle"), 1);
    assert_eq!(remote.number("calls cuMemPoolExportPointer"), 4, "B19: equal memory, equal bytes");

    let peer = importer.connect(&exports[0].1).unwrap();
    let mut imports = Vec::new();
    for (at, (_, rkey)) in exports.iter().enumerate() {
        assert!(matches!(key(rkey).kind, KeyKind::PoolAllocation { .. }));
        let import = import(&importer, &peer, rkey);
        assert!(import.is_current());
        verify(&importer, &import, rkey, at as u64 / 2);
        imports.push(import);
    }
    let calls = |name: &str| importer.fake.calls(name);
    assert_eq!((calls("cuMemPoolImportFromShareableHandle"), calls("cuMemPoolImportPointer")), (1, 4), "one of each in the process");
    assert_eq!((calls("cuMemPoolSetAccess"), importer.fake.counters().mappings), (1, 4));
    // What one user gives back is there for the other (A9).
    let other = imports.remove(1);
    drop(imports.remove(0));
    verify(&importer, &other, &exports[1].1, 0);
    assert_eq!(calls("cuMemFree"), 0);
    drop(other);
    assert_eq!((calls("cuMemFree"), calls("cuMemPoolDestroy")), (1, 0));
    drop(imports);
    assert_eq!((calls("cuMemFree"), calls("cuMemPoolDestroy")), (4, 1), "pointers first, the pool last");
    drop(peer);
    remote.finish();
    start.assert_unchanged(&importer.fake, "imports that were given back");
}

#[test]
fn freed_memory_leaves_the_table_and_the_last_of_it_takes_the_pool_along() {
    let Some((me, importer)) = enter("freed_memory_leaves_the_table_and_the_last_of_it_takes_the_pool_along") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let b = remote.number(&format!("pool_alloc {pool} {} 2", 2 * MIB));
    let ((_, first), (second, other)) = (remote.export_at(a, 2 * MIB), remote.export_at(b, 2 * MIB));
    let peer = importer.connect(&first).unwrap();
    let imported = import(&importer, &peer, &first);
    // Freed without a word: the sweep finds it.
    remote.ask(&format!("free_at {a}"));
    assert_eq!(remote.number("sweep"), 1);
    assert!(!imported.is_current());
    verify(&importer, &imported, &first, 1);
    let error = PooledImport::new(&importer.core, &peer, &key(&first), &[0], soon()).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::Lookup(LookupError::NoChunk(a)));
    let stats = remote.stats();
    assert_eq!((stats.chunks, stats.fds, remote.number("pools")), (1, 1, 1));
    // What the importer still has is no obstacle to the rest of its pool.
    let neighbour = import(&importer, &peer, &other);
    verify(&importer, &neighbour, &other, 2);
    drop(neighbour);
    // Released: nothing of the pool is published, and no fd is held.
    remote.ask(&format!("release {second}"));
    let stats = remote.stats();
    assert_eq!((stats.chunks, stats.fds, remote.number("pools")), (0, 0, 0));
    // Published anew, the pool is another entry; what is imported of it already stays one import.
    let (third, again) = remote.export_at(b, 2 * MIB);
    let neighbour = import(&importer, &peer, &again);
    verify(&importer, &neighbour, &again, 2);
    // The owner says that it goes, before it goes.
    assert_eq!(remote.number(&format!("retire_at {b} {}", 2 * MIB)), 1);
    assert!(!neighbour.is_current());
    remote.ask(&format!("release {third}"));
    let refused = remote.try_export_at(a, MIB).unwrap_err();
    assert_eq!(refused, "Freed");
    drop((imported, neighbour, peer));
    assert_eq!(importer.fake.counters().mappings, 0);
}

#[test]
fn a_pool_that_is_another_at_an_old_address_is_not_taken_for_the_first() {
    let Some((me, importer)) = enter("a_pool_that_is_another_at_an_old_address_is_not_taken_for_the_first") else { return };
    let mut remote = Remote::start(&me);
    // Nothing sweeps here: what is published of a dead pool is found dead by the export itself.
    remote.ask("exporter 64");
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, first) = remote.export_at(a, 2 * MIB);
    let peer = importer.connect(&first).unwrap();
    remote.ask(&format!("free_at {a}"));
    let b = remote.number(&format!("pool_alloc {pool} {} 2", 2 * MIB));
    let (_, second) = remote.export_at(b, 2 * MIB);
    assert_eq!(remote.number("calls cuMemPoolExportToShareableHandle"), 2, "no memory of it vouched for the published pool");
    let imported = import(&importer, &peer, &second);
    verify(&importer, &imported, &second, 2);
    let stats = remote.stats();
    assert_eq!((stats.chunks, stats.fds, remote.number("pools")), (1, 1, 1));
}

#[test]
fn memory_that_is_published_anew_waits_for_the_end_of_its_old_import() {
    // What is imported under an old identity may show other memory than what is offered now: nothing in the export data tells.
    let Some((me, importer)) = enter("memory_that_is_published_anew_waits_for_the_end_of_its_old_import") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (export, old) = remote.export_at(a, 2 * MIB);
    let peer = importer.connect(&old).unwrap();
    let first = import(&importer, &peer, &old);
    remote.ask(&format!("release {export}"));
    let (_, new) = remote.export_at(a, 2 * MIB);
    let error = PooledImport::new(&importer.core, &peer, &key(&new), &[0], soon()).unwrap_err();
    assert!(error.kind == ImportErrorKind::StillInUse && error.retryable(), "{error}");
    verify(&importer, &first, &old, 1);
    drop(first);
    let second = import(&importer, &peer, &new);
    verify(&importer, &second, &new, 1);
    drop((second, peer));
    assert_eq!((importer.fake.counters().pools, importer.fake.counters().mappings), (0, 0));
}

#[test]
fn a_range_stays_in_one_allocation() {
    let Some((me, _)) = enter("a_range_stays_in_one_allocation") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let cause = format!("LeavesAllocation {{ base: {a}, len: {} }}", 2 * MIB);
    for (address, len) in [(a, 2 * MIB + 1), (a + MIB, MIB + 1), (a + 2 * MIB - 1, u64::MAX - a - 2 * MIB)] {
        assert_eq!(remote.try_export_at(address, len).unwrap_err(), cause);
    }
    assert_eq!((remote.stats().chunks, remote.number("pools")), (0, 0));
}

#[test]
fn past_the_budget_the_broker_makes_the_pools_fd() {
    let Some((me, importer)) = enter("past_the_budget_the_broker_makes_the_pools_fd") else { return };
    let start = Snapshot::take(&importer.fake);
    let mut remote = Remote::start(&me);
    remote.ask("exporter_with reserve=100000000");
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, rkey) = remote.export_at(a, 2 * MIB);
    assert_eq!((remote.stats().fds, remote.number("pools")), (0, 1));
    let fds = remote.number("fds");
    for route in [Route::Auto, Route::Broker] {
        let peer = importer.connect_with(&rkey, &ConnectOptions::default().with_route(route)).unwrap();
        let imported = import(&importer, &peer, &rkey);
        verify(&importer, &imported, &rkey, 1);
    }
    let peer = importer.connect(&rkey).unwrap();
    let error = PooledImport::new(&importer.core, &peer, &key(&rkey), &[0], soon()).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::NoFd, "by pidfd alone there is none");
    // A pool of which nothing is there any more is not exported, though it was published.
    let KeyKind::PoolAllocation { slot } = key(&rkey).kind else { panic!("a key of another kind") };
    let with_broker = importer.connect_with(&rkey, &ConnectOptions::default()).unwrap();
    let found = with_broker.lookup_pooled(slot, a, 2 * MIB).unwrap();
    let made = remote.number("calls cuMemPoolExportToShareableHandle");
    remote.ask(&format!("free_at {a}"));
    let error = with_broker.import_pooled(&importer.core, &found, &[0], soon()).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::Retired);
    assert_eq!(remote.number("calls cuMemPoolExportToShareableHandle"), made);
    assert!(remote.number("fds") <= fds + 1, "but for a connection nothing is held");
    drop((peer, with_broker));
    remote.finish();
    start.assert_unchanged(&importer.fake, "imports by the broker");
}

#[test]
fn many_threads_import_and_give_back_one_pointer() {
    // A9: the fake driver has the defect; whoever met a dying pointer would read unmapped memory.
    let Some((me, importer)) = enter("many_threads_import_and_give_back_one_pointer") else { return };
    let mut remote = Remote::start(&me);
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, rkey) = remote.export_at(a, 2 * MIB);
    let context = importer.cuda.ctx_get_current().unwrap().expose_provenance();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                importer.cuda.ctx_set_current(core::ptr::with_exposed_provenance_mut(context)).unwrap();
                // A peer for each: as two users that know nothing of each other.
                let peer = importer.connect(&rkey).unwrap();
                for _ in 0..50 {
                    let import = import(&importer, &peer, &rkey);
                    pattern::check(&importer.cuda, import.address(), 0, 4096, 1).unwrap();
                }
            });
        }
    });
    assert_eq!(importer.fake.counters().mappings, 0);
    let calls = |name: &str| importer.fake.calls(name);
    assert_eq!(calls("cuMemPoolImportPointer"), calls("cuMemFree"));
    assert_eq!(calls("cuMemPoolImportFromShareableHandle"), calls("cuMemPoolDestroy"));
}

#[test]
fn another_device_reads_a_pool_after_it_was_asked_whether_it_can() {
    let config = FakeConfig { devices: Some(2), ..FakeConfig::default() };
    let Some((me, importer)) = enter_with("another_device_reads_a_pool_after_it_was_asked_whether_it_can", &config) else { return };
    let mut remote = Remote::start(&me);
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, rkey) = remote.export_at(a, 2 * MIB);
    let peer = importer.connect(&rkey).unwrap();
    let other = PooledImport::new(&importer.core, &peer, &key(&rkey), &[1], soon()).unwrap();
    assert_eq!(importer.fake.calls("cuDeviceCanAccessPeer"), 1);
    importer.cuda.enter_primary(1);
    pattern::check(&importer.cuda, other.address(), 0, 2 * MIB, 1).unwrap();
    other.open_to(&[0, 1], soon()).unwrap();
    drop(other);
    assert_eq!(importer.fake.calls("cuMemPoolDestroy"), 1);
    // Without an answer nothing is tried.
    importer.fake.add_fault("cuDeviceCanAccessPeer#*=801");
    let error = PooledImport::new(&importer.core, &peer, &key(&rkey), &[1], soon()).unwrap_err();
    assert!(matches!(error.kind, ImportErrorKind::Driver(driver) if driver.call == "cuDeviceCanAccessPeer"), "{error}");
    assert_eq!(importer.fake.counters().mappings, 0);
    assert_eq!(importer.fake.calls("cuMemPoolDestroy"), 2, "and nothing of it stays");
}

#[test]
fn a_device_that_cannot_reach_the_pool_gets_nothing() {
    // B36: this driver grants the access, and nothing comes of it.
    let config = FakeConfig { devices: Some(2), no_peers: true, ..FakeConfig::default() };
    let Some((me, importer)) = enter_with("a_device_that_cannot_reach_the_pool_gets_nothing", &config) else { return };
    let start = Snapshot::take(&importer.fake);
    let mut remote = Remote::start(&me);
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, rkey) = remote.export_at(a, 2 * MIB);
    let peer = importer.connect(&rkey).unwrap();
    for devices in [&[1][..], &[0, 1]] {
        let error = PooledImport::new(&importer.core, &peer, &key(&rkey), devices, soon()).unwrap_err();
        assert_eq!(error.kind, ImportErrorKind::NoPeerAccess { device: 1, home: 0 });
    }
    drop(peer);
    remote.finish();
    start.assert_unchanged(&importer.fake, "refusals");
}

#[test]
fn many_allocations_of_a_pool_cost_one_look_each() {
    let Some((me, importer)) = enter("many_allocations_of_a_pool_cost_one_look_each") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    let pool = remote.number("pool 0 1");
    const MANY: u64 = 300;
    let addresses: Vec<u64> = (0..MANY).map(|seed| remote.number(&format!("pool_alloc {pool} 512 {seed}"))).collect();
    let before = remote.number("calls cuPointerGetAttribute");
    let rkeys: Vec<Rkey> = addresses.iter().map(|address| remote.export_at(*address, 512).1).collect();
    let looks = remote.number("calls cuPointerGetAttribute") - before;
    assert!(looks <= 2 * MANY, "{looks}: one for the allocation, one for whoever vouches for the pool");
    assert_eq!((remote.stats().chunks, remote.stats().fds), (MANY, 1));
    let peer = importer.connect(&rkeys[0]).unwrap();
    for (rkey, seed) in rkeys.iter().zip(0..) {
        verify(&importer, &import(&importer, &peer, rkey), rkey, seed);
    }
    let imports: Vec<PooledImport> = rkeys.iter().map(|rkey| import(&importer, &peer, rkey)).collect();
    assert_eq!(importer.fake.counters().pools, 1);
    drop(imports);
    assert_eq!((importer.fake.counters().pools, importer.fake.counters().mappings), (0, 0));
}

#[test]
fn ordinals_mean_nothing_in_another_process() {
    let config = FakeConfig { devices: Some(2), ..FakeConfig::default() };
    let Some((me, importer)) = enter_with("ordinals_mean_nothing_in_another_process", &config) else { return };
    // The exporter sees the second GPU alone and calls it 0.
    let mut remote = Remote::start_with(&me, |command| {
        command.env("CUDA_VISIBLE_DEVICES", "1");
    });
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, rkey) = remote.export_at(a, 2 * MIB);
    assert_eq!(importer.core.device_with_uuid(rkey.device).unwrap(), Some(1));
    let peer = importer.connect(&rkey).unwrap();
    let imported = import(&importer, &peer, &rkey);
    assert_eq!(importer.fake.calls("cuDeviceCanAccessPeer"), 1, "device 0 here is another one");
    verify(&importer, &imported, &rkey, 1);
}

#[test]
fn a_gpu_that_is_not_visible_is_named() {
    let config = FakeConfig { devices: Some(2), visible_devices: Some("0".to_owned()), ..FakeConfig::default() };
    let Some((me, importer)) = enter_with("a_gpu_that_is_not_visible_is_named", &config) else { return };
    let start = Snapshot::take(&importer.fake);
    let mut remote = Remote::start_with(&me, |command| {
        command.env("CUDA_VISIBLE_DEVICES", "1");
    });
    let pool = remote.number("pool 0 1");
    let a = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
    let (_, pooled) = remote.export_at(a, 2 * MIB);
    let memory = remote.memory(16 * MIB, &[(2 * MIB, 1)]);
    let (_, chunks) = remote.export(&memory, 0, 2 * MIB);
    let plain = remote.number(&format!("alloc {} 7", 2 * MIB));
    let (_, legacy) = remote.export_at(plain, 2 * MIB);
    let expected = ImportErrorKind::DeviceNotVisible { uuid: pooled.device };
    let peer = importer.connect(&pooled).unwrap();
    assert_eq!(PooledImport::new(&importer.core, &peer, &key(&pooled), &[0], soon()).unwrap_err().kind, expected);
    assert_eq!(importer.import_from(&peer, &chunks).unwrap_err().kind, expected);
    assert_eq!(LegacyImport::open(&importer.core, &legacy, 0, soon()).unwrap_err().kind, expected);
    drop(peer);
    remote.finish();
    start.assert_unchanged(&importer.fake, "imports of a GPU that is not there");
}
