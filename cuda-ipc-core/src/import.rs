//! The import machine: in which order chunks are fetched, checked, imported and mapped, and how a failure is undone.
//!
//! It does nothing itself. [`Transfer::next`] says what to do, the runner does it and tells [`Transfer::report`] how it went, until
//! [`Action::Finished`]. So each order of failures can be tried without a driver, and nothing here needs std, alloc, a clock or unsafe code.
//!
//! Per chunk: fetch the fd (in batches), re-check that the entry is still live, import, close the fd, map, release the handle; so at most one batch of
//! fds and one handle are held at a time, whatever the number of chunks. Then one set-access for each run of adjacent chunks. On a failure exactly what
//! was done is undone: the batch's fds are closed, the handle in hand is released, and each mapped run is unmapped by one call.

use core::fmt;

use crate::table::{Chunk, ChunkId};

/// A chunk as a table look-up gave it.
pub type Found = (ChunkId, Chunk);

/// What the runner is to do next. Numbers index the slice of chunks that the transfer was made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Get the fds of `count` chunks from `first` on: all of them, or the first ones ([`Transfer::report_fetched`]), or none and an error.
    Fetch {
        /// First chunk.
        first: usize,
        /// Number of chunks, at least 1.
        count: usize,
    },
    /// Read the chunk's table entry again; an error if it is not live under the same identity.
    Recheck(usize),
    /// Give the chunk's fd to the driver, and keep the handle.
    Import(usize),
    /// Close the chunk's fd.
    CloseFd(usize),
    /// Map the handle at the chunk's place in the window.
    Map(usize),
    /// Release the handle.
    Release(usize),
    /// Set access over a run of adjacent chunks.
    SetAccess {
        /// First chunk.
        first: usize,
        /// Number of chunks.
        count: usize,
    },
    /// Unmap a run of adjacent chunks: part of undoing.
    Unmap {
        /// First chunk.
        first: usize,
        /// Number of chunks.
        count: usize,
    },
    /// Nothing more: ask [`Transfer::into_result`].
    Finished,
}

/// The step at which a transfer failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Getting the fd from the exporter.
    Fetch,
    /// Reading the entry again.
    Recheck,
    /// `cuMemImportFromShareableHandle`.
    Import,
    /// `cuMemMap`.
    Map,
    /// `cuMemRelease`.
    Release,
    /// `cuMemSetAccess`.
    SetAccess,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fetch => "fetch",
            Self::Recheck => "re-check",
            Self::Import => "import",
            Self::Map => "map",
            Self::Release => "release",
            Self::SetAccess => "set access",
        })
    }
}

/// Why a transfer failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure<E> {
    /// The step.
    pub step: Step,
    /// The chunk (for set-access the first of the run).
    pub chunk: usize,
    /// What the runner reported.
    pub error: E,
    /// How many chunks stayed mapped because undoing failed too. Their part of the address range must not be freed.
    pub stuck: usize,
}

/// One import of some chunks; see the module's documentation.
#[derive(Debug)]
pub struct Transfer<'c, E> {
    chunks: &'c [Found],
    batch: usize,
    state: State,
    /// The chunk at hand.
    at: usize,
    /// Fds of chunks `at..fetched` are open (in some states from `at + 1`).
    fetched: usize,
    /// Chunks `0..mapped` are mapped.
    mapped: usize,
    failure: Option<Failure<E>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Fetch,
    Recheck,
    Import,
    Close,
    Map,
    Release,
    SetAccess,
    // Undoing.
    ReleaseUnmapped,
    CloseRest,
    Unmap,
    Finished,
}

impl<'c, E: Copy> Transfer<'c, E> {
    /// A transfer of `chunks`, which are in ascending order of address without overlap, fetching at most `batch` fds at a time (0 counts as 1).
    pub const fn new(chunks: &'c [Found], batch: usize) -> Self {
        let state = if chunks.is_empty() { State::Finished } else { State::Fetch };
        Self { chunks, batch: if batch == 0 { 1 } else { batch }, state, at: 0, fetched: 0, mapped: 0, failure: None }
    }

    /// What to do next. Does not change until [`Transfer::report`] is called.
    pub fn next(&self) -> Action {
        match self.state {
            State::Fetch => Action::Fetch { first: self.at, count: self.batch.min(self.chunks.len() - self.at) },
            State::Recheck => Action::Recheck(self.at),
            State::Import => Action::Import(self.at),
            State::Close | State::CloseRest => Action::CloseFd(self.at),
            State::Map => Action::Map(self.at),
            State::Release | State::ReleaseUnmapped => Action::Release(self.at),
            State::SetAccess => Action::SetAccess { first: self.at, count: self.run_from(self.at, self.chunks.len()) },
            State::Unmap => Action::Unmap { first: self.at, count: self.run_from(self.at, self.mapped) },
            State::Finished => Action::Finished,
        }
    }

