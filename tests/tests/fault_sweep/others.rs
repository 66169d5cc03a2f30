//! The same of memory of pools and of `cuMemAlloc`: fds, pools, pointers, mappings and contexts are afterwards what they were.

use core::ptr::null_mut;

use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::{Deadline, LegacyImport, PooledImport};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, key};
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::points::{Point, Verdict};
use cuda_ipc_tests::sweep::Sweep;

use super::{MIB, enter, judge_export, judge_import, text};

type Outcome = Result<(), String>;

/// What these may survive beside what any operation may.
fn tolerates(point: &Point, verdict: Verdict, outcome: &Outcome) -> bool {
    // "No context": asked again in one.
    if outcome.is_ok() && point.name.starts_with("cuMemPool") && verdict == Verdict::Fail(201) {
        return true;
    }
    let survivable = [
        // Which context is current: without an answer the primary one is taken.
        "cuCtxGetDevice",
        "cuCtxGetCurrent",
        // Tried twice.
        "cuCtxPopCurrent",
        "cuDevicePrimaryCtxRelease",
        "cuMemFree",
        "cuMemPoolDestroy",
        "cuIpcCloseMemHandle",
    ];
    outcome.is_ok() && survivable.contains(&point.name)
}

fn judge_imports(point: &Point, verdict: Verdict, outcome: &Outcome) -> bool {
    tolerates(point, verdict, outcome) || judge_import(point, verdict, outcome)
}

/// A close pushes its context anew where that fails.
fn judge_legacy(point: &Point, verdict: Verdict, outcome: &Outcome) -> bool {
    outcome.is_ok() && point.name == "cuCtxPushCurrent" || judge_imports(point, verdict, outcome)
}

fn judge_exports(point: &Point, verdict: Verdict, outcome: &Outcome) -> bool {
    tolerates(point, verdict, outcome) || judge_export(point, verdict, outcome)
}

/// Pushed contexts and retains of primary ones: 0 pushed beside what the test itself has.
fn contexts(importer: &Importer) -> (bool, u64) {
    (importer.cuda.ctx_get_current().unwrap().is_null(), importer.fake.counters().primary_retains)
}

#[test]
fn an_import_of_a_pool_survives_or_names_every_failure() {
    let Some((me, importer, watch)) = enter("others::an_import_of_a_pool_survives_or_names_every_failure") else { return };
    let mut remote = Remote::start(&me);
    let pool = remote.number("pool 0 1");
    let addresses = [1, 2].map(|seed| remote.number(&format!("pool_alloc {pool} {} {seed}", 2 * MIB)));
    let rkeys = addresses.map(|address| remote.export_at(address, 2 * MIB).1);
    let mut operation = || {
        let peer = importer.connect(&rkeys[0]).map_err(text)?;
        let import = |rkey: &Rkey| PooledImport::new(&importer.core, &peer, &key(rkey), &[0], Deadline::after(LONG)).map_err(text);
        // The second by the pool that is there already.
        let (mut first, mut second) = (import(&rkeys[0])?, import(&rkeys[1])?);
        for (import, seed) in [(&first, 1), (&second, 2)] {
            pattern::check(&importer.cuda, import.address(), 0, 4096, seed).unwrap();
        }
        first.close().map_err(text)?;
        second.close().map_err(text)
    };
    let mut sweep = Sweep { watch, fake: importer.fake, operation: &mut operation, judge: &judge_imports };
    let report = sweep.run();
    let pairs = sweep.run_pairs();
    println!("import of a pool: {report:?}, {pairs} pairs");
    let calls = ["cuMemPoolImportFromShareableHandle", "cuMemPoolSetAccess", "cuMemPoolImportPointer", "cuMemFree", "cuMemPoolDestroy"];
    assert_eq!(calls.map(|call| report.functions[call]), [1, 1, 2, 2, 1]);
    assert!(report.points >= 40 && report.runs >= 360 && pairs >= 300, "{} {} {pairs}", report.points, report.runs);
}

