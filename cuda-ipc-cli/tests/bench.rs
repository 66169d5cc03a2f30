//! The benches on the fake driver, with as little of everything as there can be: what they report and count, never what they time.

mod support;

use serde_json::Value;

use support::{Fake, program, run};

/// Runs a bench that has to succeed, with `--json`, and checks what every report has.
fn report(fake: &Fake, args: &[&str]) -> Value {
    let args: Vec<&str> = ["bench"].iter().chain(args).chain(&["--json"]).copied().collect();
    let (code, out, err) = fake.run(&args);
    assert_eq!(code, 0, "{args:?}: {err}");
    let report: Value = serde_json::from_str(&out).expect("one JSON object");
    assert_eq!((&report["bench"], &report["driver"]), (&args[1].into(), &"fake".into()));
    for text in ["gpu", "cuda_version", "kernel", "cpu", "program"] {
        assert!(report[text].as_str().is_some_and(|text| !text.is_empty()), "{text}: {report}");
    }
    for number in ["cpus", "cores", "reps"] {
        assert!(report[number].as_u64().is_some_and(|number| number > 0), "{number}: {report}");
    }
    report
}

/// Runs a bench that has to succeed, for its text.
fn text(fake: &Fake, args: &[&str]) -> String {
    let (code, out, err) = fake.run(args);
    assert_eq!(code, 0, "{args:?}: {err}");
    out
}

fn list<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().unwrap_or_else(|| panic!("{name} is no list in {value}"))
}

/// Panics unless these are spreads: three positive numbers, in order.
fn assert_spreads(row: &Value, names: &[&str]) {
    for name in names {
        let [min, median, max] = ["min", "median", "max"].map(|number| row[name][number].as_f64().unwrap_or(f64::NAN));
        assert!(0.0 < min && min <= median && median <= max, "{name}: {row}");
    }
}

#[test]
fn wrong_uses_exit_with_64() {
    let cases: &[&[&str]] = &[
        &["cache", "--windows", "0"],
        &["cache", "--chunks", "1,,2"],
        &["cache", "--threads", "0"],
        &["cache", "--span", "0"],
        &["growth", "--chunks", "0"],
        &["give-back", "--size", "big"],
        &["give-back", "--ways", "politely"],
        &["export", "--cache"],
        &["bandwidth", "--kinds", "vram"],
        &["parts", "--parts", "0"],
        &["plot", "--svg", "x"],
        &["plot", "report.json"],
    ];
    for case in cases {
        let args: Vec<&str> = ["bench"].iter().chain(*case).copied().collect();
        let (code, out, _) = run(program(&args));
        assert_eq!((code, out.as_str()), (64, ""), "{case:?}");
    }
}

#[test]
fn benches_report_what_they_measured() {
    let Some(fake) = Fake::new("bench") else { return };
    for (bench, comparison) in [("import", "import"), ("export", "export_and_release"), ("broker", "import")] {
        let report = report(&fake, &[bench, "--chunks", "1,3", "--reps", "3"]);
        assert_eq!(report["reps"], 3);
        let rows = list(&report, "rows");
        assert_eq!(rows.iter().map(|row| &row["chunks"]).collect::<Vec<_>>(), [1, 3]);
        for row in rows {
            let comparison = &row[comparison];
            for number in [&comparison["ratio_of_medians"], &comparison["median_of_pair_ratios"], &comparison["ours"]["min"]] {
                assert!(number.as_f64().is_some_and(|number| number > 0.0), "{bench}: {row}");
            }
        }
        let out = text(&fake, &["bench", bench, "--chunks", "1", "--reps", "1"]);
        assert!(out.starts_with(&format!("bench {bench}: driver=fake")) && out.contains("ratio of medians"), "{out}");
    }
}

#[test]
fn an_import_through_a_cache_imports_every_chunk_each_time() {
    let Some(fake) = Fake::new("bench-import-cache") else { return };
    let found = report(&fake, &["import", "--cache", "--chunks", "1,7", "--reps", "3"]);
    for (row, chunks) in list(&found, "rows").iter().zip([1, 7]) {
        assert_eq!((&row["chunks"], &row["cached"]["imported_chunks"]), (&chunks.into(), &chunks.into()));
        assert_spreads(&row["cached"], &["window", "lease"]);
        assert_spreads(&row["cached"]["import"], &["floor", "ours"]);
    }
    let without = report(&fake, &["import", "--chunks", "1", "--reps", "1"]);
    assert!(without["rows"][0]["cached"].is_null());
}

