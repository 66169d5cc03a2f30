//! The exporting side: processes at command, and what each has where.

use std::collections::BTreeMap;

use cuda_ipc_core::key::Key;
use cuda_ipc_tests::exporter::{Remote, RemoteMemory};

use super::steps::{GRANULES, How, PEERS, SPACES};
use crate::support::*;

/// A reservation of an exporter.
pub(super) struct Space {
    pub(super) memory: RemoteMemory,
    /// Numbers of the exports of the chunks, by offset.
    exports: BTreeMap<u64, u64>,
    /// Known from the first export on.
    pub(super) key: Option<Key>,
}

pub(super) struct Exporters<'w> {
    world: &'w World,
    remotes: Vec<Remote>,
    pub(super) spaces: Vec<Space>,
    /// Of the last chunk made.
    seed: u64,
}

fn peer(space: usize) -> usize {
    space / SPACES
}

impl<'w> Exporters<'w> {
    pub(super) fn new(world: &'w World) -> Self {
        Self { world, remotes: (0..PEERS).map(|_| world.remote()).collect(), spaces: Vec::new(), seed: 0 }
    }

    /// Begins a case: nothing is exported, and all reservations are fresh.
    pub(super) fn begin(&mut self) {
        for at in 0..self.spaces.len() {
            let (remote, space) = (&mut self.remotes[peer(at)], &self.spaces[at]);
            remote.ask(&format!("retire {} 0 {}", space.memory.index, space.memory.len));
            remote.ask(&format!("unreserve {}", space.memory.index));
        }
        self.spaces = (0..PEERS * SPACES).map(|at| space(&mut self.remotes[peer(at)])).collect();
    }

    /// Makes and exports a chunk, if there is room.
    pub(super) fn map(&mut self, at: usize, granule: u64, granules: u64) {
        let (offset, len) = (granule * CHUNK, granules * CHUNK);
        let (remote, space) = (&mut self.remotes[peer(at)], &mut self.spaces[at]);
        let taken = space.memory.chunks.iter().any(|(&start, &(chunk, _))| start < offset + len && offset < start + chunk);
        if taken || granule + granules > GRANULES {
            return;
        }
        self.seed += 1;
        space.memory.map(remote, offset, len, self.seed);
        let (export, rkey) = remote.export(&space.memory, offset, len);
        space.exports.insert(offset, export);
        space.key = Some(key(&rkey));
    }

    /// Ends one of the chunks there are; says where it was.
    pub(super) fn free(&mut self, pick: usize, how: How) -> Option<(usize, u64)> {
        let all: Vec<(usize, u64)> =
            self.spaces.iter().enumerate().flat_map(|(at, space)| space.memory.chunks.keys().map(move |&offset| (at, offset))).collect();
        let (at, offset) = *all.get(pick.checked_rem(all.len())?)?;
        let (remote, space) = (&mut self.remotes[peer(at)], &mut self.spaces[at]);
        let (index, len, export) = (space.memory.index, space.memory.chunks[&offset].0, space.exports[&offset]);
        match how {
            How::Retire => drop(remote.ask(&format!("retire {index} {offset} {len}"))),
            How::Release => drop(remote.ask(&format!("release {export}"))),
            How::Sweep => {}
        }
        space.memory.unmap(remote, offset);
        if matches!(how, How::Sweep) {
            remote.ask("sweep");
        }
        Some((at, offset / CHUNK))
    }

    /// Kills a process and starts another one in its place.
    pub(super) fn kill(&mut self, at: usize) {
        core::mem::replace(&mut self.remotes[at], self.world.remote()).kill();
        for own in at * SPACES..(at + 1) * SPACES {
            self.spaces[own] = space(&mut self.remotes[at]);
        }
    }
}

fn space(remote: &mut Remote) -> Space {
    Space { memory: remote.memory(GRANULES * CHUNK, &[]), exports: BTreeMap::new(), key: None }
}
