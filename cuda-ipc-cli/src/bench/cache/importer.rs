//! The importing process: opens windows, warms them, and has the loops run over them.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheOptions, PeerWindows, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::key::Key;
use cuda_ipc_core::sys::driver::Cuda;
use serde::{Deserialize, Serialize};

use super::contest::Contest;
use super::loops::{ByAddress, ByHandle, Lane, Nothing, Piece, Place, RUN};
use super::report::{Findings, HitRow, OpenRow};
use super::threads;
use crate::bench::machine;
use crate::bench::samples::micros;
use crate::demo::importer::{DEADLINE, decode};
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::peer_process::Link;

/// What the command wants measured.
#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    /// Numbers of windows, ascending.
    pub(super) windows: Vec<u32>,
    /// Chunks of a lease.
    pub(super) chunks: Vec<u32>,
    pub(super) threads: Vec<u32>,
    /// At how many windows threads are measured.
    pub(super) threads_at: u32,
    /// How many windows, the first ones, have the most chunks; the others have one.
    pub(super) wide: u32,
    pub(super) reps: u32,
    pub(super) span_ms: u64,
}

/// An exporter's windows.
#[derive(Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) rkey: String,
    pub(super) windows: Vec<(u64, u64)>,
}

/// A window that can be opened.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) key: Key,
    /// Number of its exporter.
    pub(super) peer: u32,
}

impl Source {
    pub(super) const fn place(&self) -> Place {
        Place { address: self.key.base, peer: self.peer }
    }
}

/// A cache, and windows of it that are open and mapped, in the order of their sources.
pub(super) struct Open {
    pub(super) cache: Cache,
    /// By number of the exporter.
    pub(super) peers: Vec<Arc<PeerWindows>>,
    pub(super) windows: Vec<Arc<Window>>,
    /// Times that opening has taken so far.
    pub(super) window_time: Duration,
    pub(super) lease_time: Duration,
}

impl Open {
    pub(super) fn new(cuda: Cuda) -> Self {
        let mut options = CacheOptions::default();
        options.max_windows = u64::MAX;
        // Asleep anyway; with many caches side by side its threads would be many.
        options.sweep = false;
        Self {
            cache: Cache::new(cuda, options),
            peers: Vec::new(),
            windows: Vec::new(),
            window_time: Duration::ZERO,
            lease_time: Duration::ZERO,
        }
    }

    /// Opens one more window and maps all of it.
    pub(super) fn add(&mut self, source: &Source, device: i32) -> Result<(), Failure> {
        let (start, key) = (Instant::now(), &source.key);
        let window = self.cache.window(key, device, false, Deadline::after(DEADLINE)).map_err(Failure::at("opening a window"))?;
        let opened = Instant::now();
        let lease = window.lease(key.base, key.len, Deadline::after(DEADLINE)).map_err(Failure::at("mapping a window"))?;
        drop(lease);
        self.window_time += opened - start;
        self.lease_time += opened.elapsed();
        self.windows.push(window);
        while self.peers.len() <= source.peer as usize {
            // Sources come in the order of their exporters, so this is the next one; a lane that has none of an exporter's windows never asks for it.
            let peer = self.cache.peer(key.nonce).ok_or_else(|| Failure::new("opening a window", "the cache does not know the peer"))?;
            self.peers.push(peer);
        }
        Ok(())
    }
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let settings: Settings = link.receive()?;
    let offers: Vec<Offer> = link.receive()?;
    limits::raise_open_files();
    let (gpu, sources) = sources(&offers)?;
    let cpus = machine::cpus();
    let contest = Contest { reps: settings.reps, span: Duration::from_millis(settings.span_ms), cpus: &cpus };

