//! Whatever happens in an exporter between any two steps of an import of its pool: the right bytes or a named error, and nothing left behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_ipc_core::importer::{Deadline, ImportError, ImportErrorKind, Peer, PooledImport};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::sys::driver;
use cuda_ipc_core::table::LookupError;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, key};
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::Snapshot;
use cuda_ipc_tests::{hooked, pattern, shim};

const LEN: u64 = 2 << 20;

/// What may happen in the exporter's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The allocation, and with it the pool, is retired; the memory stays.
    Retire,
    /// It is retired and freed, and another one of the pool, mostly at its address, is exported.
    Replace,
    /// It is retired; memory of another pool is exported, whose fd and entries get the numbers.
    OtherPool,
    /// It is retired; the application puts an unrelated file over the number of the pool's fd.
    PutFile,
    /// The pool is published anew, in other slots: nothing is wrong with the memory.
    Again,
    /// The process becomes another one by exec.
    Exec,
    /// The process is killed and reaped.
    Kill,
}

/// An exporter process and what it has.
struct Life {
    remote: Option<Remote>,
    pool: u64,
    other: u64,
    /// The allocation of the pool, while there is one.
    address: Option<u64>,
    rkey: Rkey,
    /// All that was exported, by key: the seed of its bytes.
    exported: Vec<(Key, u64)>,
}

impl Life {
    fn begin(mut remote: Remote, seed: u64) -> Self {
        let (pool, other) = (remote.number("pool 0 1"), remote.number("pool 0 1"));
        let address = remote.number(&format!("pool_alloc {pool} {LEN} {seed}"));
        let (_, rkey) = remote.export_at(address, LEN);
        Self { remote: Some(remote), pool, other, address: Some(address), rkey, exported: vec![(key(&rkey), seed)] }
    }

    fn ask(&mut self, what: &str) -> String {
        self.remote.as_mut().unwrap().ask(what)
    }

    fn retire(&mut self) {
        if let Some(address) = self.address {
            self.ask(&format!("retire_at {address} {LEN}"));
        }
    }

    /// Allocates, fills and exports.
    fn export(&mut self, pool: u64, seed: u64) -> u64 {
        let address = self.ask(&format!("pool_alloc {pool} {LEN} {seed}")).parse().unwrap();
        let (_, rkey) = self.remote.as_mut().unwrap().export_at(address, LEN);
        self.exported.push((key(&rkey), seed));
        self.rkey = rkey;
        address
    }

    fn happen(&mut self, event: Event, number: Option<u32>, seed: u64) {
        match event {
            Event::Retire => self.retire(),
            Event::Replace => {
                self.retire();
                if let Some(address) = self.address.take() {
                    self.ask(&format!("free_at {address}"));
                }
                self.address = Some(self.export(self.pool, seed));
            }
            Event::OtherPool => {
                self.retire();
                let other = self.other;
                let address = self.export(other, seed);
                // For the end of the round.
                self.ask(&format!("free_at {address}"));
            }
            Event::PutFile => {
                self.retire();
                if let Some(number) = number {
                    self.ask(&format!("put {number} /dev/null"));
                }
            }
            Event::Again => {
                self.retire();
                let (address, seed) = (self.address.unwrap(), self.exported.last().unwrap().1);
                // Whose slots and number come between.
                let other = self.other;
                let between = self.export(other, seed + 5);
                let (_, rkey) = self.remote.as_mut().unwrap().export_at(address, LEN);
                self.exported.push((key(&rkey), seed));
                self.rkey = rkey;
                self.ask(&format!("free_at {between}"));
            }
            Event::Exec => {
                let mut remote = self.remote.take().unwrap();
                remote.exec();
                *self = Self::begin(remote, seed);
            }
            Event::Kill => self.remote.take().unwrap().kill(),
        }
    }
}

/// Imports from a peer that is reached first, or is known.
fn import(importer: &Importer, rkey: &Rkey, known: Option<&Arc<Peer>>) -> Result<PooledImport, ImportError> {
    let peer = match known {
        Some(peer) => peer.clone(),
        None => importer.connect(rkey)?,
    };
    PooledImport::new(&importer.core, &peer, &key(rkey), &[0], Deadline::after(LONG))
}

