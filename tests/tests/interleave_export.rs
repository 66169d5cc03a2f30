//! An allocator frees and replaces memory between any two steps of an export of it. What is published is what is there, or it is marked as gone.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside, Peer};
use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::Snapshot;
use cuda_ipc_tests::{exporter, hooked, pattern, shim};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 2 * MIB;
const CHUNKS: u64 = GRANULES as u64;
const GRANULES: usize = 3;

/// What the allocator does with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Tells, frees it, and makes another in its place.
    ToldReplace(u64),
    /// The same without a word.
    Replace(u64),
    /// Tells and frees it.
    ToldFree(u64),
    /// Frees it without a word.
    Free(u64),
    /// Frees this chunk and the next, and makes one of twice the length in their place, without a word.
    Merge(u64),
}

/// The importing process: says what it finds at the start of each granule of a range, as the seed among those that it is given; 0 for none of them.
fn read(me: &Inside) {
    let importer = Importer::start();
    me.tell("ready");
    while let Some(request) = me.listen() {
        let (rkey, seeds) = request.split_once(' ').unwrap();
        let bytes: Vec<u8> = (0..rkey.len() / 2).map(|at| u8::from_str_radix(&rkey[2 * at..2 * at + 2], 16).unwrap()).collect();
        let seeds: Vec<u64> = seeds.split(' ').map(|seed| seed.parse().unwrap()).collect();
        me.tell(&match importer.import(&Rkey::decode(&bytes).unwrap()) {
            Ok(import) => {
                let found = (0..import.len() / CHUNK).map(|granule| {
                    let is = |seed: &&u64| {
                        let at = import.address() + granule * CHUNK;
                        // A chunk's second granule has bytes of its own.
                        pattern::check(&importer.cuda, at, 0, 4096, **seed).is_ok()
                            || pattern::check(&importer.cuda, at, CHUNK, 4096, **seed).is_ok()
                    };
                    seeds.iter().find(is).map_or("0".to_owned(), u64::to_string)
                });
                found.collect::<Vec<_>>().join(" ")
            }
            Err(error) => format!("error {error}"),
        });
    }
}

struct World {
    importer: Importer,
    watch: Watch,
    reader: Peer,
    memory: Memory,
    /// What is mapped at each granule.
    seeds: [u64; GRANULES],
    next: u64,
    outcomes: BTreeMap<String, usize>,
}

impl World {
    fn map(&mut self, chunk: u64, chunks: u64) {
        self.next += 1;
        self.memory.mark(chunk * CHUNK, chunks * CHUNK, self.next).unwrap();
        for granule in chunk..chunk + chunks {
            self.seeds[usize::try_from(granule).unwrap()] = self.next;
        }
    }

    /// Frees the chunk that begins there, if one does.
    fn free(&mut self, chunk: u64) {
        if let Some(len) = self.memory.len_at(chunk * CHUNK) {
            self.memory.unmap(chunk * CHUNK).unwrap();
            (chunk..chunk + len / CHUNK).for_each(|granule| self.seeds[usize::try_from(granule).unwrap()] = 0);
        }
    }

    fn happen(&mut self, exporter: &Exporter, event: Event) {
        if let Event::ToldReplace(chunk) | Event::ToldFree(chunk) = event {
            exporter.retire(self.memory.base() + chunk * CHUNK, CHUNK);
        }
        match event {
            Event::ToldReplace(chunk) | Event::Replace(chunk) => {
                self.free(chunk);
                self.map(chunk, 1);
            }
            Event::ToldFree(chunk) | Event::Free(chunk) => self.free(chunk),
            Event::Merge(chunk) => {
                self.free(chunk);
                self.free(chunk + 1);
                self.map(chunk, 2);
            }
        }
    }

