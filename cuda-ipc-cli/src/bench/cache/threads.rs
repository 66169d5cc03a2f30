//! Several threads: on different windows of one cache, against caches of their own and against locks; and on one window.

use std::sync::Arc;

use cuda_ipc_cache::{IntervalIndex, PeerWindows, Window};

use super::contest::{Contest, Times};
use super::importer::{Open, Settings, Source, piece};
use super::locked::{Hits, Locked, Locking};
use super::loops::{ByAddress, ByHandle, Lane, Place, RUN};
use super::report::{Findings, LockRow, SameWindowRow, ThreadRow};
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::peer_process::Link;

/// Measures all numbers of threads and of chunks.
pub(super) fn measure(
    findings: &mut Findings,
    contest: &Contest<'_>,
    settings: &Settings,
    gpu: &Gpu,
    open: &Open,
    sources: &[Source],
    link: &mut Link,
) -> Result<(), Failure> {
    let sources = sources.get(..open.windows.len()).unwrap_or(sources);
    let locked = Locked::new(sources.iter().map(|source| (source.place(), source.key.len)));
    for (number, &threads) in (1..).zip(&settings.threads) {
        let threads = threads as usize;
        if threads > open.windows.len() {
            findings.notes.push(format!("{threads} threads are more than there are windows"));
            continue;
        }
        link.progress("importer opens private windows", number, settings.threads.len() as u64)?;
        let own = private(contest, gpu, sources, threads)?;
        for &chunks in &settings.chunks {
            link.progress(&format!("{threads} threads, leases of {chunks}"), number, settings.threads.len() as u64)?;
            let leased = if chunks == 1 { sources.len() } else { sources.len().min(settings.wide as usize) };
            if threads > leased {
                findings.notes.push(format!("{threads} threads are more than there are windows of {chunks} chunks"));
                continue;
            }
            let table = Contenders { contest, threads, leased, open, own: &own, sources, piece: piece(settings, chunks) };
            table.measure(findings, &locked)?;
        }
    }
    Ok(())
}

/// What one thread has for itself.
struct Own {
    open: Open,
    /// Indexes with as many ranges as the shared ones have, by number of the exporter.
    as_large: Vec<Arc<IntervalIndex<Window>>>,
}

/// Deals the windows to the threads, each of which opens its own in a cache of its own.
fn private(contest: &Contest<'_>, gpu: &Gpu, sources: &[Source], threads: usize) -> Result<Vec<Own>, Failure> {
    let (cuda, device) = (*gpu.cuda(), gpu.ordinal());
    let open = |thread: usize| {
        // Where it will run, so that its memory is its own too.
        contest.pin(thread, threads);
        let mut open = Open::new(cuda);
        for source in dealt(sources, thread, threads) {
            open.add(source, device)?;
        }
        let as_large = as_large(&open, sources, thread, threads);
        Ok(Own { open, as_large })
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(move || open(thread))).collect();
        let panicked = |_| Failure::new("opening private windows", "a thread has panicked");
        handles.into_iter().map(|handle| handle.join().map_err(panicked)?).collect()
    })
}

/// The share of one of so many threads: every so manieth.
fn dealt<T>(all: &[T], thread: usize, threads: usize) -> impl Iterator<Item = &T> {
    all.iter().skip(thread).step_by(threads)
}

/// The thread's windows, with ranges of everybody else's between them that it never looks for.
fn as_large(open: &Open, sources: &[Source], thread: usize, threads: usize) -> Vec<Arc<IntervalIndex<Window>>> {
    let mut indexes = Vec::new();
    for (number, source) in sources.iter().enumerate() {
        while indexes.len() <= source.peer as usize {
            indexes.push(Arc::new(IntervalIndex::default()));
        }
        let window = open.windows.get(number / threads).filter(|_| number % threads == thread).or(open.windows.first());
        if let (Some(index), Some(window)) = (indexes.get(source.peer as usize), window) {
            index.insert(source.key.base, source.key.len, window.clone());
        }
    }
    indexes
}

/// One number of threads and of chunks.
struct Contenders<'a> {
    contest: &'a Contest<'a>,
    threads: usize,
    /// How many windows, the first ones, are leased.
    leased: usize,
    open: &'a Open,
    own: &'a [Own],
    sources: &'a [Source],
    piece: super::loops::Piece,
}