#[test]
fn an_import_by_a_legacy_handle_survives_or_names_every_failure() {
    let Some((me, importer, watch)) = enter("others::an_import_by_a_legacy_handle_survives_or_names_every_failure") else { return };
    let mut remote = Remote::start(&me);
    let address = remote.number(&format!("alloc {} 7", 2 * MIB));
    let (_, rkey) = remote.export_at(address, 2 * MIB);
    let current = importer.cuda.ctx_get_current().unwrap();
    // In the thread's own context, and in the primary one where it has none.
    for context in [current, null_mut()] {
        importer.cuda.ctx_set_current(context).unwrap();
        let before = contexts(&importer);
        let mut operation = || {
            let outcome = LegacyImport::open(&importer.core, &rkey, 0, Deadline::after(LONG)).map_err(text).and_then(|mut import| {
                let again = LegacyImport::open(&importer.core, &rkey, 0, Deadline::after(LONG)).map_err(text)?;
                assert_eq!(again.address(), import.address());
                drop(again);
                import.close().map_err(text)
            });
            assert_eq!(contexts(&importer), before, "{outcome:?}");
            outcome
        };
        let mut sweep = Sweep { watch, fake: importer.fake, operation: &mut operation, judge: &judge_legacy };
        let report = sweep.run();
        let pairs = sweep.run_pairs();
        println!("import by a legacy handle: {report:?}, {pairs} pairs");
        assert_eq!((report.functions["cuIpcOpenMemHandle"], report.functions["cuIpcCloseMemHandle"]), (1, 1));
        assert!(report.points >= 15 && report.runs >= 120 && pairs >= 50, "{} {} {pairs}", report.points, report.runs);
    }
}

#[test]
fn an_export_of_a_pool_and_of_plain_memory_survives_or_names_every_failure() {
    let test = "others::an_export_of_a_pool_and_of_plain_memory_survives_or_names_every_failure";
    let Some((_, importer, watch)) = enter(test) else { return };
    let cuda = importer.cuda;
    let pool = cuda.pool_create(0, 1).unwrap();
    let [first, second] = [0, 1].map(|_| cuda.alloc_from_pool(2 << 20, pool, null_mut()).unwrap());
    let plain = cuda.mem_alloc(2 << 20).unwrap();
    let context = cuda.ctx_get_current().unwrap();
    cuda.ctx_set_current(null_mut()).unwrap();
    let before = contexts(&importer);
    let mut operation = || {
        // No thread: it might be the one that drops the exporter, out of this test's sight.
        let mut options = exporter::without_broker();
        options.sweep_interval = None;
        let exporter = Exporter::new(importer.core, options).map_err(text)?;
        let outcome = [first, second, first + MIB, plain].into_iter().try_fold(Vec::new(), |mut exports, address| {
            exports.push(exporter.export(address, MIB).map_err(text)?);
            Ok::<_, String>(exports)
        });
        if let Ok(exports) = &outcome {
            let stats = exporter.stats();
            // Where the driver has said of the first that it is not there, the third has published it anew.
            let bases = [0, 2].map(|at: usize| exports[at].key().unwrap().base);
            assert_eq!((bases[0], stats.chunks, stats.pools, stats.fds), (bases[1], 2, 1, 1));
        }
        let outcome = outcome.map(drop);
        let stats = exporter.stats();
        assert_eq!((stats.chunks, stats.pools, stats.fds), (0, 0, 0), "{outcome:?}");
        assert_eq!(contexts(&importer), before, "{outcome:?}");
        outcome
    };
    let mut sweep = Sweep { watch, fake: importer.fake, operation: &mut operation, judge: &judge_exports };
    let report = sweep.run();
    let pairs = sweep.run_pairs();
    println!("export of a pool and of plain memory: {report:?}, {pairs} pairs");
    let calls = ["cuMemPoolExportToShareableHandle", "cuMemPoolExportPointer", "cuIpcGetMemHandle"];
    assert_eq!(calls.map(|call| report.functions[call]), [1, 2, 1]);
    assert!(report.points >= 60 && report.runs >= 500 && pairs >= 500, "{} {} {pairs}", report.points, report.runs);
    cuda.ctx_set_current(context).unwrap();
}
