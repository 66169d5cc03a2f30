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
    for text in ["gpu", "cuda_version", "kernel", "cpu"] {
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
    for (bench, comparison) in [("import", "import"), ("export", "export_and_release"), ("bandwidth", "gbps")] {
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

#[test]
fn an_import_by_the_broker_is_measured_against_one_by_pidfd() {
    let Some(fake) = Fake::new("bench-import-broker") else { return };
    let found = report(&fake, &["import", "--broker", "--chunks", "1,7", "--reps", "3"]);
    for row in list(&found, "rows") {
        assert_spreads(&row["brokered"], &["connect"]);
        assert_spreads(&row["brokered"]["import"], &["floor", "ours"]);
    }
    let without = report(&fake, &["import", "--chunks", "1", "--reps", "1"]);
    assert!(without["rows"][0]["brokered"].is_null());
}

#[test]
fn bandwidth_tells_the_kind_of_memory_from_the_import() {
    let Some(fake) = Fake::new("bench-kinds") else { return };
    let found = report(&fake, &["bandwidth", "--chunks", "2", "--reps", "3"]);
    for comparison in ["gbps", "local_chunks", "over_local_chunks"] {
        assert_spreads(&found["rows"][0][comparison], &["floor", "ours"]);
    }
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
