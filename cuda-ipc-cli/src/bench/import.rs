//! Import of all chunks of a range, against the bare calls for the same chunks.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::importer::{Access, ConnectOptions, Deadline, Import, ImportError, Peer, Route};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::rkey::Rkey;
use serde::{Deserialize, Serialize};

use super::samples::{Comparison, Spread, compare, micros};
use super::steps::{self, Step};
use super::{Measured, Pairs, Tables, start_exporter, table};
use crate::Role;
use crate::demo::importer::{DEADLINE, decode};
use crate::exporter_process::Kind;
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;
use crate::size;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) rkey: String,
    pub(super) reps: u32,
    /// Whether imports through a cache are measured, too.
    pub(super) cache: bool,
}

/// What was found for one number of chunks. Times are microseconds.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    chunks: usize,
    bytes: u64,
    import: Comparison,
    /// What a first contact adds: connect and first look-up, less the usual look-up.
    first_contact: Spread,
    /// Reaching a peer that is not known.
    connect: Spread,
    /// Looking the chunks up in a table that was mapped just now.
    first_lookup: Spread,
    /// The same in a table that was read before: part of every import.
    known_lookup: Spread,
    /// Where the time goes.
    steps: Vec<Step>,
    cached: Option<Cached>,
}

/// Import through a cache: a window of a known peer, and a lease of all of it.
#[derive(Serialize, Deserialize)]
struct Cached {
    import: Comparison,
    /// Of ours, opening the window.
    window: Spread,
    /// Of ours, the lease.
    lease: Spread,
    /// Chunks that each lease has imported.
    imported_chunks: u64,
}

pub(super) fn measure(pairs: &Pairs, cache: bool, sizes: Vec<u64>, progress: &mut Progress) -> Measured<Row> {
    let (exporter, exported) = start_exporter(&pairs.common, Kind::Vmm, sizes, progress)?;
    let settings = Settings { rkey: exported.rkey, reps: pairs.reps, cache };
    let mut importer = PeerProcess::start(Role::BenchImporter, &settings, pairs.common.silence())?;
    let row = importer.receive(progress)?;
    progress.finish();
    importer.finish()?;
    exporter.finish()?;
    Ok((row, exported.facts))
}

pub(super) fn tables(rows: &[Row]) -> Tables {
    let mut imports = table(&[
        "chunks",
        "size",
        "floor us: min / median / max",
        "ours us: min / median / max",
        "ratio of medians",
        "median of pair ratios",
    ]);
    let mut contacts = table(&[
        "chunks",
        "first contact adds us: min / median / max",
        "connect us: min / median / max",
        "first look-up us",
        "look-up in a known table us",
    ]);
    let mut cached = table(&[
        "chunks",
        "floor us: min / median / max",
        "window and lease us: min / median / max",
        "ratio of medians",
        "median of pair ratios",
        "of it the window us",
    ]);
    let ratios = |pair: &Comparison| [format!("{:.3}", pair.ratio_of_medians), format!("{:.3}", pair.median_of_pair_ratios)];
    for row in rows {
        let chunks = row.chunks.to_string();
        let [of_medians, of_pairs] = ratios(&row.import);
        let (floor, ours) = (row.import.floor.to_string(), row.import.ours.to_string());
        imports.add_row([chunks.clone(), size::human(row.bytes), floor, ours, of_medians, of_pairs]);
        contacts.add_row([
            chunks.clone(),
            row.first_contact.to_string(),
            row.connect.to_string(),
            row.first_lookup.to_string(),
            row.known_lookup.to_string(),
        ]);
        if let Some(Cached { import, window, .. }) = &row.cached {
            let [of_medians, of_pairs] = ratios(import);
            cached.add_row([chunks.clone(), import.floor.to_string(), import.ours.to_string(), of_medians, of_pairs, window.to_string()]);
        }
    }
    let mut tables = vec![
        ("Import from a known peer", imports),
        ("What a first contact adds: connect and first look-up, less the look-up that every import does", contacts),
    ];
    if rows.iter().any(|row| row.cached.is_some()) {
        tables.push(("Import through a cache: a fresh window of a known peer, and a lease of all of it", cached));
    }
    tables.push((steps::TITLE, steps::table(rows.iter().map(|row| (row.chunks, &row.steps[..])))));
    tables
}

/// The importing process.
pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { rkey, reps, cache } = link.receive()?;
    limits::raise_open_files();
    let (rkey, key) = decode(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let connect = || connect_by(&gpu, &key, Route::Pidfd);
    let look_up = |peer: &Peer| peer.lookup(rkey.base, rkey.len).map_err(gpu.at::<ImportError>("looking the chunks up"));

    let (mut connects, mut first_lookups) = (Vec::new(), Vec::new());
    for _ in 0..reps.max(100) {
        let start = Instant::now();
        let peer = connect()?;
        let connected = Instant::now();
        let found = look_up(&peer)?;
        first_lookups.push(micros(connected.elapsed()));
        connects.push(micros(connected - start));
        drop((found, peer));
    }

    let peer = Arc::new(connect()?);
    let found = look_up(&peer)?;
    let mut known_lookups = Vec::new();
    for _ in 0..reps.max(100) {
        let start = Instant::now();
        let found = look_up(&peer)?;
        known_lookups.push(micros(start.elapsed()));
        drop(found);
    }

    let known_lookup = Spread::of(&known_lookups);
    let first_contacts: Vec<f64> =
        connects.iter().zip(&first_lookups).map(|(connect, lookup)| connect + lookup - known_lookup.median).collect();

    let chunks: Vec<(i32, u64)> = found.iter().filter_map(|(_, chunk)| Some((chunk.fd?.cast_signed(), chunk.len))).collect();
    if chunks.len() != found.len() {
        return Err(Failure::new("preparing the floor", "the exporter holds no fd for some chunks"));
    }
    let pidfd = pidfd_sys::pidfd_open(key.pid).map_err(Failure::at("opening a pidfd"))?;
    let floor = |gpu: &Gpu| floor(gpu, pidfd.as_fd(), &chunks, rkey.len);
    let phase = format!("import of {} chunks", chunks.len());
    let import = compare(reps, link, &phase, || floor(&gpu), || import_from(&gpu, &peer, &rkey, &key))?;
    let cached = if cache { Some(cached(&gpu, &rkey, &key, reps, link, || floor(&gpu))?) } else { None };
    let timed = gpu.timed()?;
    let steps = steps::measure(reps, link, || floor(&timed), || import_from(&timed, &peer, &rkey, &key))?;
    link.send(&Row {
        chunks: chunks.len(),
        bytes: rkey.len,
        import,
        first_contact: Spread::of(&first_contacts),
        connect: Spread::of(&connects),
        first_lookup: Spread::of(&first_lookups),
        known_lookup,
        steps,
        cached,
    })?;
    link.wait_for_end();
    Ok(())
}

