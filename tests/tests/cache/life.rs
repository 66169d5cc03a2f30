//! Exporters that exit, are killed, restart under the same pid, or replace themselves: new bytes or an error, never the old ones, and memory comes back.

use core::time::Duration;
use std::time::Instant;

use cuda_ipc_cache::CacheErrorKind;
use cuda_ipc_core::importer::ImportErrorKind;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::exporter::{Remote, RemoteMemory};
use cuda_ipc_tests::memory::STABLE;
use cuda_ipc_tests::snapshot::wait_until;

use crate::support::*;

const HALF_A_SECOND: Duration = Duration::from_millis(500);

/// An exporter whose next life has the same pid, addresses, sizes and fd numbers, but other bytes.
#[test]
fn an_exporter_that_calls_exec_is_another_peer() {
    let Some(world) = enter(test_name!(an_exporter_that_calls_exec_is_another_peer)) else { return };
    let mut remote = world.remote();
    let old = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, old_rkey) = remote.export(&old, 0, 2 * CHUNK);
    let cache = world.quiet_cache();
    let old_window = window(&cache, &old_rkey);
    // The second chunk is not imported yet.
    drop(world.verify(&old_window, &old, 0, CHUNK));

    remote.exec();
    let new = remote.memory_at(8 * CHUNK, old.base, &[(CHUNK, 11), (CHUNK, 12)]);
    let (_, new_rkey) = remote.export(&new, 0, 2 * CHUNK);
    assert_eq!((new.base, key(&new_rkey).pid, key(&new_rkey).table_fd), (old.base, key(&old_rkey).pid, key(&old_rkey).table_fd));

    // The old table says "live" for ever, and its fd number is that of the new life's second chunk.
    let error = old_window.lease(old.base + CHUNK, CHUNK, soon()).unwrap_err();
    let CacheErrorKind::Import(import) = error.kind else { panic!("{error}") };
    assert_eq!(import.kind, ImportErrorKind::ExporterGone);

    let new_window = window(&cache, &new_rkey);
    drop(world.verify(&new_window, &new, 0, 2 * CHUNK));
    assert_eq!(cache.stats().peers, 2);
    cache.trim();
    assert_eq!(cache.stats().peers, 1);
    let error = old_window.lease(old.base, CHUNK, soon()).unwrap_err();
    assert_eq!(error.kind, CacheErrorKind::Closed);
    world.assert_mapped(&cache, 2);

    drop((old_window, new_window));
    remote.finish();
    world.close(cache);
}

#[test]
fn the_sweeper_finds_an_exec() {
    let Some(world) = enter(test_name!(the_sweeper_finds_an_exec)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, CHUNK));
    remote.exec();
    let began = Instant::now();
    assert!(wait_until(HALF_A_SECOND, || cache.stats().chunks == 0), "{:?}", began.elapsed());
    assert!(window.lease(memory.base, CHUNK, soon()).is_err());
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_killed_exporters_memory_stays_under_its_lease_and_comes_back_after_it() {
    let Some(world) = enter(test_name!(a_killed_exporters_memory_stays_under_its_lease_and_comes_back_after_it)) else { return };
    let mut observer = world.remote();
    let all = observer.number("free");
    let mut remote = world.remote();
    let memory = remote.memory(64 * CHUNK, &[(8 * CHUNK, 1), (8 * CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 16 * CHUNK);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 8 * CHUNK, 8 * CHUNK));
    let lease = world.verify(&window, &memory, 0, 8 * CHUNK);

    remote.kill();
    // What is idle goes; what is leased stays, with its bytes, and is accounted for.
    assert!(wait_until(HALF_A_SECOND, || observer.number("free") == all - 8 * CHUNK));
    memory.verify(&world.importer.cuda, lease.address(), 0, 8 * CHUNK).expect("the bytes of the dead");
    let stats = cache.stats();
    assert_eq!((stats.peers, stats.windows, stats.chunks, stats.waiting_unmaps), (0, 1, 1, 1));
    world.assert_mapped(&cache, 1);
    assert_eq!(window.lease(memory.base, CHUNK, soon()).unwrap_err().kind, CacheErrorKind::Closed);

    drop(lease);
    assert!(wait_until(HALF_A_SECOND, || observer.number("free") == all));
    let stats = cache.stats();
    assert_eq!((stats.windows, stats.chunks, stats.address_space, stats.unmapped_purged), (0, 0, 0, 2));
    drop(window);
    observer.finish();
    world.close(cache);
}

