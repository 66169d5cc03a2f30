//! Which plots each report has. What a report lacks gives no plot.

use serde_json::Value;

use super::chart::{Axis, Body, Chart, Line, Point};

const CHUNKS: Axis = Axis { label: "chunks", log: true };
const TIME: Axis = Axis { label: "microseconds", log: true };

/// The plots of one report.
pub(super) fn charts(report: &Value) -> Vec<Chart> {
    let rows = |name: &str| report[name].as_array().map_or(&[][..], Vec::as_slice);
    let of = |file, title, x, y, body| Chart { file, title, source: source(report), x, y, body };
    let times = |file, title, lines: &[(&str, &str)]| of(file, title, CHUNKS, TIME, over(rows("rows"), "/chunks", lines));
    let ratio = |file, title, name: &str| {
        let y = Axis { label: "times the floor", log: false };
        of(file, title, CHUNKS, y, over(rows("rows"), "/chunks", &[("median of pair ratios", name)]))
    };
    let charts = match report["bench"].as_str().unwrap_or_default() {
        "import" => vec![
            times(
                "import",
                "Import of N chunks from a known peer",
                &[("bare driver calls", "/import/floor"), ("cuda-ipc", "/import/ours")],
            ),
            ratio("import-ratio", "Import of N chunks over the bare driver calls", "/import/median_of_pair_ratios"),
        ],
        "export" => {
            let lines = [
                ("bare driver calls", "/export_and_release/floor"),
                ("cuda-ipc, unknown chunks", "/export_and_release/ours"),
                ("cuda-ipc, 16 MiB inside known chunks", "/registration"),
            ];
            vec![times("export", "Export of N chunks and its release, and registration inside them", &lines)]
        }
        "broker" => {
            let lines = [("by pidfd", "/import/floor"), ("by the broker", "/import/ours")];
            vec![times("broker", "Import of N chunks by the exporter's broker", &lines)]
        }
        "growth" => {
            let lines = [
                ("one chunk, fresh window", "/new_chunk/floor"),
                ("the new chunk", "/new_chunk/ours"),
                ("all chunks, one of them new", "/all_chunks/ours"),
            ];
            let x = Axis { label: "chunks mapped before", log: true };
            vec![of("growth", "A lease after the reservation has grown by one chunk", x, TIME, over(rows("rows"), "/chunks", &lines))]
        }
        "cache" => cache(report),
        "bandwidth" => {
            let x = Axis { label: "GB/s, median of batches", log: false };
            vec![of("bandwidth", "Copies from imported memory and from local memory", x, NONE, bandwidth(rows("rows")))]
        }
        "give-back" => {
            let bars =
                rows("rows").iter().filter_map(|row| Some((row["way"].as_str()?.to_owned(), row.pointer("/back_ms/median")?.as_f64()?)));
            let x = Axis { label: "milliseconds until all memory is free again, median", log: true };
            vec![of("give-back", "Memory of an idle importer after the exporter's free", x, NONE, Body::Bars(bars.collect()))]
        }
        "parts" => {
            let names = [
                ("lease, mapped", "/leases/again/lease/median"),
                ("lease, nothing mapped yet (most hit what others have mapped)", "/leases/first/lease/median"),
                ("decode and open, the window known", "/leases/again/open/median"),
                ("release of a registration", "/registration/release/median"),
                ("registration inside known chunks", "/registration/each/median"),
            ];
            let bars = names.into_iter().filter_map(|(name, at)| Some((name.to_owned(), report.pointer(at)?.as_f64()?)));
            let x = Axis { label: "microseconds, median of all parts", log: true };
            vec![of("parts", "Many sub-ranges of one segment", x, NONE, Body::Bars(bars.collect()))]
        }
        "peers" => {
            let bars = rows("rows").iter().filter_map(|row| Some((row["name"].as_str()?.to_owned(), row["gbps"].as_f64()?)));
            let x = Axis { label: "GB/s, median", log: true };
            vec![of("peers", "Reading another process's memory of expandable segments", x, NONE, Body::Bars(bars.collect()))]
        }
        _ => Vec::new(),
    };
    charts.into_iter().filter(|chart| !is_empty(&chart.body)).collect()
}

/// The axis of bars.
const NONE: Axis = Axis { label: "", log: false };

