//! An importing process of a soak: leases what exporters share, compares every byte, and is told what it should not find any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheError, CacheErrorKind, CacheOptions, Opened, OpenedLease};
use cuda_ipc_core::importer::{ConnectOptions, Deadline, ImportErrorKind, Route};
use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::rkey::{Payload, Rkey};
use serde::{Deserialize, Serialize};

use super::exporter::{Shared, What};
use super::memory::Part;
use super::state::State;
use crate::bench::samples::micros;
use crate::demo::importer::{DEADLINE, decode_any};
use crate::exporter_process::{PART, part_of};
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::pattern::Pattern;
use crate::peer_process::Link;
use crate::random::Random;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
    pub(super) seed: u64,
    /// Name of the way to exporters.
    pub(super) route: String,
    /// Bytes that its cache keeps.
    pub(super) keep: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// Lease what is shared and compare it; look for what is gone.
    Use(Shared),
    /// Let go of everything, and say what is left.
    Rest,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Used {
    /// Compared.
    pub(super) bytes: u64,
    /// Chunks leased.
    pub(super) chunks: u64,
    /// Of these, chunks that had to be imported.
    pub(super) imported: u64,
    /// What the lease took.
    pub(super) lease_us: f64,
    /// Whether what was gone was looked for, and was gone.
    pub(super) gone: bool,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, seed, route, keep } = link.receive()?;
    limits::raise_open_files();
    let gpu = Gpu::open(device)?;
    let route: Route = route.parse().map_err(Failure::at("reading the route"))?;
    let mut options = CacheOptions::default();
    options.connect = ConnectOptions::default().with_route(route);
    options.max_mapped_bytes = keep;
    let mut user = User {
        gpu: &gpu,
        cache: Cache::new(*gpu.cuda(), options),
        opened: BTreeMap::new(),
        nonces: BTreeSet::new(),
        random: Random::new(seed),
    };
    link.send(&())?;
    while let Some(ask) = link.receive_unless_ended()? {
        match ask {
            Ask::Use(shared) => link.send(&user.use_it(&shared)?)?,
            Ask::Rest => link.send(&user.rest()?)?,
        }
    }
    Ok(())
}

struct User<'g> {
    gpu: &'g Gpu,
    cache: Cache,
    /// What is kept open, by rkey, as a user keeps it for the rkey's life.
    opened: BTreeMap<String, Arc<Opened>>,
    /// Exporters seen since the last rest.
    nonces: BTreeSet<Nonce>,
    random: Random,
}

/// Whether the peer of a window has ended, as far as this process is concerned.
fn is_over(error: &CacheError) -> bool {
    error.kind == CacheErrorKind::Closed || error.import().is_some_and(|import| import.kind == ImportErrorKind::ExporterGone)
}

impl User<'_> {
    fn use_it(&mut self, shared: &Shared) -> Result<Used, Failure> {
        if shared.rkey.is_empty() {
            return Ok(Used::default());
        }
        let rkey = decode_any(&shared.rkey)?;
        if let Payload::Posix(key) = rkey.payload {
            self.nonces.insert(key.nonce);
        }
        if shared.what == What::Freed && !self.opened.contains_key(&shared.rkey) {
            // Never seen here; and an exporter that shares nothing may have ended its broker.
            return Ok(Used::default());
        }
        let mut opened = self.open(shared, &rkey)?;
        let mut used = Used::default();
        if let (Some(first), Some(last)) = (shared.parts.first(), shared.parts.last()) {
            // All of it, or a piece that begins and ends anywhere.
            let (mut start, mut end) = (first.address, last.address + last.len);
            if self.random.below(2) == 0 {
                start += self.random.below(end - start);
                end = start + 1 + self.random.below(end - start);
            }
            let imported = self.cache.stats().imported_chunks;
            let begin = Instant::now();
            let deadline = Deadline::after(DEADLINE);
            let leasing = Failure::at("leasing shared memory");
            match opened.lease(start, end - start, deadline).map(drop) {
                Err(error) if is_over(&error) => {
                    // An exporter that shared nothing for a moment has ended its broker, and with it this peer.
                    self.opened.remove(&shared.rkey);
                    opened = self.open(shared, &rkey)?;
                }
                outcome => outcome.map_err(&leasing)?,
            }
            let lease = opened.lease(start, end - start, deadline).map_err(leasing)?;
            used.lease_us = micros(begin.elapsed());
            used.chunks = match &lease {
                OpenedLease::Window(lease) => lease.chunks().into(),
                _ => 1,
            };
            used.imported = self.cache.stats().imported_chunks - imported;
            for part in &shared.parts {
                used.bytes += self.compare(part, start, end, lease.address())?;
            }
        }
        if let Some((address, len)) = shared.gone {
            match opened.lease(address, len, Deadline::after(DEADLINE)) {
                Err(error) if error.kind == CacheErrorKind::NoChunk || is_over(&error) => used.gone = true,
                Err(error) => return Err(Failure::new("leasing what was said to be gone", error)),
                Ok(_) => {
                    return Err(Failure::new(
                        "leasing what was said to be gone",
                        format!("{len:#x} bytes at {address:#x} are still leased"),
                    ));
                }
            }
        }
        if shared.what == What::Freed || self.random.below(20) == 0 {
            self.opened.remove(&shared.rkey);
        }
        Ok(used)
    }

    fn open(&mut self, shared: &Shared, rkey: &Rkey) -> Result<Arc<Opened>, Failure> {
        if let Some(opened) = self.opened.get(&shared.rkey) {
            return Ok(opened.clone());
        }
        let opened = self.cache.open(rkey, self.gpu.ordinal(), false, Deadline::after(DEADLINE));
        let opened = Arc::new(opened.map_err(Failure::at("opening what is shared"))?);
        self.opened.insert(shared.rkey.clone(), opened.clone());
        Ok(opened)
    }

    /// Compares what of a part lies in `[start, end)`, which begins at `local` here. Returns how many bytes that is.
    fn compare(&self, part: &Part, start: u64, end: u64, local: u64) -> Result<u64, Failure> {
        let (from, to) = (part.address.max(start), (part.address + part.len).min(end));
        let pattern = Pattern::new(part.seed);
        let mut buffer = vec![0; PART];
        let mut at = from;
        while at < to {
            let bytes = part_of(&mut buffer, to - at);
            self.gpu.download(bytes, local + (at - start)).map_err(self.gpu.at("reading leased memory"))?;
            if let Some(difference) = pattern.first_difference(at, bytes) {
                return Err(Failure::new("comparing leased memory", difference));
            }
            at += bytes.len() as u64;
        }
        Ok(to.saturating_sub(from))
    }

    fn rest(&mut self) -> Result<State, Failure> {
        self.opened.clear();
        self.cache.trim();
        for nonce in core::mem::take(&mut self.nonces) {
            self.cache.purge_peer(nonce);
        }
        let stats = self.cache.stats();
        State::take(self.gpu, stats.windows, stats.peers)
    }
}
