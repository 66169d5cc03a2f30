//! One call for whatever an rkey names.

use cuda_ipc_cache::{CacheErrorKind, Opened};
use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_tests::exporter;
use cuda_ipc_tests::pattern;

use crate::support::*;

#[test]
fn every_kind_of_memory_is_opened_by_one_call() {
    let Some(world) = enter(test_name!(every_kind_of_memory_is_opened_by_one_call)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(16 * CHUNK, &[(2 * CHUNK, 1)]);
    let (_, chunks) = remote.export(&memory, 0, 2 * CHUNK);
    let pool = remote.number("pool 0 1");
    let address = remote.number(&format!("pool_alloc {pool} {} 1", 2 * CHUNK));
    let (_, pooled) = remote.export_at(address, 2 * CHUNK);
    let address = remote.number(&format!("alloc {} 1", 2 * CHUNK));
    let (_, legacy) = remote.export_at(address, 2 * CHUNK);
    let cache = world.quiet_cache();
    for (rkey, kind) in [(&chunks, "chunks"), (&pooled, "pooled"), (&legacy, "legacy")] {
        // What travels is bytes.
        let rkey = Rkey::decode(&rkey.encode()).unwrap();
        let opened = cache.open(&rkey, 0, false, soon()).unwrap();
        for (offset, len) in [(0, 2 * CHUNK), (CHUNK, CHUNK)] {
            let lease = opened.lease(rkey.base + offset, len, soon()).unwrap();
            pattern::check(&world.importer.cuda, lease.address(), offset, len, 1).unwrap_or_else(|error| panic!("{kind}: {error}"));
        }
        for (address, len) in [(rkey.base - 1, 2), (rkey.base, 0), (rkey.base, 32 * CHUNK), (rkey.base, u64::MAX)] {
            assert_eq!(opened.lease(address, len, soon()).unwrap_err().kind, CacheErrorKind::OutsideWindow, "{kind}");
        }
        assert_eq!(opened.window().is_some(), kind != "legacy");
        assert_eq!(cache.stats().legacy_handles, u64::from(kind == "legacy"));
    }
    assert_eq!(cache.stats().legacy_handles, 0);
    // Opened twice by two who do not know of each other: one mapping.
    let both = [cache.open(&legacy, 0, false, soon()).unwrap(), cache.open(&legacy, 0, false, soon()).unwrap()];
    let addresses = both.each_ref().map(|opened| opened.lease(legacy.base, 1, soon()).unwrap().address());
    assert_eq!((addresses[0], cache.stats().legacy_handles), (addresses[1], 2));
    drop(both);
    let nothing = Rkey { payload: Payload::NoIpc, ..legacy };
    assert_eq!(cache.open(&nothing, 0, false, soon()).unwrap_err().kind, CacheErrorKind::NoIpc);
    remote.finish();
    world.close(cache);
}

#[test]
fn memory_of_this_process_is_its_own_address() {
    let Some(world) = enter(test_name!(memory_of_this_process_is_its_own_address)) else { return };
    let cuda = world.importer.cuda;
    let exporter = Exporter::new(world.importer.core, exporter::without_broker()).unwrap();
    let (_, chunk) = cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let plain = cuda.mem_alloc(2 << 20).unwrap();
    let pool = cuda.pool_create(0, 1).unwrap();
    let pooled = cuda.alloc_from_pool(2 << 20, pool, core::ptr::null_mut()).unwrap();
    let cache = world.quiet_cache();
    for address in [chunk, plain, pooled] {
        let export = exporter.export(address + 4096, 8192).unwrap();
        let rkey = Rkey::decode(&export.rkey().encode()).unwrap();
        let opened = cache.open(&rkey, 0, true, soon()).unwrap();
        assert!(matches!(opened, Opened::Own { .. }), "{opened:?}");
        assert_eq!(opened.lease(address + 4096, 8192, soon()).unwrap().address(), address + 4096);
        assert_eq!(opened.lease(address - 1, 2, soon()).unwrap_err().kind, CacheErrorKind::OutsideWindow);
    }
    assert_eq!(world.importer.fake.counters().imports_made, 0);
    assert_eq!(world.importer.fake.calls("cuIpcOpenMemHandle") + world.importer.fake.calls("cuMemPoolImportPointer"), 0);
}
