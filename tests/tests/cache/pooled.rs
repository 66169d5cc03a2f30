//! Windows of pool allocations: the same leases, limits and deaths as of chunks, at addresses that the driver chooses.

use core::time::Duration;
use std::sync::Arc;

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::{Cache, CacheErrorKind, Lease, Window};
use cuda_ipc_core::importer::ImportErrorKind;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::driver::FakeConfig;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::snapshot::wait_until;

use crate::support::*;

/// An odd length: no whole number of granules.
const LEN: u64 = 5 * (1 << 20) + 512;

/// A pool at a test's command, and what was allocated from it.
struct PoolThere {
    remote: Remote,
    pool: u64,
}

impl PoolThere {
    fn start(world: &World) -> Self {
        let mut remote = world.remote();
        let pool = remote.number("pool 0 1");
        Self { remote, pool }
    }

    fn alloc(&mut self, seed: u64) -> (u64, Rkey) {
        let address = self.remote.number(&format!("pool_alloc {} {LEN} {seed}", self.pool));
        let (_, rkey) = self.remote.export_at(address, LEN);
        (address, rkey)
    }

    /// Frees without a word, and lets a sweep find it.
    fn free(&mut self, address: u64) {
        self.remote.ask(&format!("free_at {address}"));
        assert_eq!(self.remote.number("sweep"), 1);
    }
}

impl World {
    /// Leases all of an allocation, and compares every byte.
    #[track_caller]
    fn verify_pooled<'w>(&self, window: &'w Window, seed: u64) -> Lease<'w> {
        let lease = window.lease(window.base(), window.len(), soon()).expect("a lease");
        pattern::check(&self.importer.cuda, lease.address(), 0, LEN, seed).expect("the exporter's bytes");
        lease
    }

    /// Panics unless what the driver has, what the cache says and `allocations` agree.
    #[track_caller]
    fn assert_pooled(&self, cache: &Cache, allocations: u64) {
        let (counters, stats) = (self.counters(), cache.stats());
        assert_eq!((counters.mappings, counters.mapped_bytes), (allocations, allocations * LEN), "{stats:?}");
        assert_eq!((stats.chunks, stats.bytes, stats.windows), (allocations, allocations * LEN, allocations), "{stats:?}");
        assert_eq!((stats.address_space, counters.pools), (0, u64::from(allocations != 0)), "{stats:?}");
    }
}

#[test]
fn an_allocation_is_leased_like_a_chunk() {
    let Some(world) = enter(test_name!(an_allocation_is_leased_like_a_chunk)) else { return };
    let mut there = PoolThere::start(&world);
    let ((a, first), (_, second)) = (there.alloc(1), there.alloc(2));
    let cache = world.quiet_cache();
    let (one, two) = (window(&cache, &first), window(&cache, &second));
    world.assert_pooled(&cache, 0);
    let lease = world.verify_pooled(&one, 1);
    drop(world.verify_pooled(&two, 2));
    world.assert_pooled(&cache, 2);
    // Any part of it, at its place; nothing beyond it.
    for (offset, len) in [(0, 1), (LEN - 1, 1), (3 << 20, 1 << 20), (17, LEN - 17)] {
        let part = one.try_lease(a + offset, len).expect("a hit");
        assert_eq!(part.address(), lease.address() + offset);
    }
    for (offset, len) in [(0, LEN + 1), (LEN, 1), (1, LEN), (0, 0)] {
        let error = one.lease(a + offset, len, soon()).unwrap_err();
        assert_eq!(error.kind, CacheErrorKind::OutsideWindow);
    }
    // A hit asks nobody: every call of the driver's would fail.
    let calls = world.importer.fake.total_calls();
    (0..1000).for_each(|_| drop(one.lease(a, LEN, soon()).unwrap()));
    assert_eq!(world.importer.fake.total_calls(), calls);
    assert!(Arc::ptr_eq(&one, &window(&cache, &first)), "one window for equal keys");
    assert_eq!(one.hold_address().unwrap_err().kind, CacheErrorKind::NoReservation);
    drop(lease);
    assert_eq!(world.importer.fake.calls("cuMemPoolImportFromShareableHandle"), 1);
    drop((one, two));
    there.remote.finish();
    world.close(cache);
}

