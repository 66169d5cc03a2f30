//! `cuda-ipc bench plot`, and `--svg` of every bench: draws what a `--json` report says.
//!
//! Both draw from the JSON alone, so that a report of another machine or day gives the same plots. Which plots a report has is in `plot/reports.rs`, how one
//! is drawn in `plot/chart.rs`.

mod chart;
mod reports;

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::Failure;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A file with one or more reports, as --json prints them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// The folder for the SVG files
    #[arg(long, value_name = "DIR")]
    svg: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    std::fs::create_dir_all(&args.svg).map_err(Failure::at(&format!("making the folder {}", args.svg.display())))?;
    let mut drawn = 0;
    for file in &args.files {
        let step = format!("reading {}", file.display());
        let text = std::fs::read_to_string(file).map_err(Failure::at(&step))?;
        for report in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
            drawn += draw_all(&report.map_err(Failure::at(&step))?, &args.svg)?;
        }
    }
    if drawn == 0 { Err(Failure::new("drawing", "there is no report of a bench in these files that has a plot")) } else { Ok(()) }
}

/// Draws the plots of a report, or of a report of several, into the folder, which exists. Says on standard error which files it has written.
pub(super) fn draw(report: &Value, folder: &Path) -> Result<(), Failure> {
    draw_all(report, folder).map(|_| ())
}

/// The reports in a report of several: of `bench all`, and of the GPU kit, whose steps have theirs.
fn within(report: &Value) -> impl Iterator<Item = &Value> {
    let list = |name: &str| report[name].as_array().map_or(&[][..], Vec::as_slice).iter();
    list("reports").chain(list("steps").map(|step| &step["result"]))
}

fn draw_all(report: &Value, folder: &Path) -> Result<usize, Failure> {
    let mut drawn = 0;
    for report in core::iter::once(report).chain(within(report)) {
        for chart in reports::charts(report) {
            let file = folder.join(chart.file).with_extension("svg");
            let step = format!("drawing {}", file.display());
            let svg = chart.svg().map_err(Failure::at(&step))?;
            std::fs::write(&file, svg).map_err(Failure::at(&step))?;
            eprintln!("wrote {}", file.display());
            drawn += 1;
        }
    }
    Ok(drawn)
}
