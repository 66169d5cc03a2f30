//! Refusals: which peers could not be reached, and until when nobody tries again.
//!
//! Remembered per peer, so that one refused peer costs the others nothing; for a growing time, so that a peer that cannot be reached costs little and one that
//! becomes reachable is found.

use core::time::Duration;
use std::collections::HashMap;
use std::time::Instant;

use cuda_ipc_core::importer::ImportError;
use cuda_ipc_core::key::Nonce;

use super::CacheOptions;

/// Peers remembered at most: keys with made-up nonces must not fill the memory.
const MOST: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Refusals {
    by_peer: HashMap<Nonce, Refusal>,
}

#[derive(Debug)]
struct Refusal {
    error: ImportError,
    backoff: Duration,
    until: Instant,
}

impl Refusals {
    /// The refusal of this peer that still stands.
    pub(super) fn standing(&self, peer: Nonce) -> Option<ImportError> {
        self.by_peer.get(&peer).filter(|refusal| Instant::now() < refusal.until).map(|refusal| refusal.error)
    }

    pub(super) fn add(&mut self, peer: Nonce, error: ImportError, options: &CacheOptions) {
        let now = Instant::now();
        if self.by_peer.len() >= MOST {
            self.by_peer.retain(|_, refusal| now < refusal.until);
            if self.by_peer.len() >= MOST {
                return;
            }
        }
        let backoff = match self.by_peer.get(&peer) {
            // The same cause again: twice as long. Another cause starts over.
            Some(before) if before.error.kind == error.kind => (before.backoff * 2).min(options.last_backoff),
            _ => options.first_backoff,
        };
        self.by_peer.insert(peer, Refusal { error, backoff, until: now + backoff });
    }

    pub(super) fn forget(&mut self, peer: Nonce) {
        self.by_peer.remove(&peer);
    }
}
