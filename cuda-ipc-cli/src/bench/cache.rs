//! `cuda-ipc bench cache`: what a hit costs.
//!
//! This file is the command: it starts as many exporters as the windows need, and one importer, which measures (`cache/importer.rs`, `cache/threads.rs`) by
//! the loops of `cache/loops.rs` and the clockwork of `cache/contest.rs`.

mod contest;
pub(crate) mod exporter;
pub(crate) mod importer;
mod locked;
mod loops;
pub(crate) mod misses;
mod report;
mod threads;

use serde::Serialize;

use super::{Common, Found, machine};
use crate::Role;
use crate::failure::Failure;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use exporter::Made;
use importer::Offer;
use report::Findings;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many windows are open, each of them another reservation
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [100, 10_000, 100_000], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    windows: Vec<u32>,
    /// How many chunks a lease covers
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 26, 400], value_parser = clap::value_parser!(u32).range(1..=4096))]
    chunks: Vec<u32>,
    /// How many threads take leases at once [default: 1, 2, 4 and so on, up to one for each processor]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Vec<u32>,
    /// At how many windows threads are measured; where there are never so many, at as many as there are
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    threads_at: u32,
    /// How many repetitions of each loop, besides one to warm up
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    reps: u32,
    /// How long a repetition takes at least
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    span: u64,
    /// How many windows one exporter makes at most [default: as many as its limit of open files allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    per_exporter: Option<u32>,
    #[command(flatten)]
    pub(super) common: Common,
}

/// How many windows have more than one chunk, at most: an fd is needed for each.
const WIDE: u32 = 32;
/// How many exporters at most.
const EXPORTERS: usize = 64;

#[derive(Serialize)]
struct Body {
    exporters: usize,
    /// Windows that were exported.
    windows: usize,
    span_ms: u64,
    #[serde(flatten)]
    findings: Findings,
    /// Leases that are misses, on several threads.
    miss_threads: Vec<misses::Row>,
}

pub(super) fn run(args: &Args) -> Result<Found, Failure> {
    let mut progress = Progress::new();
    let (mut windows, mut chunks) = (args.windows.clone(), args.chunks.clone());
    for list in [&mut windows, &mut chunks] {
        list.sort_unstable();
        list.dedup();
    }
    let threads = if args.threads.is_empty() { up_to_all_processors() } else { args.threads.clone() };
    let widest = chunks.last().copied().unwrap_or(1);
    let wide = if widest == 1 { 0 } else { WIDE.min(windows.first().copied().unwrap_or(1)) };
    let wanted: Vec<u32> = (0..windows.last().copied().unwrap_or(1)).map(|number| if number < wide { widest } else { 1 }).collect();

    let (exporters, mades) = start_exporters(args, &wanted, &mut progress)?;
    let made: usize = mades.iter().map(|made| made.windows.len()).sum();
    let settings = importer::Settings {
        windows,
        chunks,
        threads: threads.clone(),
        threads_at: args.threads_at,
        wide,
        reps: args.reps,
        span_ms: args.span,
    };
    let mut importer = PeerProcess::start(Role::BenchCacheImporter, &settings, args.common.silence())?;
    let offers: Vec<Offer> = mades.iter().map(|made| Offer { rkey: made.rkey.clone(), windows: made.windows.clone() }).collect();
    importer.send(&offers)?;
    let mut findings: Findings = importer.receive(&mut progress)?;
    progress.finish();
    let count = exporters.len();
    for process in core::iter::once(importer).chain(exporters) {
        // What was measured stands, even if it takes a process too long to give up its many thousand mappings.
        if let Err(failure) = process.finish() {
            eprintln!("note: {failure}");
        }
    }

    if made < wanted.len() {
        let limit = mades.last().and_then(|made| made.limit.as_deref()).unwrap_or("no more exporters");
        findings.notes.push(format!("{made} of {} windows were made: {limit}", wanted.len()));
    }
    let facts = mades.into_iter().next().map(|first| {
        findings.notes.extend(first.note);
        first.facts
    });
    if findings.misses != 0 {
        return Err(Failure::new("measuring hits", format!("{} leases were no hits", findings.misses)));
    }
    for note in &findings.notes {
        eprintln!("note: {note}");
    }
    let misses = misses::measure(args, &threads, &mut progress)?;
    let mut tables = findings.tables();
    tables.push((misses::TITLE, misses::table(&misses)));
    let about =
        format!("{made} windows of {count} exporter{}, {} repetitions of {} ms", if count == 1 { "" } else { "s" }, args.reps, args.span);
    let body = Body { exporters: count, windows: made, span_ms: args.span, findings, miss_threads: misses };
    Found::new("cache", facts, args.reps, &about, &body, tables)
}

/// Powers of two, and the number of processors at the end.
fn up_to_all_processors() -> Vec<u32> {
    let all = u32::try_from(machine::cpus().len()).unwrap_or(1).clamp(1, 1024);
    let mut threads: Vec<u32> = (0..10).map(|power| 1 << power).take_while(|&threads| threads < all).collect();
    threads.push(all);
    threads
}

/// Starts exporters until they have all windows, or one finds a limit that the next one would find, too.
fn start_exporters(args: &Args, wanted: &[u32], progress: &mut Progress) -> Result<(Vec<PeerProcess>, Vec<Made>), Failure> {
    let (mut exporters, mut mades, mut done) = (Vec::new(), Vec::<Made>::new(), 0);
    while let Some(left) = wanted.get(done..).filter(|left| !left.is_empty() && exporters.len() < EXPORTERS) {
        let settings = exporter::Settings { device: args.common.device, chunks: left.to_vec(), at_most: args.per_exporter };
        let mut exporter = PeerProcess::start(Role::BenchCacheExporter, &settings, args.common.silence())?;
        match exporter.receive::<Made>(progress) {
            Ok(made) => {
                done += made.windows.len();
                exporters.push(exporter);
                mades.push(made);
            }
            Err(failure) if mades.is_empty() => return Err(failure),
            Err(failure) => {
                eprintln!("note: no more exporters after {}: {failure}", exporters.len());
                break;
            }
        }
    }
    Ok((exporters, mades))
}
