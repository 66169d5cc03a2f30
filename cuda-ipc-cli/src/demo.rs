//! `cuda-ipc demo`: two processes share a range of many chunks, and every byte is checked.
//!
//! This file is the command: it starts both processes, carries the rkey from one to the other, and prints the outcome. The exporting process is
//! `exporter_process.rs`, the importing one `demo/importer.rs`.

pub(crate) mod importer;

use core::time::Duration;

use clap::ValueEnum;
use cuda_ipc_core::importer::Route;
use serde::Serialize;

use crate::Role;
use crate::chunk_sizes;
use crate::exporter_process::{self, Exported, Kind};
use crate::failure::Failure;
use crate::gpu::{DriverKind, GpuFacts};
use crate::output;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use crate::size;
use importer::Imported;

/// Let two processes share GPU memory and verify every byte.
///
/// One process makes chunks of 2 MiB and 20 MiB in turn in one address range, writes a pattern to all of them, and exports a range that starts inside the
/// first chunk and ends inside the last. Memory of other kinds is one allocation of the same size; of cuMemAlloc memory all of it is shared. The other process gets nothing but the 108 bytes of the rkey, imports the range for reading, compares every byte,
/// and measures copies from it to local memory of the same GPU.
///
/// The last line on standard output is the result: RESULT driver=fake|cuda kind=vmm|pool|malloc chunks=N bytes=N route=pidfd|broker|legacy verified=true|false gbps=X, where bytes is the
/// length of the shared range, and gbps is 1e-9 * bytes per second of the median copy: copies are queued back to back in batches, a batch is timed by the
/// host's clock from the first call to its completion, and the median is over the batches. Where the GPU has no room for the whole range twice, a copy goes in parts to the
/// same local memory.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What kind of memory is shared
    #[arg(long, value_enum, default_value_t = Kind::Vmm)]
    kind: Kind,
    /// How many chunks the range has
    #[arg(long, value_name = "N", default_value_t = 26, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunks: u32,
    /// Total size of the chunks, such as 512M; each second chunk then has 2 MiB and the others share the rest [default: 2 MiB and 20 MiB in turn]
    #[arg(long, value_name = "S", value_parser = size::parse)]
    size: Option<u64>,
    /// How the importer gets fds: fetches them by pidfd_getfd(2), asks the exporter's broker for them, or what is allowed, in this order
    #[arg(long, value_name = "auto|pidfd|broker", default_value_t = Route::Auto)]
    route: Route,
    /// Print the result as a JSON object, with the times of export and import, the GPU and the driver
    #[arg(long)]
    json: bool,
    /// The GPU, by its number here
    #[arg(long, value_name = "I", default_value_t = 0)]
    device: u32,
    /// Give up when a process says nothing for that many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// The outcome.
#[derive(Serialize)]
struct Report {
    driver: DriverKind,
    kind: Kind,
    chunks: usize,
    bytes: u64,
    /// The way that was taken.
    route: String,
    verified: bool,
    /// `None`: not measured, because the bytes were wrong.
    gbps: Option<f64>,
    export_us: f64,
    connect_us: f64,
    import_us: f64,
    #[serde(flatten)]
    facts: WithoutDriver,
}

/// Facts that the report has beside `driver`.
#[derive(Serialize)]
struct WithoutDriver {
    gpu: String,
    gpu_uuid: String,
    cuda_version: String,
    driver_version: Option<String>,
    kernel: String,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.kind == Kind::Malloc && args.route != Route::Auto {
        return Err(Failure::Usage("memory of cuMemAlloc goes by a legacy handle, which takes no route".to_owned()));
    }
    let sizes = match args.size {
        Some(total) => chunk_sizes::with_total(args.chunks, total).map_err(Failure::Usage)?,
        None => chunk_sizes::mixed(args.chunks),
    };
    let silence = Duration::from_secs(args.timeout);
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(Failure::at("choosing a pattern"))?;
    let seed = u64::from_ne_bytes(seed);
    let mut progress = Progress::new();

    let settings = exporter_process::Settings {
        device: args.device,
        kind: args.kind,
        sizes,
        seed: Some(seed),
        inside_chunks: true,
        fd_each: args.route == Route::Pidfd,
    };
    let mut exporter = PeerProcess::start(Role::Exporter, &settings, silence)?;
    let mut importer = PeerProcess::start(Role::DemoImporter, &importer::Settings { seed, route: args.route.to_string() }, silence)?;
    let exported: Exported = exporter.receive(&mut progress)?;
    importer.send(&exported.rkey)?;
    let imported: Imported = importer.receive(&mut progress).map_err(|failure| match exporter.unexpected_end() {
        Some(end) => failure.note(end.to_string()),
        None => failure,
    })?;
    progress.finish();
    importer.finish()?;
    exporter.finish()?;

    if let Some(note) = &exported.note {
        eprintln!("note: {note}");
    }
    let report = Report::new(args, exported, &imported);
    if args.json { output::json(&report) } else { output::text(&report.line()) }?;
    match imported.difference {
        None => Ok(()),
        Some(difference) => Err(Failure::new("verifying the imported bytes", difference)),
    }
}

impl Report {
    fn new(args: &Args, exported: Exported, imported: &Imported) -> Self {
        let GpuFacts { driver, gpu, gpu_uuid, cuda_version, driver_version, kernel } = exported.facts;
        Self {
            driver,
            kind: args.kind,
            chunks: exported.chunks,
            bytes: imported.bytes,
            route: imported.route.clone(),
            verified: imported.difference.is_none(),
            gbps: imported.gbps,
            export_us: exported.export_us,
            connect_us: imported.connect_us,
            import_us: imported.import_us,
            facts: WithoutDriver { gpu, gpu_uuid, cuda_version, driver_version, kernel },
        }
    }

    fn line(&self) -> String {
        let name = |value: Option<clap::builder::PossibleValue>| value.map_or_else(String::new, |value| value.get_name().to_owned());
        let kind = name(self.kind.to_possible_value());
        let gbps = self.gbps.map_or_else(|| "none".to_owned(), |gbps| format!("{gbps:.1}"));
        let Self { driver, chunks, bytes, route, verified, .. } = self;
        format!("RESULT driver={driver} kind={kind} chunks={chunks} bytes={bytes} route={route} verified={verified} gbps={gbps}")
    }
}
