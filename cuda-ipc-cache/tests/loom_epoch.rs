//! Models of the epoch: what a check stands for, and for how long. The table is the real one, its writer too.
#![cfg(loom)]
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod models;

use cuda_ipc_cache::slot::Slot;
use cuda_ipc_core::table::ChunkId;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use models::{Table, explore};

/// A chunk here and in the table, and what the exporter says after having retired it.
struct Mapped {
    id: ChunkId,
    slot: Slot,
    gone: AtomicU64,
}

struct World {
    table: Table,
    chunks: [Mapped; 2],
}

impl World {
    fn new() -> Arc<Self> {
        let table = Table::new();
        let chunks = [0, 1].map(|at| {
            let (id, slot) = (table.publish(at), Slot::new());
            slot.publish(id, 1, table.reader().epoch());
            Mapped { id, slot, gone: AtomicU64::new(0) }
        });
        Arc::new(Self { table, chunks })
    }

    fn retire(&self, at: usize) {
        self.table.retire(self.chunks[at].id);
        self.chunks[at].gone.store(1, Ordering::Release);
    }

    /// A hit on a chunk, as `Window::try_lease` makes one. Fails the model if the death had been seen before.
    fn use_chunk(&self, at: usize) -> bool {
        let chunk = &self.chunks[at];
        let gone = chunk.gone.load(Ordering::Acquire) != 0;
        let table = self.table.reader();
        let epoch = table.epoch();
        chunk.slot.take().unwrap();
        let hit = chunk.slot.is_current(&table, epoch);
        chunk.slot.end();
        assert!(!(hit && gone), "a hit on a chunk whose death was known");
        hit
    }
}

/// Two ranges, two deaths, one epoch after each.
#[test]
fn a_check_of_one_chunk_says_nothing_of_another() {
    explore(|| {
        let world = World::new();
        let exporter = {
            let world = world.clone();
            thread::spawn(move || {
                world.retire(0);
                world.retire(1);
            })
        };
        for at in [1, 0, 1] {
            world.use_chunk(at);
        }
        exporter.join().unwrap();
        // All is known now.
        assert!(!world.use_chunk(0) && !world.use_chunk(1));
    });
}

#[test]
fn two_users_of_a_chunk_do_not_mislead_each_other() {
    explore(|| {
        let world = World::new();
        let exporter = {
            let world = world.clone();
            thread::spawn(move || world.retire(1))
        };
        let other = {
            let world = world.clone();
            thread::spawn(move || world.use_chunk(1))
        };
        world.use_chunk(1);
        other.join().unwrap();
        world.use_chunk(1);
        exporter.join().unwrap();
        assert!(!world.use_chunk(1));
    });
}

/// One epoch for a whole window, as one writes it first: who compares one chunk marks both.
#[test]
#[should_panic = "a hit on a chunk whose death was known"]
fn the_model_finds_a_check_that_stands_for_two() {
    explore(|| {
        let world = World::new();
        let exporter = {
            let world = world.clone();
            thread::spawn(move || world.retire(1))
        };
        let epoch = world.table.reader().epoch();
        if world.use_chunk(0) {
            world.chunks[1].slot.mark_checked(epoch);
        }
        exporter.join().unwrap();
        world.use_chunk(1);
    });
}

/// The epoch from after the comparison, as one writes it first.
#[test]
#[should_panic = "a hit on a chunk whose death was known"]
fn the_model_finds_an_epoch_that_was_loaded_too_late() {
    explore(|| {
        let world = World::new();
        let exporter = {
            let world = world.clone();
            thread::spawn(move || world.retire(1))
        };
        if world.use_chunk(1) {
            world.chunks[1].slot.mark_checked(world.table.reader().epoch());
        }
        exporter.join().unwrap();
        world.use_chunk(1);
    });
}

/// Who has loaded the epoch of a death learns of the death, without any other word.
#[test]
fn an_epoch_tells_the_death_that_made_it() {
    explore(|| {
        let world = World::new();
        let exporter = {
            let world = world.clone();
            thread::spawn(move || world.retire(0))
        };
        let table = world.table.reader();
        let epoch = table.epoch();
        let live = table.is_live(world.chunks[0].id);
        assert!(epoch == 0 || !live);
        exporter.join().unwrap();
    });
}

/// A chunk that is imported while it dies: published with the epoch from before its look-up, it is never a hit once the death is known.
#[test]
fn what_dies_while_it_is_imported_is_never_a_hit() {
    explore(|| {
        let world = World::new();
        let slot = Slot::new();
        let exporter = {
            let world = world.clone();
            thread::spawn(move || world.retire(0))
        };
        let table = world.table.reader();
        let epoch = table.epoch();
        // The look-up and the re-check after the fetch.
        if table.is_live(world.chunks[0].id) {
            slot.publish(world.chunks[0].id, 1, epoch);
        }
        exporter.join().unwrap();
        if slot.take().is_ok() {
            assert!(!slot.is_current(&table, table.epoch()));
        }
    });
}
