//! `cuda-ipc bench`: what the library's work costs against the least that the same work can cost, measured in the same run.
//!
//! This file is the command: it parses what is to be measured and has it measured. What is measured, and against what, is in the file of each measurement;
//! `bench/samples.rs` has the arithmetic, `bench/machine.rs` the processor, `bench/found.rs` how it is printed, `bench/plot.rs` how it is drawn.

mod all;
pub(crate) mod bandwidth;
pub(crate) mod broker;
pub(crate) mod cache;
pub(crate) mod export;
mod found;
pub(crate) mod give_back;
pub(crate) mod growth;
pub(crate) mod import;
mod machine;
pub(crate) mod parts;
mod plot;
pub(crate) mod samples;
mod steps;

use core::time::Duration;
use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;

use crate::Role;
use crate::chunk_sizes;
use crate::exporter_process::{self, Exported, Kind};
use crate::failure::Failure;
use crate::gpu::GpuFacts;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use found::{Found, Tables, table};

/// Measure what sharing costs, each figure against its floor in the same run.
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
    /// in reverse order. What a first contact adds (connect, and the first look-up in a fresh table) is measured apart, and so is where the time goes: in runs
    /// of their own each driver call is led past a clock. With --cache the import is also measured as a cache does it: a fresh window of a known peer, and a
    /// lease of the whole range.
    Import(ImportArgs),
    /// Export of N chunks and its release, against the bare calls for the same chunks; and registration inside known chunks
    ///
    /// The floor is, by hand: for each chunk cuMemRetainAllocationHandle, cuMemExportToShareableHandle, cuMemRelease; then close all fds. Ours is the
    /// export of the range, none of whose chunks is published yet, and its release, by an exporter that has another chunk exported; what the first export adds
    /// (threads, a socket) is measured apart. Registration is the export of 16 MiB in the middle of the range while an
    /// export of all of it is held. Where the time goes is measured in runs of their own, in which each driver call is led past a clock.
    Export(Pairs),
    /// Import by the exporter's broker, against import by pidfd, both from peers that are connected already
    Broker(Pairs),
    /// Copies from imported memory of each kind, against copies from local memory of cuMemAlloc and of the same kind, all to the same local memory
    ///
    /// Copies are queued back to back in batches; a batch is timed by the host's clock from the first call to its completion. GB/s are 1e9 copied bytes a
    /// second. The sub-range begins inside the first chunk and ends inside the last; its floor is the same sub-range of local memory of the kind.
    Bandwidth(bandwidth::Args),
    /// Many sub-ranges of one segment: registration of each inside known chunks, and an opened window and lease of each in the importer
    ///
    /// The exporter holds an export of the whole segment and registers every part, holding all; the importer opens each part's rkey and leases it, holding
    /// all leases, and then all over again. The first pass imports each chunk once, whichever part comes first; the second imports nothing.
    Parts(parts::Args),
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
    /// All of these, one after the other
    All(all::Args),
    /// Draw what a --json report says, without measuring
    Plot(plot::Args),
}

#[derive(clap::Args)]
struct ImportArgs {
    /// Also measure imports through a cache
    #[arg(long)]
    cache: bool,
    #[command(flatten)]
    pairs: Pairs,
}

#[derive(clap::Args)]
struct Pairs {
    /// How many chunks, of 2 MiB and 20 MiB in turn; several numbers are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 5, 25, 100, 400, 2000], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
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
    /// Also draw plots, as SVG files in this folder
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// The GPU, by its number here
    #[arg(long, value_name = "I", default_value_t = 0)]
    device: u32,
    /// Give up when a process says nothing for that many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// A row, and the machine it was measured on.
type Measured<R> = Result<(R, GpuFacts), Failure>;
/// The body of a report that has nothing but rows.
#[derive(Serialize)]
struct Rows<R> {
    rows: Vec<R>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.what {
        What::Plot(args) => plot::run(args),
        What::All(args) => all::run(args),
        What::Import(ImportArgs { pairs: Pairs { common, .. }, .. })
        | What::Export(Pairs { common, .. })
        | What::Broker(Pairs { common, .. })
        | What::Bandwidth(bandwidth::Args { common, .. })
        | What::Parts(parts::Args { common, .. })
        | What::Growth(growth::Args { common, .. })
        | What::Cache(cache::Args { common, .. })
        | What::GiveBack(give_back::Args { common, .. }) => {
            common.make_folder()?;
            let found = measure(&args.what)?;
            found.draw(common)?;
            found.print(common)
        }
    }
}

/// Measures one thing.
fn measure(what: &What) -> Result<Found, Failure> {
    match what {
        What::Import(ImportArgs { cache, pairs }) => {
            each_number(pairs, "import", |sizes, progress| import::measure(pairs, *cache, sizes, progress), import::tables)
        }
        What::Export(pairs) => each_number(pairs, "export", |sizes, progress| export::measure(pairs, sizes, progress), export::tables),
        What::Broker(pairs) => each_number(pairs, "broker", |sizes, progress| broker::measure(pairs, sizes, progress), broker::tables),
        What::Bandwidth(args) => bandwidth::run(args),
        What::Parts(args) => parts::run(args),
        What::Growth(args) => growth::run(args),
        What::Cache(args) => cache::run(args),
        What::GiveBack(args) => give_back::run(args),
        What::All(_) | What::Plot(_) => Err(Failure::Usage("this is no single measurement".to_owned())),
    }
}

/// Measures a row for each number of chunks.
fn each_number<R: Serialize>(
    pairs: &Pairs,
    name: &'static str,
    measure: impl Fn(Vec<u64>, &mut Progress) -> Measured<R>,
    tables: fn(&[R]) -> Tables,
) -> Result<Found, Failure> {
    let mut progress = Progress::new();
    let (mut rows, mut facts) = (Vec::new(), None);
    for &count in &pairs.chunks {
        let (row, found) = measure(chunk_sizes::mixed(count), &mut progress)?;
        rows.push(row);
        facts.get_or_insert(found);
    }
    progress.finish();
    let tables = tables(&rows);
    Found::new(name, facts, pairs.reps, &format!("{} pairs", pairs.reps), &Rows { rows }, tables)
}

/// Starts an exporter of memory of this kind and these chunk sizes, whose contents do not matter.
fn start_exporter(common: &Common, kind: Kind, sizes: Vec<u64>, progress: &mut Progress) -> Result<(PeerProcess, Exported), Failure> {
    let settings = exporter_process::Settings { device: common.device, kind, sizes, seed: None, inside_chunks: false, fd_each: true };
    let mut exporter = PeerProcess::start(Role::Exporter, &settings, common.silence())?;
    let exported = exporter.receive(progress)?;
    Ok((exporter, exported))
}

impl Common {
    const fn silence(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Makes the folder of the plots: before the measurement, not after it, is when to find that there can be none.
    fn make_folder(&self) -> Result<(), Failure> {
        let Some(folder) = &self.svg else { return Ok(()) };
        std::fs::create_dir_all(folder).map_err(Failure::at(&format!("making the folder {}", folder.display())))
    }
}