/// The fact that the error names; panics if the events do not explain it.
#[track_caller]
fn judge(error: &ImportError, event: Event, what: &str) -> &'static str {
    let over = matches!(event, Event::Exec | Event::Kill);
    match error.kind {
        ImportErrorKind::Lookup(LookupError::NoChunk(_)) => "nothing there",
        ImportErrorKind::Retired => "retired",
        ImportErrorKind::ExporterGone if over => "the exporter is gone",
        ImportErrorKind::Table(_) if over => "another table",
        ImportErrorKind::NotATable(_) if over => "no table",
        ImportErrorKind::Pidfd(_) if over => "no such process or fd",
        // Freed after its identity was checked for the last time. Where nothing is freed, no foreign pool has reached the driver.
        ImportErrorKind::Driver(error) if error.call == "cuMemPoolImportPointer" && (over || event == Event::Replace) => "freed",
        _ => panic!("{error} is not explained by {what}"),
    }
}

#[test]
fn pools_come_and_go_between_any_two_steps() {
    let Some(me) = Inside::enter("pools_come_and_go_between_any_two_steps", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "main" => return me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {}
    }
    let mut importer = Importer::start();
    importer.core = driver::Cuda::with(hooked::driver()).unwrap();
    let watch = Watch::new();
    let mut life = Life::begin(Remote::start(&me), 100);
    let (mut seed, mut outcomes, mut rounds) = (1000, BTreeMap::<&str, usize>::new(), 0);
    for is_known in [false, true] {
        let peer = importer.connect(&life.rkey).unwrap();
        let mut points: Vec<Point> = Vec::new();
        let rkey = life.rkey;
        // The first one sets things up for good.
        drop(import(&importer, &rkey, None).unwrap());
        drop(watch.run(
            |point| {
                points.push(*point);
                Verdict::Go
            },
            || import(&importer, &rkey, is_known.then_some(&peer)).unwrap(),
        ));
        drop(peer);
        for at in points {
            for event in [Event::Retire, Event::Replace, Event::OtherPool, Event::PutFile, Event::Again, Event::Exec, Event::Kill] {
                let ends = matches!(event, Event::Exec | Event::Kill);
                if ends && !at.before {
                    continue;
                }
                rounds += 1;
                seed += 10;
                let what = format!("{event:?} at {at:?}, known peer {is_known}");
                let (rkey, peer) = (life.rkey, importer.connect(&life.rkey).unwrap());
                let KeyKind::PoolAllocation { slot } = key(&rkey).kind else { panic!("{rkey:?}") };
                let number = peer.table().and_then(|table| {
                    let (_, allocation) = table.chunk_in(slot).ok()??;
                    let cuda_ipc_core::table::ChunkKind::PoolAllocation { pool, .. } = allocation.kind else { return None };
                    table.chunk_in(pool).ok()??.1.fd
                });
                let old = life.exported.clone();
                let before = Snapshot::take(&importer.fake).without_pipes();
                let mut happened = false;
                let outcome = watch.run(
                    |point| {
                        if *point == at {
                            happened = true;
                            life.happen(event, number, seed);
                        }
                        Verdict::Go
                    },
                    || import(&importer, &rkey, is_known.then_some(&peer)),
                );
                assert!(happened, "{what}");
                let name = match outcome {
                    Ok(imported) => {
                        let all: Vec<_> = old.iter().chain(&life.exported).filter(|(exported, _)| *exported == key(&rkey)).collect();
                        let is = |seed: u64| pattern::check(&importer.cuda, imported.address(), 0, 4096, seed).is_ok();
                        assert!(all.iter().any(|(_, seed)| is(*seed)), "bytes that were never exported by this key: {what}");
                        if ends {
                            assert!(peer.is_gone(), "{what}");
                            "the bytes of the life that is over"
                        } else if imported.is_current() {
                            assert!(all.last().is_some_and(|(_, seed)| is(*seed)), "old bytes, and nothing says so: {what}");
                            "the present bytes"
                        } else {
                            "bytes of memory that is marked as gone"
                        }
                    }
                    Err(error) => judge(&error, event, &what),
                };
                *outcomes.entry(name).or_default() += 1;
                assert_eq!(before, Snapshot::take(&importer.fake).without_pipes(), "something is left, or gone, after {what}");
                // As before, or another life.
                drop(peer);
                if life.remote.is_none() {
                    life = Life::begin(Remote::start(&me), seed + 1);
                } else if !ends {
                    life.ask("renew");
                    life.exported.clear();
                    if let Some(address) = life.address.take() {
                        life.ask(&format!("free_at {address}"));
                    }
                    life.address = Some(life.export(life.pool, seed + 1));
                }
            }
        }
    }
    println!("{rounds} rounds: {outcomes:?}");
    assert!(rounds >= 480, "{rounds}");
    for outcome in
        ["the present bytes", "bytes of memory that is marked as gone", "retired", "nothing there", "the exporter is gone", "another table"]
    {
        assert!(outcomes.contains_key(outcome), "{outcome}: {outcomes:?}");
    }
}
