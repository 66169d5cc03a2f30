//! What is found, as JSON and as tables. Times are nanoseconds of one take and end, as each thread sees it.

use comfy_table::Table;
use serde::{Deserialize, Serialize};

use super::contest::Times;
use crate::bench::samples::Spread;
use crate::bench::{Tables, table};

/// Everything that the importer has found.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Findings {
    /// What could not be done as asked.
    pub(super) notes: Vec<String>,
    pub(super) opening: Vec<OpenRow>,
    pub(super) hits: Vec<HitRow>,
    pub(super) threads: Vec<ThreadRow>,
    pub(super) same_window: Vec<SameWindowRow>,
    pub(super) locks: Vec<LockRow>,
    /// Leases of the shared cache that were no hits while hits were measured; 0, or the figures are wrong.
    pub(super) misses: u64,
    /// Chunks that the shared cache has imported.
    pub(super) imported_chunks: u64,
}

/// Opening so many windows, a mean over all of them. Microseconds.
#[derive(Serialize, Deserialize)]
pub(super) struct OpenRow {
    windows: usize,
    window_us: f64,
    first_lease_us: f64,
}

impl OpenRow {
    #[allow(clippy::cast_precision_loss, reason = "times to be printed")]
    pub(super) fn new(windows: usize, window_us: f64, first_lease_us: f64) -> Self {
        Self { windows, window_us: window_us / windows as f64, first_lease_us: first_lease_us / windows as f64 }
    }
}

/// One thread.
#[derive(Serialize, Deserialize)]
pub(super) struct HitRow {
    windows: usize,
    chunks: u32,
    /// Among how many windows leases are taken.
    leased_windows: usize,
    /// Random number and choice of a handle alone.
    choice: Spread,
    handle: Spread,
    address: Spread,
    runs: Spread,
    one_window: Spread,
}

impl HitRow {
    pub(super) fn new(windows: usize, chunks: u32, leased_windows: usize, times: &[Times]) -> Option<Self> {
        let [choice, handle, address, runs, one] = times else { return None };
        Some(Self {
            windows,
            chunks,
            leased_windows,
            choice: choice.spread(),
            handle: handle.spread(),
            address: address.spread(),
            runs: runs.spread(),
            one_window: one.spread(),
        })
    }
}

/// Threads on different windows. Ratios are of throughputs, in the same repetition.
#[derive(Serialize, Deserialize)]
pub(super) struct ThreadRow {
    pub(super) threads: usize,
    /// Whether each thread had a processor of its own.
    pub(super) pinned: bool,
    pub(super) windows: usize,
    pub(super) chunks: u32,
    pub(super) handle: Spread,
    pub(super) shared: Spread,
    pub(super) private: Spread,
    pub(super) ratio: Spread,
    pub(super) private_as_large: Spread,
    pub(super) ratio_as_large: Spread,
    pub(super) shared_runs: Spread,
    pub(super) private_runs: Spread,
    pub(super) ratio_runs: Spread,
}

/// All threads on one window.
#[derive(Serialize, Deserialize)]
pub(super) struct SameWindowRow {
    pub(super) threads: usize,
    pub(super) pinned: bool,
    pub(super) chunks: u32,
    pub(super) ours: Spread,
    pub(super) read_lock: Option<Spread>,
    pub(super) write_lock: Option<Spread>,
}

/// Threads on different windows, ours against locks.
#[derive(Serialize, Deserialize)]
pub(super) struct LockRow {
    pub(super) threads: usize,
    pub(super) pinned: bool,
    pub(super) ours: Spread,
    pub(super) read_lock: Spread,
    pub(super) write_lock: Spread,
    /// Throughput of ours over that of the variant.
    pub(super) over_read_lock: Spread,
    pub(super) over_write_lock: Spread,
}

