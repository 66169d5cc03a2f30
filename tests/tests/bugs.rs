//! Public bug reports of which no other test tries the essence; each test is named after its id in `docs/bug-catalogue.md`.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheErrorKind, CacheOptions, Lease, Window};
use cuda_ipc_core::importer::{Access, ConnectOptions, Deadline, Import, ImportErrorKind, ImportStep, Peer, Route};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::apart;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::importer::{self, Importer, LONG, key};
use cuda_ipc_tests::snapshot::Snapshot;
use pidfd_sys::numbers::PIDFD_GETFD;

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 2 * MIB;

/// Enters a test; `None` in the runner's process, and in the exporters' when they are over.
fn enter(test: &str) -> Option<(Inside, Importer)> {
    enter_with(test, &FakeConfig::default())
}

fn enter_with(test: &str, config: &FakeConfig) -> Option<(Inside, Importer)> {
    let entered = importer::enter_with(test, config)?;
    // What is made once in a process is made now.
    cuda_ipc_core::sys::ProcessLife::current().unwrap();
    Some(entered)
}

fn cache(importer: &Importer) -> Cache {
    let mut options = CacheOptions::default();
    options.sweep = false;
    Cache::new(importer.core, options)
}

fn window(cache: &Cache, rkey: &Rkey) -> Arc<Window> {
    cache.window(&key(rkey), 0, false, Deadline::after(LONG)).unwrap()
}

#[test]
fn b3_a_thousand_lives_of_one_address() {
    // Freed and made anew at one address, larger and smaller, told and untold: a lease gives the bytes of now, or an error.
    let Some((me, importer)) = enter("b3_a_thousand_lives_of_one_address") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.marked_memory_at(16 * MIB, 0, &[]);
    let start = Snapshot::take(&importer.fake);
    let cache = cache(&importer);
    let mut known: Option<Arc<Window>> = None;
    for round in 0..1000_u64 {
        let len = [1, 4, 2, 3, 1, 2][usize::try_from(round % 6).unwrap()] * CHUNK;
        memory.map(&mut remote, 0, len, 5000 + round);
        let (_, rkey) = remote.export(&memory, 0, len);
        let window = known.get_or_insert_with(|| window(&cache, &rkey));
        let lease = window.lease(memory.base, len, Deadline::after(LONG)).unwrap();
        memory.spot_check(&importer.cuda, lease.address(), 0, len).unwrap_or_else(|error| panic!("round {round}: {error}"));
        drop(lease);
        if round % 2 == 0 {
            remote.ask(&format!("retire {} 0 {len}", memory.index));
            let error = window.lease(memory.base, len, Deadline::after(LONG)).unwrap_err();
            assert_eq!(error.kind, CacheErrorKind::NoChunk, "round {round}");
        }
        memory.unmap(&mut remote, 0);
    }
    let counters = importer.fake.counters();
    assert_eq!((counters.imports_made, counters.mappings), (1000, 1), "one chunk a life, and the last one is still there");
    drop(known);
    drop(cache);
    start.assert_settles(&importer.fake, "a thousand lives of an address");
}

#[test]
fn b9_a_key_that_is_looked_at_and_dropped_holds_nothing() {
    let Some((me, importer)) = enter("b9_a_key_that_is_looked_at_and_dropped_holds_nothing") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(CHUNK, 1), (20 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 22 * MIB);
    let start = Snapshot::take(&importer.fake);
    let before = importer.fake.counters();
    let cache = cache(&importer);
    for _ in 0..100 {
        let rkey = Rkey::decode(&rkey.encode()).unwrap();
        drop(window(&cache, &rkey));
        drop(importer.connect(&rkey).unwrap());
    }
    let after = importer.fake.counters();
    assert_eq!((after.imports_made, after.handles, after.mappings), (before.imports_made, before.handles, before.mappings));
    assert_eq!((after.reservations, cache.stats().bytes), (before.reservations, 0), "not even addresses");
    // The exporter frees what was looked at: nothing of it stays.
    let free = free_bytes(&importer);
    remote.ask(&format!("retire {} 0 {}", memory.index, memory.len));
    remote.ask(&format!("unmap {} {CHUNK}", memory.index));
    assert_eq!(free_bytes(&importer) - free, 20 * MIB);
    drop(cache);
    start.assert_settles(&importer.fake, "a hundred looks at a key");
}

