//! `cuda-ipc bench`: what the library's work costs against the least that the same work can cost, measured in the same run.
//!
//! This file is the command: it parses what is to be measured and prints what was found. What is measured, and against what, is in the file of each
//! measurement; `bench/samples.rs` has the arithmetic, `bench/machine.rs` the processor.

pub(crate) mod bandwidth;
pub(crate) mod cache;
pub(crate) mod export;
pub(crate) mod give_back;
pub(crate) mod growth;
pub(crate) mod import;
mod machine;
pub(crate) mod samples;

use core::time::Duration;

use clap::Subcommand;
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::Role;
use crate::chunk_sizes;
use crate::exporter_process::{self, Exported};
use crate::failure::Failure;
use crate::gpu::GpuFacts;
use crate::output;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use machine::Machine;

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
    /// in reverse order. What a first contact adds (connect, and the first look-up in a fresh table) is measured apart. With --cache the import is also
    /// measured as a cache does it: a fresh window of a known peer, and a lease of the whole range. With --broker imports by the exporter's broker are
    /// measured against imports by pidfd, both from peers that are connected already.
    Import(ImportArgs),
    /// Export of N chunks and its release, against the bare calls for the same chunks; and registration inside known chunks
    ///
    /// The floor is, by hand: for each chunk cuMemRetainAllocationHandle, cuMemExportToShareableHandle, cuMemRelease; then close all fds. Ours is the
    /// export of the range, none of whose chunks is published yet, and its release. Registration is the export of 16 MiB in the middle of the range while an
    /// export of all of it is held.
    Export(Pairs),
    /// Copies from imported memory, against copies from local memory of cuMemAlloc and from local chunks, all to the same local memory
    ///
    /// Copies are queued back to back in batches; a batch is timed by the host's clock from the first call to its completion. GB/s are 1e9 copied bytes a
    /// second.
    Bandwidth(Pairs),
    /// Take and end of a lease that is a hit: by window and by address, on one thread and on several, against private caches and against locks
    ///
    /// Exporters make the windows: one-chunk reservations, and up to 32 with as many chunks as the longest lease. All chunks are one physical chunk, mapped
    /// again and again, so a few MiB of GPU memory do; what limits the windows is the limit of open files (an fd for each chunk), which is raised to the hard
    /// one, and past it more exporters are started. The importer opens all windows and maps them, and then nothing but hits is measured; that there were no
    /// misses is checked. A loop takes a lease and ends it at once: of a random window that it holds; of a random window that it finds by address in the
    /// cache's index; by address in runs of 64 pieces of one window, as lists of descriptors are; of one window only. Threads have disjoint windows, dealt in
    /// turn. What they are compared with: the same loop where each thread has a cache of its own with only its windows; indexes of their own that are as
    /// large as the shared one; and an ordered map under an RwLock. All loops of a table row take turns, and every figure is over the repetitions. The
    /// random choice is measured alone and is part of every other figure. Threads are pinned where there are enough processors.
    Cache(cache::Args),
    /// How long memory that the exporter has freed stays with an idle importer, as a third process sees it
    ///
    /// An exporter shares memory in chunks of 20 MiB; an importer leases all of it, ends the lease and does nothing more. Then the exporter frees: having
    /// retired the range; or without a word, so that its own sweep has to find it; or it is killed. The third process asks for the free memory of the GPU every
    /// millisecond until it is what it was before the memory was made, less than one chunk missing; all contexts exist by then. The time begins when the
    /// driver's unmap has returned in the exporter, or when the kill was sent. For comparison the importer unmaps as much memory of its own, chunk by chunk.
    GiveBack(give_back::Args),
    /// A lease after the reservation has grown by one chunk, against the import of one chunk into a fresh window
    ///
    /// The window has N chunks mapped. The exporter maps and exports one more; what is timed is the lease of that chunk, and in another turn the lease of all
    /// N + 1; each has to import exactly one. The floor is the first lease of a fresh window of a reservation of one chunk, of the same peer. All three take
    /// turns; after each the exporter takes the chunk back.
    Growth(growth::Args),
}

