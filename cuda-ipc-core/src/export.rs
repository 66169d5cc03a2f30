//! The export machine: how a range is walked chunk by chunk, what is published, and how a failure is undone.
//!
//! It does nothing itself. [`Walk::next`] says what to do, the runner does it and tells [`Walk::report`] what came out, until [`Action::Finished`].
//!
//! A chunk that is already published costs one look at its buffer id and is counted; a stale one is retired; an unknown one is retained, exported,
//! released, and its buffer id is asked again: only if it is what it was before does the fd belong to the chunk that was described, and only then is it
//! published. If the allocator keeps replacing the chunk meanwhile, the walk starts that chunk over a few times. On failure the fd at hand is closed and
//! every chunk counted so far is uncounted.

use crate::reason::Cause;
use crate::table::GRANULE;

/// How often one chunk is tried while its allocator replaces it.
const ATTEMPTS: u32 = 4;

/// The driver's word on the chunk that covers an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkFacts {
    /// First address.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub buffer_id: u64,
}

impl ChunkFacts {
    const fn end(&self) -> u64 {
        self.base.saturating_add(self.len)
    }
}

/// What the runner is to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Find the reservation around this address: [`Event::Reservation`].
    QueryReservation(u64),
    /// Look for a published chunk around this address: [`Event::Known`].
    Find(u64),
    /// Ask the driver for the buffer id at this address: [`Event::Id`].
    QueryId(u64),
    /// Count one more export of this published chunk: [`Event::Done`], or [`Event::Gone`] if it was retired meanwhile.
    Count(ChunkFacts),
    /// Retire this published chunk, which the driver no longer has: [`Event::Done`].
    Retire(ChunkFacts),
    /// Ask the driver about the chunk around this address and whether a POSIX fd exists for it: [`Event::Chunk`].
    QueryChunk(u64),
    /// Retain the handle of this chunk, and keep it: [`Event::Done`].
    Retain(ChunkFacts),
    /// Export the retained handle as an fd, and keep it: [`Event::Done`].
    ExportHandle(ChunkFacts),
    /// Release the retained handle: [`Event::Done`].
    ReleaseHandle(ChunkFacts),
    /// Publish the chunk with the fd at hand and count one export of it: [`Event::Done`], or [`Event::Gone`] if it was freed meanwhile. The fd is the
    /// runner's whatever comes out: kept with the entry, or closed.
    Publish(ChunkFacts),
    /// Close the fd at hand: [`Event::Done`].
    CloseFd,
    /// Take back one count of every chunk counted or published by this walk: [`Event::Done`].
    Uncount,
    /// Nothing more: ask [`Walk::into_result`].
    Finished,
}

/// What came out of an action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The reservation's base and length in bytes.
    Reservation(u64, u64),
    /// The published chunk, if there is one.
    Known(Option<ChunkFacts>),
    /// The buffer id; `None` if there is no memory at the address any more.
    Id(Option<u64>),
    /// The chunk; `None` if nothing is mapped there.
    Chunk(Option<ChunkFacts>),
    /// It worked.
    Done,
    /// The chunk is not there any more.
    Gone,
    /// It did not work, or the memory is of a kind that has no POSIX fd.
    Refused(Cause),
}

/// One export of `[address, address + len)`; see the module's documentation.
#[derive(Debug)]
pub struct Walk {
    state: State,
    cursor: u64,
    start: u64,
    end: u64,
    reservation: (u64, u64),
    attempts: u32,
    failure: Option<(Cause, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Reservation,
    Find,
    CompareId(ChunkFacts),
    Count(ChunkFacts),
    Retire(ChunkFacts),
    Describe,
    Retain(ChunkFacts),
    Export(ChunkFacts),
    Release(ChunkFacts),
    Recheck(ChunkFacts),
    Publish(ChunkFacts),
    /// Close the fd, then start the chunk over.
    CloseAndRetry,
    // Undoing.
    ReleaseAndFail(ChunkFacts),
    CloseAndFail,
    Uncount,
    Finished,
}

impl Walk {
    /// A walk over `[address, address + len)`.
    pub const fn new(address: u64, len: u64) -> Self {
        let end = address.checked_add(len);
        let mut walk = Self {
            state: State::Reservation,
            cursor: address,
            start: address,
            end: address,
            reservation: (0, 0),
            attempts: 0,
            failure: None,
        };
        match end {
            Some(end) if len != 0 => walk.end = end,
            _ => {
                walk.failure = Some((Cause::EmptyRange, address));
                walk.state = State::Finished;
            }
        }
        walk
    }