/// Rounds of sharing and freeing; `free` says how the exporter goes about it. Returns how long the memory took to come back each time, as a third process
/// sees it, while the importer did nothing.
fn times_to_come_back(world: &World, remote: &mut Remote, free: impl Fn(&mut Remote, &RemoteMemory, u64)) -> Vec<Duration> {
    const LEN: u64 = 32 * CHUNK;
    let mut observer = world.remote();
    let all = observer.number("free");
    let cache = world.cache(|_| {});
    let memory = remote.memory(LEN, &[]);
    let mut times = Vec::new();
    for _ in 0..10 {
        for at in 0..32 {
            remote.ask(&format!("map_types {} {} {CHUNK} 1", memory.index, at * CHUNK));
        }
        let (export, rkey) = remote.export(&memory, 0, LEN);
        let window = window(&cache, &rkey);
        drop(window.lease(memory.base, LEN, soon()).unwrap());
        assert_eq!(observer.number("free"), all - LEN);
        free(remote, &memory, export);
        let began = Instant::now();
        assert!(wait_until(Duration::from_secs(5), || observer.number("free") == all), "never came back");
        times.push(began.elapsed());
    }
    observer.finish();
    times.sort();
    println!("memory back after {times:?}");
    times
}

fn unmap_all(remote: &mut Remote, memory: &RemoteMemory) {
    for at in 0..32 {
        remote.ask(&format!("unmap {} {}", memory.index, at * CHUNK));
    }
}

#[test]
fn memory_whose_free_is_reported_is_back_at_once() {
    let Some(world) = enter(test_name!(memory_whose_free_is_reported_is_back_at_once)) else { return };
    let mut remote = world.remote();
    for by_release in [false, true] {
        let times = times_to_come_back(&world, &mut remote, |remote, memory, export| {
            if by_release {
                remote.ask(&format!("release {export}"));
            } else {
                remote.ask(&format!("retire {} 0 {}", memory.index, memory.len));
            }
            unmap_all(remote, memory);
        });
        // The best of ten says what the code does; the others what else the machine was doing.
        assert!(times[0] < Duration::from_millis(20), "{times:?}");
        assert!(times[5] < HALF_A_SECOND, "{times:?}");
    }
    remote.finish();
}

#[test]
fn memory_that_is_freed_without_a_word_is_back_in_half_a_second() {
    let Some(world) = enter(test_name!(memory_that_is_freed_without_a_word_is_back_in_half_a_second)) else { return };
    let mut remote = world.remote();
    // An exporter with its thread, which sweeps every 100 ms.
    remote.ask("exporter 256 100");
    let times = times_to_come_back(&world, &mut remote, |remote, memory, _| unmap_all(remote, memory));
    assert!(times[5] < HALF_A_SECOND, "{times:?}");
    remote.finish();
}

