//! The sweeper: unmaps what exporters have retired and what dead peers have left, while nobody uses the windows.
//!
//! One thread for each cache, asleep in the kernel on the epoch words of all its peers. It wakes when one of them retires something, when the last lease on a
//! dead chunk ends, when somebody has passed by a chunk in flight, when a peer is new, and a few times a second to see who has exited.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::time::Duration;
use std::sync::{Arc, Weak};
use std::time::Instant;

use cuda_ipc_core::importer::{Peer, wait_for_deaths};
use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::sys::spawn_quiet;

use super::Shared;
use crate::window::{Reclaimed, Window};

/// How often peers are asked whether they live: the longest that a dead peer's memory stays, if nothing else wakes the sweeper.
const LIVENESS: Duration = Duration::from_millis(200);
/// How soon a pass is repeated that had to leave something because work still ran: copies take milliseconds at most.
const SOON: Duration = Duration::from_millis(1);
/// How soon a pass is repeated in which a driver call failed.
const AGAIN: Duration = Duration::from_millis(20);

/// No epoch ever counts this far.
const NEVER: u64 = u64::MAX;

/// What a sweep looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Thoroughness {
    /// Peers whose epoch has changed, or where the driver refused to unmap something last time.
    Changed,
    /// These, and whether processes have replaced themselves by exec, which costs some system calls for each.
    Identity,
    /// All of all peers.
    Everything,
}

impl Shared {
    /// One pass over the peers.
    pub(super) fn sweep(self: &Arc<Self>, thoroughness: Thoroughness) -> Reclaimed {
        let mut swept = Reclaimed::default();
        if !self.is_current() {
            return swept;
        }
        let everything = self.unsettled.swap(false, AcqRel) || thoroughness == Thoroughness::Everything;
        for peer in self.all_peers() {
            if peer.peer().has_exited() || thoroughness != Thoroughness::Changed && peer.peer().is_gone() {
                swept += self.close_peer(peer.peer().nonce());
                continue;
            }
            // From before the pass: a death during it is for the next one.
            let Some(epoch) = peer.peer().table().map(|table| table.epoch()) else { continue };
            if !everything && peer.swept.load(Acquire) == epoch {
                continue;
            }
            let mut here = Reclaimed::default();
            for window in peer.windows() {
                here += window.reclaim(None);
            }
            peer.forget_unused();
            // What is leased or in flight unsettles the sweeper when it ends. For what the driver refused, no epoch equals this one, and the next pass
            // comes here again.
            peer.swept.store(if here.refused || here.draining { NEVER } else { epoch }, Release);
            swept += here;
        }
        for window in self.all_closing() {
            swept += window.close();
        }
        self.forget_settled();
        self.keep_limits();
        swept
    }

    /// Unmaps what is dead and idle in windows of pools: for a caller who is blocked by it. Never waits, and passes by what is in flight.
    pub(crate) fn clear_dead(&self) {
        for peer in self.all_peers() {
            peer.windows().iter().filter(|window| window.is_pooled()).for_each(|window| self.come_back(window.reclaim(None)));
        }
        self.all_closing().iter().filter(|window| window.is_pooled()).for_each(|window| self.settle(window));
    }

    /// Lets go of a peer: closes its windows, and keeps those in mind that have something mapped still.
    pub(super) fn close_peer(self: &Arc<Self>, nonce: Nonce) -> Reclaimed {
        let mut total = Reclaimed::default();
        if !self.is_current() {
            return total;
        }
        // One step for those who count: a window is the peer's or in mind, at any moment one of the two.
        let (_peer, windows) = {
            let mut closing = self.lock_closing();
            let Some(peer) = self.lock_peers().remove(&nonce) else { return total };
            let windows = peer.close();
            if let Some(closing) = &mut *closing {
                closing.extend(windows.iter().cloned());
            }
            (peer, windows)
        };
        for window in windows {
            total += window.close();
        }
        self.forget_settled();
        if self.options.sweep {
            self.ensure_sweeper();
        }
        self.bell.ring();
        total
    }

    /// Unmaps what is idle in a closed window, and forgets it once it has nothing.
    pub(crate) fn settle(&self, window: &Window) {
        let reclaimed = window.close();
        self.forget_settled();
        self.come_back(reclaimed);
    }

    fn forget_settled(&self) {
        let settled: Vec<Arc<Window>> = {
            let mut closing = self.lock_closing();
            let Some(closing) = &mut *closing else { return };
            let (settled, left) = core::mem::take(closing).into_iter().partition(|window| window.has_nothing());
            *closing = left;
            settled
        };
        // After the lock: this may be the end of a window.
        drop(settled);
    }

    /// A retiring chunk of `window` has lost its last lease.
    pub(crate) fn lease_ended(&self, window: &Window) {
        if window.is_closed() {
            self.settle(window);
        } else if !self.options.keep_idle {
            self.come_back(window.reclaim(None));
        } else {
            self.unsettle();
        }
    }

    /// Has the sweeper try again what could not be done now, if anything.
    pub(crate) fn come_back(&self, reclaimed: Reclaimed) {
        if reclaimed.draining || reclaimed.refused {
            self.unsettle();
        }
    }

    /// Has the sweeper look at everything soon: something was left that no change of an epoch will announce.
    pub(crate) fn unsettle(&self) {
        self.unsettled.store(true, Release);
        self.bell.ring();
    }

    /// Starts the thread if there is none.
    pub(super) fn ensure_sweeper(self: &Arc<Self>) {
        if self.counters.sweeping.load(Acquire) || self.counters.sweeping.swap(true, AcqRel) {
            return;
        }
        let weak = Arc::downgrade(self);
        if spawn_quiet("cuda-ipc-cache", move || run(&weak)).is_err() {
            // Limits: the next key tries again; until then misses and `trim` still clear what is dead.
            self.counters.sweeping.store(false, Relaxed);
        }
    }
}

/// The thread. Ends when the cache is gone or has no peers.
fn run(cache: &Weak<Shared>) {
    let mut looked: Option<Instant> = None;
    loop {
        let Some(shared) = cache.upgrade() else { return };
        let rings = shared.bell.rings();
        let peers = shared.all_peers();
        let idle = || shared.all_peers().is_empty() && shared.all_closing().is_empty();
        if idle() {
            // Whoever brings a peer after this swap finds that no thread runs; who did before has their peer seen by the second look.
            shared.counters.sweeping.swap(false, AcqRel);
            if idle() || shared.counters.sweeping.swap(true, AcqRel) {
                return;
            }
            continue;
        }
        // Epochs from before the pass: a death during it ends the sleep at once.
        let epochs: Vec<(Arc<Peer>, u64)> =
            peers.iter().filter_map(|peer| Some((peer.peer().clone(), peer.peer().table()?.epoch()))).collect();
        drop(peers);
        let mut thoroughness = Thoroughness::Changed;
        if looked.is_none_or(|then| then.elapsed() >= LIVENESS) {
            looked = Some(Instant::now());
            thoroughness = Thoroughness::Identity;
        }
        let swept = shared.sweep(thoroughness);
        shared.counters.sweeps.fetch_add(1, Relaxed);
        let pause = match swept {
            Reclaimed { draining: true, .. } => SOON,
            Reclaimed { refused: true, .. } => AGAIN,
            _ => LIVENESS,
        };
        wait_for_deaths(&epochs, &shared.bell, rings, pause);
    }
}
