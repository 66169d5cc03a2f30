//! `cuda-ipc soak`: shares memory for a long time, compares every byte, and looks for what has grown meanwhile.
//!
//! This file is the command. Two exporters (`soak/exporter.rs`), one that stays and one that is ended or killed and started again, and two importers
//! (`soak/importer.rs`), one by each route, take steps in turn: memory is made, grows, shrinks, gets other chunks and is freed, told and untold, and each time an
//! importer leases it. Every so often all of them let go of everything, and what they hold then (`soak/state.rs`) is compared. `soak/memory.rs` has the kinds of memory.

pub(crate) mod exporter;
pub(crate) mod importer;
mod memory;
mod report;
mod state;

use core::time::Duration;
use std::time::Instant;

use clap::ValueEnum;
use cuda_ipc_core::table::GRANULE;

use crate::Role;
use crate::failure::Failure;
use crate::gpu::GpuFacts;
use crate::output;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use crate::random::Random;
use exporter::Shared;
use importer::Used;
use memory::Kind;
use report::{Report, Totals};
use state::State;

/// Share memory for a long time and look for leaks
///
/// Exits with 1 if a byte was wrong, if a lease failed, or if a process has more fds, threads, memory, windows or driver objects at the end than after the first
/// minute (in runs of less than four minutes: after the first quarter). Objects of the driver are counted on the fake driver only.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long, in minutes; parts of a minute are allowed
    #[arg(long, value_name = "N", default_value_t = 1.0, value_parser = minutes)]
    minutes: f64,
    /// Go on after that until so many steps are done
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    at_least: u64,
    /// Which kinds of memory
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_enum, default_values_t = Kind::value_variants().to_vec())]
    kinds: Vec<Kind>,
    /// Repeat the choices of a run; chosen and printed if it is not given
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    /// The GPU, by its number here
    #[arg(long, value_name = "I", default_value_t = 0)]
    device: u32,
    /// Others use the GPU meanwhile: do not judge by its free memory
    #[arg(long)]
    shared_gpu: bool,
    /// Give up when a process says nothing for that many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // A week; and less than a second leaves no time to compare anything with.
        Ok(minutes) if (1.0 / 60.0..=10_080.0).contains(&minutes) => Ok(minutes),
        _ => Err("a number of minutes, from one second to a week".to_owned()),
    }
}

/// Ways to exporters; one importer for each.
const ROUTES: [&str; 2] = ["pidfd", "broker"];
/// Steps after which the second exporter ends, on average.
const LIFE: u64 = 60;
/// How long processes may take to come to rest.
const SETTLE: Duration = Duration::from_secs(5);
/// What importers keep mapped: less than exporters share at times.
const KEEP: u64 = 64 * GRANULE;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let seed = match args.seed {
        Some(seed) => seed,
        None => {
            let mut bytes = [0; 4];
            getrandom::fill(&mut bytes).map_err(Failure::at("choosing a seed"))?;
            u32::from_ne_bytes(bytes).into()
        }
    };
    eprintln!("note: --seed {seed} repeats the choices of this run");
    let time = Duration::from_secs_f64(args.minutes * 60.0);
    let mut progress = Progress::new();
    let mut stage = Stage::start(args, seed, &mut progress)?;
    let began = Instant::now();
    let minute = Duration::from_secs(60);
    let pause = if time < 4 * minute { time / 4 } else { minute };
    let (mut baseline, mut next) = (None, pause);
    while began.elapsed() < time || stage.totals.steps < args.at_least {
        stage.step(&mut progress)?;
        progress.show("soak", began.elapsed().as_secs(), time.as_secs());
        if began.elapsed() >= next && began.elapsed() < time {
            let states = stage.rest(None, &mut progress)?;
            stage.totals.rests += 1;
            progress.finish();
            eprintln!(
                "note: after {:.1} minutes: {} steps, {}",
                began.elapsed().as_secs_f64() / 60.0,
                stage.totals.steps,
                report::states(&states)
            );
            baseline.get_or_insert(states);
            next += pause;
        }
    }
    let elapsed = began.elapsed();
    let last = stage.rest(baseline.as_deref(), &mut progress)?;
    progress.finish();
    let Some(baseline) = baseline else { return Err(Failure::new("comparing", "one step took the whole time; nothing was compared")) };
    let findings: Vec<String> =
        baseline.iter().zip(&last).flat_map(|((name, then), (_, now))| then.findings(name, now, args.shared_gpu)).collect();
    let (totals, facts) = stage.end()?;
    let report = Report::new(facts, seed, elapsed, totals, &baseline, &last, &findings);
    if args.json { output::json(&report) } else { output::text(&report.text()) }?;
    match findings.split_first() {
        None => Ok(()),
        Some((first, rest)) => Err(rest.iter().fold(Failure::new("looking for leaks", first), |failure, finding| failure.note(finding))),
    }
}

