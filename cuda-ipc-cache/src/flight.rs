//! Flights: who may change which granules of a window.
//!
//! Whoever imports into or unmaps a range of granules holds a flight over it. Flights over disjoint ranges go on side by side. Where a flight is in the way,
//! one either waits for its landing, and finds its work done or learns how it failed ([`Board::enter`]); or one leaves a note and goes, and whoever lands
//! sees to what was left ([`Board::try_enter`]). So no chunk is imported twice, nobody repeats a failure that has just happened, and nothing that somebody
//! passed by is forgotten.
//!
//! The board's lock guards the flights and a state that is its owner's (`window/state.rs`). No flight waits for another while it flies.

use core::fmt;
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use std::sync::PoisonError;

use cuda_ipc_core::importer::Deadline;

use crate::sync::{Condvar, Mutex, MutexGuard};

/// See the module's documentation. `S` is what the lock guards besides, `E` a failure.
pub struct Board<S, E> {
    inner: Mutex<Inner<S, E>>,
    changed: Condvar,
}

/// What the board's lock guards; dereferences to the owner's state.
#[derive(Debug, Default)]
pub struct Inner<S, E> {
    flying: Vec<Flying>,
    last_number: u64,
    /// Failures that somebody who waited has not yet taken note of.
    failures: Vec<Failure<E>>,
    state: S,
}

#[derive(Debug)]
struct Flying {
    number: u64,
    first: u32,
    last: u32,
    waiters: u32,
    passed_by: bool,
}

#[derive(Debug)]
struct Failure<E> {
    number: u64,
    waiters: u32,
    error: E,
}

/// What came of asking for a flight.
pub enum Entry<F, E> {
    /// It is the caller's.
    Flying(F),
    /// Another one over this range has just landed, with this failure if it failed: look again.
    Landed(Option<E>),
}

/// A flight; dropping it lands.
pub struct Flight<'b, S, E: Copy> {
    board: &'b Board<S, E>,
    number: u64,
}

impl<S, E: Copy> Board<S, E> {
    /// A board with no flights.
    pub fn new(state: S) -> Self {
        let inner = Inner { flying: Vec::new(), last_number: 0, failures: Vec::new(), state };
        Self { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, Inner<S, E>> {
        // A panic under this lock would be a bug of ours; going on is better than failing for ever.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of the lock until something has changed, or for so long.
    pub fn wait<'b>(&'b self, inner: MutexGuard<'b, Inner<S, E>>, timeout: Duration) -> MutexGuard<'b, Inner<S, E>> {
        match self.changed.wait_timeout(inner, timeout) {
            Ok((inner, _)) => inner,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    /// Wakes everybody in [`Board::wait`], and in [`Board::enter`]. What they wait for was changed before.
    pub fn wake(&self) {
        // Taking the lock orders the change after a waiter's look at it, so that no wake is lost.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Asks for a flight over granules `first..=last`, and waits while another one overlaps. `None` if the deadline came first.
    pub fn enter(&self, first: u32, last: u32, deadline: Deadline) -> Option<Entry<Flight<'_, S, E>, E>> {
        let mut inner = self.lock();
        let Some(blocking) = inner.blocking(first, last).next() else { return Some(Entry::Flying(self.take_off(&mut inner, first, last))) };
        blocking.waiters += 1;
        let number = blocking.number;
        loop {
            let left = deadline.remaining();
            if left.is_zero() {
                if let Some(blocking) = inner.find(number) {
                    blocking.waiters -= 1;
                }
                return None;
            }
            inner = self.wait(inner, left);
            if inner.find(number).is_none() {
                return Some(Entry::Landed(inner.take_failure(number)));
            }
        }
    }

    /// A flight over granules `first..=last`, if nobody has one there. Otherwise whoever has one is told, when landing, that somebody has passed by.
    pub fn try_enter(&self, first: u32, last: u32) -> Option<Flight<'_, S, E>> {
        let mut inner = self.lock();
        let mut free = true;
        for flying in inner.blocking(first, last) {
            flying.passed_by = true;
            free = false;
        }
        free.then(|| self.take_off(&mut inner, first, last))
    }

    fn take_off(&self, inner: &mut Inner<S, E>, first: u32, last: u32) -> Flight<'_, S, E> {
        inner.last_number += 1;
        let number = inner.last_number;
        inner.flying.push(Flying { number, first, last, waiters: 0, passed_by: false });
        Flight { board: self, number }
    }
}

impl<S, E: Copy> Inner<S, E> {
    /// Whether nobody has a flight.
    pub fn is_quiet(&self) -> bool {
        self.flying.is_empty()
    }

    fn blocking(&mut self, first: u32, last: u32) -> impl Iterator<Item = &mut Flying> {
        self.flying.iter_mut().filter(move |flying| flying.first <= last && first <= flying.last)
    }

    fn find(&mut self, number: u64) -> Option<&mut Flying> {
        self.flying.iter_mut().find(|flying| flying.number == number)
    }

    fn take_failure(&mut self, number: u64) -> Option<E> {
        let at = self.failures.iter().position(|failure| failure.number == number)?;
        let failure = self.failures.get_mut(at)?;
        let error = failure.error;
        failure.waiters -= 1;
        if failure.waiters == 0 {
            self.failures.swap_remove(at);
        }
        Some(error)
    }
}

impl<S, E: Copy> Flight<'_, S, E> {
    /// Lands; `failure` is for those who wait. Says whether somebody has passed by.
    pub fn land(self, failure: Option<E>) -> bool {
        let passed_by = self.leave(failure);
        core::mem::forget(self);
        passed_by
    }

    fn leave(&self, failure: Option<E>) -> bool {
        let mut inner = self.board.lock();
        let Some(at) = inner.flying.iter().position(|flying| flying.number == self.number) else { return false };
        let Flying { number, waiters, passed_by, .. } = inner.flying.swap_remove(at);
        if let Some(error) = failure
            && waiters != 0
        {
            inner.failures.push(Failure { number, waiters, error });
        }
        drop(inner);
        self.board.changed.notify_all();
        passed_by
    }
}

impl<S, E: Copy> Drop for Flight<'_, S, E> {
    fn drop(&mut self) {
        self.leave(None);
    }
}

impl<S, E> Deref for Inner<S, E> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S, E> DerefMut for Inner<S, E> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

impl<S: Default, E: Copy> Default for Board<S, E> {
    fn default() -> Self {
        Self::new(S::default())
    }
}

impl<S, E> fmt::Debug for Board<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Board")
    }
}

impl<S, E: Copy> fmt::Debug for Flight<'_, S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Flight").field(&self.number).finish()
    }
}

impl<F, E> fmt::Debug for Entry<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flying(_) => "Flying",
            Self::Landed(_) => "Landed",
        })
    }
}
