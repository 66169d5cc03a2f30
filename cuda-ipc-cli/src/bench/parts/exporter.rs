//! The exporting process: one segment, all of which is exported, and a registration of each part of it.

use std::time::Instant;

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use serde::{Deserialize, Serialize};

use crate::bench::samples::{Spread, micros};
use crate::exporter_process::let_the_family_in;
use crate::failure::Failure;
use crate::gpu::{Chunks, Gpu};
use crate::hex;
use crate::limits;
use crate::peer_process::Link;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
    pub(super) chunks: u64,
    pub(super) chunk: u64,
    pub(super) parts: u32,
    /// Bytes of a part.
    pub(super) part: u64,
}

/// What registration took.
#[derive(Serialize, Deserialize)]
pub(super) struct Registered {
    /// Microseconds of each.
    pub(super) each: Spread,
    pub(super) total_ms: f64,
    /// Microseconds of each release of another registration of the same part.
    pub(super) release: Spread,
    pub(super) release_ms: f64,
    /// The encoded rkeys as hex digits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) rkeys: Vec<String>,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, chunks, chunk, parts, part } = link.receive()?;
    limits::raise_open_files();
    // Said by the other benches; here it would stand beside no figure.
    let _ = let_the_family_in()?;
    let gpu = Gpu::open(device)?;
    let sizes = vec![chunk; usize::try_from(chunks).unwrap_or(usize::MAX)];
    let memory = Chunks::new(&gpu, &sizes)?;
    let exporter = Exporter::new(*gpu.cuda(), ExporterOptions::default()).map_err(Failure::at("making the export table"))?;
    let whole = exporter.export(memory.address(), memory.len()).map_err(gpu.at("exporting the segment"))?;

    // Twice, so that there is something to release while all parts stay registered.
    let mut passes = Vec::new();
    for phase in ["exporter registers parts", "exporter registers parts again"] {
        let (mut exports, mut each) = (Vec::new(), Vec::new());
        for number in 0..parts {
            let address = memory.address() + u64::from(number) * part;
            let start = Instant::now();
            let export = exporter.export(address, part).map_err(gpu.at("exporting a part"))?;
            each.push(micros(start.elapsed()));
            exports.push(export);
            link.progress(phase, number.into(), parts.into())?;
        }
        passes.push((exports, each));
    }
    let (again, _) = passes.pop().unwrap_or_default();
    let (held, each) = passes.pop().unwrap_or_default();
    let mut releases = Vec::new();
    for export in again {
        let start = Instant::now();
        drop(export);
        releases.push(micros(start.elapsed()));
    }
    let rkeys = held.iter().map(|export| hex::encode(&export.rkey().encode())).collect();
    let ms = |each: &[f64]| each.iter().sum::<f64>() / 1000.0;
    let registered =
        Registered { each: Spread::of(&each), total_ms: ms(&each), release: Spread::of(&releases), release_ms: ms(&releases), rkeys };
    link.send(&(registered, gpu.facts()?))?;
    link.wait_for_end();
    drop((held, whole, exporter));
    Ok(())
}
