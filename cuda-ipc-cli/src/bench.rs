//! `cuda-ipc bench`: what the library's work costs against the least that the same work can cost, measured in the same run.
//!
//! This file is the command: for each number of chunks it starts the processes that measure, and prints what they found. What is measured, and against what,
//! is in the file of each measurement; `bench/samples.rs` has the arithmetic.

pub(crate) mod bandwidth;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod samples;

use core::time::Duration;

use clap::Subcommand;
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::Role;
use crate::chunk_sizes;
use crate::exporter_process::{self, Exported};
use crate::failure::Failure;
use crate::gpu::{DriverKind, GpuFacts};
use crate::output;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;

/// Measure export, import and bandwidth against their floor.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Import of N chunks from a known peer, against the bare calls for the same chunks
    ///
    /// The floor is, by hand: reserve the address space; for each chunk pidfd_getfd from a kept pidfd, cuMemImportFromShareableHandle, close, cuMemMap,
    /// cuMemRelease; then one cuMemSetAccess over all. Ours is the import of the same range from a peer that is connected already: look-ups in its
    /// table, fetches, re-checks, the same driver calls. Both are taken down outside of the timing. Floor and ours alternate in pairs, each second pair
    /// in reverse order. What a first contact adds (connect, and the first look-up in a fresh table) is measured apart.
    Import(Common),
    /// Export of N chunks and its release, against the bare calls for the same chunks; and registration inside known chunks
    ///
    /// The floor is, by hand: for each chunk cuMemRetainAllocationHandle, cuMemExportToShareableHandle, cuMemRelease; then close all fds. Ours is the
    /// export of the range, none of whose chunks is published yet, and its release. Registration is the export of 16 MiB in the middle of the range while an
    /// export of all of it is held.
    Export(Common),
    /// Copies from imported memory, against copies from local memory of cuMemAlloc, both to the same local memory
    ///
    /// Copies are queued back to back in batches; a batch is timed by the host's clock from the first call to its completion. GB/s are 1e9 copied bytes a
    /// second.
    Bandwidth(Common),
}

#[derive(clap::Args)]
struct Common {
    /// How many chunks, of 2 MiB and 20 MiB in turn; several numbers are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 26, 400], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunks: Vec<u32>,
    /// How many pairs of floor and ours
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    reps: u32,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    /// The GPU, by its number here
    #[arg(long, value_name = "I", default_value_t = 0)]
    device: u32,
    /// Give up when a process says nothing for that many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// A bench's name, how a row of it is measured, and how its rows are shown.
struct Bench<R> {
    name: &'static str,
    measure: fn(&Common, Vec<u64>, &mut Progress) -> Measured<R>,
    tables: fn(&[R]) -> Tables,
}

/// A row, and the machine it was measured on.
type Measured<R> = Result<(R, GpuFacts), Failure>;
/// Tables with their titles.
type Tables = Vec<(&'static str, Table)>;

#[derive(Serialize)]
struct Report<R> {
    bench: &'static str,
    driver: DriverKind,
    gpu: String,
    gpu_uuid: String,
    cuda_version: String,
    driver_version: Option<String>,
    kernel: String,
    reps: u32,
    rows: Vec<R>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.what {
        What::Import(common) => run_one(common, &Bench { name: "import", measure: import::measure, tables: import::tables }),
        What::Export(common) => run_one(common, &Bench { name: "export", measure: export::measure, tables: export::tables }),
        What::Bandwidth(common) => run_one(common, &Bench { name: "bandwidth", measure: bandwidth::rows, tables: bandwidth::tables }),
    }
}

fn run_one<R: Serialize>(common: &Common, bench: &Bench<R>) -> Result<(), Failure> {
    let mut progress = Progress::new();
    let (mut rows, mut facts) = (Vec::new(), None);
    for &count in &common.chunks {
        let (row, found) = (bench.measure)(common, chunk_sizes::mixed(count), &mut progress)?;
        rows.push(row);
        facts.get_or_insert(found);
    }
    // The parser lets no empty list through.
    let Some(GpuFacts { driver, gpu, gpu_uuid, cuda_version, driver_version, kernel }) = facts else { return Ok(()) };
    let report = Report { bench: bench.name, driver, gpu, gpu_uuid, cuda_version, driver_version, kernel, reps: common.reps, rows };
    if common.json { output::json(&report) } else { output::text(&text(&report, (bench.tables)(&report.rows))) }
}

fn text<R>(report: &Report<R>, tables: Tables) -> String {
    let Report { bench, driver, cuda_version, gpu, kernel, reps, .. } = report;
    let version = report.driver_version.as_ref().map_or_else(String::new, |version| format!(" {version}"));
    let mut text = format!("bench {bench}: driver={driver}{version} (CUDA {cuda_version}), {gpu}, Linux {kernel}, {reps} pairs");
    for (title, table) in tables {
        text += &format!("\n\n{title}\n\n{table}");
    }
    text
}

/// An empty table that can be pasted into a document.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header);
    table
}

/// Starts an exporter of all of these chunks, whose contents do not matter.
fn start_exporter(common: &Common, sizes: Vec<u64>, progress: &mut Progress) -> Result<(PeerProcess, Exported), Failure> {
    let settings = exporter_process::Settings { device: common.device, sizes, seed: None, inside_chunks: false };
    let mut exporter = PeerProcess::start(Role::Exporter, &settings, common.silence())?;
    let exported = exporter.receive(progress)?;
    Ok((exporter, exported))
}

impl Common {
    const fn silence(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}
