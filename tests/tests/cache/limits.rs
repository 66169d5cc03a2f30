//! What all windows may hold together: bytes, windows, address space, nothing idle.

use std::sync::{Arc, Barrier};

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::{Cache, CacheErrorKind, Window};
use cuda_ipc_tests::driver::FakeConfig;
use cuda_ipc_tests::exporter::{Remote, RemoteMemory};

use crate::support::*;

/// Windows of reservations of `chunks` chunks each.
fn windows(cache: &Cache, remote: &mut Remote, count: u64, chunks: u64) -> Vec<(RemoteMemory, Arc<Window>)> {
    let made = (0..count).map(|number| {
        let contents: Vec<(u64, u64)> = (0..chunks).map(|at| (CHUNK, 1000 * number + at)).collect();
        let memory = remote.memory(chunks * CHUNK, &contents);
        let (_, rkey) = remote.export(&memory, 0, chunks * CHUNK);
        (memory, window(cache, &rkey))
    });
    made.collect()
}

/// B4: far more allocations than the cache may hold, one after the other, some of them freed meanwhile.
#[test]
fn ten_thousand_allocations_pass_through_a_small_limit() {
    const LIMIT: u64 = 64 * CHUNK;
    let config = FakeConfig { memory_bytes: Some(64 << 30), ..FakeConfig::default() };
    let Some(world) = enter_with(test_name!(ten_thousand_allocations_pass_through_a_small_limit), &config) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| {
        options.max_mapped_bytes = LIMIT;
        options.max_windows = 3;
    });
    let mut exports = Vec::new();
    for number in 0..100 {
        let memory = remote.memory(100 * CHUNK, &[]);
        for at in 0..100 {
            remote.ask(&format!("map_types {} {} {CHUNK} 1", memory.index, at * CHUNK));
        }
        let (export, rkey) = remote.export(&memory, 0, 100 * CHUNK);
        let window = window(&cache, &rkey);
        for at in 0..100 {
            drop(window.lease(memory.base + at * CHUNK, CHUNK, soon()).unwrap());
            let counters = world.counters();
            assert!(counters.mapped_bytes <= LIMIT, "{counters:?}");
            assert!(counters.reservations <= 3, "{counters:?}");
        }
        // Some are freed while they are mapped here, others when they are long gone.
        exports.push((export, memory.index));
        if exports.len() == 5 || number % 2 == 0 {
            let (export, index) = exports.remove(0);
            remote.ask(&format!("release {export}"));
            remote.ask(&format!("unreserve {index}"));
        }
    }
    assert_eq!(world.counters().imports_made, 10_000);
    drop(cache);
    remote.finish();
    let fake = &world.importer.fake;
    assert_eq!((fake.calls("cuMemMap"), fake.calls("cuMemUnmap")), (10_000, 10_000));
    world.start.assert_settles(fake, "the end of the cache");
}

