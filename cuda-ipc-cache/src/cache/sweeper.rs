//! The sweeper: unmaps what exporters have retired and what dead peers have left, while nobody uses the windows.
//!
//! One thread for each cache, asleep in the kernel on the epoch words of all its peers. It wakes when one of them retires something, when the last lease on a
//! dead chunk ends, when a peer is new, and a few times a second to see who has exited.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::time::Duration;
use std::sync::{Arc, Weak};

use cuda_ipc_core::importer::{Peer, wait_for_deaths};
use cuda_ipc_core::sys::spawn_quiet;

use super::Shared;
use crate::window::{Reclaimed, UnmapCause, Window};

/// How often peers are asked whether they live: the longest that a dead peer's memory stays, if nothing else wakes the sweeper.
const LIVENESS: Duration = Duration::from_millis(200);
/// How soon a pass is repeated that had to leave something: a chunk in flight, or a driver call that failed.
const AGAIN: Duration = Duration::from_millis(20);

/// No epoch ever counts this far.
const NEVER: u64 = u64::MAX;

/// Which peers a sweep looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Thoroughness {
    /// Those whose epoch has changed, or who had something left last time.
    Changed,
    /// All.
    Everything,
}

impl Shared {
    /// One pass over the peers.
    pub(super) fn sweep(&self, thoroughness: Thoroughness) -> Reclaimed {
        let everything = self.unsettled.swap(false, AcqRel) || thoroughness == Thoroughness::Everything;
        let mut swept = Reclaimed::default();
        for peer in self.all_peers() {
            if peer.peer().has_exited() {
                swept += self.bury(peer.peer());
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
            // With something left, no epoch equals this one, so the next pass comes here again.
            peer.swept.store(if here.left { NEVER } else { epoch }, Release);
            swept += here;
        }
        swept
    }

    /// Closes the windows of a peer that has exited.
    fn bury(&self, peer: &Arc<Peer>) -> Reclaimed {
        let mut buried = Reclaimed::default();
        if let Some(dead) = self.lock_peers().remove(&peer.nonce()) {
            for window in dead.windows() {
                buried += window.close(UnmapCause::Purged);
            }
        }
        buried
    }

    /// A retiring chunk of `window` has lost its last lease.
    pub(crate) fn lease_ended(&self, window: &Window) {
        if window.is_closed() || !self.options.keep_idle {
            // Nobody sweeps what the cache has let go of.
            window.reclaim(Some(UnmapCause::Purged));
            window.release_address_space();
        } else {
            self.unsettle();
        }
    }

    /// Has the sweeper look at everything soon.
    pub(crate) fn unsettle(&self) {
        self.unsettled.store(true, Release);
        self.bell.ring();
    }

    /// Starts the thread if there is none.
    pub(super) fn ensure_sweeper(self: &Arc<Self>) {
        if self.counters.sweeping.swap(true, AcqRel) {
            return;
        }
        let weak = Arc::downgrade(self);
        if spawn_quiet("cuda-ipc-cache", move || run(&weak)).is_err() {
            // Limits: the next new peer tries again; until then misses and `trim` still clear what is dead.
            self.counters.sweeping.store(false, Relaxed);
        }
    }
}

/// The thread. Ends when the cache is gone or has no peers.
fn run(cache: &Weak<Shared>) {
    loop {
        let Some(shared) = cache.upgrade() else { return };
        let rings = shared.bell.rings();
        let peers = shared.all_peers();
        if peers.is_empty() {
            shared.counters.sweeping.store(false, Relaxed);
            // A peer that came between the look and the store found the thread running.
            if shared.all_peers().is_empty() || shared.counters.sweeping.swap(true, AcqRel) {
                return;
            }
            continue;
        }
        // Epochs from before the pass: a death during it ends the sleep at once.
        let epochs: Vec<(Arc<Peer>, u64)> =
            peers.iter().filter_map(|peer| Some((peer.peer().clone(), peer.peer().table()?.epoch()))).collect();
        if epochs.len() != peers.len() {
            // A forked child has no thread, so this cannot be; were it so, there would be nothing to do.
            return;
        }
        let left_something = shared.sweep(Thoroughness::Changed).left;
        shared.counters.sweeps.fetch_add(1, Relaxed);
        drop(peers);
        wait_for_deaths(&epochs, &shared.bell, rings, if left_something { AGAIN } else { LIVENESS });
    }
}
