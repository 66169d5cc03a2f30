//! A window mirrors a reservation while chunks come, go and are replaced in it.

use cuda_ipc_cache::CacheErrorKind;

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
    assert_eq!(cache.stats().windows, 1);
    world.assert_mapped(&cache, 3);

    drop(window);
    remote.finish();
    world.close(cache);
}