#[test]
fn the_least_recently_used_window_makes_room() {
    let Some(world) = enter(test_name!(the_least_recently_used_window_makes_room)) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| {
        options.sweep = false;
        options.max_mapped_bytes = 6 * CHUNK;
    });
    let windows = windows(&cache, &mut remote, 4, 2);
    let lease = |at: usize| world.verify(&windows[at].1, &windows[at].0, 0, 2 * CHUNK);
    let is_hit = |at: usize| windows[at].1.try_lease(windows[at].0.base, 2 * CHUNK).is_some();
    for at in 0..3 {
        drop(lease(at));
    }
    assert!(is_hit(0) && is_hit(2), "used again, after the second");
    drop(lease(3));
    world.assert_mapped(&cache, 6);
    assert!(!is_hit(1) && is_hit(0) && is_hit(2) && is_hit(3));
    assert_eq!(cache.stats().unmapped_limit, 2);

    // What is leased is counted and stays; what is idle in the asking window goes last.
    let held = [lease(0), lease(2), lease(3)];
    drop(lease(1));
    world.assert_mapped(&cache, 8);
    drop(held);
    drop(windows[1].1.try_lease(windows[1].0.base, CHUNK).unwrap());
    world.assert_mapped(&cache, 8);

    drop(windows);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_window_larger_than_the_limit_gives_up_its_own_chunks_one_by_one() {
    let Some(world) = enter(test_name!(a_window_larger_than_the_limit_gives_up_its_own_chunks_one_by_one)) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| {
        options.sweep = false;
        options.max_mapped_bytes = 8 * CHUNK;
    });
    let windows = windows(&cache, &mut remote, 1, 32);
    let (memory, window) = &windows[0];
    for round in 0..2 {
        for at in 0..32 {
            drop(world.verify(window, memory, at * CHUNK, CHUNK));
            world.assert_mapped(&cache, if round == 0 { (at + 1).min(8) } else { 8 });
        }
    }
    // More at once than there is room for is mapped all the same: a lease is worth more than a limit.
    let all = world.verify(window, memory, 0, 32 * CHUNK);
    world.assert_mapped(&cache, 32);
    drop(all);
    drop(windows);
    remote.finish();
    world.close(cache);
}

#[test]
fn windows_are_limited_too() {
    let Some(world) = enter(test_name!(windows_are_limited_too)) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| {
        options.sweep = false;
        options.max_windows = 4;
    });
    let windows = windows(&cache, &mut remote, 10, 1);
    for round in 0..3 {
        for (number, (memory, window)) in (1..).zip(&windows) {
            drop(world.verify(window, memory, 0, CHUNK));
            world.assert_mapped(&cache, if round == 0 { number.min(4) } else { 4 });
        }
    }
    // Leased windows cannot make room, and a fifth is not refused for that.
    let held: Vec<_> = windows.iter().take(6).map(|(memory, window)| world.verify(window, memory, 0, CHUNK)).collect();
    world.assert_mapped(&cache, 6);
    drop(held);
    drop(windows);
    remote.finish();
    world.close(cache);
}

#[test]
fn address_space_runs_out_with_a_clear_error() {
    let Some(world) = enter(test_name!(address_space_runs_out_with_a_clear_error)) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| {
        options.sweep = false;
        options.max_address_space = 10 * CHUNK;
    });
    let windows = windows(&cache, &mut remote, 3, 5);
    let held = [0, 1].map(|at: usize| world.verify(&windows[at].1, &windows[at].0, 0, CHUNK));
    let error = windows[2].1.lease(windows[2].0.base, CHUNK, soon()).unwrap_err();
    assert_eq!(error.kind, CacheErrorKind::AddressSpace { wanted: 5 * CHUNK, reserved: 10 * CHUNK, limit: 10 * CHUNK });
    assert!(error.retryable());
    println!("{error}");
    world.assert_mapped(&cache, 2);
    drop(held);
    drop(world.verify(&windows[2].1, &windows[2].0, 0, 5 * CHUNK));
    assert_eq!(world.counters().reserved_bytes, 10 * CHUNK);

    // What could never fit is told before anything is made for it.
    let huge = remote.memory(11 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&huge, 0, CHUNK);
    let error = try_window(&cache, &rkey).unwrap_err();
    assert!(matches!(error.kind, CacheErrorKind::AddressSpace { wanted, .. } if wanted == 11 * CHUNK), "{error}");
    drop(windows);
    remote.finish();
    world.close(cache);
}

