//! The exporting process: many reservations, all of whose chunks are one physical chunk, so that a GPU without room has room for them.
//!
//! A handle may be mapped at any number of addresses. Each mapping has a buffer id, an entry in the table and an fd of its own, so for the importer these are
//! chunks like any others. What limits their number is the limit of open files; past it another exporter is started.

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::table::GRANULE;
use serde::{Deserialize, Serialize};

use crate::exporter_process::let_the_family_in;
use crate::failure::Failure;
use crate::gpu::{Gpu, GpuFacts};
use crate::hex;
use crate::limits;
use crate::peer_process::Link;

/// Fds left to the process.
const RESERVE: u64 = 128;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
    /// How many chunks each reservation has.
    pub(super) chunks: Vec<u32>,
    /// How many reservations at most.
    pub(super) at_most: Option<u32>,
}

/// Reservations that are exported, in the order in which they were asked for; perhaps not all of them.
#[derive(Serialize, Deserialize)]
pub(super) struct Made {
    /// The rkey of the first one: the others differ in base and length.
    pub(super) rkey: String,
    /// Base and length.
    pub(super) windows: Vec<(u64, u64)>,
    /// Why there are no more.
    pub(super) limit: Option<String>,
    pub(super) facts: GpuFacts,
    pub(super) note: Option<String>,
}

/// Reservations over one handle, given back when dropped.
struct Aliases<'g> {
    gpu: &'g Gpu,
    handle: u64,
    reserved: Vec<(u64, u64)>,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, chunks, at_most } = link.receive()?;
    limits::raise_open_files();
    let note = let_the_family_in()?;
    let gpu = Gpu::open(device)?;
    let mut aliases = Aliases::new(&gpu)?;
    let mut options = ExporterOptions::default();
    options.fd_reserve = RESERVE;
    // Nothing dies here, and looking for it would take a tenth of a processor.
    options.sweep_interval = None;
    let exporter = Exporter::new(*gpu.cuda(), options).map_err(Failure::at("making the export table"))?;

    let room = limits::open_files().saturating_sub(RESERVE);
    let (mut exports, mut used, mut limit) = (Vec::new(), 0, None);
    for (number, &count) in chunks.iter().enumerate() {
        used += u64::from(count);
        if at_most.is_some_and(|at_most| number as u64 >= at_most.into()) {
            limit = Some("as many as one exporter was asked to make".to_owned());
        } else if used > room {
            limit = Some(format!("its limit of open files is {}", limits::open_files()));
        } else {
            let made = aliases.add(count).and_then(|(base, len)| exporter.export(base, len).map_err(gpu.at("exporting a reservation")));
            match made {
                Ok(export) => exports.push(export),
                Err(failure) => limit = Some(failure.to_string()),
            }
        }
        if limit.is_some() {
            break;
        }
        link.progress("exporter makes windows", number as u64 + 1, chunks.len() as u64)?;
    }
    let Some(first) = exports.first() else {
        return Err(Failure::new("making windows", limit.unwrap_or_else(|| "none are wanted".to_owned())));
    };
    let windows = exports.iter().filter_map(|export| export.key().map(|key| (key.base, key.len))).collect();
    link.send(&Made { rkey: hex::encode(&first.rkey().encode()), windows, limit, facts: gpu.facts()?, note })?;
    link.wait_for_end();
    drop((exports, exporter));
    drop(aliases);
    Ok(())
}

impl<'g> Aliases<'g> {
    fn new(gpu: &'g Gpu) -> Result<Self, Failure> {
        let handle = gpu.create(GRANULE).map_err(gpu.at("creating the chunk"))?;
        Ok(Self { gpu, handle, reserved: Vec::new() })
    }

    /// Makes a reservation of `count` chunks.
    fn add(&mut self, count: u32) -> Result<(u64, u64), Failure> {
        let (gpu, len) = (self.gpu, u64::from(count) * GRANULE);
        let base = gpu.reserve(len).map_err(gpu.at("reserving address space"))?;
        for at in (base..base + len).step_by(usize::try_from(GRANULE).unwrap_or(usize::MAX)) {
            if let Err(error) = gpu.map(at, GRANULE, self.handle) {
                let _ = if at > base { gpu.unmap(base, at - base) } else { Ok(()) };
                let _ = gpu.free_reservation(base, len);
                return Err(gpu.at("mapping the chunk once more")(error));
            }
        }
        self.reserved.push((base, len));
        gpu.set_access(base, len, true).map_err(gpu.at("giving access to a reservation"))?;
        Ok((base, len))
    }
}

impl Drop for Aliases<'_> {
    fn drop(&mut self) {
        for &(base, len) in &self.reserved {
            if self.gpu.unmap(base, len).is_ok() {
                let _ = self.gpu.free_reservation(base, len);
            }
        }
        let _ = self.gpu.release(self.handle);
    }
}
