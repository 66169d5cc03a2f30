//! Exporters that exit, are killed, restart under the same pid, or replace themselves: new bytes or an error, never the old ones, and memory comes back.

use core::time::Duration;
use std::time::Instant;

use cuda_ipc_cache::CacheErrorKind;
use cuda_ipc_core::importer::ImportErrorKind;
use cuda_ipc_tests::snapshot::wait_until;

use crate::support::*;

/// What the two tests below have in common: an exporter whose next life has the same pid, addresses, sizes and fd numbers, but other bytes.
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
    assert!(wait_until(Duration::from_millis(500), || cache.stats().chunks == 0), "{:?}", began.elapsed());
    assert!(window.lease(memory.base, CHUNK, soon()).is_err());
    drop(window);
    remote.finish();
    world.close(cache);
}
