//! Export of all chunks of a range and its release, against the bare calls for the same chunks; and registration inside known chunks.

use std::os::fd::OwnedFd;
use std::time::Instant;

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::table::GRANULE;
use serde::{Deserialize, Serialize};

use super::samples::{Comparison, Spread, compare, micros};
use super::steps::{self, Step};
use super::{Measured, Pairs, Tables, table};
use crate::Role;
use crate::failure::Failure;
use crate::gpu::{Chunks, Gpu};
use crate::limits;
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;
use crate::size;

/// How much a registration inside known chunks asks for.
const REGISTERED: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
struct Settings {
    device: u32,
    sizes: Vec<u64>,
    reps: u32,
}

/// What was found for one number of chunks. Times are microseconds.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    chunks: usize,
    bytes: u64,
    /// Export and release together.
    export_and_release: Comparison,
    /// Of ours, the export.
    export: Spread,
    /// Of ours, the release.
    release: Spread,
    /// Export of one chunk by an exporter that has none: it starts its threads and its socket.
    first: Spread,
    /// The same by one that has some.
    further: Spread,
    /// Export of a part while the whole is exported.
    registration: Spread,
    registered_bytes: u64,
    registered_chunks: usize,
    /// Where the time of export and release goes.
    steps: Vec<Step>,
}

pub(super) fn measure(pairs: &Pairs, sizes: Vec<u64>, progress: &mut Progress) -> Measured<Row> {
    let settings = Settings { device: pairs.common.device, sizes, reps: pairs.reps };
    let mut exporter = PeerProcess::start(Role::BenchExporter, &settings, pairs.common.silence())?;
    let found = exporter.receive(progress)?;
    progress.finish();
    exporter.finish()?;
    Ok(found)
}

pub(super) fn tables(rows: &[Row]) -> Tables {
    let mut exports = table(&[
        "chunks",
        "size",
        "floor us: min / median / max",
        "ours us: min / median / max",
        "ratio of medians",
        "median of pair ratios",
    ]);
    let mut parts = table(&[
        "chunks",
        "export us: min / median / max",
        "release us: min / median / max",
        "one chunk by an exporter that has none us",
        "by one that has some us",
    ]);
    let mut registrations = table(&["chunks", "registered", "chunks touched", "registration us: min / median / max"]);
    for row in rows {
        let both = row.export_and_release;
        let chunks = row.chunks.to_string();
        exports.add_row([
            chunks.clone(),
            size::human(row.bytes),
            both.floor.to_string(),
            both.ours.to_string(),
            format!("{:.3}", both.ratio_of_medians),
            format!("{:.3}", both.median_of_pair_ratios),
        ]);
        parts.add_row([chunks.clone(), row.export.to_string(), row.release.to_string(), row.first.to_string(), row.further.to_string()]);
        registrations.add_row([chunks, size::human(row.registered_bytes), row.registered_chunks.to_string(), row.registration.to_string()]);
    }
    vec![
        ("Export of unknown chunks and its release", exports),
        ("Ours in its parts", parts),
        ("Registration inside known chunks", registrations),
        (steps::TITLE, steps::table(rows.iter().map(|row| (row.chunks, &row.steps[..])))),
    ]
}

