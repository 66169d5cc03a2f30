//! The importing process: opens the rkey of each part and leases the part, twice.

use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheOptions, Opened};
use cuda_ipc_core::importer::Deadline;
use serde::{Deserialize, Serialize};

use crate::bench::samples::{Spread, micros};
use crate::demo::importer::{DEADLINE, decode_any};
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::peer_process::Link;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    /// One of each part.
    pub(super) rkeys: Vec<String>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Leased {
    pub(super) first: Pass,
    pub(super) again: Pass,
}

/// One time through all parts. Microseconds of each.
#[derive(Serialize, Deserialize)]
pub(super) struct Pass {
    /// From the rkey's bytes to what can be leased.
    pub(super) open: Spread,
    pub(super) lease: Spread,
    pub(super) total_ms: f64,
    /// Chunks that were imported.
    pub(super) imported: u64,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { rkeys } = link.receive()?;
    limits::raise_open_files();
    let first = rkeys.first().ok_or_else(|| Failure::new("opening parts", "there are none"))?;
    let gpu = Gpu::with_uuid(decode_any(first)?.device)?;
    let mut options = CacheOptions::default();
    // Whatever it would do, it would do it in the middle of something that is timed.
    options.sweep = false;
    let cache = Cache::new(*gpu.cuda(), options);

    let opened = open(&gpu, &cache, &rkeys, link)?;
    let (first, leases) = lease(&cache, &opened, link)?;
    let opened_again = open(&gpu, &cache, &rkeys, link)?;
    let (again, more_leases) = lease(&cache, &opened_again, link)?;
    link.send(&Leased { first, again })?;
    link.wait_for_end();
    drop((leases, more_leases));
    Ok(())
}

/// A part that can be leased: what was opened, its address in the exporter, its length, and how long opening took.
struct Part {
    opened: Opened,
    address: u64,
    len: u64,
    us: f64,
}

fn open(gpu: &Gpu, cache: &Cache, rkeys: &[String], link: &mut Link) -> Result<Vec<Part>, Failure> {
    let mut parts = Vec::new();
    for rkey in rkeys {
        let bytes = crate::hex::decode(rkey).map_err(Failure::at("reading the rkey"))?;
        let start = Instant::now();
        let rkey = cuda_ipc_core::rkey::Rkey::decode(&bytes).map_err(Failure::at("reading the rkey"))?;
        let opened = cache.open(&rkey, gpu.ordinal(), false, Deadline::after(DEADLINE)).map_err(Failure::at("opening a part"))?;
        parts.push(Part { opened, address: rkey.base, len: rkey.len, us: micros(start.elapsed()) });
        link.progress("importer opens parts", parts.len() as u64, rkeys.len() as u64)?;
    }
    Ok(parts)
}

/// Leases all parts and keeps the leases.
fn lease<'p>(cache: &Cache, parts: &'p [Part], link: &mut Link) -> Result<(Pass, Vec<cuda_ipc_cache::OpenedLease<'p>>), Failure> {
    let before = cache.stats().imported_chunks;
    let (mut leases, mut times) = (Vec::new(), Vec::new());
    for part in parts {
        let deadline = Deadline::after(DEADLINE);
        let start = Instant::now();
        let lease = part.opened.lease(part.address, part.len, deadline).map_err(Failure::at("leasing a part"))?;
        times.push(micros(start.elapsed()));
        leases.push(lease);
        link.progress("importer leases parts", leases.len() as u64, parts.len() as u64)?;
    }
    let opens: Vec<f64> = parts.iter().map(|part| part.us).collect();
    let total_ms = (opens.iter().sum::<f64>() + times.iter().sum::<f64>()) / 1000.0;
    let imported = cache.stats().imported_chunks - before;
    Ok((Pass { open: Spread::of(&opens), lease: Spread::of(&times), total_ms, imported }, leases))
}