#[test]
fn freed_memory_is_given_back_once_nobody_leases_it() {
    let Some(world) = enter(test_name!(freed_memory_is_given_back_once_nobody_leases_it)) else { return };
    let mut there = PoolThere::start(&world);
    let ((a, first), (b, second)) = (there.alloc(1), there.alloc(2));
    let cache = world.cache(|_| {});
    let (one, two) = (window(&cache, &first), window(&cache, &second));
    let lease = world.verify_pooled(&one, 1);
    drop(world.verify_pooled(&two, 2));
    there.free(b);
    assert!(wait_until(Duration::from_secs(5), || cache.stats().unmapped_dead == 1), "idle and dead: the sweeper");
    there.free(a);
    assert_eq!(one.lease(a, LEN, soon()).unwrap_err().kind, CacheErrorKind::NoChunk);
    pattern::check(&world.importer.cuda, lease.address(), 0, LEN, 1).expect("what is leased stays");
    drop(lease);
    assert!(wait_until(Duration::from_secs(5), || world.counters().mappings == 0));
    assert_eq!(two.lease(b, LEN, soon()).unwrap_err().kind, CacheErrorKind::NoChunk);
    drop((one, two));
    there.remote.finish();
    world.close(cache);
}

#[test]
fn another_allocation_at_the_same_address_is_imported_anew() {
    // B3: a pool hands the same address out again and again.
    let Some(world) = enter(test_name!(another_allocation_at_the_same_address_is_imported_anew)) else { return };
    let mut there = PoolThere::start(&world);
    let cache = world.quiet_cache();
    let (mut replaced, mut last) = (0, None);
    for round in 0..50 {
        let (address, rkey) = there.alloc(round);
        let window = window(&cache, &rkey);
        drop(world.verify_pooled(&window, round));
        replaced += u64::from(last.replace(key(&rkey)) == Some(key(&rkey)));
        there.free(address);
    }
    assert!(replaced > 0, "the same key never named two allocations");
    assert_eq!(cache.stats().unmapped_replaced, replaced);
    // While the old one is leased, the new one has to wait.
    let (address, rkey) = there.alloc(100);
    let window = window(&cache, &rkey);
    let lease = world.verify_pooled(&window, 100);
    there.free(address);
    let (again, new) = there.alloc(101);
    if (again, key(&new)) == (address, key(&rkey)) {
        assert_eq!(window.lease(address, LEN, in_ms(5)).unwrap_err().kind, CacheErrorKind::Busy);
        assert_eq!(window.lease_holding(address, LEN, soon(), &[&lease]).unwrap_err().kind, CacheErrorKind::Busy);
        drop(lease);
        drop(world.verify_pooled(&window, 101));
    } else {
        panic!("the fake driver gives another address");
    }
    drop(window);
    there.remote.finish();
    world.close(cache);
}

#[test]
fn memory_that_is_published_anew_in_another_slot_waits_for_its_old_window() {
    let Some(world) = enter(test_name!(memory_that_is_published_anew_in_another_slot_waits_for_its_old_window)) else { return };
    let mut there = PoolThere::start(&world);
    let address = there.remote.number(&format!("pool_alloc {} {LEN} 1", there.pool));
    let (export, old) = there.remote.export_at(address, LEN);
    let cache = world.quiet_cache();
    let first = window(&cache, &old);
    let lease = world.verify_pooled(&first, 1);
    // Another allocation takes its slot meanwhile.
    there.remote.ask(&format!("release {export}"));
    there.alloc(2);
    there.alloc(3);
    let (_, new) = there.remote.export_at(address, LEN);
    assert_ne!(key(&new), key(&old));
    let second = window(&cache, &new);
    assert_eq!(second.lease(address, LEN, in_ms(5)).unwrap_err().kind, CacheErrorKind::Busy);
    drop(lease);
    // Idle it makes room by itself, without a sweeper.
    drop(world.verify_pooled(&second, 1));
    world.assert_pooled(&cache, 1);
    drop((first, second));
    there.remote.finish();
    world.close(cache);
}