    fn round(&mut self, at: Option<(Point, Event)>) -> Vec<Point> {
        let before = Snapshot::take(&self.importer.fake);
        let exporter = Exporter::new(self.importer.core, without_threads()).unwrap();
        let (base, len) = (self.memory.base(), CHUNKS * CHUNK);
        let mut points = Vec::new();
        let watch = self.watch;
        let exported = watch.run(
            |point| {
                points.push(*point);
                if let Some((when, event)) = at
                    && when == *point
                {
                    self.happen(&exporter, event);
                }
                Verdict::Go
            },
            || exporter.export(base, len),
        );
        let what = format!("{at:?}");
        let told = !matches!(at, Some((_, Event::Replace(_) | Event::Free(_) | Event::Merge(_))));
        let outcome = match exported {
            Ok(export) => {
                // Where nobody tells, the sweep finds out.
                let swept = if told { 0 } else { exporter.sweep() };
                let rkey: String = export.rkey().encode().iter().map(|byte| format!("{byte:02x}")).collect();
                let known: Vec<String> = (1..=self.next).rev().take(8).map(|seed| seed.to_string()).collect();
                self.reader.tell(&format!("{rkey} {}", known.join(" ")));
                let found = self.reader.listen();
                if found.starts_with("error") {
                    assert!(found.contains("no live chunk"), "{what}: {found}");
                    assert!(swept > 0 || self.seeds.contains(&0) || exporter.stats().chunks < CHUNKS, "{what}: {found}");
                    "exported, and gone by now"
                } else {
                    let now: Vec<String> = self.seeds.iter().map(u64::to_string).collect();
                    assert_eq!(found, now.join(" "), "{what}: what is read there, and what is here");
                    "exported"
                }
            }
            Err(refused) => {
                let freed = matches!(at, Some((_, Event::ToldFree(_) | Event::Free(_))));
                let named = match refused.cause {
                    Cause::Hole | Cause::NotDeviceMemory => freed,
                    // Freed between the look at it and this.
                    Cause::Driver { call: "cuMemRetainAllocationHandle", code: 1 } => freed,
                    Cause::KeptChanging => true,
                    _ => false,
                };
                assert!(named, "{what}: {refused}");
                assert_eq!(exporter.stats().chunks, 0, "{what}");
                "refused"
            }
        };
        *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
        drop(exporter);
        // All as before, and nothing pinned.
        let mapped = self.seeds.iter().filter(|&&seed| seed != 0).count() as u64;
        assert_eq!(self.importer.fake.device(0).used_bytes, mapped * CHUNK, "{what}: freed memory is free");
        if let Some((_, Event::Merge(_))) = at {
            (0..CHUNKS).for_each(|chunk| self.free(chunk));
        }
        for chunk in 0..CHUNKS {
            if self.seeds[usize::try_from(chunk).unwrap()] == 0 {
                self.map(chunk, 1);
            }
        }
        before.assert_unchanged(&self.importer.fake, &what);
        points
    }
}

fn without_threads() -> cuda_ipc_core::exporter::ExporterOptions {
    let mut options = exporter::without_broker();
    options.sweep_interval = None;
    options
}

#[test]
fn an_allocator_works_between_any_two_steps_of_an_export() {
    let Some(me) = Inside::enter("an_allocator_works_between_any_two_steps_of_an_export", &FakeConfig::default()) else { return };
    match me.role() {
        "reader" => return read(&me),
        "main" => return me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {}
    }
    let mut importer = Importer::start();
    importer.core = driver::Cuda::with(hooked::driver()).unwrap();
    // The reader is a child of this process, and where Yama asks, only ancestors may fetch.
    pidfd_sys::set_ptracer(pidfd_sys::Ptracer::Any).unwrap();
    let mut reader = me.spawn("reader").unwrap();
    assert_eq!(reader.listen(), "ready");
    let memory = Memory::reserve(importer.cuda, 64 * MIB, 0).unwrap();
    let (seeds, outcomes) = ([0; GRANULES], BTreeMap::new());
    let mut world = World { importer, watch: Watch::new(), reader, memory, seeds, next: 0, outcomes };
    (0..CHUNKS).for_each(|chunk| world.map(chunk, 1));
    world.round(None);
    let points = world.round(None);
    assert_eq!(world.outcomes.keys().collect::<Vec<_>>(), ["exported"]);
    let mut rounds = 0;
    for point in points {
        for event in [Event::ToldReplace, Event::Replace, Event::ToldFree, Event::Free] {
            for chunk in 0..CHUNKS {
                world.round(Some((point, event(chunk))));
                rounds += 1;
            }
        }
        for chunk in 0..CHUNKS - 1 {
            world.round(Some((point, Event::Merge(chunk))));
            rounds += 1;
        }
    }
    println!("{rounds} rounds: {:?}", world.outcomes);
    assert!(rounds >= 728, "{rounds}");
    for outcome in ["exported", "exported, and gone by now", "refused"] {
        assert!(world.outcomes.contains_key(outcome), "{outcome}");
    }
}
