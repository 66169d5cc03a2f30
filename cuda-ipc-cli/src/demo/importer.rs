//! The importing child of the demo: knows the rkey and the seed of the pattern, nothing else.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_core::importer::{Access, ConnectOptions, Deadline, Import, Peer, Route};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::rkey::{Payload, Rkey};
use serde::{Deserialize, Serialize};

use crate::bench::bandwidth;
use crate::bench::samples::micros;
use crate::exporter_process::{PART, part_of};
use crate::failure::Failure;
use crate::finding::explained;
use crate::gpu::{Buffer, Gpu};
use crate::hex;
use crate::limits;
use crate::pattern::{Difference, Pattern};
use crate::peer_process::Link;

/// What the command wants.
#[derive(Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Seed of the pattern that the exporter writes.
    pub(crate) seed: u64,
    /// Name of the way that may be taken.
    pub(crate) route: String,
}

/// What came out.
#[derive(Serialize, Deserialize)]
pub(crate) struct Imported {
    /// Length of the range.
    pub(crate) bytes: u64,
    /// Name of the way that was taken.
    pub(crate) route: String,
    pub(crate) connect_us: f64,
    pub(crate) import_us: f64,
    /// The first wrong byte; none if all are right.
    pub(crate) difference: Option<String>,
    /// Measured where all bytes are right.
    pub(crate) gbps: Option<f64>,
}

/// How long reaching the exporter and importing may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn run(link: &mut Link) -> Result<(), Failure> {
    let settings: Settings = link.receive()?;
    let rkey: String = link.receive()?;
    limits::raise_open_files();
    let (rkey, key) = decode(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;

    let route: Route = settings.route.parse().map_err(Failure::at("reading the route"))?;
    let options = ConnectOptions::default().with_route(route);
    let start = Instant::now();
    let peer = Peer::connect_with(&key, &options, Deadline::after(DEADLINE))
        .map_err(|error| explained(gpu.at("reaching the exporter")(error), &error, &key))?;
    let connect_us = micros(start.elapsed());

    let (route, peer, devices) = (peer.route().to_string(), Arc::new(peer), [gpu.ordinal()]);
    let access = Access { devices: &devices, writable: false };
    let start = Instant::now();
    let import = Import::new(gpu.cuda(), &peer, &key, rkey.base, rkey.len, access, Deadline::after(DEADLINE))
        .map_err(|error| explained(gpu.at("importing the range")(error), &error, &key))?;
    let import_us = micros(start.elapsed());

    let difference = verify(&gpu, &import, rkey.base, Pattern::new(settings.seed), link)?;
    let gbps = if difference.is_none() {
        let local = Buffer::at_most(&gpu, rkey.len)?;
        Some(bandwidth::measure(&gpu, &local, import.address(), rkey.len, link)?)
    } else {
        None
    };
    if !import.is_current() {
        return Err(Failure::new("looking at the exporter's table once more", "a chunk was retired while it was in use"));
    }
    import.close().map_err(gpu.at("unmapping the range"))?;
    let difference = difference.map(|difference| difference.to_string());
    link.send(&Imported { bytes: rkey.len, route, connect_us, import_us, difference, gbps })?;
    link.wait_for_end();
    Ok(())
}

/// The rkey and its key.
pub(crate) fn decode(text: &str) -> Result<(Rkey, Key), Failure> {
    let step = "reading the rkey";
    let bytes = hex::decode(text).map_err(Failure::at(step))?;
    let rkey = Rkey::decode(&bytes).map_err(Failure::at(step))?;
    match rkey.payload {
        Payload::Posix(key) => Ok((rkey, key)),
        _ => Err(Failure::new(step, "it is of another handle type than POSIX fd")),
    }
}

/// Compares every byte of the import with what the exporter wrote at its address.
fn verify(gpu: &Gpu, import: &Import, base: u64, pattern: Pattern, link: &mut Link) -> Result<Option<Difference>, Failure> {
    let mut buffer = vec![0; PART];
    let mut done = 0;
    while done < import.len() {
        let part = part_of(&mut buffer, import.len() - done);
        gpu.download(part, import.address() + done).map_err(gpu.at("reading the imported bytes"))?;
        if let Some(difference) = pattern.first_difference(base + done, part) {
            return Ok(Some(difference));
        }
        done += part.len() as u64;
        link.progress("importer compares every byte", done, import.len())?;
    }
    Ok(None)
}