#[test]
fn limits_count_allocations_like_chunks() {
    let Some(world) = enter(test_name!(limits_count_allocations_like_chunks)) else { return };
    let mut there = PoolThere::start(&world);
    let rkeys: Vec<Rkey> = (0..4).map(|seed| there.alloc(seed).1).collect();
    let by_bytes = |options: &mut cuda_ipc_cache::CacheOptions| options.max_mapped_bytes = 2 * LEN;
    let by_windows = |options: &mut cuda_ipc_cache::CacheOptions| options.max_windows = 2;
    let limits: [&dyn Fn(&mut cuda_ipc_cache::CacheOptions); 2] = [&by_bytes, &by_windows];
    for limit in limits {
        let cache = world.cache(|options| {
            options.sweep = false;
            limit(options);
        });
        let windows: Vec<_> = rkeys.iter().map(|rkey| window(&cache, rkey)).collect();
        let leased = world.verify_pooled(&windows[0], 0);
        for (window, seed) in windows.iter().zip(0..).skip(1) {
            drop(world.verify_pooled(window, seed));
            world.assert_pooled(&cache, 2);
        }
        assert_eq!(cache.stats().unmapped_limit, 2);
        assert!(windows[0].try_lease(windows[0].base(), LEN).is_some() && windows[3].try_lease(windows[3].base(), LEN).is_some());
        drop(leased);
        drop(windows);
        drop(cache);
        assert_eq!((world.counters().mappings, world.counters().pools), (0, 0));
    }
    // Nothing idle is kept where that is asked for.
    let cache = world.cache(|options| (options.sweep, options.keep_idle) = (false, false));
    let window = window(&cache, &rkeys[0]);
    for _ in 0..3 {
        drop(world.verify_pooled(&window, 0));
        world.assert_pooled(&cache, 0);
    }
    drop(window);
    there.remote.finish();
    world.close(cache);
}

#[test]
fn a_dead_exporters_pool_is_given_back() {
    let Some(world) = enter(test_name!(a_dead_exporters_pool_is_given_back)) else { return };
    let mut there = PoolThere::start(&world);
    let (_, rkey) = there.alloc(1);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    drop(world.verify_pooled(&window, 1));
    there.remote.kill();
    assert!(wait_until(Duration::from_secs(5), || world.counters().mappings == 0 && world.counters().pools == 0));
    drop(window);
    world.close(cache);
}

#[test]
fn what_the_driver_does_not_take_back_is_tried_again() {
    let Some(world) = enter(test_name!(what_the_driver_does_not_take_back_is_tried_again)) else { return };
    let mut there = PoolThere::start(&world);
    let (address, rkey) = there.alloc(1);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    drop(world.verify_pooled(&window, 1));
    there.free(address);
    let fake = &world.importer.fake;
    fake.add_fault("cuMemFree#*=999");
    assert_eq!(cache.trim(), 0);
    assert_eq!((cache.stats().waiting_unmaps, world.counters().mappings), (1, 1));
    fake.clear_faults();
    // The pool's end may fail as well: it is tried again with the next one's.
    fake.add_fault("cuMemPoolDestroy#*=999");
    assert_eq!(cache.trim(), LEN);
    assert_eq!((world.counters().mappings, world.counters().pools), (0, 1));
    fake.clear_faults();
    let (_, next) = there.alloc(2);
    let other = crate::support::window(&cache, &next);
    drop(world.verify_pooled(&other, 2));
    drop((window, other));
    there.remote.finish();
    world.close(cache);
}

#[test]
fn a_driver_that_misses_a_context_gets_one() {
    // A sweeper's thread has none; "no context" must not pass for "released already".
    let Some(world) = enter(test_name!(a_driver_that_misses_a_context_gets_one)) else { return };
    let mut there = PoolThere::start(&world);
    let (address, rkey) = there.alloc(1);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    drop(world.verify_pooled(&window, 1));
    there.free(address);
    let (fake, retains) = (&world.importer.fake, world.counters().primary_retains);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fake.add_fault("cuMemFree#1=201; cuMemPoolDestroy#1=201");
            assert_eq!(cache.trim(), LEN);
            fake.clear_faults();
        });
    });
    let counters = world.counters();
    assert_eq!((counters.mappings, counters.pools, counters.primary_retains), (0, 0, retains));
    drop(window);
    there.remote.finish();
    world.close(cache);
}

