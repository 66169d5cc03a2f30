//! The `cuda-ipc` program: shows, inspects and measures sharing of CUDA memory between processes.
//!
//! This file is the command line; what a command does is in the module of its name. Standard output carries a command's report and nothing else, so that it
//! can be piped; progress, notes and errors go to standard error. Exit codes: 0 done, 1 failed, 64 used wrongly; doctor's say how good the
//! lane is, and those of `run` are in its module.

#![deny(unsafe_code)]

mod bench;
mod chunk_sizes;
mod demo;
mod doctor;
mod exporter_process;
mod failure;
mod finding;
mod gpu;
mod hex;
mod inspect;
mod limits;
mod output;
mod pattern;
mod peer_process;
mod progress;
mod random;
mod run;
mod size;
mod soak;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use failure::Failure;

/// sysexits.h: the command was used wrongly.
const EX_USAGE: u8 = 64;
/// sysexits.h: the report could not be written. Smaller numbers of `doctor` are verdicts.
const EX_IOERR: u8 = 74;

/// Shares CUDA memory between processes over POSIX file descriptors.
#[derive(Parser)]
#[command(name = "cuda-ipc", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Args),
    Doctor(doctor::Args),
    Inspect(inspect::Args),
    Run(run::Args),
    Bench(bench::Args),
    Soak(soak::Args),
    /// (started by the commands above)
    #[command(hide = true)]
    Child {
        role: Role,
    },
}

/// What a child process of this program does; see `peer_process.rs` for how it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    Exporter,
    DemoImporter,
    DoctorNeighbour,
    BenchImporter,
    BenchExporter,
    BenchBrokerImporter,
    BenchReader,
    BenchPartsExporter,
    BenchPartsImporter,
    BenchMisses,
    BenchCacheExporter,
    BenchCacheImporter,
    BenchGiveBackExporter,
    BenchGiveBackImporter,
    BenchWatcher,
    BenchGrowthExporter,
    BenchGrowthImporter,
    SoakExporter,
    SoakImporter,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, on standard output; everything else is a wrong use.
            let asked = !error.use_stderr();
            let _ = error.print();
            return if asked { ExitCode::SUCCESS } else { ExitCode::from(EX_USAGE) };
        }
    };
    let result = match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Doctor(args) => match doctor::run(&args) {
            Ok(code) => return code,
            Err(failure) => {
                eprintln!("error: {failure}");
                return ExitCode::from(EX_IOERR);
            }
        },
        Command::Inspect(args) => inspect::run(&args),
        Command::Run(args) => return run::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Child { role } => {
            return peer_process::serve(match role {
                Role::Exporter => exporter_process::run,
                Role::DemoImporter => demo::importer::run,
                Role::DoctorNeighbour => doctor::neighbour,
                Role::BenchImporter => bench::import::child,
                Role::BenchExporter => bench::export::child,
                Role::BenchBrokerImporter => bench::broker::child,
                Role::BenchPartsExporter => bench::parts::exporter::child,
                Role::BenchPartsImporter => bench::parts::importer::child,
                Role::BenchMisses => bench::cache::misses::child,
                Role::BenchReader => bench::bandwidth::child,
                Role::BenchCacheExporter => bench::cache::exporter::child,
                Role::BenchCacheImporter => bench::cache::importer::child,
                Role::BenchGiveBackExporter => bench::give_back::exporter::child,
                Role::BenchGiveBackImporter => bench::give_back::importer::child,
                Role::BenchWatcher => bench::give_back::watcher::child,
                Role::BenchGrowthExporter => bench::growth::exporter::child,
                Role::BenchGrowthImporter => bench::growth::importer::child,
                Role::SoakExporter => soak::exporter::child,
                Role::SoakImporter => soak::importer::child,
            });
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(what)) => {
            eprintln!("error: {what}\n\nFor more information, try '--help'.");
            ExitCode::from(EX_USAGE)
        }
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}
