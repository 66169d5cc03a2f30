//! Leases that are misses: each of several threads leases chunks that are not mapped, of one window, and all threads lease the same one.
//!
//! The driver does imports one after the other, so threads cannot be faster than one. As many threads that make the bare calls for as many chunks show what of it
//! is the driver's. After each round the window is closed, which is not timed, and the next round begins with a fresh one.

use core::time::Duration;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Barrier;
use std::time::Instant;

use comfy_table::Table;
use cuda_ipc_cache::{Cache, CacheOptions, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::key::Key;
use cuda_ipc_core::table::GRANULE;
use serde::{Deserialize, Serialize};

use super::Args;
use crate::Role;
use crate::bench::import::bare_import;
use crate::bench::samples::{Comparison, Spread, micros};
use crate::bench::{machine, start_exporter};
use crate::demo::importer::{DEADLINE, decode};
use crate::exporter_process::Kind;
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;

/// Chunks that a thread leases in a round.
const EACH: u32 = 8;
pub(super) const TITLE: &str =
    "Misses: leases of chunks of 2 MiB that are not mapped, of one window. us (min / median / max), of a round over its leases";

#[derive(Serialize, Deserialize)]
struct Settings {
    rkey: String,
    threads: Vec<u32>,
    reps: u32,
}

/// One number of threads.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    threads: u32,
    /// From the first lease to the last one's return, over the number of leases.
    different_us: Spread,
    /// The bare calls for the same chunks on as many threads: the floor.
    different: Comparison,
    /// The same where all threads lease one chunk: the whole of it.
    same_us: Spread,
    /// Chunks imported in each round, least and most: of different chunks, of the same.
    imported: [(u64, u64); 2],
}

/// Starts an exporter and an importer, and has them measured.
pub(super) fn measure(args: &Args, threads: &[u32], progress: &mut Progress) -> Result<Vec<Row>, Failure> {
    let most = threads.iter().copied().max().unwrap_or(1);
    let chunks = vec![GRANULE; (most * EACH) as usize];
    let (exporter, exported) = start_exporter(&args.common, Kind::Vmm, chunks, progress)?;
    let settings = Settings { rkey: exported.rkey, threads: threads.to_vec(), reps: args.reps };
    let mut importer = PeerProcess::start(Role::BenchMisses, &settings, args.common.silence())?;
    let rows = importer.receive(progress)?;
    progress.finish();
    importer.finish()?;
    exporter.finish()?;
    Ok(rows)
}

pub(super) fn table(rows: &[Row]) -> Table {
    let header =
        ["threads", "bare calls us", "different chunks, us a lease", "median of pair ratios", "imported", "the same chunk, us", "imported"];
    let mut table = crate::bench::table(&header);
    let imported = |(least, most): (u64, u64)| if least == most { least.to_string() } else { format!("{least} to {most}") };
    for Row { threads, different_us, different, same_us, imported: [own, same] } in rows {
        table.add_row([
            threads.to_string(),
            different.floor.to_string(),
            different_us.to_string(),
            format!("{:.3}", different.median_of_pair_ratios),
            imported(*own),
            same_us.to_string(),
            imported(*same),
        ]);
    }
    table
}

/// The importing process.
pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { rkey, threads, reps } = link.receive()?;
    limits::raise_open_files();
    let (rkey, key) = decode(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let mut options = CacheOptions::default();
    // Whatever it would do, it would do it in the middle of something that is timed.
    options.sweep = false;
    let cache = Cache::new(*gpu.cuda(), options);
    let rounds = Rounds::new(cache, key, &gpu, rkey.device)?;
    let mut rows = Vec::new();
    for (at, &threads) in (1..).zip(&threads) {
        let (mut different, mut bare, mut same, mut imported) = (Vec::new(), Vec::new(), Vec::new(), [(u64::MAX, 0); 2]);
        // The first round is for warming up.
        for rep in 0..=reps {
            let floor = rounds.bare(threads)?;
            if rep != 0 {
                bare.push(micros(floor) / f64::from(threads * EACH));
            }
            for (one_chunk, times, counts) in [(false, &mut different, 0), (true, &mut same, 1)] {
                let (elapsed, count) = rounds.round(threads, one_chunk)?;
                if rep != 0 {
                    let leases = if one_chunk { 1.0 } else { f64::from(threads * EACH) };
                    times.push(micros(elapsed) / leases);
                    if let Some((least, most)) = imported.get_mut(counts) {
                        (*least, *most) = (count.min(*least), count.max(*most));
                    }
                }
            }
            link.progress("misses", at, threads.into())?;
        }
        let comparison = Comparison::of(&bare, &different);
        rows.push(Row { threads, different_us: comparison.ours, different: comparison, same_us: Spread::of(&same), imported });
    }
    link.send(&rows)?;
    link.wait_for_end();
    Ok(())
}

