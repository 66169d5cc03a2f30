//! A driver, a table and a runner, as simple as they can be, that check each action's conditions and can be made to fail.

use std::collections::BTreeMap;

use cuda_ipc_core::export::{Action, ChunkFacts, Event, Walk};
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::table::GRANULE;

pub(crate) const BASE: u64 = 16 * GRANULE;
pub(crate) const LEN: u64 = 64 * GRANULE;

/// How a chunk stands in the table before the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Before {
    Unknown,
    /// Published and counted by another export.
    Known,
    /// Published, but the memory has been replaced since.
    Stale,
}

/// What happens at an action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// The action is refused.
    Refuse,
    /// Just before the action the chunk around the cursor is replaced by another at the same place.
    Replace,
    /// Just before the action the chunk is freed.
    Free,
    /// Just before the action another thread retires the published chunk.
    RetireElsewhere,
    /// Just before the action another thread publishes the chunk.
    PublishElsewhere,
}

pub(crate) const FAULTS: [Fault; 5] = [Fault::Refuse, Fault::Replace, Fault::Free, Fault::RetireElsewhere, Fault::PublishElsewhere];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Published {
    facts: ChunkFacts,
    others: u32,
    ours: u32,
}

/// The reservation, or the cause and its address.
pub(crate) type Outcome = Result<(u64, u64), (Cause, u64)>;

/// See the module's documentation.
pub(crate) struct World {
    pub(crate) range: (u64, u64),
    /// What the driver has mapped, by address.
    memory: BTreeMap<u64, ChunkFacts>,
    table: BTreeMap<u64, Published>,
    next_id: u64,
    /// The retained handle and the fd at hand: buffer ids of the memory they keep.
    handle: Option<u64>,
    fd: Option<u64>,
    faults: BTreeMap<usize, Fault>,
    pub(crate) actions: usize,
    /// Refused action number, what it was, where the walk stood, and what had to be given back then.
    refused: Option<(usize, Action, u64, usize)>,
    cursor: u64,
    freed: bool,
}

pub(crate) fn refusal(action: usize) -> Cause {
    Cause::Driver { call: "injected", code: u32::try_from(action).expect("few actions") }
}

impl World {
    /// Chunks of one, two, three, one, ... granules back to back from [`BASE`]; the walk leaves out `margin` bytes at both ends.
    pub(crate) fn new(chunks: &[Before], margin: u64, faults: impl IntoIterator<Item = (usize, Fault)>) -> Self {
        let (mut memory, mut table, mut at) = (BTreeMap::new(), BTreeMap::new(), BASE);
        for (number, before) in (0_u64..).zip(chunks) {
            let facts = ChunkFacts { base: at, len: (1 + number % 3) * GRANULE, buffer_id: 100 + number };
            memory.insert(at, facts);
            match before {
                Before::Unknown => {}
                Before::Known => drop(table.insert(at, Published { facts, others: 1, ours: 0 })),
                Before::Stale => {
                    let facts = ChunkFacts { buffer_id: 50 + number, ..facts };
                    table.insert(at, Published { facts, others: 1, ours: 0 });
                }
            }
            at += facts.len;
        }
        World {
            range: (BASE + margin, at - BASE - 2 * margin),
            memory,
            table,
            next_id: 1000,
            handle: None,
            fd: None,
            faults: faults.into_iter().collect(),
            actions: 0,
            refused: None,
            cursor: BASE + margin,
            freed: false,
        }
    }

    fn mapped(&self, address: u64) -> Option<ChunkFacts> {
        self.memory.range(..=address).next_back().map(|(_, facts)| *facts).filter(|facts| address < facts.base + facts.len)
    }

    fn published(&mut self, address: u64) -> Option<&mut Published> {
        let (_, published) = self.table.range_mut(..=address).next_back()?;
        (address < published.facts.base + published.facts.len).then_some(published)
    }

    fn happen(&mut self, fault: Fault) {
        let cursor = self.cursor;
        match (fault, self.mapped(cursor)) {
            (Fault::Replace, Some(facts)) => {
                self.next_id += 1;
                self.memory.insert(facts.base, ChunkFacts { buffer_id: self.next_id, ..facts });
            }
            (Fault::Free, Some(facts)) => {
                self.memory.remove(&facts.base);
                self.freed = true;
            }
            (Fault::RetireElsewhere, _) => {
                if let Some(base) = self.published(cursor).map(|published| published.facts.base) {
                    self.table.remove(&base);
                }
            }
            (Fault::PublishElsewhere, Some(facts)) => {
                self.table.entry(facts.base).or_insert(Published { facts, others: 1, ours: 0 });
            }
            _ => {}
        }
    }

