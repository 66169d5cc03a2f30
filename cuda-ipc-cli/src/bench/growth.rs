//! `cuda-ipc bench growth`: what it costs that a reservation has grown by one chunk, against the import of one chunk alone.
//!
//! This file is the command: it has the exporter (`growth/exporter.rs`) grow and shrink, and the importer (`growth/importer.rs`) lease what is new.

pub(crate) mod exporter;
pub(crate) mod importer;

use serde::Serialize;

use super::samples::{Comparison, take_turns};
use super::{Common, Found, Rows, Tables, table};
use crate::Role;
use crate::failure::Failure;
use crate::gpu::GpuFacts;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use exporter::Exported;
use importer::Timed;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many chunks of 2 MiB are mapped before; several numbers are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 100, 2000], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunks: Vec<u32>,
    /// How often
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    reps: u32,
    #[command(flatten)]
    pub(super) common: Common,
}

/// What was found for one number of chunks. Times are microseconds; the floor is one chunk in a fresh window of one chunk.
#[derive(Serialize)]
struct Row {
    chunks: u32,
    /// A lease of the new chunk.
    new_chunk: Comparison,
    /// A lease of all chunks, the new one among them.
    all_chunks: Comparison,
    /// Chunks that each lease has imported, least and most: of the new chunk, of all, of the fresh window.
    imported: [(u64, u64); 3],
}

/// The three leases, in turns.
#[derive(Clone, Copy)]
enum Turn {
    Fresh,
    New,
    All,
}

pub(super) fn run(args: &Args) -> Result<Found, Failure> {
    let mut progress = Progress::new();
    let (mut rows, mut facts) = (Vec::new(), None);
    for &chunks in &args.chunks {
        let (row, found) = measure(args, chunks, &mut progress)?;
        rows.push(row);
        facts.get_or_insert(found);
    }
    progress.finish();
    let tables = tables(&rows);
    Found::new("growth", facts, args.reps, &format!("{} times each, in turns", args.reps), &Rows { rows }, tables)
}

fn measure(args: &Args, chunks: u32, progress: &mut Progress) -> Result<(Row, GpuFacts), Failure> {
    let settings = exporter::Settings { device: args.common.device, chunks };
    let mut exporter = PeerProcess::start(Role::BenchGrowthExporter, &settings, args.common.silence())?;
    let Exported { rkey, facts } = exporter.receive(progress)?;
    let mut importer = PeerProcess::start(Role::BenchGrowthImporter, &importer::Settings { rkey }, args.common.silence())?;
    let () = importer.receive(progress)?;

    let mut imported = [(u64::MAX, 0); 3];
    let phase = format!("one more than {chunks} chunks");
    let samples = {
        // All turns talk to both processes.
        let cell = core::cell::RefCell::new((&mut exporter, &mut importer, &mut *progress, &mut imported));
        let turn = |turn: Turn| {
            let mut guard = cell.borrow_mut();
            let (exporter, importer, progress, imported) = &mut *guard;
            lease(turn, exporter, importer, progress, imported)
        };
        let report = |done, total| {
            cell.borrow_mut().2.show(&phase, done, total);
            Ok(())
        };
        take_turns(args.reps, report, &mut [&mut || turn(Turn::Fresh), &mut || turn(Turn::New), &mut || turn(Turn::All)])?
    };
    importer.finish()?;
    exporter.finish()?;
    let [fresh, new, all] = samples.as_slice() else { return Err(Failure::new("measuring", "samples are missing")) };
    Ok((Row { chunks, new_chunk: Comparison::of(fresh, new), all_chunks: Comparison::of(fresh, all), imported }, facts))
}

/// One lease, of something that is new for it; afterwards everything is as before.
fn lease(
    turn: Turn,
    exporter: &mut PeerProcess,
    importer: &mut PeerProcess,
    progress: &mut Progress,
    imported: &mut [(u64, u64); 3],
) -> Result<f64, Failure> {
    let (make, ask) = match turn {
        Turn::Fresh => (exporter::Ask::Fresh, None),
        Turn::New => (exporter::Ask::Grow, Some(importer::Ask::New)),
        Turn::All => (exporter::Ask::Grow, Some(importer::Ask::All)),
    };
    exporter.send(&make)?;
    let rkey: String = exporter.receive(progress)?;
    importer.send(&ask.unwrap_or(importer::Ask::Fresh { rkey }))?;
    let Timed { us, imported: count } = importer.receive(progress)?;
    exporter.send(&exporter::Ask::Undo)?;
    let () = exporter.receive(progress)?;
    importer.send(&importer::Ask::Settle)?;
    let () = importer.receive(progress)?;
    if count != 1 {
        return Err(Failure::new("leasing one more chunk", format!("{count} chunks were imported")));
    }
    let [new, all, fresh] = imported;
    let (least, most) = match turn {
        Turn::Fresh => fresh,
        Turn::New => new,
        Turn::All => all,
    };
    (*least, *most) = (count.min(*least), count.max(*most));
    Ok(us)
}

fn tables(rows: &[Row]) -> Tables {
    let mut growth = table(&[
        "mapped before",
        "one chunk, fresh window us: min / median / max",
        "lease of the new chunk us",
        "ratio of medians",
        "median of ratios",
        "lease of all chunks us",
        "ratio of medians",
        "median of ratios",
    ]);
    for Row { chunks, new_chunk, all_chunks, .. } in rows {
        growth.add_row([
            chunks.to_string(),
            new_chunk.floor.to_string(),
            new_chunk.ours.to_string(),
            format!("{:.3}", new_chunk.ratio_of_medians),
            format!("{:.3}", new_chunk.median_of_pair_ratios),
            all_chunks.ours.to_string(),
            format!("{:.3}", all_chunks.ratio_of_medians),
            format!("{:.3}", all_chunks.median_of_pair_ratios),
        ]);
    }
    vec![("A lease after the reservation has grown by one chunk; each has imported exactly one", growth)]
}