/// A new contact with the exporter, by one way only.
pub(super) fn connect_by(gpu: &Gpu, key: &Key, route: Route) -> Result<Peer, Failure> {
    let options = ConnectOptions::default().with_route(route);
    Peer::connect_with(key, &options, Deadline::after(DEADLINE)).map_err(gpu.at("reaching the exporter"))
}

/// Imports the range and unmaps it again; microseconds of the import.
pub(super) fn import_from(gpu: &Gpu, peer: &Arc<Peer>, rkey: &Rkey, key: &Key) -> Result<f64, Failure> {
    let devices = [gpu.ordinal()];
    let access = Access { devices: &devices, writable: false };
    let start = Instant::now();
    let import = Import::new(gpu.cuda(), peer, key, rkey.base, rkey.len, access, Deadline::after(DEADLINE))
        .map_err(gpu.at("importing the range"))?;
    let elapsed = start.elapsed();
    import.close().map_err(gpu.at("unmapping the range"))?;
    Ok(micros(elapsed))
}

/// The bare calls for the same, and their undoing; microseconds of the first.
fn floor(gpu: &Gpu, pidfd: BorrowedFd<'_>, chunks: &[(i32, u64)], span: u64) -> Result<f64, Failure> {
    let start = Instant::now();
    let base = bare_import(gpu, pidfd, chunks, span)?;
    let elapsed = start.elapsed();
    gpu.unmap(base, span).and_then(|()| gpu.free_reservation(base, span)).map_err(gpu.at("taking the floor down"))?;
    Ok(micros(elapsed))
}

/// The same through a cache, against the same floor.
fn cached(
    gpu: &Gpu,
    rkey: &Rkey,
    key: &Key,
    reps: u32,
    link: &mut Link,
    floor: impl FnMut() -> Result<f64, Failure>,
) -> Result<Cached, Failure> {
    let mut options = CacheOptions::default();
    // Whatever it would do, it would do it in the middle of something that is timed.
    options.sweep = false;
    let cache = Cache::new(*gpu.cuda(), options);
    let open = |writable| cache.window(key, gpu.ordinal(), writable, Deadline::after(DEADLINE)).map_err(Failure::at("opening a window"));
    let (mut windows, mut leases, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    let ours = || {
        // Makes the peer known and its table read, by a window that is not used.
        let known = open(true)?;
        known.peer().lookup(rkey.base, rkey.len).map_err(gpu.at("looking the chunks up"))?;
        let (before, deadline) = (cache.stats().imported_chunks, Deadline::after(DEADLINE));
        let start = Instant::now();
        let window = open(false)?;
        let opened = start.elapsed();
        let lease = window.lease(rkey.base, rkey.len, deadline).map_err(Failure::at("leasing the range"))?;
        let leased = start.elapsed();
        drop(lease);
        counts.push(cache.stats().imported_chunks - before);
        windows.push(micros(opened));
        leases.push(micros(leased - opened));
        // So that the next window is a fresh one.
        cache.purge_peer(key.nonce);
        Ok(micros(leased))
    };
    let import = compare(reps, link, "import through a cache", floor, ours)?;
    let imported_chunks = counts.first().copied().unwrap_or_default();
    if counts.iter().any(|&count| count != imported_chunks) {
        return Err(Failure::new("importing through a cache", "the leases have imported different numbers of chunks"));
    }
    Ok(Cached { import, window: Spread::of(&windows), lease: Spread::of(&leases), imported_chunks })
}

/// The least that importing can be: the calls that nobody can leave out, with all they need known beforehand.
pub(super) fn bare_import(gpu: &Gpu, pidfd: BorrowedFd<'_>, chunks: &[(i32, u64)], span: u64) -> Result<u64, Failure> {
    let driver = |step: &'static str| gpu.at(step);
    let base = gpu.reserve(span).map_err(driver("floor: reserving"))?;
    let mut at = base;
    for &(number, len) in chunks {
        let fd = pidfd_sys::pidfd_getfd(pidfd, number).map_err(Failure::at("floor: fetching an fd"))?;
        let handle = gpu.import_fd(fd.as_fd()).map_err(driver("floor: importing"))?;
        drop(fd);
        gpu.map(at, len, handle).map_err(driver("floor: mapping"))?;
        gpu.release(handle).map_err(driver("floor: releasing"))?;
        at += len;
    }
    gpu.set_access(base, span, false).map_err(driver("floor: giving access"))?;
    Ok(base)
}
