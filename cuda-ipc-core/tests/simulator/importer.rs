//! The importing process: reaches the peer, reads its table, transfers a range. One step at a time.

use std::collections::BTreeMap;

use core::sync::atomic::AtomicU64;

use cuda_ipc_core::import::{Action, Found, Transfer};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::table::Reader;
use cuda_ipc_core::table::reader::Chunks;

use crate::exporter::World;
use crate::kernel::{LAYOUT, Object, Physical, Words};

/// Ways to import, right and wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Fds fetched at a time.
    pub(crate) batch: usize,
    /// When to fetch the table's fd once more: if it is still the table that was opened, the program is still the one that wrote it.
    pub(crate) proof: Proof,
    /// Read the entries again after fetching.
    pub(crate) rechecks: bool,
}

/// When an importer makes sure that the table is still there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Proof {
    Never,
    /// With the last re-check: foreign memory may have come as far as the driver by then, but nobody gets access to it.
    Once,
    /// After the fetches of each batch: foreign memory never reaches the driver.
    EachBatch,
}

impl Manner {
    pub(crate) const fn right(batch: usize) -> Self {
        Self { batch, proof: Proof::Once, rechecks: true }
    }
}

/// Why an import failed.
pub(crate) type Name = String;

enum State {
    OpenPeer,
    FetchTable,
    OpenTable(Words),
    LoadEpoch,
    Lookup(Chunks<'static, AtomicU64>),
    Transfer(Transfer<'static, usize>),
    Finished(Result<(), Name>),
}

/// See the module's documentation.
pub(crate) struct Importer {
    manner: Manner,
    key: Key,
    range: (u64, u64),
    life: u64,
    table: Option<(Words, Reader<'static, AtomicU64>)>,
    /// Loaded before the look-ups.
    epoch: u64,
    chunks: Vec<Found>,
    state: State,
    fds: BTreeMap<usize, Object>,
    handle: Option<Physical>,
    mapped: BTreeMap<usize, Physical>,
    accessible: usize,
    names: Vec<Name>,
}

impl Importer {
    /// An import of `[address, address + len)` by a key.
    pub(crate) fn new(key: Key, (address, len): (u64, u64), manner: Manner) -> Self {
        // The key travels as bytes.
        let key = Key::decode(&key.encode()).expect("a key");
        assert!(key.covers(address, len));
        Importer {
            manner,
            key,
            range: (address, len),
            life: 0,
            table: None,
            epoch: 0,
            chunks: Vec::new(),
            state: State::OpenPeer,
            fds: BTreeMap::new(),
            handle: None,
            mapped: BTreeMap::new(),
            accessible: 0,
            names: Vec::new(),
        }
    }

    /// One step; the outcome once there is one.
    pub(crate) fn step(&mut self, world: &mut World) -> Option<Result<(), Name>> {
        let state = core::mem::replace(&mut self.state, State::OpenPeer);
        self.state = self.next(state, world).unwrap_or_else(|name| State::Finished(Err(name)));
        match &self.state {
            State::Finished(outcome) => Some(outcome.clone()),
            _ => None,
        }
    }

    fn reader(&self) -> &Reader<'static, AtomicU64> {
        &self.table.as_ref().expect("an open table").1
    }

    fn next(&mut self, state: State, world: &mut World) -> Result<State, Name> {
        Ok(match state {
            State::OpenPeer => {
                self.life = world.process.alive.then_some(world.process.life).ok_or("no process of that pid")?;
                State::FetchTable
            }
            State::FetchTable => match world.process.getfd(self.life, self.key.table_fd)? {
                Object::Table(words) => State::OpenTable(words),
                _ => return Err("not a table".into()),
            },
            State::OpenTable(words) => {
                let reader = Reader::open(words, LAYOUT, self.key.nonce).map_err(|error| error.to_string())?;
                self.table = Some((words, reader));
                State::LoadEpoch
            }
            State::LoadEpoch => {
                self.epoch = self.reader().epoch();
                State::Lookup(self.reader().chunks(self.range.0, self.range.1))
            }
            State::Lookup(mut walk) => match walk.next() {
                Some(found) => {
                    self.chunks.push(found.map_err(|error| error.to_string())?);
                    State::Lookup(walk)
                }
                // The machine borrows the chunks; a run is short, so they may stay.
                None => State::Transfer(Transfer::new(self.chunks.clone().leak(), self.manner.batch)),
            },
            State::Transfer(mut transfer) => {
                let action = transfer.next();
                if let Some(outcome) = self.act(action, world) {
                    let outcome = outcome.map_err(|name| {
                        self.names.push(name);
                        self.names.len() - 1
                    });
                    transfer.report(outcome);
                }
                if transfer.next() == Action::Finished {
                    State::Finished(transfer.into_result().map_err(|failure| {
                        assert_eq!(failure.stuck, 0, "undoing does not fail here");
                        format!("{} of chunk {}: {}", failure.step, failure.chunk, self.names[failure.error])
                    }))
                } else {
                    State::Transfer(transfer)
                }
            }
            State::Finished(outcome) => State::Finished(outcome),
        })
    }

    /// One step of an action; `None` if it is not done yet.
    fn act(&mut self, action: Action, world: &mut World) -> Option<Result<(), Name>> {
        Some(match action {
            Action::Fetch { first, count } => return self.fetch(first, count, world),
            Action::Recheck(at) => {
                if self.manner.rechecks && !self.reader().is_live(self.chunks[at].0) {
                    Err("retired".into())
                } else if self.manner.proof == Proof::Once && at + 1 == self.chunks.len() {
                    self.prove_table(world).map_err(Name::from)
                } else {
                    Ok(())
                }
            }
            Action::Import(at) => {
                let id = self.chunks[at].0;
                let fd = self.fds[&at];
                let right = |physical| world.truth.get(&(self.key.nonce, id)) == Some(&physical);
                if !matches!(fd, Object::Memory(physical) if right(physical)) {
                    world.foreign.push(format!("a foreign fd reaches the driver for {id:?}: {fd:?}"));
                }
                match fd {
                    // The driver takes any memory.
                    Object::Memory(physical) => {
                        self.handle = Some(physical);
                        Ok(())
                    }
                    _ => Err("the driver does not know this fd".into()),
                }
            }
            Action::CloseFd(at) => {
                assert!(self.fds.remove(&at).is_some());
                Ok(())
            }
            Action::Map(at) => {
                self.mapped.insert(at, self.handle.expect("a handle"));
                Ok(())
            }
            Action::Release(_) => {
                assert!(self.handle.take().is_some());
                Ok(())
            }
            Action::SetAccess { count, .. } => {
                self.accessible += count;
                Ok(())
            }
            Action::Unmap { first, count } => {
                (first..first + count).for_each(|at| assert!(self.mapped.remove(&at).is_some()));
                Ok(())
            }
            Action::Finished => Ok(()),
        })
    }

    /// One getfd of a batch, at its end the one that proves the table.
    fn fetch(&mut self, first: usize, count: usize, world: &mut World) -> Option<Result<(), Name>> {
        let at = (first..first + count).find(|at| !self.fds.contains_key(at));
        let outcome = match at {
            Some(at) => match self.chunks[at].1.fd {
                Some(number) => world.process.getfd(self.life, number).map(|object| {
                    self.fds.insert(at, object);
                }),
                None => Err("no fd"),
            },
            None => {
                let proved = self.prove_table(world);
                if proved.is_ok() {
                    return Some(Ok(()));
                }
                proved
            }
        };
        match outcome {
            Ok(()) if self.fds.len() == count && self.manner.proof != Proof::EachBatch => Some(Ok(())),
            Ok(()) => None,
            Err(name) => {
                // All or none.
                self.fds.clear();
                Some(Err(name.into()))
            }
        }
    }

    /// Whether the number of the table still leads to the table that was opened.
    fn prove_table(&self, world: &World) -> Result<(), &'static str> {
        match world.process.getfd(self.life, self.key.table_fd)? {
            Object::Table(words) if self.table.is_some_and(|(opened, _)| core::ptr::eq(opened, words)) => Ok(()),
            _ => Err("the table is not there any more"),
        }
    }

    /// What must hold once there is an outcome, then and later.
    pub(crate) fn verify(&self, world: &mut World, outcome: &Result<(), Name>) {
        let mut wrong = |what: String| world.errors.push(what);
        if !self.fds.is_empty() || self.handle.is_some() {
            wrong(format!("fds or handles are left: {:?} {:?}", self.fds, self.handle));
        }
        match outcome {
            Err(name) => {
                if name.is_empty() || !self.mapped.is_empty() {
                    wrong(format!("failed as {name:?} with {:?} mapped", self.mapped));
                }
            }
            Ok(()) => {
                let mut cursor = self.range.0;
                for (at, (id, chunk)) in self.chunks.iter().enumerate() {
                    if self.mapped.get(&at) != world.truth.get(&(self.key.nonce, *id)) {
                        world.errors.push(format!("{id:?} is mapped to {:?}", self.mapped.get(&at)));
                    }
                    if chunk.address > cursor || chunk.end() <= cursor {
                        world.errors.push(format!("{chunk:?} leaves a gap at {cursor:#x}"));
                    }
                    cursor = chunk.end();
                }
                if cursor < self.range.0 + self.range.1 || self.accessible != self.chunks.len() {
                    world.errors.push(format!("not all is mapped: up to {cursor:#x}"));
                }
                self.verify_epoch(world);
            }
        }
    }

    /// An epoch loaded before the look-ups and found unchanged says that nothing checked has died, as long as the program runs that wrote the table.
    pub(crate) fn verify_epoch(&self, world: &mut World) {
        let same_program = world.key().is_some_and(|key| key.nonce == self.key.nonce);
        if same_program && self.reader().epoch() == self.epoch {
            for (id, _) in &self.chunks {
                if !world.is_published(self.key.nonce, *id) || !self.reader().is_live(*id) {
                    world.errors.push(format!("{id:?} has died without a new epoch"));
                }
            }
        }
    }
}
