//! An exporter and an importer whose steps a test interleaves: whenever the importer is about to call out, or has just done so, something happens in the
//! exporter's process first.
//!
//! [`World::round`] runs one import with an event at a point and judges the outcome: the right bytes or a named error, and nothing left behind.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_ipc_cache::{Cache, CacheError, CacheErrorKind, CacheOptions, Lease, LeaseParts, Window};
use cuda_ipc_core::importer::{Deadline, Import, ImportError, ImportErrorKind, Peer};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::sys::driver;
use cuda_ipc_core::table::LookupError;

use crate::driver::Inside;
use crate::exporter::{Remote, RemoteMemory};
use crate::hooked;
use crate::importer::{Importer, LONG, key};
use crate::memory::STABLE;
use crate::pattern;
use crate::points::{Point, Verdict, Watch};
use crate::snapshot::Snapshot;

const MIB: u64 = 1 << 20;
/// Length of each chunk.
const CHUNK: u64 = 2 * MIB;
/// Number of chunks.
pub const CHUNKS: u64 = 3;

/// What may happen in the exporter's process to one of its chunks, or to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// The chunk is retired and freed.
    Retire(u64),
    /// The chunk is replaced at its address, and the new one is exported.
    Replace(u64),
    /// The chunk is retired and freed; another one elsewhere gets its slot and its fd number.
    Reuse(u64),
    /// The chunk is retired; the application puts the fd of an unrelated chunk over the number.
    PutChunk(u64),
    /// The chunk is retired; the application puts an unrelated file over the number.
    PutFile(u64),
    /// The process becomes another one by exec, with the same pid, the same addresses and the same fd numbers for other memory.
    Exec,
    /// The process is killed and reaped.
    Kill,
    /// The process is killed and reaped, and another one is started under its pid, with the same addresses and fd numbers for other memory. Only in a PID
    /// namespace of which this process is the first.
    Restart,
}

impl Event {
    /// Whether the exporter's life is over after it.
    pub const fn ends_life(self) -> bool {
        matches!(self, Self::Exec | Self::Kill | Self::Restart)
    }
}

/// Ways to import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The peer is reached first.
    Key,
    /// The peer is known.
    KnownPeer,
    /// A cache that knows nobody opens a window and leases all of it.
    Lease,
    /// A cache that has all of a window mapped leases it once more, after one chunk was replaced.
    LeaseAgain,
}

/// What a way has led to.
enum Got {
    Import(Box<Import>),
    /// The parts of a lease of the whole window, which is ended by hand, and the cache, which goes after it.
    Lease(Arc<Window>, LeaseParts, #[expect(dead_code, reason = "it is only kept")] Cache),
}

/// Why it has led nowhere.
enum Why {
    Import(ImportError),
    Lease(CacheError),
}

impl Got {
    fn address(&self) -> u64 {
        match self {
            Self::Import(import) => import.address(),
            Self::Lease(_, parts, _) => parts.address,
        }
    }