    /// Takes the outcome of a fetch that got the fds of the first `count` chunks it was asked for: at least one. The rest is asked for again later.
    pub fn report_fetched(&mut self, count: usize) {
        if self.state == State::Fetch && count != 0 {
            self.fetched = (self.at + count.min(self.batch)).min(self.chunks.len());
            self.state = State::Recheck;
        }
    }

    /// Takes the outcome of the action that [`Transfer::next`] gave; of a fetch, that it got all fds.
    pub fn report(&mut self, outcome: Result<(), E>) {
        match (self.state, outcome) {
            (State::Fetch, Ok(())) => self.report_fetched(self.batch),
            (State::Fetch, Err(error)) => self.fail(Step::Fetch, error, State::CloseRest),
            (State::Recheck, Ok(())) => self.state = State::Import,
            (State::Recheck, Err(error)) => self.fail(Step::Recheck, error, State::CloseRest),
            (State::Import, Ok(())) => self.state = State::Close,
            (State::Import, Err(error)) => self.fail(Step::Import, error, State::CloseRest),
            // The kernel has let go of the number even where close reports an error.
            (State::Close, _) => self.state = State::Map,
            (State::Map, Ok(())) => {
                self.mapped = self.at + 1;
                self.state = State::Release;
            }
            (State::Map, Err(error)) => self.fail(Step::Map, error, State::ReleaseUnmapped),
            (State::Release, Ok(())) => self.advance(),
            (State::Release, Err(error)) => {
                self.fail(Step::Release, error, State::CloseRest);
                self.close_from(self.at + 1);
            }
            (State::SetAccess, Ok(())) => {
                self.at += self.run_from(self.at, self.chunks.len());
                if self.at == self.chunks.len() {
                    self.state = State::Finished;
                }
            }
            (State::SetAccess, Err(error)) => {
                self.fail(Step::SetAccess, error, State::Unmap);
                self.unmap_all();
            }
            (State::ReleaseUnmapped, _) => self.close_from(self.at + 1),
            (State::CloseRest, _) => self.close_from(self.at + 1),
            (State::Unmap, outcome) => {
                let count = self.run_from(self.at, self.mapped);
                if outcome.is_err()
                    && let Some(failure) = &mut self.failure
                {
                    failure.stuck += count;
                }
                self.at += count;
                if self.at >= self.mapped {
                    self.state = State::Finished;
                }
            }
            (State::Finished, _) => {}
        }
        // A failed fetch, re-check or import enters CloseRest with the chunk at hand; there may be nothing to close.
        if self.state == State::CloseRest && self.at >= self.fetched {
            self.unmap_all();
        }
    }

    /// How it ended. `Ok` means that every chunk is mapped and accessible; an error that none is, except `stuck` ones.
    pub fn into_result(self) -> Result<(), Failure<E>> {
        self.failure.map_or(Ok(()), Err)
    }

    /// After one chunk is done: the next of the batch, the next batch, or access.
    fn advance(&mut self) {
        self.at += 1;
        self.state = if self.at < self.fetched {
            State::Recheck
        } else if self.at < self.chunks.len() {
            State::Fetch
        } else {
            self.at = 0;
            State::SetAccess
        };
    }

    fn fail(&mut self, step: Step, error: E, then: State) {
        self.failure = Some(Failure { step, chunk: self.at, error, stuck: 0 });
        self.state = then;
    }

    fn close_from(&mut self, at: usize) {
        self.at = at;
        self.state = State::CloseRest;
        if self.at >= self.fetched {
            self.unmap_all();
        }
    }

    fn unmap_all(&mut self) {
        self.at = 0;
        self.state = if self.mapped == 0 { State::Finished } else { State::Unmap };
    }

    /// Length of the run of adjacent chunks that begins at `first` and ends before `limit`.
    fn run_from(&self, first: usize, limit: usize) -> usize {
        let run = self.chunks.get(first..limit).unwrap_or(&[]);
        let joints = run.iter().zip(run.iter().skip(1));
        1 + joints.take_while(|((_, left), (_, right))| left.end() == right.address).count()
    }
}