#[test]
fn b10_a_pinned_lease_outlives_all_but_its_end() {
    // Given up as plain numbers, as a caller of the C ABI has it: purge, limits, the exporter's free and its death leave the mapping alone.
    let Some((me, importer)) = enter("b10_a_pinned_lease_outlives_all_but_its_end") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(4 * MIB, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    let cache = cache(&importer);
    let window = window(&cache, &rkey);
    let parts = window.lease(rkey.base, 4 * MIB, Deadline::after(LONG)).unwrap().into_parts();
    let same = |when: &str| {
        cuda_ipc_tests::pattern::check(&importer.cuda, parts.address, 0, 4 * MIB, 1).unwrap_or_else(|error| panic!("{when}: {error}"))
    };
    same("at first");
    remote.ask(&format!("retire {} 0 {CHUNK}", memory.index));
    memory.unmap(&mut remote, 0);
    assert_eq!(cache.trim(), 0);
    same("after the exporter has freed it");
    remote.kill();
    cache.trim();
    cache.purge_peer(key(&rkey).nonce);
    same("after the exporter's death and a purge");
    assert_eq!(importer.fake.counters().mappings, 1);
    drop(Lease::from_parts(&window, parts));
    assert_eq!(importer.fake.counters().mappings, 0, "its end unmaps it");
}

#[test]
fn b18_a_refused_key_costs_no_driver_call() {
    // What a key is and where it leads it says itself; nothing is tried on the driver to find out.
    let Some((me, importer)) = enter("b18_a_refused_key_costs_no_driver_call") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(8 * MIB, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = cache(&importer);
    let calls = importer.fake.total_calls();
    // A key of another version, and of an unknown kind, with a right checksum or without one.
    for at in 0..64 {
        let mut bytes = key(&rkey).encode();
        bytes[at] ^= 0xa5;
        cuda_ipc_core::key::Key::decode(&bytes).unwrap_err();
    }
    // No way is open to this process any more.
    apart::refuse(PIDFD_GETFD, libc::EPERM);
    let error = importer.connect(&rkey).unwrap_err();
    assert_eq!(error.step, ImportStep::FetchTable);
    let auto = ConnectOptions::default().with_route(Route::Auto);
    Peer::connect_with(&key(&rkey), &auto, Deadline::after(LONG)).map(drop).unwrap_err();
    let error = cache.window(&key(&rkey), 0, false, Deadline::after(LONG)).unwrap_err();
    assert!(error.import().is_some(), "{error}");
    assert_eq!(importer.fake.total_calls(), calls);
}

#[test]
fn b24_nobody_is_let_in_unasked() {
    // Each process here dies at once if it calls PR_SET_PTRACER; only the one that asks for it does.
    let Some((me, importer)) = enter("b24_nobody_is_let_in_unasked") else { return };
    if me.role() == "importer" {
        let Some(rkey) = me.listen() else { return };
        let rkey = from_hex(&rkey);
        for route in [Route::Pidfd, Route::Broker, Route::Auto] {
            let options = ConnectOptions::default().with_route(route);
            let peer = importer.connect_with(&rkey, &options).unwrap();
            importer.import_from(&peer, &rkey).unwrap().close().unwrap();
        }
        let cache = cache(&importer);
        let window = window(&cache, &rkey);
        drop(window.lease(rkey.base, rkey.len, Deadline::after(LONG)).unwrap());
        me.tell("done");
        // Now the opt-in, as a user of these crates would do it.
        if me.listen().is_some() {
            let _ = pidfd_sys::set_ptracer(pidfd_sys::Ptracer::Any);
            me.tell("it was possible");
        }
        return;
    }
    let mut remote = Remote::start_with(&me, apart::dying_of_ptracer);
    remote.ask("exporter_with");
    let memory = remote.memory(8 * MIB, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let mut process = me.spawn_with("importer", apart::dying_of_ptracer).unwrap();
    process.tell(&hex(&rkey));
    assert_eq!(process.listen(), "done");
    remote.ask("sweep");
    remote.release_all();
    remote.finish();
    // And what would have happened.
    process.tell("ask for it");
    let end = process.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&end), Some(libc::SIGSYS), "{end}");
}

#[test]
fn b28_a_denied_import_holds_nothing_of_the_exporter() {
    let Some((me, importer)) = enter("b28_a_denied_import_holds_nothing_of_the_exporter") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(CHUNK, 1), (20 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 22 * MIB);
    let start = Snapshot::take(&importer.fake);
    let free = free_bytes(&importer);
    // Denied in the middle: the first chunk is imported by then.
    let peer = importer.connect(&rkey).unwrap();
    let began = Instant::now();
    for fault in ["cuMemImportFromShareableHandle#2=304", "cuMemMap#2=304", "cuMemSetAccess#1=304"] {
        importer.fake.add_fault(fault);
        let error = importer.import_from(&peer, &rkey).map(drop).unwrap_err();
        assert!(matches!(error.kind, ImportErrorKind::Driver(driver) if driver.code == 304), "{error}");
        importer.fake.clear_faults();
    }
    assert!(began.elapsed() < LONG, "an answer, and no wait for the deadline");
    remote.ask(&format!("retire {} 0 {}", memory.index, memory.len));
    memory.unmap(&mut remote, CHUNK);
    memory.unmap(&mut remote, 0);
    assert_eq!(free_bytes(&importer) - free, 22 * MIB, "all of it is free at once");
    drop(peer);
    start.assert_unchanged(&importer.fake, "denied imports");
}

#[test]
fn b39_ordinals_mean_nothing_in_another_process() {
    // Two GPUs, which the exporter and the importer see in opposite orders.
    let config = FakeConfig { devices: Some(2), visible_devices: Some("0,1".to_owned()), ..FakeConfig::default() };
    let Some((me, importer)) = enter_with("b39_ordinals_mean_nothing_in_another_process", &config) else { return };
    let mut remote = Remote::start_with(&me, |command| {
        command.env("CUDA_VISIBLE_DEVICES", "1,0");
    });
    let memory = remote.memory(8 * MIB, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    assert_eq!(importer.core.device_uuid(1).unwrap(), rkey.device, "its first is our second");
    assert_ne!(importer.core.device_uuid(0).unwrap(), rkey.device);
    let used = importer.fake.device(1).used_bytes;
    assert!(used >= CHUNK && importer.fake.device(0).used_bytes < CHUNK);
    let peer = importer.connect(&rkey).unwrap();
    let ordinal = (0..2).find(|&ordinal| importer.core.device_uuid(ordinal).unwrap() == rkey.device).unwrap();
    let access = Access { devices: &[ordinal], writable: false };
    let import = Import::new(&importer.core, &peer, &key(&rkey), rkey.base, rkey.len, access, Deadline::after(LONG)).unwrap();
    // Only this device was given access.
    memory.verify(&importer.cuda, import.address(), 0, CHUNK).unwrap_err();
    importer.cuda.enter_primary(ordinal);
    memory.verify(&importer.cuda, import.address(), 0, CHUNK).unwrap();
    assert_eq!(importer.fake.device(1).used_bytes, used, "the same memory");
}

#[test]
fn a12_who_is_denied_is_told_in_time_and_alone() {
    // To agree on a route before the next common step is the caller's; ours is that each process learns its own answer, and soon.
    let Some((me, importer)) = enter("a12_who_is_denied_is_told_in_time_and_alone") else { return };
    if me.role() == "rank" {
        let rkey = from_hex(&me.listen().unwrap());
        if me.listen().unwrap() == "denied" {
            apart::refuse(PIDFD_GETFD, libc::EPERM);
        }
        let limit = Duration::from_secs(20);
        let options = ConnectOptions::default().with_route(Route::Auto);
        let began = Instant::now();
        let answer = Peer::connect_with(&key(&rkey), &options, Deadline::after(limit)).map(|peer| {
            importer.import_from(&Arc::new(peer), &rkey).unwrap().close().unwrap();
        });
        assert!(began.elapsed() < limit / 2, "{:?}", began.elapsed());
        return me.tell(if answer.is_ok() { "imported" } else { "refused" });
    }
    let mut remote = Remote::start(&me);
    let memory = remote.memory(8 * MIB, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let mut ranks: Vec<_> = (0..4).map(|_| me.spawn("rank").unwrap()).collect();
    for (number, rank) in ranks.iter_mut().enumerate() {
        rank.tell(&hex(&rkey));
        rank.tell(if number == 1 { "denied" } else { "welcome" });
    }
    let answers: Vec<String> = ranks.iter_mut().map(cuda_ipc_tests::driver::Peer::listen).collect();
    assert_eq!(answers, ["imported", "refused", "imported", "imported"]);
    ranks.into_iter().for_each(cuda_ipc_tests::driver::Peer::finish);
}

fn hex(rkey: &Rkey) -> String {
    rkey.encode().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Rkey {
    let bytes: Vec<u8> = (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect();
    Rkey::decode(&bytes).unwrap()
}

fn free_bytes(importer: &Importer) -> u64 {
    importer.cuda.mem_info().unwrap().0 as u64
}
