//! Every driver call and every libc call of an export and an import fails once, in every plausible way.
//!
//! The outcome is success where that is possible, or an error that names the call and its code; nothing is left behind, and the operation works again.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "fault_sweep/others.rs"]
mod others;

use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::{Deadline, Placement};
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, READ};
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::sweep::{Sweep, names};
use cuda_ipc_tests::{hooked, shim};

const MIB: u64 = 1 << 20;

/// Enters a test in a process with the shim and a hooked driver.
fn enter(test: &str) -> Option<(Inside, Importer, Watch)> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        "main" => me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {
            let mut importer = Importer::start();
            importer.core = driver::Cuda::with(hooked::driver()).unwrap();
            return Some((me, importer, Watch::new()));
        }
    }
    None
}

/// What any operation may survive, and why.
fn survives(point: &Point, verdict: Verdict) -> bool {
    match (point.name, verdict) {
        // Only keeps a capture elsewhere from being disturbed.
        ("cuThreadExchangeStreamCaptureMode", _) => true,
        // Tried twice.
        ("cuMemRelease" | "cuMemUnmap" | "cuMemAddressFree", _) => true,
        // The number is free, the range is unmapped.
        ("close" | "munmap", _) => true,
        // The fd has the flag already.
        ("fcntl(F_SETFD)", _) => true,
        // Whether a number still is our fd, before it is closed; how often that may be is asserted.
        ("fstat", _) => true,
        // The standard library repeats it, or takes another way.
        ("open" | "getrandom", Verdict::Fail(libc::EINTR)) => true,
        ("statx", Verdict::Fail(libc::ENOSYS | libc::EPERM)) => true,
        _ => false,
    }
}

fn judge_import(point: &Point, verdict: Verdict, outcome: &Result<(), String>) -> bool {
    match (outcome, point.name, verdict) {
        // Whether the exporter is gone; without an answer the next call finds out.
        (Ok(()), "poll", _) => true,
        (Ok(()), ..) => survives(point, verdict),
        // The table's number is closed there: as after an exec.
        (Err(text), "pidfd_getfd", Verdict::Fail(libc::EBADF)) if text.ends_with("the exporter has exited") => true,
        (Err(text), ..) => names(text, point, verdict),
    }
}

fn judge_export(point: &Point, verdict: Verdict, outcome: &Result<(), String>) -> bool {
    match (outcome, point.name, verdict) {
        // The driver says that there is no such memory (any more): asked again.
        (Ok(()), "cuPointerGetAttribute", Verdict::Fail(1)) => true,
        // Kernels that do not know a flag of it.
        (Ok(()), "memfd_create", Verdict::Fail(libc::EINVAL)) => true,
        // Nobody sleeps on the table for ever, and the next export tries for a thread again.
        (Ok(()), "futex" | "pthread_create", _) => true,
        (Ok(()), ..) => survives(point, verdict),
        (Err(text), ..) => names(text, point, verdict),
    }
}

fn text(error: impl core::fmt::Display) -> String {
    error.to_string()
}

#[test]
fn an_import_survives_or_names_every_failure() {
    let Some((me, importer, watch)) = enter("an_import_survives_or_names_every_failure") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, MIB, 6 * MIB);
    let mut operation = || {
        let peer = importer.connect(&rkey).map_err(text)?;
        let import = importer.import_from(&peer, &rkey).map_err(text)?;
        memory.spot_check(&importer.cuda, import.address(), MIB, 6 * MIB).unwrap();
        import.close().map_err(text)
    };
    let mut sweep = Sweep { watch, fake: importer.fake, operation: &mut operation, judge: &judge_import };
    let report = sweep.run();
    let pairs = sweep.run_pairs();
    println!("import: {report:?}, {pairs} pairs");
    assert_eq!(report.survived["fstat"], 1, "of the pidfd, at the end");
    assert!(report.points >= 44 && report.runs >= 418 && pairs >= 347);
}

