//! Every interleaving of leases and a release, on the file that the library uses (`src/words.rs`): nobody uses a window that was taken away, and of many ends
//! of one lease one succeeds.
//!
//! `cargo xtask test --stage loom` runs this. The checker knows the one order of all sequentially consistent operations for fences only, so here a fence stands
//! where the library relies on its accesses being in that order.

#![cfg(loom)]
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, reason = "a model of a part of the library")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

    pub(crate) fn between_own_word_and_the_other() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

#[path = "../src/words.rs"]
mod words;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use words::{ClaimWord, OpenWord};

const WINDOW: u32 = 5;

/// A window's place, what is behind its pointer, and the places of two threads' leases. The checker finds every access to `entry` that is not ordered.
struct World {
    open: OpenWord,
    entry: UnsafeCell<u32>,
    claims: [ClaimWord; 2],
}

impl World {
    fn new() -> (Arc<Self>, u64) {
        let world = Self { open: OpenWord::new(), entry: UnsafeCell::new(7), claims: [ClaimWord::new(), ClaimWord::new()] };
        let generation = world.open.open();
        (Arc::new(world), generation)
    }

    /// As `cuda_ipc_lease`: the lease's generation, if the window was open.
    fn lease(&self, own: usize, generation: u64) -> Option<u64> {
        let claimed = self.claims[own].take(WINDOW).expect("a place of its own");
        if !self.open.is_open(generation) {
            self.claims[own].free(claimed);
            return None;
        }
        self.look();
        self.claims[own].publish(claimed);
        Some(claimed.generation())
    }

    /// As `cuda_ipc_lease_end`: whether this was the one.
    fn end(&self, own: usize, lease: u64) -> bool {
        let Some(claimed) = self.claims[own].live(lease).and_then(|live| self.claims[own].end(live)) else { return false };
        self.look();
        self.claims[own].free(claimed);
        true
    }

    /// As the reaping of a closed window: whether it was taken away.
    fn reap(&self) -> bool {
        if self.claims.iter().any(|claim| claim.names(WINDOW)) {
            return false;
        }
        self.entry.with_mut(|_| ());
        self.open.turn();
        true
    }

    fn look(&self) {
        self.entry.with(|_| ());
    }
}

#[test]
fn no_lease_uses_a_window_that_was_taken_away() {
    loom::model(|| {
        let (world, generation) = World::new();
        let user = thread::spawn({
            let world = world.clone();
            move || {
                if let Some(lease) = world.lease(0, generation) {
                    assert!(world.end(0, lease));
                }
            }
        });
        world.open.shut();
        let gone = world.reap();
        user.join().unwrap();
        // Whoever was in the way is not any more.
        assert!(gone || world.reap());
        assert_eq!(world.lease(1, generation), None, "a stale handle");
    });
}

#[test]
fn two_threads_lease_while_a_third_releases() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (world, generation) = World::new();
        let users: Vec<_> = (0..2)
            .map(|own| {
                let world = world.clone();
                thread::spawn(move || {
                    if let Some(lease) = world.lease(own, generation) {
                        assert!(world.end(own, lease));
                    }
                })
            })
            .collect();
        world.open.shut();
        let gone = world.reap();
        users.into_iter().for_each(|user| user.join().unwrap());
        assert!(gone || world.reap());
    });
}

#[test]
fn a_lease_that_two_threads_end_ends_once() {
    loom::model(|| {
        let (world, generation) = World::new();
        let lease = world.lease(0, generation).unwrap();
        let other = thread::spawn({
            let world = world.clone();
            move || world.end(0, lease)
        });
        let mine = world.end(0, lease);
        assert!(mine != other.join().unwrap(), "ended by both, or by none");
        // The place is free again, for another generation.
        let next = world.lease(0, generation).unwrap();
        assert!(next != lease && !world.end(0, lease) && world.end(0, next));
    });
}

#[test]
fn a_released_window_stays_while_its_lease_does() {
    loom::model(|| {
        let (world, generation) = World::new();
        let lease = world.lease(0, generation).unwrap();
        let closer = thread::spawn({
            let world = world.clone();
            move || {
                world.open.shut();
                world.reap()
            }
        });
        world.look();
        assert!(world.end(0, lease));
        let gone = closer.join().unwrap();
        assert!(gone || world.reap());
    });
}
