//! A driver that fails: nothing is lost, nothing is unmapped twice, and what could not be done is done later.

use core::time::Duration;

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::CacheErrorKind;
use cuda_ipc_core::importer::ImportErrorKind;
use cuda_ipc_tests::snapshot::wait_until;

use crate::support::*;

/// Each step of an import fails once.
#[test]
fn a_failed_step_leaves_the_window_as_it_was() {
    let Some(world) = enter(test_name!(a_failed_step_leaves_the_window_as_it_was)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (2 * CHUNK, 2), (CHUNK, 3), (CHUNK, 4)]);
    let (_, rkey) = remote.export(&memory, 0, 5 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let fake = &world.importer.fake;
    // 208 is ALREADY_MAPPED, as where the application has the handle open itself (B7).
    let faults = [
        ("cuMemAddressReserve#*", 2),
        ("cuMemImportFromShareableHandle#1", 999),
        ("cuMemImportFromShareableHandle#3", 208),
        ("cuMemMap#1", 208),
        ("cuMemMap#3", 2),
        ("cuMemSetAccess#1", 101),
        // Tried twice each time.
        ("cuMemRelease#*", 1),
    ];
    for (fault, code) in faults {
        fake.add_fault(&format!("{fault}={code}"));
        let error = window.lease(memory.base + CHUNK, 4 * CHUNK, soon()).unwrap_err();
        let driver = match error.kind {
            CacheErrorKind::Driver(driver) => driver,
            CacheErrorKind::Import(import) => match import.kind {
                ImportErrorKind::Driver(driver) => driver,
                _ => panic!("{error}"),
            },
            _ => panic!("{error}"),
        };
        assert_eq!(driver.code, code);
        assert!(fault.starts_with(driver.call), "{error}");
        fake.clear_faults();
        // Handles that the driver did not take back are the driver's to keep.
        let counters = world.counters();
        assert_eq!((counters.mappings, cache.stats().chunks, cache.stats().bytes), (0, 0, 0), "{fault}");
    }
    drop(world.verify(&window, &memory, 0, 5 * CHUNK));
    assert_eq!(cache.stats().chunks, 4);
    drop(window);
    remote.finish();
    drop(cache);
    let counters = world.counters();
    assert_eq!((counters.mappings, counters.reservations), (0, 0));
}

#[test]
fn what_cannot_be_unmapped_is_kept_and_tried_again() {
    let Some(world) = enter(test_name!(what_cannot_be_unmapped_is_kept_and_tried_again)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));
    let fake = &world.importer.fake;

    // A dead chunk.
    memory.replace(&mut remote, 0, 11);
    remote.export(&memory, 0, CHUNK);
    fake.add_fault("cuMemUnmap#*=999");
    assert_eq!(cache.trim(), 0);
    assert_eq!((cache.stats().waiting_unmaps, cache.stats().bytes), (1, 2 * CHUNK));
    world.assert_mapped(&cache, 2);
    let error = window.lease(memory.base, CHUNK, soon()).unwrap_err();
    assert!(matches!(error.kind, CacheErrorKind::Driver(driver) if driver.call == "cuMemUnmap"), "{error}");
    // Its neighbour does not mind.
    assert!(window.try_lease(memory.base + CHUNK, CHUNK).is_some());
    fake.clear_faults();
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));
    world.assert_mapped(&cache, 2);

    // A whole peer.
    fake.add_fault("cuMemUnmap#*=999");
    assert_eq!(cache.purge_peer(key(&rkey).nonce), 0);
    let stats = cache.stats();
    assert_eq!((stats.peers, stats.windows, stats.chunks, stats.waiting_unmaps), (0, 1, 2, 2));
    drop(window);
    world.assert_mapped(&cache, 2);
    assert_eq!(cache.trim(), 0);
    fake.clear_faults();
    assert_eq!(cache.trim(), 2 * CHUNK);
    world.assert_mapped(&cache, 0);
    assert_eq!(cache.stats().unmapped_purged, 2);
    remote.finish();
    world.close(cache);
}

#[test]
fn the_sweeper_tries_again_by_itself() {
    let Some(world) = enter(test_name!(the_sweeper_tries_again_by_itself)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));
    let fake = &world.importer.fake;
    fake.add_fault("cuMemUnmap#*=999");
    remote.ask(&format!("retire {} 0 {CHUNK}", memory.index));
    assert!(wait_until(Duration::from_secs(5), || fake.calls("cuMemUnmap") > 4), "tries, and again");
    world.assert_mapped(&cache, 2);
    remote.kill();
    assert!(wait_until(Duration::from_secs(5), || cache.stats().waiting_unmaps == 2));
    fake.clear_faults();
    assert!(wait_until(Duration::from_secs(5), || world.counters().mappings == 0));
    assert!(wait_until(Duration::from_secs(5), || cache.stats().windows == 0));
    drop(window);
    world.close(cache);
}

/// An import fails, and so does undoing it.
#[test]
fn what_a_failed_undoing_left_is_unmapped_before_anything_else_comes_there() {
    let Some(world) = enter(test_name!(what_a_failed_undoing_left_is_unmapped_before_anything_else_comes_there)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (2 * CHUNK, 2), (CHUNK, 3)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let fake = &world.importer.fake;
    fake.add_fault("cuMemSetAccess#1=2; cuMemUnmap#*=999");
    let error = window.lease(memory.base, 4 * CHUNK, soon()).unwrap_err();
    assert!(matches!(error.kind, CacheErrorKind::Import(import) if import.stuck_bytes == 4 * CHUNK), "{error}");
    assert_eq!((world.counters().mappings, cache.stats().chunks), (3, 0));
    // In its way: a refusal each time, and the address space stays.
    let error = window.lease(memory.base + CHUNK, CHUNK, soon()).unwrap_err();
    assert!(matches!(error.kind, CacheErrorKind::Import(_)), "{error}");
    cache.trim();
    assert_eq!((world.counters().mappings, world.counters().reservations), (3, 1));
    fake.clear_faults();
    cache.trim();
    world.assert_mapped(&cache, 0);
    drop(world.verify(&window, &memory, 0, 4 * CHUNK));
    world.assert_mapped(&cache, 3);

    // And where the window is given up meanwhile.
    cache.purge_peer(key(&rkey).nonce);
    drop(window);
    let window = crate::support::window(&cache, &rkey);
    fake.add_fault("cuMemSetAccess#1=2; cuMemUnmap#*=999");
    assert!(window.lease(memory.base, 4 * CHUNK, soon()).is_err());
    cache.purge_peer(key(&rkey).nonce);
    drop(window);
    assert_eq!((world.counters().mappings, world.counters().reservations), (3, 1));
    fake.clear_faults();
    cache.trim();
    world.assert_mapped(&cache, 0);
    remote.finish();
    world.close(cache);
}

/// B42: a driver that is going down counts everything as released.
#[test]
fn a_driver_on_its_way_out_is_no_failure() {
    let Some(world) = enter(test_name!(a_driver_on_its_way_out_is_no_failure)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));
    let deinitialized = CUresult::CUDA_ERROR_DEINITIALIZED.0;
    world.importer.fake.add_fault(&format!("cuMemUnmap#*={deinitialized}; cuMemAddressFree#*={deinitialized}"));
    drop(window);
    drop(cache);
    assert!(world.importer.fake.calls("cuMemUnmap") <= 4, "no more than for each chunk");
    remote.finish();
}