#[test]
fn an_import_of_two_runs_survives_or_names_every_failure() {
    // A5: import of chunk i fails, or its map, or the access to either run; undone is exactly what was done.
    let Some((me, importer, watch)) = enter("an_import_of_two_runs_survives_or_names_every_failure") else { return };
    let mut remote = Remote::start(&me);
    let chunks = [2, 2, 4, 2, 2, 2].map(|mib| (mib * MIB, mib));
    let memory = remote.memory(64 * MIB, &chunks);
    let (_, rkey) = remote.export(&memory, 0, 14 * MIB);
    let ranges = [(0, 4 * MIB), (8 * MIB, 6 * MIB)];
    // No current context in this one: it needs none.
    let context = importer.cuda.ctx_get_current().unwrap();
    let mut operation = || {
        importer.cuda.ctx_set_current(core::ptr::null_mut()).unwrap();
        let peer = importer.connect(&rkey).map_err(text)?;
        let found: Vec<_> = ranges.iter().flat_map(|&(at, len)| peer.lookup(memory.base + at, len).unwrap()).collect();
        assert_eq!(found.len(), 5);
        let local_base = importer.core.reserve(14 * MIB).map_err(text)?;
        let placement = Placement { remote_base: memory.base, local_base };
        let imported = peer.import(&importer.core, &found, placement, READ, Deadline::after(LONG)).map_err(text);
        if imported.is_ok() {
            importer.cuda.ctx_set_current(context).unwrap();
            for (at, len) in ranges {
                memory.spot_check(&importer.cuda, local_base + at, at, len).unwrap();
                importer.core.unmap(local_base + at, len).map_err(text)?;
            }
        }
        importer.core.free_reservation(local_base, 14 * MIB).map_err(text)?;
        imported
    };
    let mut sweep = Sweep { watch, fake: importer.fake, operation: &mut operation, judge: &judge_import };
    let report = sweep.run();
    let pairs = sweep.run_pairs();
    println!("import of two runs: {report:?}, {pairs} pairs");
    assert_eq!(report.functions["cuMemSetAccess"], 2);
    assert_eq!(report.survived["fstat"], 1, "of the pidfd, at the end");
    assert!(report.points >= 54 && report.runs >= 510 && pairs >= 549);
}

#[test]
fn an_export_survives_or_names_every_failure() {
    let Some((_, importer, watch)) = enter("an_export_survives_or_names_every_failure") else { return };
    let mut memory = Memory::reserve(importer.cuda, 64 * MIB, 0).unwrap();
    for (offset, len) in [(0, 2 * MIB), (2 * MIB, 4 * MIB), (6 * MIB, 2 * MIB), (8 * MIB, 2 * MIB)] {
        memory.map(offset, len, offset).unwrap();
    }
    // Its thread would now and then be the last to hold the exporter, and then the end of it is not this thread's to watch.
    let mut options = exporter::without_broker();
    options.sweep_interval = None;
    let mut operation = || {
        let exporter = Exporter::new(importer.core, options.clone()).map_err(text)?;
        let some = exporter.export(memory.base() + MIB, 6 * MIB).map_err(text)?;
        let all = exporter.export(memory.base(), 10 * MIB).map_err(text)?;
        assert_eq!((some.chunks().len(), all.chunks().len(), exporter.stats().chunks), (3, 4, 4));
        assert_eq!(some.key(), all.key());
        drop(all);
        exporter.retire(memory.base(), 2 * MIB);
        Ok(())
    };
    let mut sweep = Sweep { watch, fake: importer.fake, operation: &mut operation, judge: &judge_export };
    let report = sweep.run();
    let pairs = sweep.run_pairs();
    println!("export: {report:?}, {pairs} pairs");
    assert_eq!(report.survived["fstat"], 5, "of four chunks and the table, at the end");
    assert!(report.points >= 69 && report.runs >= 623 && pairs >= 834);
}
