//! Models of flights: one import for all who want it, a failure for all who waited, and nothing forgotten by those who do not wait.
#![cfg(loom)]
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod models;

use core::sync::atomic::Ordering;

use cuda_ipc_cache::flight::{Board, Entry};
use cuda_ipc_cache::slot::Slot;
use cuda_ipc_core::table::ChunkId;
use loom::sync::Arc;
use loom::thread;

use models::{Mapping, explore, never};

/// What the window's lock guards here.
#[derive(Default)]
struct State {
    mapped: bool,
    imports: usize,
    closed: bool,
}

struct World {
    board: Board<State, &'static str>,
    /// Touched by imports and unmaps; loom finds two at once.
    mapping: Mapping,
    slot: Slot,
    failures: usize,
}

impl World {
    fn new(failures: usize) -> Arc<Self> {
        Arc::new(Self { board: Board::default(), mapping: Mapping::new(0), slot: Slot::new(), failures })
    }

    /// A miss: as `lease_slow` goes about it.
    fn import(&self) -> Result<(), &'static str> {
        loop {
            match self.board.enter(0, 0, never()).unwrap() {
                Entry::Landed(Some(error)) => return Err(error),
                Entry::Landed(None) => {}
                Entry::Flying(flight) => {
                    let mut state = self.board.lock();
                    if state.mapped {
                        return Ok(());
                    }
                    state.imports += 1;
                    let fails = state.imports <= self.failures;
                    drop(state);
                    self.mapping.set(1);
                    if fails {
                        self.mapping.set(0);
                        flight.land(Some("the import failed"));
                        return Err("the import failed");
                    }
                    self.slot.publish(ChunkId { slot: 0, generation: 1 }, 1, 0);
                    self.board.lock().mapped = true;
                    return Ok(());
                }
            }
        }
    }

    /// As `Window::reclaim` goes about it: unmaps what has no lease, and comes back if somebody has passed by meanwhile. Returns how often it has unmapped.
    fn reclaim(&self) -> u32 {
        let mut unmapped = 0;
        while let Some(flight) = self.board.try_enter(0, 0) {
            if self.board.lock().mapped {
                self.slot.retire();
                if self.slot.leases() == 0 {
                    self.mapping.set(0);
                    self.slot.clear();
                    self.board.lock().mapped = false;
                    unmapped += 1;
                }
            }
            if !flight.land(None) {
                break;
            }
        }
        unmapped
    }

    fn end(&self) -> u32 {
        if self.slot.end() { self.reclaim() } else { 0 }
    }
}

fn all_import(world: &Arc<World>, threads: usize) -> Vec<Result<(), &'static str>> {
    let others: Vec<_> = (1..threads)
        .map(|_| {
            let world = world.clone();
            thread::spawn(move || world.import())
        })
        .collect();
    let mut results = vec![world.import()];
    results.extend(others.into_iter().map(|thread| thread.join().unwrap()));
    results
}

#[test]
fn three_who_want_a_chunk_import_it_once() {
    explore(|| {
        let world = World::new(0);
        assert!(all_import(&world, 3).iter().all(Result::is_ok));
        assert_eq!((world.board.lock().imports, world.mapping.read()), (1, 1));
    });
}

#[test]
fn a_failure_is_shared_by_those_who_waited_and_repeated_by_nobody() {
    // How many have failed together, in the interleaving where most have.
    let most = std::sync::Arc::new(core::sync::atomic::AtomicUsize::new(0));
    let seen = most.clone();
    explore(move || {
        let world = World::new(1);
        let results = all_import(&world, 3);
        let succeeded = results.iter().filter(|result| result.is_ok()).count();
        let imports = world.board.lock().imports;
        // The first fails, and whoever waited for it with it. Who came later has imported, once for all.
        assert!(succeeded < 3);
        seen.fetch_max(3 - succeeded, Ordering::Relaxed);
        assert_eq!(imports, 1 + usize::from(succeeded > 0));
        assert!(world.board.lock().is_quiet());
        assert!(world.import().is_ok());
    });
    assert_eq!(most.load(Ordering::Relaxed), 3, "nobody has shared a failure");
}

#[test]
fn the_last_lease_and_a_purge_unmap_once() {
    explore(|| {
        let world = World::new(0);
        world.import().unwrap();
        world.slot.take().unwrap();
        let purge = {
            let world = world.clone();
            thread::spawn(move || world.reclaim())
        };
        let unmapped = world.end() + purge.join().unwrap();
        assert_eq!((unmapped, world.mapping.read(), world.board.lock().mapped), (1, 0, false));
    });
}

/// A purge that comes during an import finds nothing to unmap yet. It leaves a note, and the import that lands sees to it.
#[test]
fn a_purge_during_an_import_is_not_forgotten() {
    explore(|| {
        let world = World::new(0);
        let purge = {
            let world = world.clone();
            thread::spawn(move || {
                world.board.lock().closed = true;
                world.reclaim()
            })
        };
        let mut unmapped = 0;
        if let Some(flight) = world.board.try_enter(0, 0)
            && !world.board.lock().closed
        {
            world.mapping.set(1);
            world.slot.publish(ChunkId { slot: 0, generation: 1 }, 1, 0);
            world.board.lock().mapped = true;
            if flight.land(None) {
                unmapped += world.reclaim();
            }
            unmapped += purge.join().unwrap();
            assert_eq!((unmapped, world.board.lock().mapped), (1, false));
        }
    });
}