    fn act(&mut self, action: Action) -> Event {
        let number = self.actions;
        self.actions += 1;
        if let Action::Find(address) = action {
            // The walk stands where it asks.
            self.cursor = address;
        }
        let fault = self.faults.get(&number).copied();
        fault.into_iter().for_each(|fault| self.happen(fault));
        let refuse = fault == Some(Fault::Refuse);
        if let Some((at, ..)) = self.refused {
            assert!(matches!(action, Action::ReleaseHandle(_) | Action::CloseFd | Action::Uncount), "{action:?} after the refusal at {at}");
        } else if refuse && !matches!(action, Action::Retire(_) | Action::CloseFd | Action::Uncount) {
            // Releasing gives the handle up even where the driver says no; publishing gives the fd up.
            let handle = usize::from(self.handle.is_some() && !matches!(action, Action::ReleaseHandle(_)));
            let fd = usize::from(self.fd.is_some() && !matches!(action, Action::Publish(_)));
            self.refused = Some((number, action, self.cursor, handle + fd + 1));
        }
        let done = if refuse { Event::Refused(refusal(number)) } else { Event::Done };
        match action {
            _ if refuse && !matches!(action, Action::ReleaseHandle(_) | Action::Publish(_) | Action::CloseFd | Action::Uncount) => done,
            Action::QueryReservation(address) => {
                assert_eq!(address, self.range.0);
                Event::Reservation(BASE, LEN)
            }
            Action::Find(address) => Event::Known(self.published(address).map(|published| published.facts)),
            Action::QueryId(address) => Event::Id(self.mapped(address).map(|facts| facts.buffer_id)),
            Action::Count(facts) => match self.published(facts.base) {
                Some(published) if published.facts == facts => {
                    published.ours += 1;
                    Event::Done
                }
                _ => Event::Gone,
            },
            Action::Retire(facts) => {
                assert_ne!(self.mapped(facts.base).map(|mapped| mapped.buffer_id), Some(facts.buffer_id), "live memory is not retired");
                if self.published(facts.base).is_some_and(|published| published.facts == facts) {
                    self.table.remove(&facts.base);
                }
                Event::Done
            }
            Action::QueryChunk(address) => Event::Chunk(self.mapped(address)),
            Action::Retain(facts) => {
                assert!(self.handle.is_none() && self.fd.is_none());
                match self.mapped(facts.base) {
                    Some(mapped) => {
                        self.handle = Some(mapped.buffer_id);
                        Event::Done
                    }
                    None => {
                        self.refused = Some((number, action, self.cursor, 1));
                        Event::Refused(refusal(number))
                    }
                }
            }
            Action::ExportHandle(_) => {
                assert!(self.fd.is_none());
                self.fd = Some(self.handle.expect("a retained handle"));
                Event::Done
            }
            Action::ReleaseHandle(_) => {
                assert!(self.handle.take().is_some(), "released once");
                done
            }
            Action::Publish(facts) => {
                assert!(self.handle.is_none(), "no handle is held while the table changes");
                let fd = self.fd.take().expect("an fd at hand");
                assert_eq!(fd, facts.buffer_id, "the fd is the described memory's");
                if refuse {
                    return done;
                }
                let still_there = self.mapped(facts.base) == Some(facts);
                match self.published(facts.base) {
                    Some(published) if published.facts == facts => published.ours += 1,
                    _ if !still_there => return Event::Gone,
                    _ => drop(self.table.insert(facts.base, Published { facts, others: 0, ours: 1 })),
                }
                Event::Done
            }
            Action::CloseFd => {
                assert!(self.fd.take().is_some(), "closed once");
                done
            }
            Action::Uncount => {
                for published in self.table.values_mut() {
                    assert!(published.ours <= 1, "a chunk is counted once by one walk");
                    published.ours = 0;
                }
                done
            }
            Action::Finished => unreachable!("not an action"),
        }
    }

    /// Runs the walk to its end and checks everything that holds whatever happened.
    pub(crate) fn check(mut self) -> (Outcome, Self) {
        let mut walk = Walk::new(self.range.0, self.range.1);
        loop {
            let action = walk.next();
            assert_eq!(walk.next(), action, "asking changes nothing");
            if action == Action::Finished {
                break;
            }
            walk.report(self.act(action));
            assert!(self.actions < 500);
        }
        walk.report(Event::Gone);
        assert_eq!(walk.next(), Action::Finished, "a finished walk stays so");
        let result = walk.into_result();
        assert!(self.handle.is_none() && self.fd.is_none(), "no handle and no fd is left");
        match result {
            Ok(reservation) => {
                assert!(self.refused.is_none());
                assert_eq!(reservation, (BASE, LEN));
            }
            Err((cause, address)) => {
                assert!(self.table.values().all(|published| published.ours == 0), "no count is left");
                match self.refused {
                    Some((number, _, cursor, undo)) => {
                        assert_eq!((cause, address), (refusal(number), cursor));
                        assert_eq!(self.actions - number - 1, undo, "each thing is given back by one action");
                    }
                    None => {
                        assert_eq!(address, self.cursor);
                        assert!(cause == Cause::KeptChanging || cause == Cause::Hole && self.freed, "{cause:?}");
                    }
                }
            }
        }
        (result, self)
    }

    /// After a success without interference behind the cursor: each chunk of the range is published, counted once by this walk, and is what is mapped.
    pub(crate) fn assert_all_counted(&self) {
        let mut cursor = self.range.0;
        while cursor < self.range.0 + self.range.1 {
            let facts = self.mapped(cursor).expect("no hole");
            let published = self.table.get(&facts.base).expect("published");
            assert_eq!((published.facts, published.ours), (facts, 1));
            cursor = facts.base + facts.len;
        }
    }
}