/// The steps of the first row: for each, how many calls the floor and ours have made.
fn steps(report: &Value) -> Vec<(String, u64, u64)> {
    let number = |step: &Value, name: &str| step[name].as_u64().expect("a number of calls");
    let step = |step: &Value| (step["step"].as_str().expect("a name").to_owned(), number(step, "floor_calls"), number(step, "ours_calls"));
    list(&report["rows"][0], "steps").iter().map(step).collect()
}

#[test]
fn the_split_of_an_import_has_the_calls_of_the_floor_and_no_others() {
    let Some(fake) = Fake::new("bench-steps") else { return };
    let steps = steps(&report(&fake, &["import", "--chunks", "7", "--reps", "3"]));
    let named = |name: &str| steps.iter().find(|step| step.0 == name).map(|step| (step.1, step.2));
    for (call, number) in [
        ("cuMemAddressReserve", 1),
        ("cuMemImportFromShareableHandle", 7),
        ("cuMemMap", 7),
        ("cuMemRelease", 7),
        ("cuMemSetAccess", 1),
        ("everything else", 0),
    ] {
        assert_eq!(named(call), Some((number, number)), "{call}: {steps:?}");
    }
    // What ours asks beyond that does not grow with the chunks.
    let more: Vec<_> = steps.iter().filter(|step| step.1 != step.2).collect();
    assert!(more.iter().all(|step| step.0 == "cuThreadExchangeStreamCaptureMode" && step.2 == 4), "{steps:?}");
}

#[test]
fn the_split_of_an_export_shows_what_is_asked_about_each_chunk() {
    let Some(fake) = Fake::new("bench-export-steps") else { return };
    let steps = steps(&report(&fake, &["export", "--chunks", "7", "--reps", "3"]));
    for call in ["cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemRelease"] {
        assert!(steps.contains(&(call.to_owned(), 7, 7)), "{call}: {steps:?}");
    }
}

#[test]
fn an_import_by_the_broker_is_measured_against_one_by_pidfd() {
    let Some(fake) = Fake::new("bench-broker") else { return };
    let found = report(&fake, &["broker", "--chunks", "1,7", "--reps", "3"]);
    let rows = list(&found, "rows");
    assert_eq!(rows.iter().map(|row| &row["chunks"]).collect::<Vec<_>>(), [1, 7]);
    for row in rows {
        assert_spreads(row, &["connect", "connect_pidfd"]);
        assert_spreads(&row["import"], &["floor", "ours"]);
    }
}

#[test]
fn bandwidth_tells_the_kind_of_memory_from_the_import() {
    let Some(fake) = Fake::new("bench-kinds") else { return };
    let found = report(&fake, &["bandwidth", "--chunks", "2", "--reps", "3"]);
    let rows = list(&found, "rows");
    let of = |row: &Value| (row["kind"].as_str().unwrap_or_default().to_owned(), row["chunks"].as_u64(), row["bytes"].as_u64());
    let bytes = Some(22 << 20);
    let wanted = [("vmm", 2), ("pool", 1), ("malloc", 1)].map(|(kind, chunks)| (kind.to_owned(), Some(chunks), bytes));
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), wanted);
    for row in rows {
        for comparison in ["gbps", "local", "over_local", "sub_range"] {
            assert_spreads(&row[comparison], &["floor", "ours"]);
        }
    }
    let found = report(&fake, &["bandwidth", "--kinds", "pool", "--chunks", "1", "--reps", "1"]);
    assert_eq!(list(&found, "rows").len(), 1);
}

#[test]
fn parts_of_a_segment_import_each_chunk_once() {
    let Some(fake) = Fake::new("bench-parts") else { return };
    // 37 parts do not fit the chunks evenly: some lie over the border of two.
    let found = report(&fake, &["parts", "--parts", "37", "--size", "60M"]);
    assert_eq!((&found["chunks"], &found["parts"]), (&3.into(), &37.into()));
    assert_eq!(found["leases"]["first"]["imported"], 3);
    assert_eq!(found["leases"]["again"]["imported"], 0);
    assert_spreads(&found["registration"], &["each", "release"]);
    for pass in ["first", "again"] {
        assert_spreads(&found["leases"][pass], &["open", "lease"]);
    }
    let (code, _, err) = fake.run(&["bench", "parts", "--parts", "1000000", "--size", "20M"]);
    assert!(code == 64 && err.contains("512 bytes"), "{code}: {err}");
}

