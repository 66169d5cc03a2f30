//! Copies from imported memory of each kind, against copies from local memory: of `cuMemAlloc`, and of the same kind. So it is seen what the kind of memory
//! costs, and what it costs that the memory is another process's.
//!
//! Copies are queued in batches long enough that starting and completing a batch, some ten microseconds, do not count.

use core::time::Duration;
use std::time::Instant;

use clap::ValueEnum;
use cuda_ipc_core::importer::Route;
use serde::{Deserialize, Serialize};

use super::samples::{Comparison, Spread, take_turns};
use super::{Common, Found, Measured, Rows, Tables, start_exporter, table};
use crate::Role;
use crate::chunk_sizes;
use crate::demo::importer::{Shared, decode_any};
use crate::exporter_process::{Kind, Memory};
use crate::failure::Failure;
use crate::gpu::{Buffer, Gpu};
use crate::limits;
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;
use crate::size;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kinds of memory
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_enum, default_values_t = [Kind::Vmm, Kind::Pool, Kind::Malloc])]
    kinds: Vec<Kind>,
    /// How many chunks, of 2 MiB and 20 MiB in turn; memory of other kinds is one allocation of their sum
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 25, 400], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunks: Vec<u32>,
    /// How many batches of each
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    reps: u32,
    #[command(flatten)]
    pub(super) common: Common,
}

#[derive(Serialize, Deserialize)]
struct Settings {
    rkey: String,
    kind: Kind,
    sizes: Vec<u64>,
    reps: u32,
}

/// What was found for one kind and size, in GB/s; more is better.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    kind: Kind,
    /// 1 for memory of other kinds than chunks.
    chunks: usize,
    bytes: u64,
    /// Copies in a batch.
    batch: u32,
    /// Imported memory over local memory of `cuMemAlloc`.
    gbps: Comparison,
    /// Local memory of the same kind over local memory of `cuMemAlloc`.
    local: Comparison,
    /// Imported memory over local memory of the same kind.
    over_local: Comparison,
    /// The same for a sub-range.
    sub_range: Comparison,
}

pub(super) fn run(args: &Args) -> Result<Found, Failure> {
    let mut progress = Progress::new();
    let (mut rows, mut facts) = (Vec::new(), None);
    for &kind in &args.kinds {
        for &count in &args.chunks {
            let (row, found) = row(args, kind, chunk_sizes::mixed(count), &mut progress)?;
            rows.push(row);
            facts.get_or_insert(found);
        }
    }
    progress.finish();
    let tables = tables(&rows);
    Found::new("bandwidth", facts, args.reps, &format!("{} batches of each, in turns", args.reps), &Rows { rows }, tables)
}

fn row(args: &Args, kind: Kind, sizes: Vec<u64>, progress: &mut Progress) -> Measured<Row> {
    let (exporter, exported) = start_exporter(&args.common, kind, sizes.clone(), progress)?;
    let settings = Settings { rkey: exported.rkey, kind, sizes, reps: args.reps };
    let mut reader = PeerProcess::start(Role::BenchReader, &settings, args.common.silence())?;
    let row = reader.receive(progress)?;
    progress.finish();
    reader.finish()?;
    exporter.finish()?;
    Ok((row, exported.facts))
}

fn tables(rows: &[Row]) -> Tables {
    let mut copies = table(&[
        "kind",
        "chunks",
        "size",
        "copies in a batch",
        "cuMemAlloc GB/s: min / median / max",
        "local, same kind GB/s: min / median / max",
        "imported GB/s: min / median / max",
    ]);
    let mut ratios = table(&["kind", "chunks", "what over what", "ratio of medians", "median of pair ratios"]);
    for Row { kind, chunks, bytes, batch, gbps, local, over_local, sub_range } in rows {
        let kind = kind.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        copies.add_row([
            kind.clone(),
            chunks.to_string(),
            size::human(*bytes),
            batch.to_string(),
            gbps.floor.to_string(),
            local.ours.to_string(),
            gbps.ours.to_string(),
        ]);
        let pairs = [
            ("imported over cuMemAlloc", gbps),
            ("local of the same kind over cuMemAlloc", local),
            ("imported over local of the same kind", over_local),
            ("a sub-range, imported over local of the same kind", sub_range),
        ];
        for (what, pair) in pairs {
            ratios.add_row([
                kind.clone(),
                chunks.to_string(),
                what.to_owned(),
                format!("{:.3}", pair.ratio_of_medians),
                format!("{:.3}", pair.median_of_pair_ratios),
            ]);
        }
    }
    vec![("Copies from local and from imported memory", copies), ("Throughput over throughput", ratios)]
}

