//! `cuda-ipc bench all`: every bench, one after the other, with the arguments that it has by itself or, with `--quick`, with smaller ones.

use clap::Parser;
use serde_json::{Value, json};

use super::{Common, measure};
use crate::failure::Failure;
use crate::output;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fewer repetitions of smaller things: whether it works rather than what it costs
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    common: Common,
}

/// Each bench with its arguments of `--quick`.
const BENCHES: &[(&str, &str)] = &[
    ("import", "--chunks 1,5,25 --reps 5"),
    ("export", "--chunks 1,5,25 --reps 5"),
    ("broker", "--chunks 1,5,25 --reps 5"),
    ("growth", "--chunks 1,25 --reps 5"),
    ("bandwidth", "--chunks 1,3 --reps 2"),
    ("parts", "--parts 300 --size 64M"),
    ("cache", "--windows 10,100 --chunks 1,5 --threads 1,2 --reps 2 --span 2"),
    ("give-back", "--size 100M --reps 1"),
];

/// A line as a user would write it.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: super::Args,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let common = &args.common;
    common.make_folder()?;
    let mut reports = Vec::new();
    for (at, (name, quick)) in (1..).zip(BENCHES) {
        eprintln!("bench {name}, {at} of {}", BENCHES.len());
        let (device, timeout) = (common.device.to_string(), common.timeout.to_string());
        let line = ["bench", name, "--device", &device, "--timeout", &timeout];
        let quick = quick.split_whitespace().filter(|_| args.quick);
        let line = Line::try_parse_from(line.into_iter().chain(quick)).map_err(Failure::at("writing the arguments of a bench"))?;
        let found = measure(&line.args.what)?;
        found.draw(common)?;
        if !common.json {
            // As soon as there is something to read.
            found.print(common)?;
            output::text(&"")?;
        }
        reports.push(found.into_report());
    }
    if common.json { output::json(&together(reports)) } else { Ok(()) }
}

/// One report of several, which `plot` reads like a single one.
fn together(reports: Vec<Value>) -> Value {
    json!({ "bench": "all", "program": env!("CARGO_PKG_VERSION"), "reports": reports })
}
