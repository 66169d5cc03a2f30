//! A window mirrors a reservation while chunks come, go and are replaced in it.

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::CacheErrorKind;
use cuda_ipc_tests::pattern;

use crate::support::*;

#[test]
fn growth_imports_what_is_new_and_nothing_else() {
    let Some(world) = enter(test_name!(growth_imports_what_is_new_and_nothing_else)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(64 * CHUNK, &[(CHUNK, 1), (3 * CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, 4 * CHUNK));
    assert_eq!(world.counters().imports_made, 2);

    memory.map(&mut remote, 4 * CHUNK, CHUNK, 3);
    let beyond = window.lease(memory.base + 3 * CHUNK, 2 * CHUNK, soon()).unwrap_err();
    assert_eq!((beyond.kind, beyond.address), (CacheErrorKind::NoChunk, memory.base + 4 * CHUNK), "not exported yet");
    remote.export(&memory, 4 * CHUNK, CHUNK);
    drop(world.verify(&window, &memory, 0, 5 * CHUNK));
    assert_eq!(world.counters().imports_made, 3);
    world.assert_mapped(&cache, 3);

    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn what_shrinks_away_fails_by_name_and_the_rest_stays_a_hit() {
    let Some(world) = enter(test_name!(what_shrinks_away_fails_by_name_and_the_rest_stays_a_hit)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(64 * CHUNK, &[(CHUNK, 1), (CHUNK, 2), (CHUNK, 3), (CHUNK, 4)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, 0, 4 * CHUNK));

    remote.ask(&format!("retire {} {} {}", memory.index, 2 * CHUNK, 2 * CHUNK));
    memory.unmap(&mut remote, 2 * CHUNK);
    memory.unmap(&mut remote, 3 * CHUNK);
    let before = (cache.stats().misses, world.counters().driver_calls);
    for len in [CHUNK, 2 * CHUNK] {
        assert!(window.try_lease(memory.base, len).is_some(), "nothing died here");
    }
    assert_eq!((cache.stats().misses, world.counters().driver_calls), before);
    for (offset, hole) in [(0, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK), (2 * CHUNK + 7, 2 * CHUNK + 7), (3 * CHUNK, 3 * CHUNK)] {
        let error = window.lease(memory.base + offset, 3 * CHUNK, soon()).unwrap_err();
        assert_eq!((error.kind, error.address), (CacheErrorKind::NoChunk, memory.base + hole));
    }
    world.assert_mapped(&cache, 4);
    assert_eq!(cache.trim(), 2 * CHUNK);
    world.assert_mapped(&cache, 2);
    assert_eq!(cache.stats().unmapped_dead, 2);
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));

    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_chunk_replaced_in_the_middle_is_the_only_one_imported_anew() {
    let Some(world) = enter(test_name!(a_chunk_replaced_in_the_middle_is_the_only_one_imported_anew)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(64 * CHUNK, &[(CHUNK, 1), (2 * CHUNK, 2), (CHUNK, 3)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    let address = world.verify(&window, &memory, 0, 4 * CHUNK).address();
    for round in 0..5 {
        memory.replace(&mut remote, CHUNK, 100 + round);
        let missing = window.lease(memory.base, 4 * CHUNK, soon()).unwrap_err();
        assert_eq!((missing.kind, missing.address), (CacheErrorKind::NoChunk, memory.base + CHUNK));
        remote.export(&memory, CHUNK, 2 * CHUNK);
        let lease = world.verify(&window, &memory, 0, 4 * CHUNK);
        assert_eq!(lease.address(), address, "at its old place");
        drop(lease);
        assert_eq!(world.counters().imports_made, 4 + round);
        world.assert_mapped(&cache, 3);
    }
    assert_eq!(cache.stats().unmapped_replaced, 5);

    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn chunks_may_come_again_in_other_sizes() {
    let Some(world) = enter(test_name!(chunks_may_come_again_in_other_sizes)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(16 * CHUNK, &[]);
    let (cache, mut handle, mut seed) = (world.quiet_cache(), None, 0);
    // Each line fills the same sixteen granules.
    let layouts: [&[u64]; 8] = [&[16], &[8, 8], &[1, 14, 1], &[4, 4, 4, 4], &[5, 11], &[11, 5], &[1; 16], &[3, 10, 3]];
    for layout in layouts {
        for offset in memory.chunks.keys().copied().collect::<Vec<_>>() {
            memory.unmap(&mut remote, offset);
        }
        remote.ask("sweep");
        let mut offset = 0;
        for granules in layout {
            seed += 1;
            memory.map(&mut remote, offset, granules * CHUNK, seed);
            offset += granules * CHUNK;
        }
        let (_, rkey) = remote.export(&memory, 0, 16 * CHUNK);
        let window = handle.get_or_insert_with(|| window(&cache, &rkey));
        // First a part in the middle, which may be the inside of a chunk, then all.
        drop(world.verify(window, &memory, 6 * CHUNK + 12345, CHUNK));
        drop(world.verify(window, &memory, 0, 16 * CHUNK));
        world.assert_mapped(&cache, layout.len() as u64);
    }

    drop(handle);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_hole_is_an_error_until_it_is_filled() {
    let Some(world) = enter(test_name!(a_hole_is_an_error_until_it_is_filled)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(16 * CHUNK, &[]);
    memory.map(&mut remote, CHUNK, 2 * CHUNK, 1);
    memory.map(&mut remote, 5 * CHUNK, 2 * CHUNK, 2);
    let (_, rkey) = remote.export(&memory, CHUNK, 2 * CHUNK);
    remote.export(&memory, 5 * CHUNK, 2 * CHUNK);
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    for (offset, len, hole) in [(0, CHUNK, 0), (0, 2 * CHUNK, 0), (CHUNK, 3 * CHUNK, 3 * CHUNK), (6 * CHUNK, 2 * CHUNK, 7 * CHUNK)] {
        let error = window.lease(memory.base + offset, len, soon()).unwrap_err();
        assert_eq!((error.kind, error.address), (CacheErrorKind::NoChunk, memory.base + hole));
    }
    assert_eq!(world.counters().imports_made, 0, "nothing is imported for a range with a hole");
    drop(world.verify(&window, &memory, CHUNK, 2 * CHUNK));
    drop(world.verify(&window, &memory, 5 * CHUNK, 2 * CHUNK));
    memory.map(&mut remote, 3 * CHUNK, 2 * CHUNK, 3);
    remote.export(&memory, 3 * CHUNK, 2 * CHUNK);
    drop(world.verify(&window, &memory, CHUNK, 6 * CHUNK));
    world.assert_mapped(&cache, 3);

    // Ranges that are none, or not the reservation's.
    let outside = [(memory.base, 0), (memory.base - 1, 2), (memory.base + memory.len, 1), (memory.base, memory.len + 1), (u64::MAX, 2)];
    for (address, len) in outside {
        let error = window.lease(address, len, soon()).unwrap_err();
        assert_eq!((error.kind, error.address), (CacheErrorKind::OutsideWindow, address));
    }
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_key_is_good_for_what_lives_when_its_neighbours_are_dead() {
    let Some(world) = enter(test_name!(a_key_is_good_for_what_lives_when_its_neighbours_are_dead)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (CHUNK, 2), (CHUNK, 3), (CHUNK, 4)]);
    // Of the whole, and imported for the first time when half of it has died.
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    for dead in [0, 3] {
        remote.ask(&format!("retire {} {} {CHUNK}", memory.index, dead * CHUNK));
        memory.unmap(&mut remote, dead * CHUNK);
    }
    let cache = world.quiet_cache();
    let window = window(&cache, &rkey);
    drop(world.verify(&window, &memory, CHUNK, 2 * CHUNK));
    for dead in [0, 3] {
        let error = window.lease(memory.base + dead * CHUNK, CHUNK, soon()).unwrap_err();
        assert_eq!((error.kind, error.address), (CacheErrorKind::NoChunk, memory.base + dead * CHUNK));
    }
    drop(window);
    remote.finish();
    world.close(cache);
}

#[test]
fn keys_of_different_age_share_a_window() {
    let Some(world) = enter(test_name!(keys_of_different_age_share_a_window)) else { return };
    let mut remote = world.remote();
    let chunks: Vec<(u64, u64)> = (0..50).map(|seed| (CHUNK, seed)).collect();
    let mut memory = remote.memory(128 * CHUNK, &chunks);
    let (_, old) = remote.export(&memory, 0, 50 * CHUNK);
    for at in 50..100 {
        memory.map(&mut remote, at * CHUNK, CHUNK, at);
    }
    let (_, young) = remote.export(&memory, 50 * CHUNK, 50 * CHUNK);
    assert_eq!(key(&old), key(&young));
    let cache = world.quiet_cache();
    for round in 0..3 {
        for at in 0..50 {
            for (rkey, at) in [(&old, at), (&young, 50 + at)] {
                let window = window(&cache, rkey);
                if round == 0 {
                    drop(world.verify(&window, &memory, at * CHUNK, CHUNK));
                } else {
                    assert!(window.try_lease(memory.base + at * CHUNK, CHUNK).is_some());
                }
            }
        }
        assert_eq!(world.counters().imports_made, 100, "as many as there are chunks");
    }
    let stats = cache.stats();
    assert_eq!((stats.windows, stats.misses, stats.chunk_leases), (1, 100, 300));
    remote.finish();
    world.close(cache);
}

#[test]
fn a_larger_reservation_at_the_same_base_is_another_window() {
    let Some(world) = enter(test_name!(a_larger_reservation_at_the_same_base_is_another_window)) else { return };
    let mut remote = world.remote();
    let small = remote.memory(8 * CHUNK, &[(4 * CHUNK, 1), (4 * CHUNK, 2)]);
    let (_, small_key) = remote.export(&small, 0, 8 * CHUNK);
    let cache = world.quiet_cache();
    let small_window = window(&cache, &small_key);
    let lease = world.verify(&small_window, &small, 0, 8 * CHUNK);

    remote.ask(&format!("retire {} 0 {}", small.index, small.len));
    remote.ask(&format!("unreserve {}", small.index));
    let large = remote.memory_at(24 * CHUNK, small.base, &[(6 * CHUNK, 11), (6 * CHUNK, 12), (12 * CHUNK, 13)]);
    if large.base != small.base {
        println!("skipped: the addresses after the small reservation are taken");
        return;
    }
    let (_, large_key) = remote.export(&large, 0, 24 * CHUNK);
    let large_window = window(&cache, &large_key);
    drop(world.verify(&large_window, &large, 0, 24 * CHUNK));
    assert_eq!(cache.stats().windows, 2);
    small.verify(&world.importer.cuda, lease.address(), 0, 8 * CHUNK).expect("a lease keeps its bytes");
    drop(lease);

    // Through the old window: the new chunks that lie in it wholly, and no other.
    drop(world.verify(&small_window, &large, 0, 6 * CHUNK));
    let error = small_window.lease(large.base + 6 * CHUNK, CHUNK, soon()).unwrap_err();
    assert_eq!((error.kind, error.address), (CacheErrorKind::NoChunk, large.base + 6 * CHUNK));
    drop((small_window, large_window));
    remote.finish();
    world.close(cache);
}

#[test]
fn access_to_write_is_a_window_of_its_own() {
    let Some(world) = enter(test_name!(access_to_write_is_a_window_of_its_own)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(4 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    let cache = world.quiet_cache();
    let read = window(&cache, &rkey);
    let write = cache.window(&key(&rkey), 0, true, soon()).unwrap();
    let (reading, writing) = (world.verify(&read, &memory, 0, CHUNK), world.verify(&write, &memory, 0, CHUNK));
    let cuda = &world.importer.cuda;
    assert_eq!(cuda.fill(reading.address(), 9, 4096), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    pattern::fill(cuda, writing.address(), CHUNK, 77).unwrap();
    remote.ask(&format!("check {} 0 {CHUNK} 77", memory.index));
    memory.chunks.insert(0, (CHUNK, 77));
    memory.verify(cuda, reading.address(), 0, CHUNK).unwrap();
    world.assert_mapped(&cache, 2);
    drop((reading, writing));
    drop((read, write));
    remote.finish();
    world.close(cache);
}