/// The exporting process.
pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, sizes, reps } = link.receive()?;
    limits::raise_open_files();
    let gpu = Gpu::open(device)?;
    let memory = Chunks::new(&gpu, &sizes)?;
    let (base, len) = (memory.address(), memory.len());
    let exporter = make_exporter(&gpu)?;
    let addresses: Vec<u64> = sizes
        .iter()
        .scan(base, |next, size| {
            let address = *next;
            *next += size;
            Some(address)
        })
        .collect();

    let (anchor, other) = (Chunks::new(&gpu, &[GRANULE])?, Chunks::new(&gpu, &[GRANULE])?);
    let first = one_chunk(&gpu, &exporter, &other, reps)?;
    // Held from here on: an exporter in use has something exported, and so its threads.
    let _anchored = exporter.export(anchor.address(), anchor.len()).map_err(gpu.at("exporting a chunk to hold"))?;
    let further = one_chunk(&gpu, &exporter, &other, reps)?;

    let (mut exports, mut releases) = (Vec::new(), Vec::new());
    let ours = || {
        let times = export_once(&gpu, &exporter, base, len)?;
        exports.push(times.export_us);
        releases.push(times.release_us);
        Ok(times.export_us + times.release_us)
    };
    let export_and_release = compare(reps, link, &format!("export of {} chunks", sizes.len()), || floor(&gpu, &addresses), ours)?;

    let whole = exporter.export(base, len).map_err(gpu.at("exporting the range"))?;
    let registered_bytes = len.min(REGISTERED);
    let middle = base + (len - registered_bytes) / 2;
    let (mut registrations, mut registered_chunks) = (Vec::new(), 0);
    for _ in 0..reps.max(100) {
        let start = Instant::now();
        let part = exporter.export(middle, registered_bytes).map_err(gpu.at("exporting a part"))?;
        registrations.push(micros(start.elapsed()));
        registered_chunks = part.chunks().len();
    }
    drop(whole);

    let timed = gpu.timed()?;
    let exporter = make_exporter(&timed)?;
    let _anchored = exporter.export(anchor.address(), anchor.len()).map_err(gpu.at("exporting a chunk to hold"))?;
    let ours = || export_once(&timed, &exporter, base, len).map(|times| times.export_us + times.release_us);
    let steps = steps::measure(reps, link, || floor(&timed, &addresses), ours)?;

    let row = Row {
        chunks: sizes.len(),
        bytes: len,
        export_and_release,
        export: Spread::of(&exports),
        release: Spread::of(&releases),
        first,
        further,
        registration: Spread::of(&registrations),
        registered_bytes,
        registered_chunks,
        steps,
    };
    link.send(&(row, gpu.facts()?))?;
    link.wait_for_end();
    Ok(())
}

fn make_exporter(gpu: &Gpu) -> Result<Exporter, Failure> {
    Exporter::new(*gpu.cuda(), ExporterOptions::default()).map_err(Failure::at("making the export table"))
}

/// What one export took.
struct Times {
    export_us: f64,
    release_us: f64,
}

fn export_once(gpu: &Gpu, exporter: &Exporter, base: u64, len: u64) -> Result<Times, Failure> {
    let start = Instant::now();
    let export = exporter.export(base, len).map_err(gpu.at("exporting the range"))?;
    let exported = start.elapsed();
    drop(export);
    Ok(Times { export_us: micros(exported), release_us: micros(start.elapsed() - exported) })
}

/// Exports of one chunk, each released again; what the exports took.
fn one_chunk(gpu: &Gpu, exporter: &Exporter, memory: &Chunks<'_>, reps: u32) -> Result<Spread, Failure> {
    let times = (0..reps).map(|_| export_once(gpu, exporter, memory.address(), memory.len()).map(|times| times.export_us));
    times.collect::<Result<Vec<f64>, Failure>>().map(|times| Spread::of(&times))
}

/// The bare calls for the same, and the closing of all fds.
fn floor(gpu: &Gpu, addresses: &[u64]) -> Result<f64, Failure> {
    let start = Instant::now();
    let fds = bare_export(gpu, addresses)?;
    drop(fds);
    Ok(micros(start.elapsed()))
}

/// The least that exporting can be: the calls that nobody can leave out.
fn bare_export(gpu: &Gpu, addresses: &[u64]) -> Result<Vec<OwnedFd>, Failure> {
    let driver = |step: &'static str| gpu.at(step);
    let mut fds = Vec::with_capacity(addresses.len());
    for &address in addresses {
        let handle = gpu.retain(address).map_err(driver("floor: retaining"))?;
        fds.push(gpu.export_fd(handle).map_err(driver("floor: exporting"))?);
        gpu.release(handle).map_err(driver("floor: releasing"))?;
    }
    Ok(fds)
}