impl Contenders<'_> {
    fn measure(&self, findings: &mut Findings, locked: &Locked) -> Result<(), Failure> {
        let piece = self.piece;
        let handles = ByHandle { lanes: self.lanes(|thread| self.dealt_windows(thread)), piece };
        let shared = |run| ByAddress { lanes: self.by_address(|_| self.open.peers.clone()), piece, run };
        let private = |run| ByAddress { lanes: self.by_address(|thread| self.own_peers(thread)), piece, run };
        let as_large = ByAddress { lanes: self.by_address(|thread| self.own_as_large(thread)), piece, run: 1 };
        let one: Vec<Arc<Window>> = self.open.windows.iter().take(1).cloned().collect();
        let same = ByHandle { lanes: self.lanes(|_| one.clone()), piece };
        let places = self.lanes(|thread| self.dealt_places(thread));
        let one_place = self.lanes(|_| self.sources.iter().take(1).map(Source::place).collect());
        let hits = |locking, lanes| Hits { cache: locked, locking, lanes };
        // Locks know no chunks.
        let with_locks = piece.chunks == 1;
        let (shared, private) = ([shared(1), shared(RUN)], [private(1), private(RUN)]);
        let locks = [
            hits(Locking::Read, &places[..]),
            hits(Locking::Write, &places[..]),
            hits(Locking::Read, &one_place[..]),
            hits(Locking::Write, &one_place[..]),
        ];
        let mut works: Vec<&dyn super::contest::Work> = vec![&handles, &shared[0], &private[0], &shared[1], &private[1], &as_large, &same];
        if with_locks {
            works.extend(locks.iter().map(|hits| hits as &dyn super::contest::Work));
        }
        let times = self.contest.run(self.threads, &works)?;
        self.record(findings, &times).ok_or_else(|| Failure::new("measuring", "times are missing"))
    }

    fn record(&self, findings: &mut Findings, times: &[Times]) -> Option<()> {
        let (threads, chunks, pinned) = (self.threads, self.piece.chunks, self.contest.pins(self.threads));
        let (ours, locks) = times.split_at_checked(7)?;
        let [handle, shared, private, shared_runs, private_runs, as_large, same] = ours else { return None };
        findings.threads.push(ThreadRow {
            threads,
            pinned,
            windows: self.open.windows.len(),
            chunks,
            handle: handle.spread(),
            shared: shared.spread(),
            private: private.spread(),
            ratio: shared.throughput_over(private),
            private_as_large: as_large.spread(),
            ratio_as_large: shared.throughput_over(as_large),
            shared_runs: shared_runs.spread(),
            private_runs: private_runs.spread(),
            ratio_runs: shared_runs.throughput_over(private_runs),
        });
        findings.same_window.push(SameWindowRow {
            threads,
            pinned,
            chunks,
            ours: same.spread(),
            read_lock: locks.get(2).map(Times::spread),
            write_lock: locks.get(3).map(Times::spread),
        });
        if let [read, write, ..] = locks {
            findings.locks.push(LockRow {
                threads,
                pinned,
                ours: shared.spread(),
                read_lock: read.spread(),
                write_lock: write.spread(),
                over_read_lock: shared.throughput_over(read),
                over_write_lock: shared.throughput_over(write),
            });
        }
        Some(())
    }

    fn lanes<T>(&self, lane: impl Fn(usize) -> T) -> Vec<T> {
        (0..self.threads).map(lane).collect()
    }

    fn by_address<I>(&self, indexes: impl Fn(usize) -> Vec<I>) -> Vec<Lane<I>> {
        self.lanes(|thread| Lane { indexes: indexes(thread), places: self.dealt_places(thread) })
    }

    fn dealt_windows(&self, thread: usize) -> Vec<Arc<Window>> {
        dealt(self.open.windows.get(..self.leased).unwrap_or(&[]), thread, self.threads).cloned().collect()
    }

    fn dealt_places(&self, thread: usize) -> Vec<Place> {
        dealt(self.sources.get(..self.leased).unwrap_or(&[]), thread, self.threads).map(Source::place).collect()
    }

    fn own_peers(&self, thread: usize) -> Vec<Arc<PeerWindows>> {
        self.own.get(thread).map(|own| own.open.peers.clone()).unwrap_or_default()
    }

    fn own_as_large(&self, thread: usize) -> Vec<Arc<IntervalIndex<Window>>> {
        self.own.get(thread).map(|own| own.as_large.clone()).unwrap_or_default()
    }
}
