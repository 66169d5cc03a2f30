//! The importing child of the demo: knows the rkey and the seed of the pattern, nothing else.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_core::importer::{Access, ConnectOptions, Deadline, Import, LegacyImport, Peer, PooledImport, Route};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_core::sys::driver::DriverError;
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
    let rkey = decode_any(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let route: Route = settings.route.parse().map_err(Failure::at("reading the route"))?;
    let Shared { memory, address, route, connect_us, import_us } = Shared::new(&gpu, &rkey, route)?;

    let difference = verify(&gpu, (address, rkey.len), rkey.base, Pattern::new(settings.seed), link)?;
    let gbps = if difference.is_none() {
        let local = Buffer::at_most(&gpu, rkey.len)?;
        Some(bandwidth::measure(&gpu, &local, address, rkey.len, link)?)
    } else {
        None
    };
    if !memory.is_current() {
        return Err(Failure::new("looking at the exporter's table once more", "the memory was retired while it was in use"));
    }
    memory.close().map_err(gpu.at("unmapping the range"))?;
    let difference = difference.map(|difference| difference.to_string());
    link.send(&Imported { bytes: rkey.len, route, connect_us, import_us, difference, gbps })?;
    link.wait_for_end();
    Ok(())
}

/// Imported memory, by what carried it.
pub(crate) enum Memory {
    Chunks(Import),
    Pooled(PooledImport),
    Legacy(LegacyImport),
}

/// The range of an rkey, mapped here.
pub(crate) struct Shared {
    pub(crate) memory: Memory,
    /// Address here of the range's first byte.
    pub(crate) address: u64,
    /// Name of the way that was taken.
    route: String,
    connect_us: f64,
    import_us: f64,
}

impl Shared {
    /// Imports what the rkey says, by what its bytes say.
    pub(crate) fn new(gpu: &Gpu, rkey: &Rkey, route: Route) -> Result<Self, Failure> {
        let (devices, deadline) = ([gpu.ordinal()], Deadline::after(DEADLINE));
        let key = match rkey.payload {
            Payload::Posix(key) => key,
            Payload::Legacy(_) => {
                let start = Instant::now();
                let import = LegacyImport::open(gpu.cuda(), rkey, gpu.ordinal(), deadline).map_err(gpu.at("opening the legacy handle"))?;
                let import_us = micros(start.elapsed());
                let address = import.address();
                return Ok(Self { memory: Memory::Legacy(import), address, route: "legacy".to_owned(), connect_us: 0.0, import_us });
            }
            _ => return Err(Failure::new("reading the rkey", "it says that the memory cannot be shared")),
        };
        let lost = |step| move |error| explained(gpu.at(step)(error), &error, &key);
        let options = ConnectOptions::default().with_route(route);
        let start = Instant::now();
        let peer = Arc::new(Peer::connect_with(&key, &options, deadline).map_err(lost("reaching the exporter"))?);
        let connect_us = micros(start.elapsed());
        let route = peer.route().to_string();
        let start = Instant::now();
        let (memory, address) = if let KeyKind::PoolAllocation { .. } = key.kind {
            let import = PooledImport::new(gpu.cuda(), &peer, &key, &devices, deadline).map_err(lost("importing the pool's memory"))?;
            let address = import.address() + (rkey.base - key.base);
            (Memory::Pooled(import), address)
        } else {
            let access = Access { devices: &devices, writable: false };
            let import =
                Import::new(gpu.cuda(), &peer, &key, rkey.base, rkey.len, access, deadline).map_err(lost("importing the range"))?;
            let address = import.address();
            (Memory::Chunks(import), address)
        };
        Ok(Self { memory, address, route, connect_us, import_us: micros(start.elapsed()) })
    }
}

impl Memory {
    /// Whether it is still the exporter's. Of a legacy handle nothing tells.
    fn is_current(&self) -> bool {
        match self {
            Self::Chunks(import) => import.is_current(),
            Self::Pooled(import) => import.is_current(),
            Self::Legacy(_) => true,
        }
    }

    pub(crate) fn close(self) -> Result<(), DriverError> {
        match self {
            Self::Chunks(import) => import.close(),
            Self::Pooled(mut import) => import.close(),
            Self::Legacy(mut import) => import.close(),
        }
    }
}

/// The rkey, whatever carries it.
pub(crate) fn decode_any(text: &str) -> Result<Rkey, Failure> {
    let step = "reading the rkey";
    let bytes = hex::decode(text).map_err(Failure::at(step))?;
    Rkey::decode(&bytes).map_err(Failure::at(step))
}

/// The rkey and its key.
pub(crate) fn decode(text: &str) -> Result<(Rkey, Key), Failure> {
    let rkey = decode_any(text)?;
    match rkey.payload {
        Payload::Posix(key) => Ok((rkey, key)),
        _ => Err(Failure::new("reading the rkey", "it is of another handle type than POSIX fd")),
    }
}

/// Compares every byte of the import with what the exporter wrote at its address.
fn verify(gpu: &Gpu, (address, len): (u64, u64), base: u64, pattern: Pattern, link: &mut Link) -> Result<Option<Difference>, Failure> {
    let mut buffer = vec![0; PART];
    let mut done = 0;
    while done < len {
        let part = part_of(&mut buffer, len - done);
        gpu.download(part, address + done).map_err(gpu.at("reading the imported bytes"))?;
        if let Some(difference) = pattern.first_difference(base + done, part) {
            return Ok(Some(difference));
        }
        done += part.len() as u64;
        link.progress("importer compares every byte", done, len)?;
    }
    Ok(None)
}