    /// Whether nothing of it has died, as far as whoever uses it can know.
    fn is_current(&self, base: u64) -> bool {
        match self {
            Self::Import(import) => import.is_current(),
            Self::Lease(window, ..) => window.try_lease(base, CHUNKS * CHUNK).is_some(),
        }
    }
}

impl Drop for Got {
    fn drop(&mut self) {
        if let Self::Lease(window, parts, _) = self {
            drop(Lease::from_parts(window, *parts));
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct World<'a> {
    me: &'a Inside,
    importer: Importer,
    watch: Watch,
    exporter: Life,
    /// To look at the table, and the known peer of imports.
    peer: Arc<Peer>,
    seed: u64,
    /// Outcomes so far, by name.
    pub outcomes: BTreeMap<&'static str, usize>,
    /// How many new lives had pid, addresses and fd numbers of the one before.
    pub doubles: usize,
}

/// An exporter process and what it has.
#[derive(Debug)]
struct Life {
    remote: Option<Remote>,
    memory: RemoteMemory,
    /// Another reservation, with one chunk that is not exported.
    decoy: RemoteMemory,
    rkey: Rkey,
    /// For each chunk, the seeds of what was exported at its address since the round began.
    exported: Vec<Vec<u64>>,
}

impl<'a> World<'a> {
    /// Starts an exporter. This process has the shim.
    pub fn start(me: &'a Inside) -> Self {
        let mut importer = Importer::start();
        importer.core = driver::Cuda::with(hooked::driver()).expect("a driver");
        let exporter = Life::begin(Remote::start(me), 100);
        let peer = importer.connect(&exporter.rkey).expect("a peer");
        Self { me, importer, watch: Watch::new(), exporter, peer, seed: 1000, outcomes: BTreeMap::new(), doubles: 0 }
    }

    /// The points of an import that nothing disturbs, before and after each call.
    pub fn points(&mut self, way: Way) -> Vec<Point> {
        let mut points = Vec::new();
        let hook = |point: &Point| {
            points.push(*point);
            Verdict::Go
        };
        // What is set up at the first use only is no part of it.
        let prepared = self.prepare(way);
        drop(import(&self.importer, way, &self.exporter.rkey, &self.peer, prepared));
        let prepared = self.prepare(way);
        let imported = self
            .watch
            .run(hook, || import(&self.importer, way, &self.exporter.rkey, &self.peer, prepared))
            .map_err(|_| "refused")
            .expect("an import that nothing disturbs");
        drop(imported);
        points
    }

    /// What has to be there before a way is gone: for [`Way::LeaseAgain`] a window of which one chunk was replaced since.
    fn prepare(&mut self, way: Way) -> Option<Prepared> {
        if way != Way::LeaseAgain {
            return None;
        }
        let rkey = self.exporter.rkey;
        let (cache, window) = open(&self.importer, &rkey).expect("a window");
        drop(window.lease(rkey.base, rkey.len, Deadline::after(LONG)).expect("a lease"));
        self.seed += 10;
        self.exporter.replace(1, self.seed);
        self.exporter.export();
        Some((cache, window))
    }

    /// Imports, with the events at their points, and judges what comes out. Then the exporter is as before, or there is another.
    #[track_caller]
    pub fn round(&mut self, way: Way, events: &[(Point, Event)]) {
        let what = format!("{way:?} {events:?}");
        let before = Snapshot::take(&self.importer.fake).without_pipes();
        let prepared = self.prepare(way);
        let old = self.exporter.memory.clone();
        self.exporter.exported.iter_mut().for_each(|seeds| drop(seeds.drain(..seeds.len() - 1)));
        let (importer, watch, rkey, peer) = (self.importer, self.watch, self.exporter.rkey, self.peer.clone());
        let mut pending: Vec<(Point, Event)> = events.to_vec();
        let mut over = false;
        let outcome = watch.run(
            |point| {
                while let Some(at) = pending.iter().position(|(when, _)| when == point) {
                    let (_, event) = pending.remove(at);
                    over |= event.ends_life();
                    self.happen(event);
                }
                Verdict::Go
            },
            || import(&importer, way, &rkey, &peer, prepared),
        );
        assert!(events.len() != 1 || pending.is_empty(), "it has not come to {what}");
        let name = match outcome {
            Ok(got) if over => {
                old.spot_check(&importer.cuda, got.address(), 0, CHUNKS * CHUNK).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(peer.is_gone(), "{what}");
                "the bytes of the life that is over"
            }
            Ok(got) => self.judge_import(&got, &what),
            Err(Why::Import(error)) => judge_error(&error, over, &what),
            Err(Why::Lease(error)) => judge_lease_error(&error, over, &what),
        };
        *self.outcomes.entry(name).or_default() += 1;
        let now = Snapshot::take(&importer.fake).without_pipes();
        assert_eq!(before, now, "something is left, or gone, after {what}");
        self.restore(over);
    }

    /// Each chunk is one that was exported at its address; all are the last ones, if the import says that it is current.
    #[track_caller]
    fn judge_import(&self, got: &Got, what: &str) -> &'static str {
        let mut stale = 0;
        for (chunk, seeds) in (0..).zip(&self.exporter.exported) {
            let address = got.address() + chunk * CHUNK;
            let is = |seed: &u64| pattern::check(&self.importer.cuda, address, 0, 4096, *seed).is_ok();
            let found = seeds.iter().position(is).unwrap_or_else(|| panic!("chunk {chunk} has bytes of another: {what}"));
            stale += usize::from(found + 1 < seeds.len() || self.exporter.memory.chunks[&(chunk * CHUNK)].1 != seeds[found]);
        }
        assert!(stale == 0 || !got.is_current(self.exporter.memory.base), "{stale} chunks are old and nothing says so: {what}");
        if stale == 0 { "the present bytes" } else { "bytes of a chunk that is marked as gone" }
    }

    fn happen(&mut self, event: Event) {
        self.seed += 10;
        let (exporter, seed) = (&mut self.exporter, self.seed);
        let entry = |peer: &Peer, exporter: &Life, chunk: u64| {
            peer.lookup(exporter.memory.base + chunk * CHUNK, CHUNK).ok().and_then(|found| found.first().copied())
        };
        match event {
            Event::Retire(chunk) => exporter.replace(chunk, seed),
            Event::Replace(chunk) => {
                exporter.replace(chunk, seed);
                exporter.export();
            }
            Event::Reuse(chunk) => {
                let was = entry(&self.peer, exporter, chunk);
                exporter.replace(chunk, seed);
                let decoy = exporter.decoy.clone();
                let (_, rkey) = exporter.remote().export(&decoy, 0, CHUNK);
                let (id, decoy) = self.peer.lookup(rkey.base, CHUNK).expect("the decoy")[0];
                if let Some((old, chunk)) = was {
                    assert_eq!((id.slot, decoy.fd), (old.slot, chunk.fd), "slot and number come again");
                }
            }
            Event::PutChunk(chunk) | Event::PutFile(chunk) => {
                let was = entry(&self.peer, exporter, chunk).and_then(|(_, chunk)| chunk.fd);
                exporter.replace(chunk, seed);
                if let Some(number) = was {
                    let what = match event {
                        Event::PutChunk(_) => format!("put_chunk {number} {} 0", exporter.decoy.index),
                        _ => format!("put {number} /dev/null"),
                    };
                    exporter.remote().ask(&what);
                }
            }
            Event::Exec => {
                let mut remote = exporter.remote.take().expect("an exporter");
                remote.exec();
                *exporter = Life::begin(remote, seed);
            }
            Event::Kill => exporter.remote.take().expect("an exporter").kill(),
            Event::Restart => {
                let remote = exporter.remote.take().expect("an exporter");
                let pid = remote.pid;
                remote.kill();
                // The next process of this namespace gets the number after this one.
                std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).expect("a namespace of our own");
                let remote = Remote::start(self.me);
                assert_eq!(remote.pid, pid, "the pid comes again");
                *exporter = Life::begin(remote, seed);
            }
        }
    }

