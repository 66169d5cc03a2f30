//! Threads that want the same at the same time, or what another still uses.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Barrier;
use std::time::Instant;

use cuda_ipc_cache::{CacheErrorKind, Lease};
use cuda_ipc_core::importer::{ImportErrorKind, ImportStep};
use cuda_ipc_tests::snapshot::wait_until;

use crate::support::*;

/// Runs `body` on `count` threads that begin together, each with a context and its number.
fn together(world: &World, count: u64, body: impl Fn(u64) + Sync) {
    let begin = Barrier::new(usize::try_from(count).unwrap());
    std::thread::scope(|scope| {
        for number in 0..count {
            let (begin, body) = (&begin, &body);
            scope.spawn(move || {
                world.importer.cuda.enter_primary(0);
                begin.wait();
                body(number);
            });
        }
    });
}

/// The next call of a driver function takes long.
struct Slow<'w> {
    world: &'w World,
    call: &'static str,
    calls: u64,
}

impl<'w> Slow<'w> {
    fn next(world: &'w World, call: &'static str) -> Self {
        let fake = &world.importer.fake;
        fake.clear_faults();
        fake.add_fault(&format!("{call}#1~700ms"));
        Self { world, call, calls: fake.calls(call) }
    }

    /// Waits until somebody is in it.
    fn wait(&self) {
        assert!(
            wait_until(Duration::from_secs(20), || self.world.importer.fake.calls(self.call) > self.calls),
            "{} is not called",
            self.call
        );
    }
}