#[test]
fn idle_windows_give_way_when_the_driver_has_no_addresses() {
    let config = FakeConfig { va_bytes: Some(64 * CHUNK), ..FakeConfig::default() };
    let Some(world) = enter_with(test_name!(idle_windows_give_way_when_the_driver_has_no_addresses), &config) else { return };
    let mut remote = world.remote_with(|command| {
        command.env_remove("FAKE_CUDA_VA");
    });
    let cache = world.quiet_cache();
    let windows = windows(&cache, &mut remote, 3, 30);
    let lease = |at: usize| windows[at].1.lease(windows[at].0.base, CHUNK, soon());
    drop(lease(0).unwrap());
    let held = lease(1).unwrap();
    drop(lease(2).unwrap());
    assert_eq!(cache.stats().windows, 2);
    let held = [held, lease(2).unwrap()];
    let error = lease(0).unwrap_err();
    let CacheErrorKind::Driver(driver) = error.kind else { panic!("{error}") };
    assert_eq!((driver.call, driver.code), ("cuMemAddressReserve", CUresult::CUDA_ERROR_OUT_OF_MEMORY.0));
    assert_eq!(cache.stats().address_space, 60 * CHUNK);
    drop(held);
    drop(lease(0).unwrap());
    drop(windows);
    remote.finish();
    world.close(cache);
}

/// B5, A21: many users of one mapping, which end in any order.
#[test]
fn without_a_cache_the_last_user_unmaps_and_nobody_else() {
    let Some(world) = enter(test_name!(without_a_cache_the_last_user_unmaps_and_nobody_else)) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| options.keep_idle = false);
    let windows = windows(&cache, &mut remote, 1, 4);
    let (memory, window) = &windows[0];
    let fake = &world.importer.fake;
    for round in 1..=20 {
        let all_hold = Barrier::new(8);
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (world, all_hold) = (&world, &all_hold);
                scope.spawn(move || {
                    world.importer.cuda.enter_primary(0);
                    let lease = world.verify(window, memory, CHUNK, 2 * CHUNK);
                    all_hold.wait();
                    assert_eq!(world.counters().mappings, 2);
                    all_hold.wait();
                    // All at once in some rounds, apart in others.
                    if round % 2 == 0 {
                        std::thread::sleep(core::time::Duration::from_micros(thread * 7919 % 997));
                    }
                    drop(lease);
                });
            }
        });
        world.assert_mapped(&cache, 0);
        assert_eq!((fake.counters().imports_made, fake.calls("cuMemMap"), fake.calls("cuMemUnmap")), (2 * round, 2 * round, 2 * round));
    }
    assert_eq!(cache.stats().unmapped_limit, 40);
    drop(windows);
    remote.finish();
    world.close(cache);
}

#[test]
fn without_a_cache_nothing_stays_behind_whatever_happens() {
    let Some(world) = enter(test_name!(without_a_cache_nothing_stays_behind_whatever_happens)) else { return };
    let mut remote = world.remote();
    let cache = world.cache(|options| {
        options.keep_idle = false;
        options.sweep = false;
    });
    let mut windows = windows(&cache, &mut remote, 1, 4);
    let (memory, window) = &mut windows[0];
    // An import of which another's failure makes no use, leases that end while somebody imports next to them, and chunks that die under a lease.
    world.importer.fake.add_fault("cuMemImportFromShareableHandle#*~3ms; cuMemMap#7=2; cuMemMap#19=2; cuMemSetAccess#11=2");
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (world, window, memory) = (&world, &*window, &*memory);
            scope.spawn(move || {
                world.importer.cuda.enter_primary(0);
                for round in 0..12 {
                    let first = (thread + round) % 4;
                    let len = CHUNK * (1 + round % (4 - first));
                    drop(window.lease(memory.base + first * CHUNK, len, soon()));
                }
            });
        }
    });
    world.importer.fake.clear_faults();
    world.assert_mapped(&cache, 0);

    let lease = world.verify(window, memory, 0, 2 * CHUNK);
    remote.ask(&format!("retire {} 0 {CHUNK}", memory.index));
    assert!(window.lease(memory.base, CHUNK, soon()).is_err());
    world.assert_mapped(&cache, 2);
    drop(lease);
    world.assert_mapped(&cache, 0);
    drop(windows);
    remote.finish();
    world.close(cache);
}
