//! `cuda-ipc bench give-back`: how long freed memory stays with an importer that has been idle since it used it.
//!
//! This file is the command. Three processes take part: an exporter (`give_back/exporter.rs`), a new one each time; an importer (`give_back/importer.rs`)
//! and a watcher (`give_back/watcher.rs`), which stay. Times are by CLOCK_MONOTONIC, which all processes of a machine share.

pub(crate) mod exporter;
pub(crate) mod importer;
mod report;
pub(crate) mod watcher;

use core::time::Duration;

use clap::ValueEnum;
use cuda_ipc_core::table::GRANULE;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::{Common, Found};
use crate::Role;
use crate::failure::Failure;
use crate::gpu::GpuFacts;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use crate::size;
use exporter::{Freed, Shared};
use importer::{Leased, Settled};
use report::{Row, Sample};
use watcher::Back;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How much memory is shared, in chunks of 20 MiB
    #[arg(long, value_name = "S", default_value = "8G", value_parser = size::parse)]
    size: u64,
    /// How often each way of freeing is measured
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    reps: u32,
    /// In which ways the memory is freed
    #[arg(long, value_name = "WAY", value_delimiter = ',', value_enum, default_values_t = [Way::Retired, Way::Unreported, Way::Killed])]
    ways: Vec<Way>,
    #[command(flatten)]
    pub(super) common: Common,
}

/// PyTorch's large chunks.
const CHUNK: u64 = 10 * GRANULE;

/// How the exporter lets go of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// It retires the range, then unmaps it
    Retired,
    /// It unmaps without a word
    Unreported,
    /// It is killed
    Killed,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Retired => "retired, then freed",
            Self::Unreported => "freed without a word",
            Self::Killed => "kill -9",
        }
    }
}

#[derive(Serialize)]
struct Body {
    size: u64,
    chunks: u64,
    rows: Vec<Row>,
}

/// Nanoseconds of CLOCK_MONOTONIC.
fn now() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

pub(super) fn run(args: &Args) -> Result<Found, Failure> {
    let chunks = args.size.div_ceil(CHUNK).max(1);
    let mut progress = Progress::new();
    let mut stage = Stage::start(&args.common, chunks, &mut progress)?;
    // What the driver keeps for itself after the first use is not missing later.
    stage.round(Way::Retired, &mut progress)?;
    let mut rows = Vec::new();
    for &way in &args.ways {
        let mut samples = Vec::new();
        for rep in 0..args.reps {
            progress.show(way.name(), rep.into(), args.reps.into());
            samples.push(stage.round(way, &mut progress)?);
        }
        rows.push(Row::new(way, &samples));
    }
    progress.finish();
    let facts = stage.end()?;
    let body = Body { size: chunks * CHUNK, chunks, rows };
    let about = format!("{} in {chunks} chunks, {} times each", size::human(body.size), args.reps);
    let tables = report::tables(&body.rows);
    Found::new("give-back", Some(facts), args.reps, &about, &body, tables)
}

/// The processes that stay.
struct Stage<'a> {
    common: &'a Common,
    chunks: u64,
    importer: PeerProcess,
    watcher: PeerProcess,
    facts: Option<GpuFacts>,
    rounds: u64,
}

impl<'a> Stage<'a> {
    fn start(common: &'a Common, chunks: u64, progress: &mut Progress) -> Result<Self, Failure> {
        let settings = watcher::Settings { device: common.device };
        let mut watcher = PeerProcess::start(Role::BenchWatcher, &settings, common.silence())?;
        let () = watcher.receive(progress)?;
        let settings = importer::Settings { device: common.device, chunks, chunk: CHUNK };
        let mut importer = PeerProcess::start(Role::BenchGiveBackImporter, &settings, common.silence())?;
        let () = importer.receive(progress)?;
        Ok(Self { common, chunks, importer, watcher, facts: None, rounds: 0 })
    }

    /// Shares, lets the importer use all of it once and rest, frees, and waits until the memory is back.
    fn round(&mut self, way: Way, progress: &mut Progress) -> Result<Sample, Failure> {
        let size = self.chunks * CHUNK;
        let free_without = self.free(progress)?;
        let settings = exporter::Settings { device: self.common.device, chunks: self.chunks, chunk: CHUNK };
        let mut exporter = PeerProcess::start(Role::BenchGiveBackExporter, &settings, self.common.silence())?;
        let facts = exporter.receive(progress)?;
        self.facts.get_or_insert(facts);
        let free_before = self.free(progress)?;

        exporter.send(&exporter::Ask::Share)?;
        let Shared { rkey } = exporter.receive(progress)?;
        self.importer.send(&importer::Ask::Lease { rkey })?;
        let Leased { chunks } = self.importer.receive(progress)?;
        let free_shared = self.free(progress)?;
        if free_before.saturating_sub(free_shared) < size - size / 16 {
            let free = format!("{} and then {}", size::human(free_before), size::human(free_shared));
            return Err(Failure::new("watching the free memory", format!("sharing {} left {free} free", size::human(size))));
        }

        // The exporter looks for freed memory every so often: a round must not begin at always the same moment between two looks.
        self.rounds += 1;
        std::thread::sleep(Duration::from_millis(250 + self.rounds * 37 % 100));
        // A dead process's context goes, too.
        let back_at = if way == Way::Killed { free_without } else { free_before };
        // Less than a chunk may be missing: drivers keep some memory for themselves.
        self.watcher.send(&watcher::Ask::Watch { free: back_at.saturating_sub(CHUNK - 1) })?;
        let () = self.watcher.receive(progress)?;
        let (told, freed, exited) = if way == Way::Killed {
            exporter.kill()?;
            let killed = now();
            exporter.reap();
            (None, killed, Some(now()))
        } else {
            exporter.send(&exporter::Ask::Free { tell: way == Way::Retired })?;
            let Freed { told, freed } = exporter.receive(progress)?;
            (told, freed, None)
        };
        let Back { at, looks, longest_pause_us } = self.watcher.receive(progress)?;
        self.importer.send(&importer::Ask::Settle)?;
        let Settled { unmapped_dead, unmapped_purged, mapped_bytes, local_unmap_us } = self.importer.receive(progress)?;
        if way != Way::Killed {
            exporter.finish()?;
        }
        let Some(at) = at else {
            let free = self.free(progress)?;
            let cause = format!("{} are free, {} were; {mapped_bytes} bytes are mapped", size::human(free), size::human(back_at));
            return Err(Failure::new(format!("waiting for the memory back ({})", way.name()), cause));
        };
        let ms = |from: i64| report::ms(at - from);
        Ok(Sample {
            chunks,
            back_ms: ms(freed),
            from_told_ms: told.map(ms),
            from_exit_ms: exited.map(ms),
            local_unmap_ms: local_unmap_us / 1000.0,
            unmapped_dead,
            unmapped_purged,
            looks,
            longest_pause_ms: longest_pause_us / 1000.0,
        })
    }

    fn free(&mut self, progress: &mut Progress) -> Result<u64, Failure> {
        self.watcher.send(&watcher::Ask::Read)?;
        self.watcher.receive(progress)
    }

    fn end(self) -> Result<GpuFacts, Failure> {
        self.importer.finish()?;
        self.watcher.finish()?;
        self.facts.ok_or_else(|| Failure::new("measuring", "there was no exporter"))
    }
}
