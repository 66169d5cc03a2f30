//! The sweeper: unmaps what exporters have retired and what dead peers have left, while nobody uses the windows.
//!
//! One thread for each cache, asleep in the kernel on the epoch words of all its peers. It wakes when one of them retires something, when the last lease on a
//! dead chunk ends, when a peer is new, and a few times a second to see who has exited.

use core::sync::atomic::Ordering::{AcqRel, Relaxed};
use core::time::Duration;
use std::sync::{Arc, Weak};

use cuda_ipc_core::importer::{Peer, wait_for_deaths};
use cuda_ipc_core::sys::spawn_quiet;

use super::Shared;
use crate::window::{UnmapCause, Window};

/// How often peers are asked whether they live: the longest that a dead peer's memory stays, if nothing else wakes the sweeper.
const LIVENESS: Duration = Duration::from_millis(200);
/// How soon a pass is repeated that had to leave something: a chunk in flight, or a driver call that failed.
const AGAIN: Duration = Duration::from_millis(20);

impl Shared {
    /// One pass over all peers. Returns the bytes unmapped.
    pub(super) fn sweep(&self) -> u64 {
        let mut freed = 0;
        for peer in self.all_peers() {
            if peer.peer().has_exited() {
                freed += self.bury(peer.peer());
                continue;
            }
            for window in peer.windows() {
                freed += window.reclaim(None);
            }
            peer.forget_unused();
        }
        freed
    }

    /// Closes the windows of a peer that has exited.
    fn bury(&self, peer: &Arc<Peer>) -> u64 {
        let nonce = peer.nonce();
        let Some(dead) = self.lock_peers().remove(&nonce) else { return 0 };
        dead.windows().iter().map(|window| window.close(UnmapCause::Purged)).sum()
    }

    /// A retiring chunk of `window` has lost its last lease.
    pub(crate) fn lease_ended(&self, window: &Window) {
        if window.is_closed() || !self.options.keep_idle {
            // Nobody sweeps what the cache has let go of.
            window.reclaim(Some(UnmapCause::Purged));
            window.release_address_space();
        } else {
            self.bell.ring();
        }
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
        shared.sweep();
        let left_something = shared.stats().waiting_unmaps != 0;
        shared.counters.sweeps.fetch_add(1, Relaxed);
        drop(peers);
        wait_for_deaths(&epochs, &shared.bell, rings, if left_something { AGAIN } else { LIVENESS });
    }
}
