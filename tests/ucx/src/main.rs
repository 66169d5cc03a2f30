//! Runs UCX releases as PyPI has them, two and more processes each, on the fake driver: without the preload library and with it.
//!
//! `cargo xtask test --stage ucx` builds what is needed and calls this program. A scenario (`scenarios`) is a function that starts processes (`player`) on
//! a fake machine of its own (`world`) and says what has to come of it. The program that those processes run is C, in the folder `player`; it is compiled
//! for each release (`wheel`), and all it does it is told.

// A program has std; the lint is for the libraries.
#![allow(clippy::std_instead_of_core)]

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

mod jumps;
mod memory;
mod player;
mod scenarios;
mod wheel;
mod world;

use scenarios::{SCENARIOS, Scenario, With};
use wheel::{Release, Wheel};
use world::{Built, World};

/// What a step gives, or why the scenario has failed.
pub(crate) type Outcome<T = ()> = Result<T, String>;

const USAGE: &str = "usage: ucx-tests [--all-ucx] [--ucx VERSION]... [--tree NAME=FOLDER[:FOLDER]...]... [--scenario PART_OF_NAME]... [--pending] [--soak SECONDS] [--jobs N] [--list]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match Options::parse(&args).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            eprintln!("error: {what}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    all: bool,
    list: bool,
    pending: bool,
    jobs: usize,
    soak: Duration,
    versions: Vec<String>,
    /// UCX installed from sources; then only these, with the scenarios for them.
    trees: Vec<String>,
    scenarios: Vec<String>,
}

impl Options {
    fn parse(args: &[String]) -> Outcome<Self> {
        let cpus = std::thread::available_parallelism().map_or(2, core::num::NonZero::get);
        let mut options = Self {
            all: false,
            list: false,
            pending: false,
            jobs: cpus.min(8),
            soak: Duration::from_secs(6),
            versions: Vec::new(),
            trees: Vec::new(),
            scenarios: Vec::new(),
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().cloned().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--all-ucx" => options.all = true,
                "--list" => options.list = true,
                "--pending" => options.pending = true,
                "--ucx" => options.versions.push(value()?),
                "--tree" => options.trees.push(value()?),
                "--scenario" => options.scenarios.push(value()?),
                "--soak" => options.soak = Duration::from_secs(value()?.parse().map_err(|_| USAGE.to_owned())?),
                "--jobs" => options.jobs = value()?.parse().map_err(|_| USAGE.to_owned())?,
                other => return Err(format!("unknown argument `{other}`\n{USAGE}")),
            }
        }
        Ok(options)
    }

    fn releases(&self) -> Outcome<Vec<Release>> {
        let all = Release::all();
        for version in &self.versions {
            if !all.iter().any(|release| release.name() == *version) {
                return Err(format!("wheels.txt has no release {version}"));
            }
        }
        let named = |release: &Release| self.versions.contains(&release.name());
        Ok(all
            .into_iter()
            .filter(|release| if self.versions.is_empty() { self.all || release.is_default } else { named(release) })
            .collect())
    }

    fn wants(&self, scenario: &Scenario) -> bool {
        let named = self.scenarios.iter().any(|part| scenario.name.contains(part.as_str()));
        let for_these = scenario.with != if self.trees.is_empty() { With::Trees } else { With::Packages };
        (self.scenarios.is_empty() || named) && for_these && (scenario.pending.is_none() || self.pending)
    }
}