/// B6.
#[test]
fn a_cold_chunk_is_imported_once_for_all() {
    let Some(world) = enter(test_name!(a_cold_chunk_is_imported_once_for_all)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    world.importer.fake.add_fault("cuMemImportFromShareableHandle#*~20ms");
    together(&world, 16, |_| drop(world.verify(&window, &memory, 0, 2 * CHUNK)));
    assert_eq!((world.counters().imports_made, cache.stats().chunk_leases), (2, 32));
    world.assert_mapped(&cache, 2);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_failed_import_is_shared_by_those_who_wait_and_the_next_one_works() {
    let Some(world) = enter(test_name!(a_failed_import_is_shared_by_those_who_wait_and_the_next_one_works)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let fake = &world.importer.fake;
    fake.add_fault("cuMemImportFromShareableHandle#1~300ms; cuMemImportFromShareableHandle#1=2");
    let failed = AtomicU64::new(0);
    together(&world, 8, |_| {
        let error = window.lease(memory.base + 4096, 4096, soon()).unwrap_err();
        let CacheErrorKind::Import(import) = error.kind else { panic!("{error}") };
        assert!(matches!(import.kind, ImportErrorKind::Driver(driver) if driver.code == 2), "{error}");
        assert_eq!(import.step, ImportStep::Chunk(cuda_ipc_core::import::Step::Import));
        failed.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!((failed.into_inner(), fake.calls("cuMemImportFromShareableHandle")), (8, 1));
    world.assert_mapped(&cache, 0);
    drop(world.verify(&window, &memory, 0, CHUNK));
    assert_eq!(fake.calls("cuMemImportFromShareableHandle"), 2);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_failure_is_no_matter_of_those_who_want_other_chunks() {
    let Some(world) = enter(test_name!(a_failure_is_no_matter_of_those_who_want_other_chunks)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    // The import of both fails at the second chunk, when somebody waits for the first.
    world.importer.fake.add_fault("cuMemImportFromShareableHandle#2~200ms; cuMemMap#2=2");
    let begun = AtomicBool::new(false);
    together(&world, 2, |number| {
        if number == 0 {
            begun.store(true, Ordering::Release);
            let error = window.lease(memory.base, 2 * CHUNK, soon()).unwrap_err();
            assert_eq!(error.address, memory.base + CHUNK);
        } else {
            assert!(wait_until(Duration::from_secs(5), || begun.load(Ordering::Acquire) && world.counters().imports_made == 1));
            drop(world.verify(&window, &memory, 0, CHUNK));
        }
    });
    world.assert_mapped(&cache, 1);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_deadline_is_its_owners_alone() {
    let Some(world) = enter(test_name!(a_deadline_is_its_owners_alone)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let slow = Slow::next(&world, "cuMemImportFromShareableHandle");
    together(&world, 3, |number| match number {
        // Begins the import, and gives up after the first chunk.
        0 => {
            let error = window.lease(memory.base, 2 * CHUNK, in_ms(100)).unwrap_err();
            let CacheErrorKind::Import(import) = error.kind else { panic!("{error}") };
            assert_eq!(import.kind, ImportErrorKind::DeadlineOver);
        }
        // Waits for it, with more patience and with less.
        1 => {
            slow.wait();
            drop(world.verify(&window, &memory, 0, 2 * CHUNK));
        }
        _ => {
            slow.wait();
            let error = window.lease(memory.base, CHUNK, in_ms(20)).unwrap_err();
            assert_eq!(error.kind, CacheErrorKind::DeadlineOver);
        }
    });
    world.assert_mapped(&cache, 2);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_replaced_chunk_that_is_leased_makes_others_wait_and_only_for_it() {
    let Some(world) = enter(test_name!(a_replaced_chunk_that_is_leased_makes_others_wait_and_only_for_it)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2), (CHUNK, 3), (CHUNK, 4)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, CHUNK));
    let old = memory.clone();
    let lease = world.verify(&window, &memory, CHUNK, CHUNK);
    memory.replace(&mut remote, CHUNK, 22);
    remote.export(&memory, 0, 4 * CHUNK);

    let began = Instant::now();
    let error = window.lease(memory.base, 4 * CHUNK, in_ms(100)).unwrap_err();
    assert_eq!((error.kind, error.address), (CacheErrorKind::Busy, memory.base + CHUNK));
    assert!(error.retryable() && began.elapsed() >= Duration::from_millis(100));
    old.verify(&world.importer.cuda, lease.address(), CHUNK, CHUNK).expect("the old bytes under the old lease");

    // Any thread may end it.
    let parts = lease.into_parts();
    let waiting = AtomicBool::new(true);
    let hits = AtomicU64::new(0);
    together(&world, 3, |number| match number {
        // Waits for the old lease.
        0 => {
            drop(world.verify(&window, &memory, 0, 4 * CHUNK));
            waiting.store(false, Ordering::Release);
        }
        // Hits next to it.
        1 => {
            while waiting.load(Ordering::Acquire) {
                drop(window.try_lease(memory.base, CHUNK).expect("a hit"));
                hits.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
        }
        // Misses next to it, and later the end of the lease.
        _ => {
            std::thread::sleep(Duration::from_millis(50));
            drop(world.verify(&window, &memory, 3 * CHUNK, CHUNK));
            assert!(waiting.load(Ordering::Acquire));
            old.verify(&world.importer.cuda, parts.address, CHUNK, CHUNK).expect("the old bytes still");
            drop(Lease::from_parts(&window, parts));
        }
    });
    assert!(hits.into_inner() > 0);
    world.assert_mapped(&cache, 4);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn who_would_wait_for_himself_is_told_at_once() {
    let Some(world) = enter(test_name!(who_would_wait_for_himself_is_told_at_once)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let (own, other) = (world.verify(&window, &memory, 0, CHUNK), world.verify(&window, &memory, CHUNK, CHUNK));
    memory.replace(&mut remote, 0, 11);
    remote.export(&memory, 0, CHUNK);
    let began = Instant::now();
    for holding in [&[&own, &other][..], &[&other, &own][..], &[&own][..]] {
        let error = window.lease_holding(memory.base, 2 * CHUNK, soon(), holding).unwrap_err();
        assert_eq!(error.kind, CacheErrorKind::Busy);
    }
    // Another's lease on what is alive blocks nobody; another's on what is dead does, for as long as one is willing to wait.
    let error = window.lease_holding(memory.base, CHUNK, in_ms(50), &[&other]).unwrap_err();
    assert_eq!(error.kind, CacheErrorKind::Busy);
    assert!(began.elapsed() < Duration::from_secs(5));

    // Also where somebody else is waiting for the same lease already.
    together(&world, 2, |number| {
        if number == 0 {
            assert_eq!(window.lease(memory.base, CHUNK, in_ms(1000)).unwrap_err().kind, CacheErrorKind::Busy);
        } else {
            std::thread::sleep(Duration::from_millis(100));
            let began = Instant::now();
            assert_eq!(window.lease_holding(memory.base, CHUNK, soon(), &[&own]).unwrap_err().kind, CacheErrorKind::Busy);
            assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
        }
    });
    drop(own);
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));
    drop(other);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_chunk_that_is_replaced_during_its_import_is_looked_up_again() {
    let Some(world) = enter(test_name!(a_chunk_that_is_replaced_during_its_import_is_looked_up_again)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(8 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    // Between the look-up and the fetch; between the re-check and the import; between the import and the publication.
    for (round, call) in (0..).zip(["cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemSetAccess"]) {
        let slow = Slow::next(&world, call);
        std::thread::scope(|scope| {
            let leased = scope.spawn(|| {
                world.importer.cuda.enter_primary(0);
                window.lease(memory.base, CHUNK, soon()).map(Lease::into_parts)
            });
            slow.wait();
            let mut new = memory.clone();
            new.replace(&mut remote, 0, 100 + round);
            remote.export(&new, 0, CHUNK);
            let lease = Lease::from_parts(&window, leased.join().unwrap().expect("a lease"));
            new.verify(&world.importer.cuda, lease.address(), 0, CHUNK).expect("the new bytes");
        });
        let seed = 100 + round;
        memory.chunks.insert(0, (CHUNK, seed));
        world.assert_mapped(&cache, 1);
        // And freed for good, the same way.
        memory.replace(&mut remote, 0, seed);
        remote.export(&memory, 0, CHUNK);
    }
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn what_dies_during_its_import_does_not_stay() {
    let Some(world) = enter(test_name!(what_dies_during_its_import_does_not_stay)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.cache(|_| {});
    let window = window(&cache, &rkey);
    let slow = Slow::next(&world, "cuMemSetAccess");
    std::thread::scope(|scope| {
        let leased = scope.spawn(|| {
            world.importer.cuda.enter_primary(0);
            window.lease(memory.base, CHUNK, soon()).unwrap_err()
        });
        slow.wait();
        remote.ask(&format!("retire {} 0 {CHUNK}", memory.index));
        assert_eq!(leased.join().unwrap().kind, CacheErrorKind::NoChunk);
    });
    // The sweeper has seen the death before there was anything to sweep.
    assert!(wait_until(Duration::from_millis(500), || world.counters().mappings == 0));
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_purge_during_an_import_is_not_forgotten() {
    let Some(world) = enter(test_name!(a_purge_during_an_import_is_not_forgotten)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let slow = Slow::next(&world, "cuMemSetAccess");
    std::thread::scope(|scope| {
        let leased = scope.spawn(|| {
            world.importer.cuda.enter_primary(0);
            window.lease(memory.base, CHUNK, soon()).map(drop)
        });
        slow.wait();
        cache.purge_peer(key(&rkey).nonce);
        // It was not the lease's fault: both answers are right.
        let _ = leased.join().unwrap();
    });
    world.assert_mapped(&cache, 0);
    assert_eq!(cache.stats().address_space, 0);
    drop(window);
    remote.finish();
    world.close(cache);
}

/// Ranges of all lengths over a cold window: nobody fails because others keep importing parts of his range.
#[test]
fn many_overlapping_misses_all_succeed() {
    let Some(world) = enter(test_name!(many_overlapping_misses_all_succeed)) else { return };
    let mut remote = world.remote();
    let chunks: Vec<(u64, u64)> = (0..48).map(|seed| (CHUNK, seed)).collect();
    let memory = remote.memory(48 * CHUNK, &chunks);
    let (_, rkey) = remote.export(&memory, 0, 48 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    world.importer.fake.add_fault("cuMemImportFromShareableHandle#*~1ms");
    together(&world, 48, |number| {
        // The last chunk alone first, ever longer ranges with it then.
        let first = if number == 0 { 0 } else { 48 - number };
        let lease = window.lease(memory.base + first * CHUNK, (48 - first) * CHUNK, soon()).expect("a lease");
        memory.verify(&world.importer.cuda, lease.address(), first * CHUNK, 4096).unwrap();
    });
    assert_eq!(world.counters().imports_made, 48);
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn too_many_leases_have_an_error_of_their_own() {
    let Some(world) = enter(test_name!(too_many_leases_have_an_error_of_their_own)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let leases: Vec<_> = (0..1 << 20).map(|_| window.lease(memory.base, CHUNK, soon()).unwrap().into_parts()).collect();
    assert_eq!(window.lease(memory.base, CHUNK, soon()).unwrap_err().kind, CacheErrorKind::TooManyLeases);
    drop(Lease::from_parts(&window, leases[0]));
    drop(world.verify(&window, &memory, 0, CHUNK));
    for &parts in &leases[1..] {
        drop(Lease::from_parts(&window, parts));
    }
    assert_eq!(cache.stats().chunk_leases, (1 << 20) + 1);
    world.assert_mapped(&cache, 1);
    drop(window);
    remote.finish();
    world.close(cache);
}