/// The importing process.
pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { rkey, kind, sizes, reps } = link.receive()?;
    limits::raise_open_files();
    let rkey = decode_any(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let shared = Shared::new(&gpu, &rkey, Route::Auto)?;
    // A legacy handle's rkey says how long the driver has made the allocation, which may be more than was asked for.
    let len = rkey.len.min(sizes.iter().sum());
    let (local, target) = (Buffer::new(&gpu, len)?, Buffer::new(&gpu, len)?);
    let batch = batch(&gpu, &target, shared.address, len)?;
    let same = Memory::new(&gpu, kind, &sizes)?;
    let (same_address, _) = same.range();
    let inner = chunk_sizes::inner_range(&sizes);
    let whole = |from: u64| time(&gpu, &target, from, len, batch);
    let part = |from: u64| time(&gpu, &target, from + inner.start, inner.end - inner.start, batch);
    let chunks = if kind == Kind::Vmm { sizes.len() } else { 1 };
    let samples = take_turns(
        reps,
        |done, total| link.progress(&format!("copies of {}", size::human(len)), done, total),
        &mut [
            &mut || whole(local.address()),
            &mut || whole(same_address),
            &mut || whole(shared.address),
            &mut || part(same_address),
            &mut || part(shared.address),
        ],
    )?;
    let [alloc, local, imported, local_part, imported_part] = samples.as_slice() else {
        return Err(Failure::new("measuring", "samples are missing"));
    };
    link.send(&Row {
        kind,
        chunks,
        bytes: len,
        batch,
        gbps: Comparison::of(alloc, imported),
        local: Comparison::of(alloc, local),
        over_local: Comparison::of(local, imported),
        sub_range: Comparison::of(local_part, imported_part),
    })?;
    link.wait_for_end();
    shared.memory.close().map_err(gpu.at("unmapping the range"))
}

/// GB/s of copies of `len` bytes, the median of some batches.
pub(crate) fn measure(gpu: &Gpu, to: &Buffer<'_>, from: u64, len: u64, link: &mut Link) -> Result<f64, Failure> {
    const BATCHES: u64 = 15;
    const AT_LEAST: usize = 3;
    const LONG_ENOUGH: Duration = Duration::from_secs(2);
    let batch = batch(gpu, to, from, len)?;
    let (start, mut samples) = (Instant::now(), Vec::new());
    for done in 1..=BATCHES {
        samples.push(time(gpu, to, from, len, batch)?);
        link.progress("importer measures copies", done, BATCHES)?;
        if samples.len() >= AT_LEAST && start.elapsed() > LONG_ENOUGH {
            break;
        }
    }
    Ok(Spread::of(&samples).median)
}

/// How many copies make a batch; also warms up.
fn batch(gpu: &Gpu, to: &Buffer<'_>, from: u64, len: u64) -> Result<u32, Failure> {
    const BATCH_MICROS: u128 = 5000;
    let mut elapsed = Duration::ZERO;
    for _ in 0..2 {
        elapsed = gpu.time_copies(to, from, len, 1).map_err(gpu.at("copying from the imported range"))?;
    }
    Ok(u32::try_from(BATCH_MICROS / elapsed.as_micros().max(1)).unwrap_or(u32::MAX).clamp(1, 256))
}

/// GB/s of one batch.
#[allow(clippy::cast_precision_loss, reason = "a rate to be printed")]
fn time(gpu: &Gpu, to: &Buffer<'_>, from: u64, len: u64, batch: u32) -> Result<f64, Failure> {
    let elapsed = gpu.time_copies(to, from, len, batch).map_err(gpu.at("copying on the device"))?;
    // A byte a nanosecond is a GB/s.
    Ok(len as f64 * f64::from(batch) / elapsed.as_nanos().max(1) as f64)
}