    /// What to do next. Does not change until [`Walk::report`] is called.
    pub const fn next(&self) -> Action {
        match self.state {
            State::Reservation => Action::QueryReservation(self.cursor),
            State::Find => Action::Find(self.cursor),
            State::CompareId(facts) | State::Recheck(facts) => Action::QueryId(facts.base),
            State::Count(facts) => Action::Count(facts),
            State::Retire(facts) => Action::Retire(facts),
            State::Describe => Action::QueryChunk(self.cursor),
            State::Retain(facts) => Action::Retain(facts),
            State::Export(facts) => Action::ExportHandle(facts),
            State::Release(facts) | State::ReleaseAndFail(facts) => Action::ReleaseHandle(facts),
            State::Publish(facts) => Action::Publish(facts),
            State::CloseAndRetry | State::CloseAndFail => Action::CloseFd,
            State::Uncount => Action::Uncount,
            State::Finished => Action::Finished,
        }
    }

    /// Takes what came out of the action that [`Walk::next`] gave.
    ///
    /// An event that does not answer the action ends the walk with [`Cause::KeptChanging`]; it cannot corrupt it.
    pub fn report(&mut self, event: Event) {
        self.state = match (self.state, event) {
            (State::Finished, _) => State::Finished,
            // Undoing ignores how it went: there is nothing else to do.
            (State::ReleaseAndFail(_) | State::CloseAndFail, _) => State::Uncount,
            (State::Uncount, _) => State::Finished,
            (State::CloseAndRetry, _) => self.retry(),
            (State::Retire(_), _) => State::Describe,

            (State::Reservation, Event::Reservation(base, len)) => self.enter_reservation(base, len),
            // A chunk that does not cover the cursor would not move it: the walk would never end.
            (State::Find, Event::Known(Some(facts))) if facts.base <= self.cursor && self.cursor < facts.end() => State::CompareId(facts),
            (State::Find, Event::Known(None)) => State::Describe,
            (State::CompareId(facts), Event::Id(id)) => {
                if id == Some(facts.buffer_id) {
                    State::Count(facts)
                } else {
                    State::Retire(facts)
                }
            }
            (State::Count(facts) | State::Publish(facts), Event::Done) => self.advance(facts),
            (State::Count(_) | State::Publish(_), Event::Gone) => self.retry(),

            (State::Describe, Event::Chunk(Some(facts))) => self.accept(facts),
            (State::Describe, Event::Chunk(None)) => self.fail(Cause::Hole),
            (State::Retain(facts), Event::Done) => State::Export(facts),
            (State::Export(facts), Event::Done) => State::Release(facts),
            (State::Release(facts), Event::Done) => State::Recheck(facts),
            (State::Recheck(facts), Event::Id(id)) => {
                if id == Some(facts.buffer_id) {
                    State::Publish(facts)
                } else {
                    State::CloseAndRetry
                }
            }

            // A refusal, or an event that answers another action: what is at hand is given back.
            (state, event) => {
                self.fail(if let Event::Refused(cause) = event { cause } else { Cause::KeptChanging });
                match state {
                    State::Export(facts) => State::ReleaseAndFail(facts),
                    State::Release(_) | State::Recheck(_) => State::CloseAndFail,
                    _ => State::Uncount,
                }
            }
        };
    }

    /// The reservation's base and length in bytes, all of the range being published and counted; or the cause and the address it was found at.
    pub fn into_result(self) -> Result<(u64, u64), (Cause, u64)> {
        self.failure.map_or(Ok(self.reservation), Err)
    }

    fn enter_reservation(&mut self, base: u64, len: u64) -> State {
        let inside = base <= self.start && base.checked_add(len).is_some_and(|end| self.end <= end);
        if !inside {
            return self.fail(Cause::LeavesReservation { base, len });
        }
        self.reservation = (base, len);
        State::Find
    }

    fn accept(&mut self, facts: ChunkFacts) -> State {
        let (base, len) = self.reservation;
        // Only the first chunk may begin before the cursor; a later one that does has moved since its neighbour was published.
        let placed = if self.cursor == self.start { facts.base <= self.cursor } else { facts.base == self.cursor };
        if !placed || facts.end() <= self.cursor || facts.base < base || facts.end() > base.saturating_add(len) {
            return self.retry();
        }
        if !facts.base.is_multiple_of(GRANULE) || !facts.len.is_multiple_of(GRANULE) {
            return self.fail(Cause::Unaligned { len: facts.len });
        }
        State::Retain(facts)
    }

    fn advance(&mut self, facts: ChunkFacts) -> State {
        self.attempts = 0;
        self.cursor = facts.end();
        if self.cursor >= self.end { State::Finished } else { State::Find }
    }

    fn retry(&mut self) -> State {
        self.attempts += 1;
        if self.attempts >= ATTEMPTS { self.fail(Cause::KeptChanging) } else { State::Find }
    }

    fn fail(&mut self, cause: Cause) -> State {
        self.failure = Some((cause, self.cursor));
        State::Uncount
    }
}