#[test]
fn threads_import_their_own_chunks_and_a_common_one_once() {
    let Some(fake) = Fake::new("bench-misses") else { return };
    let args = ["cache", "--windows", "4", "--chunks", "1", "--threads", "1,3", "--reps", "2", "--span", "1"];
    let found = report(&fake, &args);
    let rows = list(&found, "miss_threads");
    assert_eq!(rows.iter().map(|row| &row["threads"]).collect::<Vec<_>>(), [1, 3]);
    for (row, each) in rows.iter().zip([8, 24]) {
        assert_eq!(row["imported"], serde_json::json!([[each, each], [1, 1]]), "{row}");
        assert_spreads(row, &["different_us", "same_us"]);
        assert_spreads(&row["different"], &["floor", "ours"]);
    }
}

#[test]
fn all_benches_are_one_report_and_its_plots_can_be_drawn_later() {
    let Some(fake) = Fake::new("bench-all") else { return };
    let folder = |name: &str| fake.machine.join(name).to_str().expect("UTF-8").to_owned();
    let (now, later, file) = (folder("now"), folder("later"), folder("report.json"));
    let (code, out, err) = fake.run(&["bench", "all", "--quick", "--json", "--svg", &now]);
    assert_eq!(code, 0, "{err}");
    let report: Value = serde_json::from_str(&out).expect("one JSON object");
    let names: Vec<&str> = list(&report, "reports").iter().filter_map(|report| report["bench"].as_str()).collect();
    assert_eq!(names, ["import", "export", "broker", "growth", "bandwidth", "parts", "cache", "give-back"]);

    std::fs::write(&file, &out).expect("a file");
    // No driver is needed for that.
    let (code, out, err) = run(program(&["bench", "plot", &file, "--svg", &later]));
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
    let plots = |folder: &str| {
        let files = std::fs::read_dir(folder).expect("a folder of plots").map(|entry| entry.expect("an entry").path());
        let mut all: Vec<_> =
            files.map(|file| (file.file_name().map(ToOwned::to_owned), std::fs::read_to_string(&file).expect("text"))).collect();
        all.sort();
        all
    };
    let drawn = plots(&now);
    assert_eq!(drawn.len(), 12);
    assert!(drawn.iter().all(|(_, svg)| svg.contains("Fake CUDA device") && svg.contains("</svg>")));
    assert!(drawn == plots(&later), "a saved report gives the same plots");

    // As the GPU kit writes them.
    let steps: Vec<Value> =
        list(&report, "reports").iter().map(|report| serde_json::json!({ "name": "a step", "status": 0, "result": report })).collect();
    std::fs::write(&file, serde_json::json!({ "steps": steps }).to_string()).expect("a file");
    let kit = folder("kit");
    let (code, _, err) = run(program(&["bench", "plot", &file, "--svg", &kit]));
    assert_eq!(code, 0, "{err}");
    assert!(drawn == plots(&kit), "the kit's results give the same plots");

    let (code, out, err) = fake.run(&["bench", "all", "--quick"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(names.iter().filter(|name| out.contains(&format!("bench {name}: driver=fake"))).count(), names.len(), "{out}");
}

#[test]
fn a_folder_that_cannot_be_made_is_found_before_anything_is_measured() {
    // There is no driver here, and none is asked for.
    for bench in ["import", "all"] {
        let (code, out, err) = run(program(&["bench", bench, "--svg", "/dev/null/plots"]));
        assert!(code == 1 && out.is_empty() && err.contains("making the folder /dev/null/plots"), "{bench}: {code} {err}");
    }
}

#[test]
fn what_is_no_report_is_not_drawn() {
    let folder = std::env::temp_dir().join(format!("cuda-ipc-cli-no-report-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    let file = folder.join("report.json");
    let (path, svg) = (file.to_str().expect("UTF-8"), folder.to_str().expect("UTF-8"));
    for (text, cause) in [("{\"bench\": \"unheard of\"}", "no report"), ("{\"bench\": ", "EOF"), ("", "no report")] {
        std::fs::write(&file, text).expect("a file");
        let (code, out, err) = run(program(&["bench", "plot", path, "--svg", svg]));
        assert!(code == 1 && out.is_empty() && err.contains(cause), "{text}: {err}");
    }
    std::fs::remove_dir_all(&folder).expect("the folder goes");
}

#[test]
fn growth_imports_exactly_one_chunk() {
    let Some(fake) = Fake::new("bench-growth") else { return };
    let found = report(&fake, &["growth", "--chunks", "1,5", "--reps", "3"]);
    let rows = list(&found, "rows");
    assert_eq!(rows.iter().map(|row| &row["chunks"]).collect::<Vec<_>>(), [1, 5]);
    for row in rows {
        assert_eq!(row["imported"], serde_json::json!([[1, 1], [1, 1], [1, 1]]), "{row}");
        for comparison in ["new_chunk", "all_chunks"] {
            assert_spreads(&row[comparison], &["floor", "ours"]);
        }
    }
}

#[test]
fn a_cache_is_measured_without_a_miss() {
    let Some(fake) = Fake::new("bench-cache") else { return };
    let args = ["--windows", "4,9", "--chunks", "1,3", "--threads", "1,3", "--threads-at", "9", "--reps", "2", "--span", "1"];
    let found = report(&fake, &[&["cache"], &args[..]].concat());
    // The four windows that both numbers have are wide.
    assert_eq!((&found["windows"], &found["exporters"], &found["misses"]), (&9.into(), &1.into(), &0.into()));
    assert_eq!(found["imported_chunks"], 4 * 3 + 5);
    assert_eq!(list(&found, "opening").iter().map(|row| &row["windows"]).collect::<Vec<_>>(), [4, 9]);
    let hits = list(&found, "hits");
    let numbers = |row: &Value| ["windows", "chunks", "leased_windows"].map(|name| row[name].as_u64().unwrap_or_default());
    assert_eq!(hits.iter().map(numbers).collect::<Vec<_>>(), [[4, 1, 4], [4, 3, 4], [9, 1, 9], [9, 3, 4]]);
    for row in hits {
        assert_spreads(row, &["choice", "handle", "address", "runs", "one_window"]);
    }
    let numbers = |row: &Value| ["threads", "chunks"].map(|name| row[name].as_u64().unwrap_or_default());
    let all = [[1, 1], [1, 3], [3, 1], [3, 3]];
    assert_eq!(list(&found, "threads").iter().map(numbers).collect::<Vec<_>>(), all);
    for row in list(&found, "threads") {
        assert_eq!(row["windows"], 9);
        assert_spreads(row, &["handle", "shared", "private", "ratio", "private_as_large", "ratio_as_large"]);
        assert_spreads(row, &["shared_runs", "private_runs", "ratio_runs"]);
    }
    assert_eq!(list(&found, "same_window").iter().map(numbers).collect::<Vec<_>>(), all);
    // Locks know no chunks.
    assert_eq!(list(&found, "locks").len(), 2);
    for row in list(&found, "locks") {
        assert_spreads(row, &["ours", "read_lock", "write_lock", "over_read_lock", "over_write_lock"]);
    }
    let out = text(&fake, &[&["bench", "cache"], &args[..]].concat());
    assert!(out.starts_with("bench cache: driver=fake") && out.contains("one window, by handle"), "{out}");
}

#[test]
fn more_windows_than_one_exporter_has_are_made_by_several() {
    let Some(fake) = Fake::new("bench-exporters") else { return };
    let args = ["--windows", "7", "--chunks", "1", "--threads", "2", "--reps", "1", "--span", "1", "--per-exporter", "3"];
    let found = report(&fake, &[&["cache"], &args[..]].concat());
    assert_eq!((&found["windows"], &found["exporters"], &found["imported_chunks"]), (&7.into(), &3.into(), &7.into()));
    assert_eq!(found["threads"][0]["windows"], 7);
}

#[test]
fn memory_is_given_back_in_every_way_and_by_the_right_cause() {
    let Some(fake) = Fake::new("bench-give-back") else { return };
    let found = report(&fake, &["give-back", "--size", "100M", "--reps", "1"]);
    assert_eq!((&found["size"], &found["chunks"]), (&(100 << 20).into(), &5.into()));
    let rows = list(&found, "rows");
    assert_eq!(rows.iter().map(|row| &row["way"]).collect::<Vec<_>>(), ["retired", "unreported", "killed"]);
    for row in rows {
        let (dead, purged) = if row["way"] == "killed" { (0, 5) } else { (5, 0) };
        assert_eq!((&row["leased"][0], &row["unmapped_dead"][0], &row["unmapped_purged"][0]), (&5.into(), &dead.into(), &purged.into()));
        assert!(row["looks"].as_u64().is_some_and(|looks| looks > 0), "{row}");
        assert!(row["back_ms"]["median"].is_number() && row["local_unmap_ms"]["median"].is_number(), "{row}");
        assert_eq!(row["from_told_ms"].is_null(), row["way"] != "retired");
        assert_eq!(row["from_exit_ms"].is_null(), row["way"] != "killed");
    }
}