impl Findings {
    pub(super) fn tables(&self) -> Tables {
        vec![
            (
                "One thread: take and end of a lease, ns (min / median / max). Nothing is subtracted; the choice is part of each",
                self.hit_table(),
            ),
            (
                "Threads on different windows, found by address: one cache for all, against a cache for each thread. ns (min / median / max) as each thread sees it; ratios are shared over private throughput",
                self.thread_table(),
            ),
            (
                "The same against indexes of one's own that are as large as the shared one; by handle; and million leases a second of the shared cache",
                self.more_threads(),
            ),
            ("All threads on one window, by handle; locks by address. ns (min / median / max)", self.same_table()),
            (
                "Threads on different windows by address: ours against an ordered map under an RwLock. ns (min / median / max)",
                self.lock_table(),
            ),
            ("Opening windows, a mean over all, us", self.open_table()),
        ]
    }

    fn hit_table(&self) -> Table {
        let header = [
            "windows",
            "chunks",
            "leased of",
            "choice alone",
            "by handle",
            "by address",
            "by address, runs of 64",
            "one window, by handle",
        ];
        let mut hits = table(&header);
        for row in &self.hits {
            hits.add_row([
                row.windows.to_string(),
                row.chunks.to_string(),
                row.leased_windows.to_string(),
                row.choice.to_string(),
                row.handle.to_string(),
                row.address.to_string(),
                row.runs.to_string(),
                row.one_window.to_string(),
            ]);
        }
        hits
    }

    fn thread_table(&self) -> Table {
        let header =
            ["threads", "windows", "chunks", "shared, random", "private, random", "ratio", "shared, runs", "private, runs", "ratio"];
        let mut threads = table(&header);
        for row in &self.threads {
            threads.add_row([
                count(row.threads, row.pinned),
                row.windows.to_string(),
                row.chunks.to_string(),
                row.shared.to_string(),
                row.private.to_string(),
                ratio(&row.ratio),
                row.shared_runs.to_string(),
                row.private_runs.to_string(),
                ratio(&row.ratio_runs),
            ]);
        }
        threads
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate to be printed")]
    fn more_threads(&self) -> Table {
        let mut threads = table(&["threads", "chunks", "private, as large", "ratio", "by handle", "shared, random, M/s"]);
        for row in &self.threads {
            threads.add_row([
                count(row.threads, row.pinned),
                row.chunks.to_string(),
                row.private_as_large.to_string(),
                ratio(&row.ratio_as_large),
                row.handle.to_string(),
                format!("{:.1}", row.threads as f64 * 1000.0 / row.shared.median),
            ]);
        }
        threads
    }

    fn same_table(&self) -> Table {
        let mut same = table(&["threads", "chunks", "ours", "RwLock read, Mutex count", "RwLock write"]);
        let optional = |spread: &Option<Spread>| spread.map_or_else(|| "-".to_owned(), |spread| spread.to_string());
        for row in &self.same_window {
            let first = count(row.threads, row.pinned);
            same.add_row([first, row.chunks.to_string(), row.ours.to_string(), optional(&row.read_lock), optional(&row.write_lock)]);
        }
        same
    }

    fn lock_table(&self) -> Table {
        let mut locks =
            table(&["threads", "ours", "RwLock read, Mutex count", "RwLock write", "ours over read lock", "ours over write lock"]);
        for row in &self.locks {
            locks.add_row([
                count(row.threads, row.pinned),
                row.ours.to_string(),
                row.read_lock.to_string(),
                row.write_lock.to_string(),
                ratio(&row.over_read_lock),
                ratio(&row.over_write_lock),
            ]);
        }
        locks
    }

    fn open_table(&self) -> Table {
        let mut opening = table(&["windows", "Cache::window us", "first lease us"]);
        for row in &self.opening {
            opening.add_row([row.windows.to_string(), format!("{:.1}", row.window_us), format!("{:.1}", row.first_lease_us)]);
        }
        opening
    }
}

/// A number of threads, marked where they had to share processors.
fn count(threads: usize, pinned: bool) -> String {
    if pinned { threads.to_string() } else { format!("{threads} (not pinned: fewer processors)") }
}

fn ratio(spread: &Spread) -> String {
    format!("{:.3} / {:.3} / {:.3}", spread.min, spread.median, spread.max)
}