    let mut findings = Findings::default();
    let mut open = Open::new(*gpu.cuda());
    let mut done = 0;
    for &wanted in &settings.windows {
        let wanted = (wanted as usize).min(sources.len());
        if let Err(failure) = grow(&mut open, &sources, wanted, gpu.ordinal(), link) {
            if open.windows.is_empty() {
                return Err(failure);
            }
            findings.notes.push(format!("the importer opens no more than {} windows: {failure}", open.windows.len()));
        }
        let count = open.windows.len();
        if count == done {
            continue;
        }
        done = count;
        findings.opening.push(OpenRow::new(count, micros(open.window_time), micros(open.lease_time)));
        let misses = open.cache.stats().misses;
        for &chunks in &settings.chunks {
            link.progress(&format!("leases of {chunks} of {count} windows"), findings.hits.len() as u64, total(&settings))?;
            let leased = if chunks == 1 { count } else { count.min(settings.wide as usize) };
            findings.hits.push(hits(&contest, &open, &sources, piece(&settings, chunks), leased)?);
        }
        if findings.threads.is_empty() && count >= settings.threads_at as usize {
            threads::measure(&mut findings, &contest, &settings, &gpu, &open, &sources, link)?;
        }
        findings.misses += open.cache.stats().misses - misses;
    }
    // There are never so many windows: then at as many as there are.
    if findings.threads.is_empty() {
        let misses = open.cache.stats().misses;
        threads::measure(&mut findings, &contest, &settings, &gpu, &open, &sources, link)?;
        findings.misses += open.cache.stats().misses - misses;
    }
    findings.imported_chunks = open.cache.stats().imported_chunks;
    link.send(&findings)?;
    link.wait_for_end();
    Ok(())
}

fn total(settings: &Settings) -> u64 {
    (settings.windows.len() * settings.chunks.len()) as u64
}

/// What a lease of so many chunks is.
pub(super) fn piece(settings: &Settings, chunks: u32) -> Piece {
    let widest = settings.chunks.iter().copied().max().unwrap_or(1);
    Piece { chunks, of: if chunks == 1 { 1 } else { widest }, deadline: Deadline::after(Duration::from_secs(365 * 86_400)) }
}

/// The GPU of the offers, and every window that is on offer.
fn sources(offers: &[Offer]) -> Result<(Gpu, Vec<Source>), Failure> {
    let mut sources = Vec::new();
    let mut gpu = None;
    for (peer, offer) in (0..).zip(offers) {
        let (rkey, key) = decode(&offer.rkey)?;
        if gpu.is_none() {
            gpu = Some(Gpu::with_uuid(rkey.device)?);
        }
        sources.extend(offer.windows.iter().map(|&(base, len)| Source { key: Key { base, len, ..key }, peer }));
    }
    gpu.map(|gpu| (gpu, sources)).ok_or_else(|| Failure::new("opening windows", "none are on offer"))
}

/// Opens windows until there are so many.
fn grow(open: &mut Open, sources: &[Source], count: usize, device: i32, link: &mut Link) -> Result<(), Failure> {
    for source in sources.get(open.windows.len()..count).unwrap_or(&[]) {
        open.add(source, device)?;
        link.progress("importer opens windows", open.windows.len() as u64, count as u64)?;
    }
    Ok(())
}

/// One thread, all ways to a window.
fn hits(contest: &Contest<'_>, open: &Open, sources: &[Source], piece: Piece, leased: usize) -> Result<HitRow, Failure> {
    let some = |count: usize| open.windows.iter().take(count).cloned().collect::<Vec<_>>();
    let by_address = |run| ByAddress {
        lanes: vec![Lane { indexes: open.peers.clone(), places: sources.iter().take(leased).map(Source::place).collect() }],
        piece,
        run,
    };
    let handles = ByHandle { lanes: vec![some(leased)], piece };
    let one = ByHandle { lanes: vec![some(1)], piece };
    let choice = Nothing { lanes: &handles.lanes };
    let times = contest.run(1, &[&choice, &handles, &by_address(1), &by_address(RUN), &one])?;
    let windows = open.windows.len();
    HitRow::new(windows, piece.chunks, leased, &times).ok_or_else(|| Failure::new("measuring", "no times"))
}
