//! Models of a slot: leases against whoever takes the chunk away, or puts another in its place.
#![cfg(loom)]
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod models;

use core::time::Duration;

use cuda_ipc_cache::flight::Board;
use cuda_ipc_cache::slot::{self, Slot};
use cuda_ipc_core::table::ChunkId;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use models::{Mapping, explore};

const fn id(generation: u64) -> ChunkId {
    ChunkId { slot: 0, generation }
}

/// What a slot must be able to do, so that a broken one can be put in its place.
trait Leasable: Send + Sync + 'static {
    fn take(&self) -> Result<(), bool>;
    fn end(&self) -> bool;
    fn retire(&self);
    fn leases(&self) -> u64;
}

impl Leasable for Slot {
    fn take(&self) -> Result<(), bool> {
        Slot::take(self)
    }
    fn end(&self) -> bool {
        Slot::end(self)
    }
    fn retire(&self) {
        Slot::retire(self);
    }
    fn leases(&self) -> u64 {
        Slot::leases(self)
    }
}

fn published() -> Slot {
    let slot = Slot::new();
    slot.publish(id(1), 1, 0);
    slot
}

/// Users and a reclaimer of one chunk. The reclaimer waits for the last lease as a window does, on its board.
fn lease_against_retire<S: Leasable>(slot: S, users: usize) {
    let shared = Arc::new((slot, Mapping::new(1), Board::<(), ()>::new(())));
    let used: Vec<_> = (0..users)
        .map(|_| {
            let shared = shared.clone();
            thread::spawn(move || {
                let (slot, mapping, board) = &*shared;
                let ended = match slot.take() {
                    Ok(()) => {
                        assert_eq!(mapping.read(), 1, "unmapped under a lease");
                        slot.end()
                    }
                    Err(last) => last,
                };
                if ended {
                    board.wake();
                }
            })
        })
        .collect();
    let (slot, mapping, board) = &*shared;
    slot.retire();
    let mut inner = board.lock();
    while slot.leases() != 0 {
        // Ends the model with a deadlock if the wake is lost.
        inner = board.wait(inner, Duration::MAX);
    }
    drop(inner);
    mapping.set(0);
    for user in used {
        user.join().unwrap();
    }
}

#[test]
fn nothing_is_unmapped_under_a_lease_and_no_wake_is_lost() {
    explore(|| lease_against_retire(published(), 2));
}

/// A slot as one writes it first: the flags in one word, the count in another.
struct Broken {
    mapped: AtomicU64,
    leases: AtomicU64,
}

impl Leasable for Broken {
    fn take(&self) -> Result<(), bool> {
        if self.mapped.load(Ordering::Acquire) == 0 {
            return Err(false);
        }
        self.leases.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
    fn end(&self) -> bool {
        self.leases.fetch_sub(1, Ordering::AcqRel) == 1
    }
    fn retire(&self) {
        self.mapped.store(0, Ordering::Release);
    }
    fn leases(&self) -> u64 {
        self.leases.load(Ordering::Acquire)
    }
}

#[test]
#[should_panic = "Causality violation"]
fn the_model_finds_a_slot_of_two_words() {
    explore(|| lease_against_retire(Broken { mapped: AtomicU64::new(1), leases: AtomicU64::new(0) }, 1));
}

/// Whoever finds leases on a retiring chunk and goes is followed by somebody who is told that the last one has ended: with no wait that could hang.
fn somebody_is_told<S: Leasable>(slot: S) {
    let shared = Arc::new(slot);
    let user = {
        let slot = shared.clone();
        thread::spawn(move || slot.take().map_or_else(|last| last, |()| slot.end()))
    };
    shared.retire();
    let idle = shared.leases() == 0;
    assert!(user.join().unwrap() || idle, "nobody was told");
}

#[test]
fn the_end_of_a_lease_is_told_or_seen() {
    explore(|| somebody_is_told(published()));
}

/// A slot in which a take that comes to nothing is undone in silence.
struct Silent(Slot);

impl Leasable for Silent {
    fn take(&self) -> Result<(), bool> {
        self.0.take().map_err(|_| false)
    }
    fn end(&self) -> bool {
        self.0.end()
    }
    fn retire(&self) {
        self.0.retire();
    }
    fn leases(&self) -> u64 {
        self.0.leases()
    }
}

#[test]
#[should_panic = "nobody was told"]
fn the_model_finds_a_take_that_is_undone_in_silence() {
    explore(|| somebody_is_told(Silent(published())));
}

#[test]
fn a_lease_sees_one_chunk_while_another_takes_its_place() {
    explore(|| {
        let shared = Arc::new((published(), Mapping::new(1)));
        let user = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (slot, mapping) = &*shared;
                if slot.take().is_ok() {
                    // Identity, length and memory belong together for as long as the lease lasts.
                    let seen = (slot.id(), slot.granules(), mapping.read());
                    assert!(matches!(seen, (ChunkId { generation: 1, .. }, 1, 1) | (ChunkId { generation: 2, .. }, 2, 2)), "{seen:?}");
                    assert_eq!((slot.id(), slot.granules(), mapping.read()), seen);
                    slot.end();
                }
            })
        };
        let (slot, mapping) = &*shared;
        slot.retire();
        // A flight that finds a lease leaves: here the model ends.
        if slot.leases() == 0 {
            mapping.set(0);
            slot.clear();
            mapping.set(2);
            slot.publish(id(2), 2, 0);
        }
        user.join().unwrap();
    });
}

#[test]
fn takes_are_counted_once_whatever_comes_between() {
    explore(|| {
        let shared = Arc::new(published());
        let users: Vec<_> = (0..2)
            .map(|_| {
                let slot = shared.clone();
                thread::spawn(move || slot.take().map(|()| slot.end()).is_ok())
            })
            .collect();
        let mut past = 0;
        shared.retire();
        if shared.leases() == 0 {
            past += shared.clear();
            shared.publish(id(2), 1, 0);
        }
        let taken = users.into_iter().map(|user| user.join().unwrap()).filter(|&taken| taken).count();
        assert_eq!(past + shared.takes(), taken as u64);
        assert_eq!(shared.leases(), 0);
    });
}

/// A chunk of two granules makes way for chunks of one, while somebody leases the second granule.
#[test]
fn a_granule_is_leased_with_the_chunk_that_covers_it() {
    explore(|| {
        let slots: Vec<Slot> = (0..2).map(|_| Slot::new()).collect();
        slots[1].publish_interior(1);
        slots[0].publish(id(1), 2, 0);
        let shared = Arc::new((slots, Mapping::new(1)));
        let user = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (slots, mapping) = &*shared;
                if let Ok(head) = slot::hold(slots, 1) {
                    let seen = (head, slots[head as usize].id().generation, mapping.read());
                    assert!(matches!(seen, (0, 1, 1) | (1, 3, 3)), "{seen:?}");
                    slots[head as usize].end();
                }
            })
        };
        let (slots, mapping) = &*shared;
        slots[0].retire();
        if slots[0].leases() == 0 {
            mapping.set(0);
            slots[0].clear();
            slots[1].clear();
            // One that does not reach as far, at the old head; and one at the granule itself.
            slots[0].publish(id(2), 1, 0);
            mapping.set(3);
            slots[1].publish(id(3), 1, 0);
        }
        user.join().unwrap();
    });
}