/// Runs what the options ask for; whether everything passed.
fn run(options: &Options) -> Outcome<bool> {
    if options.list {
        for scenario in SCENARIOS {
            let pending = match scenario.pending {
                Some(reason) => format!(" (not run: {reason})"),
                None if scenario.with == With::Trees => " (with --tree only)".to_owned(),
                None => String::new(),
            };
            println!("{:28}{}{pending}", scenario.name, scenario.about);
        }
        return Ok(true);
    }
    if !cfg!(target_arch = "x86_64") {
        println!("ucx: skipped: wheels.txt lists x86-64 releases only");
        return Ok(true);
    }
    let folder = executable_folder()?;
    let target = folder.parent().ok_or("no target folder")?;
    let built = find_built(&folder)?;
    let wheels: Vec<Wheel> = if options.trees.is_empty() {
        options.releases()?.iter().map(|release| release.fetch(target)).collect::<Outcome<_>>()?
    } else {
        options.trees.iter().map(|tree| wheel::installed(tree, target)).collect::<Outcome<_>>()?
    };
    let mut jobs: VecDeque<(&Wheel, &Scenario)> = VecDeque::new();
    for scenario in SCENARIOS.iter().filter(|scenario| options.wants(scenario)) {
        jobs.extend(wheels.iter().map(|wheel| (wheel, scenario)));
    }
    let count = jobs.len();
    let jobs = Mutex::new(jobs);
    let failures = Mutex::new(Vec::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| {
                while let Some((wheel, scenario)) = lock(&jobs).pop_front() {
                    if let Some(failure) = one(wheel, scenario, |wheel| World::new(wheel, &wheels, &built, options.soak)) {
                        lock(&failures).push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    for scenario in SCENARIOS.iter().filter(|_| options.scenarios.is_empty() && options.trees.is_empty() && !options.pending) {
        if let Some(reason) = scenario.pending {
            println!("not run: {}: {reason}", scenario.name);
        }
    }
    println!("ucx: {} passed, {} failed, {:.1} s", count - failures.len(), failures.len(), start.elapsed().as_secs_f64());
    for failure in &failures {
        println!("failed: {failure}");
    }
    Ok(failures.is_empty())
}

/// Runs one scenario with one release and reports it; its name if it has failed.
fn one(wheel: &Wheel, scenario: &Scenario, world: impl FnOnce(&Wheel) -> Outcome<World>) -> Option<String> {
    let start = Instant::now();
    let title = format!("{} {}", wheel.name, scenario.name);
    let mut evidence = String::new();
    let mut notes = Vec::new();
    let outcome = world(wheel).and_then(|mut world| {
        let outcome = (scenario.run)(&mut world);
        if outcome.is_err() {
            evidence = world.evidence();
        }
        notes = core::mem::take(&mut world.notes);
        outcome
    });
    let time = |start: Instant| Duration::as_secs_f64(&start.elapsed());
    // One write a scenario, so that those of several threads do not mix.
    match outcome {
        Ok(()) => {
            let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
            println!("{title:40} passed {:.1} s{notes}", time(start));
            None
        }
        Err(what) => {
            println!("{title:40} FAILED {:.1} s: {what}\n{evidence}", time(start));
            Some(title)
        }
    }
}

fn executable_folder() -> Outcome<PathBuf> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    exe.parent().map(Path::to_owned).ok_or_else(|| "this program is in no folder".to_owned())
}

/// What cargo has built beside this program.
fn find_built(folder: &Path) -> Outcome<Built> {
    let driver = folder.join("fake-driver");
    let failed = |error: std::io::Error| format!("{}: {error}", driver.display());
    std::fs::create_dir_all(&driver).map_err(failed)?;
    for (built, opened) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
        let library = folder.join(built);
        if !library.is_file() {
            return Err(format!("{} was not built: cargo build -p fake-cuda -p fake-nvml", library.display()));
        }
        match std::os::unix::fs::symlink(Path::new("..").join(built), driver.join(opened)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
    }
    let preload = folder.join("libcuda_ipc_preload.so");
    if !preload.is_file() {
        return Err(format!("{} was not built: cargo build -p cuda-ipc-preload", preload.display()));
    }
    let command = folder.join("cuda-ipc");
    if !command.is_file() {
        return Err(format!("{} was not built: cargo build -p cuda-ipc-cli", command.display()));
    }
    Ok(Built { driver, preload, command })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
