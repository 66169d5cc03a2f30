//! Copies from imported memory, against copies from local memory of both kinds: of `cuMemAlloc`, and mapped chunks of the same sizes. So it is seen what
//! the kind of memory costs, and what it costs that the memory is another process's.
//!
//! Copies are queued in batches long enough that starting and completing a batch, some ten microseconds, do not count.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_core::importer::{Access, Deadline, Import, Peer};
use serde::{Deserialize, Serialize};

use super::import::Settings;
use super::samples::{Comparison, Spread, take_turns};
use super::{Measured, Pairs, Tables, start_exporter, table};
use crate::Role;
use crate::demo::importer::{DEADLINE, decode};
use crate::failure::Failure;
use crate::gpu::{Buffer, Chunks, Gpu};
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;
use crate::size;

/// What was found for one number of chunks, in GB/s.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    chunks: usize,
    bytes: u64,
    /// Copies in a batch.
    batch: u32,
    /// Imported memory over local memory of `cuMemAlloc`; more is better.
    gbps: Comparison,
    /// Local chunks over local memory of `cuMemAlloc`.
    local_chunks: Comparison,
    /// Imported memory over local chunks.
    over_local_chunks: Comparison,
}

pub(super) fn rows(pairs: &Pairs, sizes: Vec<u64>, progress: &mut Progress) -> Measured<Row> {
    let (exporter, exported) = start_exporter(&pairs.common, sizes, progress)?;
    let settings = Settings { rkey: exported.rkey, reps: pairs.reps, cache: false, broker: false };
    let mut reader = PeerProcess::start(Role::BenchReader, &settings, pairs.common.silence())?;
    let row = reader.receive(progress)?;
    progress.finish();
    reader.finish()?;
    exporter.finish()?;
    Ok((row, exported.facts))
}

pub(super) fn tables(rows: &[Row]) -> Tables {
    let mut copies = table(&[
        "chunks",
        "size",
        "copies in a batch",
        "cuMemAlloc GB/s: min / median / max",
        "local chunks GB/s: min / median / max",
        "imported GB/s: min / median / max",
    ]);
    let mut ratios = table(&["chunks", "what over what", "ratio of medians", "median of pair ratios"]);
    for Row { chunks, bytes, batch, gbps, local_chunks, over_local_chunks } in rows {
        copies.add_row([
            chunks.to_string(),
            size::human(*bytes),
            batch.to_string(),
            gbps.floor.to_string(),
            local_chunks.ours.to_string(),
            gbps.ours.to_string(),
        ]);
        let pairs = [
            ("imported over cuMemAlloc", gbps),
            ("local chunks over cuMemAlloc", local_chunks),
            ("imported over local chunks", over_local_chunks),
        ];
        for (what, pair) in pairs {
            ratios.add_row([
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
    let Settings { rkey, reps, .. } = link.receive()?;
    let (rkey, key) = decode(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let peer = Arc::new(Peer::connect(&key, Deadline::after(DEADLINE)).map_err(gpu.at("reaching the exporter"))?);
    let devices = [gpu.ordinal()];
    let access = Access { devices: &devices, writable: false };
    let import = Import::new(gpu.cuda(), &peer, &key, rkey.base, rkey.len, access, Deadline::after(DEADLINE))
        .map_err(gpu.at("importing the range"))?;
    let (local, target) = (Buffer::new(&gpu, rkey.len)?, Buffer::new(&gpu, rkey.len)?);
    let batch = batch(&gpu, &target, import.address(), rkey.len)?;
    let sizes: Vec<u64> = import.chunks().iter().map(|(_, chunk)| chunk.len).collect();
    let chunks = Chunks::new(&gpu, &sizes)?;
    let copies = |from: u64| time(&gpu, &target, from, rkey.len, batch);
    let phase = format!("copies from {} chunks", sizes.len());
    let samples = take_turns(
        reps,
        |done, total| link.progress(&phase, done, total),
        &mut [&mut || copies(local.address()), &mut || copies(chunks.address()), &mut || copies(import.address())],
    )?;
    let [alloc, vmm, imported] = samples.as_slice() else { return Err(Failure::new("measuring", "samples are missing")) };
    link.send(&Row {
        chunks: sizes.len(),
        bytes: rkey.len,
        batch,
        gbps: Comparison::of(alloc, imported),
        local_chunks: Comparison::of(alloc, vmm),
        over_local_chunks: Comparison::of(vmm, imported),
    })?;
    link.wait_for_end();
    import.close().map_err(gpu.at("unmapping the range"))
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