#[test]
fn devices_get_access_by_and_by() {
    let config = FakeConfig { devices: Some(2), ..FakeConfig::default() };
    let Some(world) = enter_with(test_name!(devices_get_access_by_and_by), &config) else { return };
    let mut there = PoolThere::start(&world);
    let (_, rkey) = there.alloc(1);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let lease = world.verify_pooled(&window, 1);
    let second = cache.window(&key(&rkey), 1, false, soon()).unwrap();
    assert!(Arc::ptr_eq(&window, &second) && window.writable());
    let context = world.importer.cuda.ctx_get_current().unwrap();
    world.importer.cuda.enter_primary(1);
    pattern::check(&world.importer.cuda, lease.address(), 0, LEN, 1).unwrap();
    world.importer.cuda.ctx_set_current(context).unwrap();
    world.importer.cuda.primary_release(1).unwrap();
    drop(lease);
    drop((second, window));
    there.remote.finish();
    world.close(cache);
}

#[test]
fn a_device_that_cannot_reach_the_pool_is_refused_and_spoils_nothing() {
    // B36: this driver grants the access, and nothing comes of it.
    let config = FakeConfig { devices: Some(2), no_peers: true, ..FakeConfig::default() };
    let Some(world) = enter_with(test_name!(a_device_that_cannot_reach_the_pool_is_refused_and_spoils_nothing), &config) else { return };
    let mut there = PoolThere::start(&world);
    let (_, rkey) = there.alloc(1);
    let cache = world.quiet_cache();
    for _ in 0..2 {
        let error = cache.window(&key(&rkey), 1, false, soon()).unwrap_err();
        let CacheErrorKind::Import(import) = error.kind else { panic!("{error}") };
        assert_eq!(import.kind, ImportErrorKind::NoPeerAccess { device: 1, home: 0 });
        let window = window(&cache, &rkey);
        drop(world.verify_pooled(&window, 1));
    }
    assert_eq!(world.importer.fake.calls("cuMemPoolSetAccess"), 1, "only for the one that can");
    there.remote.finish();
    world.close(cache);
}

#[test]
fn a_driver_on_its_way_out_is_no_failure_for_a_pool() {
    // B42.
    let Some(world) = enter(test_name!(a_driver_on_its_way_out_is_no_failure_for_a_pool)) else { return };
    let mut there = PoolThere::start(&world);
    for code in [CUresult::CUDA_ERROR_DEINITIALIZED.0, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED.0, CUresult::CUDA_ERROR_INVALID_CONTEXT.0]
    {
        let (_, rkey) = there.alloc(1);
        let cache = world.cache(|_| {});
        let window = window(&cache, &rkey);
        drop(world.verify_pooled(&window, 1));
        let fake = &world.importer.fake;
        let before = fake.calls("cuMemFree");
        fake.add_fault(&format!("cuMemFree#*={code}; cuMemPoolDestroy#*={code}"));
        assert_eq!(cache.purge_peer(key(&rkey).nonce), LEN);
        assert_eq!((cache.stats().waiting_unmaps, cache.stats().bytes), (0, 0));
        drop((window, cache));
        // Twice, and each time once more in a context where the driver misses one.
        assert!(fake.calls("cuMemFree") <= before + 4);
        fake.clear_faults();
    }
    there.remote.finish();
}

#[test]
fn an_import_that_fails_leaves_the_window_as_it_was() {
    let Some(world) = enter(test_name!(an_import_that_fails_leaves_the_window_as_it_was)) else { return };
    let mut there = PoolThere::start(&world);
    let (address, rkey) = there.alloc(1);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let fake = &world.importer.fake;
    for (call, code) in
        [("cuMemPoolImportFromShareableHandle", 999), ("cuMemPoolSetAccess", 2), ("cuMemPoolImportPointer", 208), ("cuDeviceGetUuid", 4)]
    {
        fake.add_fault(&format!("{call}#*={code}"));
        let error = window.lease(address, LEN, soon()).unwrap_err();
        let CacheErrorKind::Import(import) = error.kind else { panic!("{error}") };
        assert!(matches!(import.kind, ImportErrorKind::Driver(driver) if driver.call.starts_with(call) && driver.code == code), "{error}");
        fake.clear_faults();
        world.assert_pooled(&cache, 0);
    }
    drop(world.verify_pooled(&window, 1));
    drop(window);
    there.remote.finish();
    world.close(cache);
}