#[derive(clap::Args)]
struct ImportArgs {
    /// Also measure imports through a cache
    #[arg(long)]
    cache: bool,
    /// Also measure imports by the exporter's broker
    #[arg(long)]
    broker: bool,
    #[command(flatten)]
    pairs: Pairs,
}

#[derive(clap::Args)]
struct Pairs {
    /// How many chunks, of 2 MiB and 20 MiB in turn; several numbers are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 26, 400], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunks: Vec<u32>,
    /// How many pairs of floor and ours
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    reps: u32,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
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

/// A row, and the machine it was measured on.
type Measured<R> = Result<(R, GpuFacts), Failure>;
/// Tables with their titles.
type Tables = Vec<(&'static str, Table)>;

#[derive(Serialize)]
struct Report<'a, B> {
    bench: &'static str,
    #[serde(flatten)]
    facts: GpuFacts,
    #[serde(flatten)]
    machine: Machine,
    reps: u32,
    #[serde(flatten)]
    body: &'a B,
}

/// The body of a report that has nothing but rows.
#[derive(Serialize)]
struct Rows<R> {
    rows: Vec<R>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.what {
        What::Import(ImportArgs { cache, broker, pairs }) => {
            run_one(pairs, "import", |sizes, progress| import::measure(pairs, (*cache, *broker), sizes, progress), import::tables)
        }
        What::Export(pairs) => run_one(pairs, "export", |sizes, progress| export::measure(pairs, sizes, progress), export::tables),
        What::Bandwidth(pairs) => run_one(pairs, "bandwidth", |sizes, progress| bandwidth::rows(pairs, sizes, progress), bandwidth::tables),
        What::Growth(args) => growth::run(args),
        What::Cache(args) => cache::run(args),
        What::GiveBack(args) => give_back::run(args),
    }
}

/// Measures a row for each number of chunks.
fn run_one<R: Serialize>(
    pairs: &Pairs,
    name: &'static str,
    measure: impl Fn(Vec<u64>, &mut Progress) -> Measured<R>,
    tables: fn(&[R]) -> Tables,
) -> Result<(), Failure> {
    let mut progress = Progress::new();
    let (mut rows, mut facts) = (Vec::new(), None);
    for &count in &pairs.chunks {
        let (row, found) = measure(chunk_sizes::mixed(count), &mut progress)?;
        rows.push(row);
        facts.get_or_insert(found);
    }
    // The parser lets no empty list through.
    let Some(facts) = facts else { return Ok(()) };
    let tables = tables(&rows);
    print(&pairs.common, name, facts, pairs.reps, &format!("{} pairs", pairs.reps), &Rows { rows }, tables)
}

/// Prints what was found, the way that was asked for. `about` says how it was measured.
fn print<B: Serialize>(
    common: &Common,
    bench: &'static str,
    facts: GpuFacts,
    reps: u32,
    about: &str,
    body: &B,
    tables: Tables,
) -> Result<(), Failure> {
    let report = Report { bench, facts, machine: Machine::of_this_process(), reps, body };
    if common.json {
        return output::json(&report);
    }
    let GpuFacts { driver, gpu, cuda_version, driver_version, kernel, .. } = &report.facts;
    let version = driver_version.as_ref().map_or_else(String::new, |version| format!(" {version}"));
    let machine = report.machine.line();
    let mut text = format!("bench {bench}: driver={driver}{version} (CUDA {cuda_version}), {gpu}, {machine}, Linux {kernel}, {about}");
    for (title, table) in tables {
        text += &format!("\n\n{title}\n\n{table}");
    }
    output::text(&text)
}

/// An empty table that can be pasted into a document.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header);
    table
}

/// Starts an exporter of all of these chunks, whose contents do not matter.
fn start_exporter(common: &Common, sizes: Vec<u64>, progress: &mut Progress) -> Result<(PeerProcess, Exported), Failure> {
    let settings = exporter_process::Settings {
        device: common.device,
        kind: exporter_process::Kind::Vmm,
        sizes,
        seed: None,
        inside_chunks: false,
        fd_each: true,
    };
    let mut exporter = PeerProcess::start(Role::Exporter, &settings, common.silence())?;
    let exported = exporter.receive(progress)?;
    Ok((exporter, exported))
}

impl Common {
    const fn silence(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}
