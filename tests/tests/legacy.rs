//! Memory of `cuMemAlloc` by its legacy handle, through the same rkey.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::time::Duration;

use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::{Deadline, ImportErrorKind, LegacyImport};
use cuda_ipc_core::rkey::Payload;
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{LONG, enter};
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::snapshot::Snapshot;

const MIB: u64 = 1 << 20;

fn soon() -> Deadline {
    Deadline::after(LONG)
}

#[test]
fn plain_memory_is_shared_by_its_handle() {
    let Some((me, importer)) = enter("plain_memory_is_shared_by_its_handle") else { return };
    let start = Snapshot::take(&importer.fake);
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    let address = remote.number(&format!("alloc {} 7", 5 * MIB + 1000));
    let (_, whole) = remote.export_at(address, 5 * MIB);
    let (_, inner) = remote.export_at(address + 3 * MIB + 1, 17);
    // The handle stands for the allocation, and so does the rkey, whatever part of it was named.
    assert_eq!((whole, inner.base, inner.len), (inner, address, 5 * MIB + 1000));
    assert!(matches!(whole.payload, Payload::Legacy(_)));
    assert_eq!((remote.stats().chunks, remote.stats().fds), (0, 0), "no table, no fd");

    let first = LegacyImport::open(&importer.core, &whole, 0, soon()).unwrap();
    pattern::check(&importer.cuda, first.address(), 0, 5 * MIB + 1000, 7).unwrap();
    let second = LegacyImport::open(&importer.core, &inner, 0, soon()).unwrap();
    assert_eq!((second.address(), importer.fake.calls("cuIpcOpenMemHandle")), (first.address(), 1));
    drop(first);
    pattern::check(&importer.cuda, second.address(), 0, MIB, 7).unwrap();
    assert_eq!(importer.fake.calls("cuIpcCloseMemHandle"), 0);
    drop(second);
    assert_eq!(importer.fake.calls("cuIpcCloseMemHandle"), 1);
    // Without a context of its own a thread gets the primary one, and keeps it no longer than the mapping.
    importer.cuda.ctx_set_current(core::ptr::null_mut()).unwrap();
    let third = LegacyImport::open(&importer.core, &whole, 0, soon()).unwrap();
    let retains = || importer.fake.counters().primary_retains;
    let with = retains();
    drop(third);
    assert_eq!(retains(), with - 1);
    assert!(importer.cuda.ctx_get_current().unwrap().is_null());
    remote.finish();
    start.assert_unchanged(&importer.fake, "opened handles");
}

#[test]
fn what_leaves_its_allocation_is_a_reason() {
    let Some((me, _)) = enter("what_leaves_its_allocation_is_a_reason") else { return };
    let mut remote = Remote::start(&me);
    let address = remote.number(&format!("alloc {} 7", 2 * MIB));
    let cause = format!("LeavesAllocation {{ base: {address}, len: {} }}", 2 * MIB);
    assert_eq!(remote.try_export_at(address + MIB, MIB + 1).unwrap_err(), cause);
    // Freed: said of what was exported before; of the rest the driver does not know that it ever was there.
    let other = remote.number(&format!("alloc {} 7", 2 * MIB));
    remote.export_at(other, MIB);
    for (address, cause) in [(other, "Freed"), (address, "NotDeviceMemory")] {
        remote.ask(&format!("free_at {address}"));
        assert_eq!(remote.try_export_at(address, MIB).unwrap_err(), cause);
    }
}

#[test]
fn own_handles_are_refused_by_name() {
    let Some((_, importer)) = enter("own_handles_are_refused_by_name") else { return };
    let exporter = Exporter::new(importer.core, exporter::without_broker()).unwrap();
    let address = importer.cuda.mem_alloc(2 << 20).unwrap();
    let export = exporter.export(address, MIB).unwrap();
    assert!(export.key().is_none() && export.chunks().is_empty());
    let error = LegacyImport::open(&importer.core, &export.rkey(), 0, soon()).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::OwnProcess);
    // A key of another kind, and a handle of memory that is no more.
    let rkey = export.rkey();
    drop(export);
    importer.cuda.mem_free(address).unwrap();
    let error = LegacyImport::open(&importer.core, &rkey, 0, soon()).unwrap_err();
    assert!(matches!(error.kind, ImportErrorKind::Driver(driver) if driver.call == "cuIpcOpenMemHandle"), "{error}");
}

#[test]
fn threads_that_open_and_close_one_handle_share_it() {
    // B6: ten threads, one handle.
    let Some((me, importer)) = enter("threads_that_open_and_close_one_handle_share_it") else { return };
    let mut remote = Remote::start(&me);
    let address = remote.number(&format!("alloc {} 7", 2 * MIB));
    let (_, rkey) = remote.export_at(address, 2 * MIB);
    let context = importer.cuda.ctx_get_current().unwrap().expose_provenance();
    importer.fake.add_fault("cuIpcOpenMemHandle#*~1ms");
    std::thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                importer.cuda.ctx_set_current(core::ptr::with_exposed_provenance_mut(context)).unwrap();
                for _ in 0..20 {
                    let opened = LegacyImport::open(&importer.core, &rkey, 0, soon()).unwrap();
                    pattern::check(&importer.cuda, opened.address(), 0, 4096, 7).unwrap();
                }
            });
        }
    });
    let calls = |name: &str| importer.fake.calls(name);
    assert_eq!((calls("cuIpcOpenMemHandle"), importer.fake.counters().mappings), (calls("cuIpcCloseMemHandle"), 0));
    // Whoever finds it being opened does not wait for ever.
    importer.fake.clear_faults();
    importer.fake.add_fault("cuIpcOpenMemHandle#1~300ms");
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| {
            importer.cuda.ctx_set_current(core::ptr::with_exposed_provenance_mut(context)).unwrap();
            LegacyImport::open(&importer.core, &rkey, 0, soon()).unwrap()
        });
        while calls("cuIpcOpenMemHandle") == calls("cuIpcCloseMemHandle") {
            std::thread::yield_now();
        }
        let error = LegacyImport::open(&importer.core, &rkey, 0, Deadline::after(Duration::from_millis(5))).unwrap_err();
        assert_eq!(error.kind, ImportErrorKind::DeadlineOver);
        drop(slow.join().unwrap());
    });
}