    /// After a round: all chunks are exported, and the decoy is not.
    fn restore(&mut self, over: bool) {
        if self.exporter.remote.is_none() {
            self.seed += 10;
            self.exporter = Life::begin(Remote::start(self.me), self.seed);
        } else if !over {
            // A new table: what the round has left of numbers and slots is gone.
            self.exporter.remote().ask("renew");
            self.exporter.export();
        }
        let numbers = |peer: &Peer, exporter: &Life| -> Option<Vec<_>> {
            let chunks = peer.lookup(exporter.memory.base, CHUNKS * CHUNK).ok()?;
            Some(chunks.into_iter().map(|(_, chunk)| (chunk.address, chunk.fd)).collect())
        };
        // The table that is over can still be read.
        let before = (self.peer.pid(), numbers(&self.peer, &self.exporter));
        self.peer = self.importer.connect(&self.exporter.rkey).expect("the exporter");
        let now = (self.peer.pid(), numbers(&self.peer, &self.exporter));
        self.doubles += usize::from(over && before == now && now.1.is_some());
    }
}

impl Life {
    /// Makes the same memory in each life, with other bytes.
    fn begin(mut remote: Remote, seed: u64) -> Self {
        let chunks: Vec<_> = (0..CHUNKS).map(|chunk| (CHUNK, seed + chunk)).collect();
        let memory = remote.marked_memory_at(16 * MIB, STABLE, &chunks);
        assert_eq!(memory.base, STABLE, "the same addresses in each life");
        let decoy = remote.marked_memory_at(16 * MIB, 0, &[(CHUNK, seed + 9)]);
        let (_, rkey) = remote.export(&memory, 0, CHUNKS * CHUNK);
        let exported = chunks.iter().map(|&(_, seed)| vec![seed]).collect();
        Self { remote: Some(remote), memory, decoy, rkey, exported }
    }