struct Rounds {
    cache: Cache,
    key: Key,
    device: i32,
    uuid: [u8; 16],
    cpus: Vec<usize>,
    pidfd: OwnedFd,
    /// Fd number in the exporter and length of each chunk.
    chunks: Vec<(i32, u64)>,
}

impl Rounds {
    fn new(cache: Cache, key: Key, gpu: &Gpu, uuid: [u8; 16]) -> Result<Self, Failure> {
        let device = gpu.ordinal();
        let window = cache.window(&key, device, false, Deadline::after(DEADLINE)).map_err(Failure::at("opening a window"))?;
        let found = window.peer().lookup(key.base, key.len).map_err(Failure::at("looking the chunks up"))?;
        let chunks = found.iter().filter_map(|(_, chunk)| Some((chunk.fd?.cast_signed(), chunk.len))).collect();
        let pidfd = pidfd_sys::pidfd_open(key.pid).map_err(Failure::at("opening a pidfd"))?;
        drop(window);
        cache.purge_peer(key.nonce);
        Ok(Self { cache, key, device, uuid, cpus: machine::cpus(), pidfd, chunks })
    }

    /// The bare calls for the chunks that as many threads would lease: how long all of it took.
    fn bare(&self, threads: u32) -> Result<Duration, Failure> {
        let times = self.on_threads(threads, |thread, barrier| {
            let gpu = Gpu::with_uuid(self.uuid);
            barrier.wait();
            let gpu = gpu?;
            let (first, each) = ((thread * EACH) as usize, EACH as usize);
            let mut made = Vec::new();
            let start = Instant::now();
            for chunk in self.chunks.get(first..first + each).unwrap_or(&[]).chunks(1) {
                made.push(bare_import(&gpu, self.pidfd.as_fd(), chunk, GRANULE)?);
            }
            let end = Instant::now();
            for base in made {
                gpu.unmap(base, GRANULE).and_then(|()| gpu.free_reservation(base, GRANULE)).map_err(gpu.at("taking the floor down"))?;
            }
            Ok((start, end))
        })?;
        elapsed(&times)
    }

    /// Runs `work` on that many threads, pinned where there are enough processors: when each began and ended.
    fn on_threads(
        &self,
        threads: u32,
        work: impl Fn(u32, &Barrier) -> Result<(Instant, Instant), Failure> + Sync,
    ) -> Result<Vec<(Instant, Instant)>, Failure> {
        let barrier = Barrier::new(threads as usize);
        std::thread::scope(|scope| {
            let (work, barrier) = (&work, &barrier);
            let handles: Vec<_> = (0..threads)
                .map(|thread| {
                    scope.spawn(move || {
                        if let Some(&cpu) = self.cpus.get(thread as usize).filter(|_| threads as usize <= self.cpus.len()) {
                            machine::pin(cpu);
                        }
                        work(thread, barrier)
                    })
                })
                .collect();
            let panicked = |_| Failure::new("leasing", "a thread has panicked");
            handles.into_iter().map(|handle| handle.join().map_err(panicked)?).collect()
        })
    }

    /// Leases by that many threads at once: how long all of it took, and how many chunks were imported.
    fn round(&self, threads: u32, one_chunk: bool) -> Result<(Duration, u64), Failure> {
        let window =
            self.cache.window(&self.key, self.device, false, Deadline::after(DEADLINE)).map_err(Failure::at("opening a window"))?;
        // So that nobody reads the peer's table for the first time within what is timed.
        window.peer().lookup(self.key.base, self.key.len).map_err(Failure::at("looking the chunks up"))?;
        let before = self.cache.stats().imported_chunks;
        let times = self.on_threads(threads, |thread, barrier| {
            barrier.wait();
            self.leases(&window, thread, one_chunk)
        })?;
        let imported = self.cache.stats().imported_chunks - before;
        drop(window);
        self.cache.purge_peer(self.key.nonce);
        elapsed(&times).map(|elapsed| (elapsed, imported))
    }

    /// One thread's leases: when they began and ended.
    fn leases(&self, window: &Window, thread: u32, one_chunk: bool) -> Result<(Instant, Instant), Failure> {
        let deadline = Deadline::after(DEADLINE);
        let start = Instant::now();
        let chunks = if one_chunk { 0..1 } else { thread * EACH..(thread + 1) * EACH };
        for chunk in chunks {
            let address = self.key.base + u64::from(chunk) * GRANULE;
            drop(window.lease(address, GRANULE, deadline).map_err(Failure::at("taking a lease"))?);
        }
        Ok((start, Instant::now()))
    }
}

/// From the first beginning to the last end.
fn elapsed(times: &[(Instant, Instant)]) -> Result<Duration, Failure> {
    let (first, last) = (times.iter().map(|(start, _)| *start).min(), times.iter().map(|(_, end)| *end).max());
    first.zip(last).map(|(first, last)| last - first).ok_or_else(|| Failure::new("leasing", "there were no threads"))
}