fn is_empty(body: &Body) -> bool {
    match body {
        Body::Lines(lines) => lines.is_empty(),
        Body::Bars(bars) => bars.is_empty(),
    }
}

/// The machine and the versions, in a line.
fn source(report: &Value) -> String {
    let text = |name: &str| report[name].as_str().unwrap_or("?");
    let driver = report["driver_version"].as_str().unwrap_or_else(|| text("driver"));
    format!("{}, driver {driver}, CUDA {}, Linux {}, cuda-ipc {}", text("gpu"), text("cuda_version"), text("kernel"), text("program"))
}

/// Lines over what stands in each row at `x`: each has a name and a place, of a spread or of a number.
fn over(rows: &[Value], x: &str, lines: &[(&str, &str)]) -> Body {
    let line = |&(name, at): &(&str, &str)| {
        let mut points: Vec<Point> = rows.iter().filter_map(|row| point(row.pointer(x)?.as_f64()?, row.pointer(at)?)).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        (!points.is_empty()).then(|| Line { name: name.to_owned(), points })
    };
    Body::Lines(lines.iter().filter_map(line).collect())
}

fn point(x: f64, value: &Value) -> Option<Point> {
    if let Some(median) = value.as_f64() {
        return Some(Point { x, min: median, median, max: median });
    }
    let of = |name: &str| value[name].as_f64();
    Some(Point { x, min: of("min")?, median: of("median")?, max: of("max")? })
}

fn cache(report: &Value) -> Vec<Chart> {
    let rows = |name: &str| -> Vec<Value> {
        let all = report[name].as_array().map_or(&[][..], Vec::as_slice);
        // Leases of one chunk; rows that have no such number are about nothing else.
        all.iter().filter(|row| row["chunks"].as_u64().is_none_or(|chunks| chunks == 1)).cloned().collect()
    };
    let of = |file, title, x, y, body| Chart { file, title, source: source(report), x, y, body };
    let threads = || Axis { label: "threads", log: false };
    let nanoseconds = |label| Axis { label, log: true };
    let hits = [("by window", "/handle"), ("by address", "/address"), ("by address, runs of 64", "/runs"), ("one window", "/one_window")];
    let shared = [("one cache for all", "/shared"), ("a cache for each", "/private_as_large"), ("by window", "/handle")];
    let one = [("cuda-ipc", "/ours"), ("RwLock read, Mutex count", "/read_lock"), ("RwLock write", "/write_lock")];
    let misses = [
        ("different chunks, bare calls, a chunk", "/different/floor"),
        ("different chunks, a lease", "/different_us"),
        ("the same chunk, all threads together", "/same_us"),
    ];
    vec![
        of(
            "cache-hit",
            "Take and end of a lease that is a hit, one thread",
            Axis { label: "open windows", log: true },
            Axis { label: "nanoseconds", log: false },
            over(&rows("hits"), "/windows", &hits),
        ),
        of(
            "cache-threads",
            "The same on threads with different windows",
            threads(),
            Axis { label: "nanoseconds, as each thread sees it", log: false },
            over(&rows("threads"), "/threads", &shared),
        ),
        of(
            "cache-one-window",
            "The same with all threads on one window",
            threads(),
            nanoseconds("nanoseconds, as each thread sees it"),
            over(&rows("same_window"), "/threads", &one),
        ),
        of("cache-miss", "Leases that are misses", threads(), TIME, over(&rows("miss_threads"), "/threads", &misses)),
    ]
}

fn bandwidth(rows: &[Value]) -> Body {
    let mut bars = Vec::new();
    // The first row at the top: bars go upwards.
    for row in rows.iter().rev() {
        let (Some(kind), Some(chunks), Some(bytes)) = (row["kind"].as_str(), row["chunks"].as_u64(), row["bytes"].as_u64()) else {
            continue;
        };
        let size = crate::size::human(bytes);
        let name = if kind == "vmm" { format!("{kind}, {chunks} chunks, {size}") } else { format!("{kind}, {size}") };
        for (what, at) in [("imported", "/gbps/ours/median"), ("local", "/local/ours/median")] {
            if let Some(value) = row.pointer(at).and_then(Value::as_f64) {
                bars.push((format!("{name}, {what}"), value));
            }
        }
    }
    Body::Bars(bars)
}