type States = Vec<(&'static str, State)>;

/// All processes.
struct Stage<'a> {
    args: &'a Args,
    random: Random,
    exporters: [PeerProcess; 2],
    importers: [PeerProcess; 2],
    facts: GpuFacts,
    totals: Totals,
}

impl<'a> Stage<'a> {
    fn start(args: &'a Args, seed: u64, progress: &mut Progress) -> Result<Self, Failure> {
        let mut random = Random::new(seed);
        let (stays, facts) = start_exporter(args, true, random.next(), progress)?;
        let (comes_and_goes, _) = start_exporter(args, false, random.next(), progress)?;
        let mut start_importer = |route: &str| -> Result<PeerProcess, Failure> {
            let settings = importer::Settings { device: args.device, seed: random.next(), route: route.to_owned(), keep: KEEP };
            let mut importer = PeerProcess::start(Role::SoakImporter, &settings, silence(args))?;
            let () = importer.receive(progress)?;
            Ok(importer)
        };
        let importers = [start_importer(ROUTES[0])?, start_importer(ROUTES[1])?];
        Ok(Self { args, random, exporters: [stays, comes_and_goes], importers, facts, totals: Totals::default() })
    }

    /// One exporter does something, and one importer or both use what there is then.
    fn step(&mut self, progress: &mut Progress) -> Result<(), Failure> {
        if self.random.below(LIFE) == 0 {
            self.replace_exporter(progress)?;
        }
        let exporter = if self.random.below(3) == 0 { 1 } else { 0 };
        self.exporters[exporter].send(&exporter::Ask::Step)?;
        let shared: Shared = self.exporters[exporter].receive(progress)?;
        self.totals.step(&shared);
        let who = self.random.below(3);
        for (at, importer) in self.importers.iter_mut().enumerate() {
            // The exporter that comes and goes has no fds to fetch: the broker's importer is its own.
            if (who == 2 || who == at as u64) && (exporter == 0 || ROUTES[at] == "broker") {
                importer.send(&importer::Ask::Use(shared.clone()))?;
                let used: Used = importer.receive(progress)?;
                self.totals.used(at, &used);
            }
        }
        Ok(())
    }

    /// The second exporter ends, or is killed with all that it shares, and another one takes its place.
    fn replace_exporter(&mut self, progress: &mut Progress) -> Result<(), Failure> {
        let (new, _) = start_exporter(self.args, false, self.random.next(), progress)?;
        let mut old = core::mem::replace(&mut self.exporters[1], new);
        if self.random.below(2) == 0 {
            old.kill()?;
            old.reap();
            self.totals.kills += 1;
        } else {
            old.finish()?;
            self.totals.ends += 1;
        }
        Ok(())
    }

    /// Everybody lets go of everything; what they hold once that has settled, or after a while anyway.
    fn rest(&mut self, like: Option<&[(&'static str, State)]>, progress: &mut Progress) -> Result<States, Failure> {
        let start = Instant::now();
        let mut before = self.rest_once(progress)?;
        loop {
            std::thread::sleep(Duration::from_millis(250));
            let now = self.rest_once(progress)?;
            let all_like = |others: &[(&str, State)]| now.iter().zip(others).all(|((_, state), (_, other))| state.is_settled_like(other));
            if (all_like(&before) && like.is_none_or(all_like)) || start.elapsed() > SETTLE {
                return Ok(now);
            }
            before = now;
        }
    }

    fn rest_once(&mut self, progress: &mut Progress) -> Result<States, Failure> {
        let mut states = Vec::new();
        for (name, exporter) in ["exporter", "second exporter"].into_iter().zip(&mut self.exporters) {
            exporter.send(&exporter::Ask::Rest)?;
            states.push((name, exporter.receive(progress)?));
        }
        for (name, importer) in ["importer by pidfd", "importer by broker"].into_iter().zip(&mut self.importers) {
            importer.send(&importer::Ask::Rest)?;
            states.push((name, importer.receive(progress)?));
        }
        Ok(states)
    }

    fn end(self) -> Result<(Totals, GpuFacts), Failure> {
        for process in self.importers.into_iter().chain(self.exporters) {
            process.finish()?;
        }
        Ok((self.totals, self.facts))
    }
}

fn start_exporter(args: &Args, fds: bool, seed: u64, progress: &mut Progress) -> Result<(PeerProcess, GpuFacts), Failure> {
    let settings = exporter::Settings { device: args.device, kinds: args.kinds.clone(), seed, fds };
    let mut exporter = PeerProcess::start(Role::SoakExporter, &settings, silence(args))?;
    let facts = exporter.receive(progress)?;
    Ok((exporter, facts))
}

const fn silence(args: &Args) -> Duration {
    Duration::from_secs(args.timeout)
}
