//! One call for whatever an rkey names.

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::{CacheErrorKind, Opened};
use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::LegacyImport;
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_tests::child::{fork, raw_clone, wait};
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

#[test]
fn a_child_drops_what_its_parent_has_opened_without_a_word_to_the_driver() {
    // B43.
    let Some(world) = enter(test_name!(a_child_drops_what_its_parent_has_opened_without_a_word_to_the_driver)) else { return };
    let mut remote = world.remote();
    let pool = remote.number("pool 0 1");
    let pooled = remote.number(&format!("pool_alloc {pool} {} 1", 2 * CHUNK));
    let plain = remote.number(&format!("alloc {} 1", 2 * CHUNK));
    let rkeys = [pooled, plain].map(|address| remote.export_at(address, 2 * CHUNK).1);
    let cache = world.quiet_cache();
    let open = |rkey: &Rkey| {
        let opened = cache.open(rkey, 0, false, soon()).unwrap();
        let lease = opened.lease(rkey.base, 2 * CHUNK, soon()).unwrap();
        pattern::check(&world.importer.cuda, lease.address(), 0, 2 * CHUNK, 1).unwrap();
        drop(lease);
        opened
    };
    let mut held = Some(rkeys.each_ref().map(open));
    for by_fork in [true, false] {
        let body = || {
            // Dropped here; the parent's stay.
            let opened = held.take().unwrap();
            let refused = opened.iter().zip(&rkeys).all(|(opened, rkey)| opened.lease(rkey.base, 1, soon()).is_err());
            drop(opened);
            refused && cache.open(&rkeys[1], 0, false, soon()).is_err()
        };
        let child = if by_fork { fork(body) } else { raw_clone(body) };
        wait(child, "one who has opened memory");
    }
    assert_eq!(world.importer.fake.device(0).calls_after_fork, 0);
    let opened = held.unwrap();
    for (opened, rkey) in opened.iter().zip(&rkeys) {
        let lease = opened.lease(rkey.base, 2 * CHUNK, soon()).unwrap();
        pattern::check(&world.importer.cuda, lease.address(), 0, 2 * CHUNK, 1).unwrap();
    }
    drop(opened);
    remote.finish();
    world.close(cache);
}

#[test]
fn a_driver_on_its_way_out_is_no_failure_for_a_legacy_handle() {
    // B42.
    let Some(world) = enter(test_name!(a_driver_on_its_way_out_is_no_failure_for_a_legacy_handle)) else { return };
    let mut remote = world.remote();
    let plain = remote.number(&format!("alloc {} 1", 2 * CHUNK));
    let (_, rkey) = remote.export_at(plain, 2 * CHUNK);
    let fake = &world.importer.fake;
    for call in ["cuIpcCloseMemHandle", "cuCtxPushCurrent"] {
        for code in [CUresult::CUDA_ERROR_DEINITIALIZED, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, CUresult::CUDA_ERROR_INVALID_CONTEXT] {
            let mut import = LegacyImport::open(&world.importer.core, &rkey, 0, soon()).unwrap();
            fake.add_fault(&format!("{call}#*={}", code.0));
            assert_eq!(import.close(), Ok(()), "{call} {code:?}");
            assert_eq!(import.address(), 0);
            fake.clear_faults();
        }
    }
    // Any other refusal is one, and the handle is kept for another try.
    let mut import = LegacyImport::open(&world.importer.core, &rkey, 0, soon()).unwrap();
    fake.add_fault("cuIpcCloseMemHandle#*=999");
    assert_eq!(import.close().unwrap_err().code, 999);
    fake.clear_faults();
    pattern::check(&world.importer.cuda, import.address(), 0, 2 * CHUNK, 1).unwrap();
    import.close().unwrap();
    remote.finish();
}