    fn remote(&mut self) -> &mut Remote {
        self.remote.as_mut().expect("an exporter")
    }

    /// Retires a chunk and puts another in its place, which is not exported.
    fn replace(&mut self, chunk: u64, seed: u64) {
        let remote = self.remote.as_mut().expect("an exporter");
        self.memory.replace(remote, chunk * CHUNK, seed + chunk);
    }

    fn export(&mut self) {
        let memory = self.memory.clone();
        (_, self.rkey) = self.remote().export(&memory, 0, CHUNKS * CHUNK);
        for (seeds, (_, seed)) in self.exported.iter_mut().zip(memory.chunks.into_values()) {
            if seeds.last() != Some(&seed) {
                seeds.push(seed);
            }
        }
    }
}

/// A cache with a window in which everything was mapped.
type Prepared = (Cache, Arc<Window>);

fn import(importer: &Importer, way: Way, rkey: &Rkey, peer: &Arc<Peer>, prepared: Option<Prepared>) -> Result<Got, Why> {
    match way {
        Way::Key => importer.import(rkey).map(Box::new).map(Got::Import).map_err(Why::Import),
        Way::KnownPeer => importer.import_from(peer, rkey).map(Box::new).map(Got::Import).map_err(Why::Import),
        Way::Lease | Way::LeaseAgain => {
            let (cache, window) = match prepared {
                Some(prepared) => prepared,
                None => open(importer, rkey).map_err(Why::Lease)?,
            };
            let parts = window.lease(rkey.base, rkey.len, Deadline::after(LONG)).map_err(Why::Lease)?.into_parts();
            Ok(Got::Lease(window, parts, cache))
        }
    }
}

fn open(importer: &Importer, rkey: &Rkey) -> Result<Prepared, CacheError> {
    let mut options = CacheOptions::default();
    // Its thread would call out in its own time.
    options.sweep = false;
    let cache = Cache::new(importer.core, options);
    let window = cache.window(&key(rkey), 0, false, Deadline::after(LONG))?;
    Ok((cache, window))
}

/// As [`judge_error`], of a cache.
#[track_caller]
fn judge_lease_error(error: &CacheError, over: bool, what: &str) -> &'static str {
    match error.kind {
        CacheErrorKind::NoChunk => "no chunk there",
        CacheErrorKind::KeptChanging => "kept changing",
        CacheErrorKind::Closed if over => "the exporter is gone",
        CacheErrorKind::Import(import) => judge_error(&import, over, what),
        _ => panic!("{error} is not explained by {what}"),
    }
}

/// The fact that the error names; panics if it is not one that the events explain.
#[track_caller]
fn judge_error(error: &ImportError, over: bool, what: &str) -> &'static str {
    assert_eq!(error.stuck_bytes, 0, "{what}");
    match error.kind {
        ImportErrorKind::Lookup(LookupError::NoChunk(_)) => "no chunk there",
        ImportErrorKind::Lookup(LookupError::Unsettled) => "unsettled",
        ImportErrorKind::Retired => "retired",
        // Only when the life is over is there nobody or somebody else behind the pid, and behind any number. Within it no foreign fd reaches the driver.
        ImportErrorKind::ExporterGone if over => "the exporter is gone",
        ImportErrorKind::Table(_) if over => "another table",
        ImportErrorKind::NotATable(_) if over => "no table",
        ImportErrorKind::Pidfd(_) if over => "no such process or fd",
        ImportErrorKind::Driver(_) if over => "the driver",
        _ => panic!("{error} is not explained by {what}"),
    }
}
