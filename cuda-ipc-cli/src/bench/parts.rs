//! `cuda-ipc bench parts`: what it costs to register, open and lease many sub-ranges of one segment, as lists of descriptors do.
//!
//! This file is the command; the exporter (`parts/exporter.rs`) registers, the importer (`parts/importer.rs`) opens and leases.

pub(crate) mod exporter;
pub(crate) mod importer;

use cuda_ipc_core::table::GRANULE;
use serde::Serialize;

use super::{Common, Found, Tables, table};
use crate::Role;
use crate::failure::Failure;
use crate::peer_process::PeerProcess;
use crate::progress::Progress;
use crate::size;
use exporter::Registered;
use importer::{Leased, Pass};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many sub-ranges, side by side
    #[arg(long, value_name = "N", default_value_t = 15_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    parts: u32,
    /// The segment, in chunks of 20 MiB
    #[arg(long, value_name = "S", default_value = "2G", value_parser = size::parse)]
    size: u64,
    #[command(flatten)]
    pub(super) common: Common,
}

/// PyTorch's large chunks.
const CHUNK: u64 = 10 * GRANULE;
/// Alignment of parts, as allocators have it.
const ALIGNMENT: u64 = 512;

#[derive(Serialize)]
struct Body {
    parts: u32,
    part_bytes: u64,
    size: u64,
    chunks: u64,
    registration: Registered,
    leases: Leased,
}

pub(super) fn run(args: &Args) -> Result<Found, Failure> {
    let mut progress = Progress::new();
    let chunks = args.size.div_ceil(CHUNK).max(1);
    let size = chunks * CHUNK;
    let part_bytes = size / u64::from(args.parts) / ALIGNMENT * ALIGNMENT;
    if part_bytes == 0 {
        return Err(Failure::Usage(format!("{} parts of {} are less than {ALIGNMENT} bytes each", args.parts, size::human(size))));
    }
    let settings = exporter::Settings { device: args.common.device, chunks, chunk: CHUNK, parts: args.parts, part: part_bytes };
    let mut exporter = PeerProcess::start(Role::BenchPartsExporter, &settings, args.common.silence())?;
    let (mut registration, facts): (Registered, _) = exporter.receive(&mut progress)?;
    // They are the importer's business alone.
    let rkeys = core::mem::take(&mut registration.rkeys);
    let mut importer = PeerProcess::start(Role::BenchPartsImporter, &importer::Settings { rkeys }, args.common.silence())?;
    let leases: Leased = importer.receive(&mut progress)?;
    progress.finish();
    importer.finish()?;
    exporter.finish()?;
    // The end of the segment that is no multiple of the parts stays untouched.
    let touched = (part_bytes * u64::from(args.parts)).div_ceil(CHUNK);
    if (leases.first.imported, leases.again.imported) != (touched, 0) {
        let cause =
            format!("of {touched} chunks the first pass has imported {} and the second {}", leases.first.imported, leases.again.imported);
        return Err(Failure::new("leasing parts", cause));
    }
    let body = Body { parts: args.parts, part_bytes, size, chunks, registration, leases };
    let about = format!("{} parts of {} in {chunks} chunks", args.parts, size::human(part_bytes));
    let tables = tables(&body);
    Found::new("parts", Some(facts), 1, &about, &body, tables)
}

fn tables(Body { registration, leases, .. }: &Body) -> Tables {
    let mut registered = table(&["of each part", "us: min / median / max", "all together ms"]);
    registered.add_row(["registration".to_owned(), registration.each.to_string(), format!("{:.1}", registration.total_ms)]);
    registered.add_row(["release".to_owned(), registration.release.to_string(), format!("{:.1}", registration.release_ms)]);
    let mut leased =
        table(&["pass", "chunks imported", "decode and open us: min / median / max", "lease us: min / median / max", "all together ms"]);
    let passes: [(&str, &Pass); 2] = [("nothing mapped yet", &leases.first), ("all mapped and held", &leases.again)];
    for (name, pass) in passes {
        leased.add_row([
            name.to_owned(),
            pass.imported.to_string(),
            pass.open.to_string(),
            format!("{:.2} / {:.2} / {:.1}", pass.lease.min, pass.lease.median, pass.lease.max),
            format!("{:.1}", pass.total_ms),
        ]);
    }
    vec![
        ("Registration inside known chunks; all registrations are held", registered),
        ("Each part's rkey decoded and opened, and all of the part leased; all leases are held", leased),
    ]
}