#[test]
fn a_purged_peer_is_another_one_next_time() {
    let Some(world) = enter(test_name!(a_purged_peer_is_another_one_next_time)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let nonce = key(&rkey).nonce;
    let cache = world.quiet_cache();
    let old = window(&cache, &rkey);
    drop(world.verify(&old, &memory, 0, 2 * CHUNK));
    let lease = world.verify(&old, &memory, 0, CHUNK);
    assert_eq!(cache.purge_peer(nonce), CHUNK);
    assert!(cache.peer(nonce).is_none());
    world.assert_mapped(&cache, 1);
    assert_eq!(old.lease(memory.base, CHUNK, soon()).unwrap_err().kind, CacheErrorKind::Closed);
    memory.verify(&world.importer.cuda, lease.address(), 0, CHUNK).unwrap();

    let new = window(&cache, &rkey);
    drop(world.verify(&new, &memory, 0, 2 * CHUNK));
    world.assert_mapped(&cache, 3);
    drop(lease);
    // Without a thread, too: whoever ends the last lease of a purged window unmaps.
    world.assert_mapped(&cache, 2);
    assert_eq!(cache.purge_peer(nonce), 2 * CHUNK);
    assert_eq!(cache.purge_peer(nonce), 0);
    world.assert_mapped(&cache, 0);
    drop((old, new));
    remote.finish();
    world.close(cache);
}

#[test]
fn a_lease_outlives_the_cache() {
    let Some(world) = enter(test_name!(a_lease_outlives_the_cache)) else { return };
    for sweep in [false, true] {
        let mut remote = world.remote();
        let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
        let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
        let cache = world.cache(|options| options.sweep = sweep);
        let window = window(&cache, &rkey);
        drop(world.verify(&window, &memory, CHUNK, CHUNK));
        let lease = world.verify(&window, &memory, 0, CHUNK);
        drop(cache);
        assert_eq!(world.counters().mappings, 1);
        memory.verify(&world.importer.cuda, lease.address(), 0, CHUNK).unwrap();
        assert_eq!(window.lease(memory.base + CHUNK, CHUNK, soon()).unwrap_err().kind, CacheErrorKind::Closed);
        drop(lease);
        let counters = world.counters();
        assert_eq!((counters.mappings, counters.reservations), (0, 0));
        drop(window);
        remote.finish();
        world.start.assert_settles(&world.importer.fake, "the end of the last window");
    }
}

#[test]
fn a_key_of_this_very_process_is_no_peer() {
    let Some(world) = enter(test_name!(a_key_of_this_very_process_is_no_peer)) else { return };
    use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
    let exporter = Exporter::new(world.importer.core, ExporterOptions::default()).unwrap();
    let (handle, address) = world.importer.cuda.mem_chunk(usize::try_from(CHUNK).unwrap(), 0, 1).unwrap();
    let export = exporter.export(address, CHUNK).unwrap();
    let cache = world.quiet_cache();
    for _ in 0..2 {
        let error = cache.window(&export.key().unwrap(), 0, false, soon()).unwrap_err();
        let CacheErrorKind::Import(import) = error.kind else { panic!("{error}") };
        assert_eq!(import.kind, ImportErrorKind::OwnProcess);
    }
    assert_eq!(cache.stats().refused_again, 0, "no verdict on a peer");
    drop((export, exporter));
    world.importer.cuda.mem_drop_chunk(usize::try_from(CHUNK).unwrap(), (handle, address)).unwrap();
    world.close(cache);
}

/// Unless that is asked for, as a caller does who cannot use the pointer itself.
#[test]
fn a_key_of_this_very_process_gets_a_window_if_asked() {
    let Some(world) = enter(test_name!(a_key_of_this_very_process_gets_a_window_if_asked)) else { return };
    use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
    use cuda_ipc_tests::{memory::Memory, pattern};
    let cuda = world.importer.cuda;
    let exporter = Exporter::new(world.importer.core, ExporterOptions::default()).unwrap();
    let mut memory = Memory::reserve(cuda, 8 * CHUNK, 0).unwrap();
    memory.map(0, CHUNK, 1).unwrap();
    memory.map(CHUNK, CHUNK, 2).unwrap();
    let base = memory.base();
    let export = exporter.export(base, 2 * CHUNK).unwrap();
    let cache = world.cache(|options| (options.connect.own_keys, options.sweep) = (true, false));
    let window = cache.window(&export.key().expect("a key of chunks"), 0, true, soon()).unwrap();
    let lease = window.lease(base, 2 * CHUNK, soon()).unwrap();
    assert_ne!(lease.address(), base);
    pattern::check(&cuda, lease.address(), 0, CHUNK, 1).unwrap();
    pattern::check(&cuda, lease.address() + CHUNK, 0, CHUNK, 2).unwrap();
    pattern::fill(&cuda, lease.address(), CHUNK, 3).unwrap();
    pattern::check(&cuda, base, 0, CHUNK, 3).unwrap();
    drop(lease);
    // It lives and dies as a peer's memory does.
    exporter.retire(base + CHUNK, CHUNK);
    memory.unmap(CHUNK).unwrap();
    let error = window.lease(base + CHUNK, CHUNK, soon()).unwrap_err();
    assert_eq!(error.kind, CacheErrorKind::NoChunk);
    assert_eq!(cache.trim(), CHUNK);
    assert_eq!((cache.stats().chunks, cache.stats().peers), (1, 1));
    drop((window, export, exporter, memory));
    world.close(cache);
}

/// An exporter killed and started again, at the same base.
fn restart(world: &World, remote: Remote, base: u64) -> (Remote, RemoteMemory, Rkey) {
    remote.kill();
    next_pid_is(FIXED_PID);
    let mut remote = world.remote();
    let memory = remote.memory_at(8 * CHUNK, base, &[(CHUNK, 11), (CHUNK, 12)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    (remote, memory, rkey)
}

const FIXED_PID: u32 = 42;

/// Has the kernel give the next child of this PID namespace that pid.
fn next_pid_is(pid: u32) {
    std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).expect("the last pid of a namespace of our own");
}

/// In a PID namespace of our own, where the same pid can be had twice: as two containers have, or one that is restarted.
#[test]
fn an_exporter_that_restarts_with_its_pid_is_another_peer() {
    let Some(world) = enter(test_name!(an_exporter_that_restarts_with_its_pid_is_another_peer)) else { return };
    if world.me.role() == "main" {
        if can_make_pid_namespaces() {
            let mut contained = world.me.spawn_with("contained", in_pid_namespace).unwrap();
            println!("{}", contained.listen());
            contained.finish();
        }
        return;
    }
    if std::fs::write("/proc/sys/kernel/ns_last_pid", "40").is_err() {
        return world.me.tell("skipped: pids cannot be chosen here");
    }
    for sweep in [false, true] {
        next_pid_is(FIXED_PID);
        let mut remote = world.remote();
        let old = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
        let (_, old_rkey) = remote.export(&old, 0, 2 * CHUNK);
        let cache = world.cache(|options| options.sweep = sweep);
        let old_window = window(&cache, &old_rkey);
        drop(world.verify(&old_window, &old, 0, CHUNK));

        let (remote, new, new_rkey) = restart(&world, remote, old.base);
        let (old_key, new_key) = (key(&old_rkey), key(&new_rkey));
        assert_eq!((old_key.pid, old_key.table_fd, old_key.base, old_key.len), (new_key.pid, new_key.table_fd, new_key.base, new_key.len));
        assert_eq!((old_key.pid, new.base), (FIXED_PID, old.base));

        // The chunk that is not imported yet: the old key leads to nobody.
        assert!(old_window.lease(old.base + CHUNK, CHUNK, soon()).is_err());
        let new_window = window(&cache, &new_rkey);
        drop(world.verify(&new_window, &new, 0, 2 * CHUNK));
        // The old key for the first time in another cache, by which only the new process can be reached.
        let other = world.quiet_cache();
        let error = try_window(&other, &old_rkey).unwrap_err();
        assert!(matches!(error.kind, CacheErrorKind::Import(_)), "{error}");
        cache.trim();
        assert_eq!(old_window.lease(old.base, CHUNK, soon()).unwrap_err().kind, CacheErrorKind::Closed);
        drop((old_window, new_window, other, cache));
        remote.finish();
    }
    world.start.assert_settles(&world.importer.fake, "exporters that restarted");
    world.me.tell("done");
}

/// Two containers have a pid 1 each. Their keys say in which namespace, and by pidfd neither is reached from outside.
#[test]
fn pid_1_of_two_namespaces_is_never_one_peer() {
    let Some(world) = enter(test_name!(pid_1_of_two_namespaces_is_never_one_peer)) else { return };
    if !can_make_pid_namespaces() {
        return;
    }
    let cache = world.quiet_cache();
    let (mut bases, mut keys) = (Vec::new(), Vec::new());
    for seed in [1, 11] {
        let mut remote = world.remote_with(in_pid_namespace);
        let memory = remote.memory_at(8 * CHUNK, STABLE, &[(CHUNK, seed)]);
        let (_, rkey) = remote.export(&memory, 0, CHUNK);
        assert_eq!(key(&rkey).pid, 1);
        // New bytes or an error.
        match try_window(&cache, &rkey) {
            Ok(window) => drop(world.verify(&window, &memory, 0, CHUNK)),
            Err(error) => assert!(matches!(error.kind, CacheErrorKind::Import(_)), "{error}"),
        }
        bases.push(memory.base);
        keys.push(key(&rkey));
        remote.kill();
    }
    assert_eq!((bases[0], keys[0].pid, keys[0].len), (bases[1], keys[1].pid, keys[1].len));
    assert_ne!(keys[0].nonce, keys[1].nonce);
    drop(cache);
}
