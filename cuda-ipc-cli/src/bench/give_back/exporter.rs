//! The exporting process: shares, and frees when it is told to.

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use serde::{Deserialize, Serialize};

use super::now;
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
}

#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// Make the memory and export it.
    Share,
    /// Free it, having told importers or not.
    Free { tell: bool },
}

#[derive(Serialize, Deserialize)]
pub(super) struct Shared {
    pub(super) rkey: String,
}

/// When what was done, by CLOCK_MONOTONIC.
#[derive(Serialize, Deserialize)]
pub(super) struct Freed {
    /// Before importers were told.
    pub(super) told: Option<i64>,
    /// After the driver's unmap had returned.
    pub(super) freed: i64,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, chunks, chunk } = link.receive()?;
    limits::raise_open_files();
    // The command has no other place for a note than beside the figures, and there it would say nothing about them.
    let _ = let_the_family_in()?;
    let gpu = Gpu::open(device)?;
    let sizes: Vec<u64> = (0..chunks).map(|_| chunk).collect();
    // Once for nothing: what the driver keeps afterwards, such as page tables, it has then before the free memory is looked at.
    Chunks::new(&gpu, &sizes)?.free(chunks * chunk)?;
    let exporter = Exporter::new(*gpu.cuda(), ExporterOptions::default()).map_err(Failure::at("making the export table"))?;
    link.send(&gpu.facts()?)?;

    let Ask::Share = link.receive()? else { return Err(Failure::new("sharing", "asked to free what is not shared")) };
    let memory = Chunks::new(&gpu, &sizes)?;
    let (base, len) = (memory.address(), memory.len());
    let export = exporter.export(base, len).map_err(gpu.at("exporting the range"))?;
    link.send(&Shared { rkey: hex::encode(&export.rkey().encode()) })?;

    let Ask::Free { tell } = link.receive()? else { return Err(Failure::new("freeing", "asked to share once more")) };
    let told = tell.then(now);
    if tell {
        exporter.retire(base, len);
    }
    memory.free(len)?;
    let freed = now();
    link.send(&Freed { told, freed })?;
    link.wait_for_end();
    Ok(())
}
