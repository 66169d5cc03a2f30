//! The import machine under every failure: exactly what was done is undone, and the failure is named rightly.
#![cfg(not(loom))]

mod support;

use std::collections::BTreeSet;

use cuda_ipc_core::import::{Action, Failure, Found, Step, Transfer};
use cuda_ipc_core::table::GRANULE;
use proptest::prelude::*;
use support::found;

/// `n` chunks of one to three granules; bit i of `gaps` puts a gap after chunk i.
fn chunks(n: u32, gaps: u32) -> Vec<Found> {
    let mut at = 8;
    (0..n)
        .map(|number| {
            let granules = 1 + u64::from(number) % 3;
            let chunk = found(number, at, granules);
            at += granules + u64::from(gaps >> number & 1);
            chunk
        })
        .collect()
}

/// Fds, handles and mappings of an importer that carries out actions, and fails the chosen ones.
struct World<'c> {
    chunks: &'c [Found],
    batch: usize,
    /// Fds that each fetch gets at most, in turn; empty for all that are asked for.
    yields: &'c [usize],
    fetches: usize,
    /// Numbers of the actions to fail.
    failing: BTreeSet<usize>,
    /// Fail every action after the first failure too.
    then_all: bool,
    actions: usize,
    fds: BTreeSet<usize>,
    rechecked: BTreeSet<usize>,
    handle: Option<usize>,
    mapped: BTreeSet<usize>,
    accessible: BTreeSet<usize>,
    failure: Option<Expected>,
}

/// What the transfer has to report, and how many actions undoing takes.
struct Expected {
    step: Step,
    chunk: usize,
    number: usize,
    undo: usize,
}

impl<'c> World<'c> {
    fn new(chunks: &'c [Found], batch: usize, failing: impl IntoIterator<Item = usize>) -> Self {
        World {
            chunks,
            batch,
            yields: &[],
            fetches: 0,
            failing: failing.into_iter().collect(),
            then_all: false,
            actions: 0,
            fds: BTreeSet::new(),
            rechecked: BTreeSet::new(),
            handle: None,
            mapped: BTreeSet::new(),
            accessible: BTreeSet::new(),
            failure: None,
        }
    }

    /// Maximal runs of adjacent chunks among `0..count`, as (first, count).
    fn runs(&self, count: usize) -> Vec<(usize, usize)> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for number in 0..count {
            match runs.last_mut() {
                Some((first, len)) if self.chunks[number - 1].1.end() == self.chunks[number].1.address => {
                    assert_eq!(*first + *len, number);
                    *len += 1;
                }
                _ => runs.push((number, 1)),
            }
        }
        runs
    }

    fn act(&mut self, action: Action) -> Result<(), usize> {
        let number = self.actions;
        self.actions += 1;
        let fails = self.failing.contains(&number) || self.then_all && self.failure.is_some();
        match action {
            Action::Fetch { first, count } => {
                self.forward();
                assert!(self.fds.is_empty() && self.handle.is_none(), "at most one batch and no handle");
                assert_eq!((first, count), (self.mapped.len(), self.batch.max(1).min(self.chunks.len() - first)));
                if !fails {
                    self.fetches += 1;
                    let most = self.yields.get((self.fetches - 1) % self.yields.len().max(1)).copied().unwrap_or(count);
                    self.fds.extend(first..first + count.min(most));
                }
                self.outcome(fails, Step::Fetch, first, number)
            }
            Action::Recheck(at) => {
                self.forward();
                assert!(self.fds.contains(&at) && self.handle.is_none());
                self.rechecked.insert(at);
                self.outcome(fails, Step::Recheck, at, number)
            }
            Action::Import(at) => {
                self.forward();
                assert!(self.fds.contains(&at) && self.rechecked.contains(&at), "no fd reaches the driver unchecked");
                assert!(self.handle.is_none(), "one handle at a time");
                self.handle = (!fails).then_some(at);
                self.outcome(fails, Step::Import, at, number)
            }
            Action::CloseFd(at) => {
                assert!(self.fds.remove(&at), "closed once, and only what is open");
                if fails { Err(number) } else { Ok(()) }
            }
            Action::Map(at) => {
                self.forward();
                assert!(self.handle == Some(at) && !self.fds.contains(&at) && !self.mapped.contains(&at));
                if !fails {
                    self.mapped.insert(at);
                }
                self.outcome(fails, Step::Map, at, number)
            }
            Action::Release(at) => {
                // A handle that the driver will not release is not asked for again.
                assert_eq!(self.handle.take(), Some(at));
                if self.failure.is_some() {
                    return if fails { Err(number) } else { Ok(()) };
                }
                self.outcome(fails, Step::Release, at, number)
            }
            Action::SetAccess { first, count } => {
                self.forward();
                assert!(self.mapped.len() == self.chunks.len() && self.fds.is_empty() && self.handle.is_none());
                assert!(self.runs(self.chunks.len()).contains(&(first, count)), "one call for each run");
                assert!(self.accessible.is_disjoint(&(first..first + count).collect()));
                if !fails {
                    self.accessible.extend(first..first + count);
                }
                self.outcome(fails, Step::SetAccess, first, number)
            }
            Action::Unmap { first, count } => {
                assert!(self.failure.is_some(), "only to undo");
                assert!(self.fds.is_empty() && self.handle.is_none(), "fds and handles go first");
                assert!((first..first + count).all(|at| self.mapped.contains(&at)), "nothing is unmapped that was not mapped");
                if fails {
                    return Err(number);
                }
                (first..first + count).for_each(|at| assert!(self.mapped.remove(&at)));
                Ok(())
            }
            Action::Finished => unreachable!("not an action"),
        }
    }

    fn forward(&self) {
        assert!(self.failure.is_none(), "after a failure nothing but undoing");
    }

    fn outcome(&mut self, fails: bool, step: Step, chunk: usize, number: usize) -> Result<(), usize> {
        if !fails {
            return Ok(());
        }
        let undo = self.fds.len() + usize::from(self.handle.is_some()) + self.runs(self.mapped.len()).len();
        self.failure = Some(Expected { step, chunk, number, undo });
        Err(number)
    }

    /// Runs a transfer to its end and checks everything that can be said about it. Returns the number of actions.
    fn check(mut self) -> usize {
        let mut transfer = Transfer::new(self.chunks, self.batch);
        loop {
            let action = transfer.next();
            assert_eq!(transfer.next(), action, "asking changes nothing");
            if action == Action::Finished {
                break;
            }
            match (action, self.act(action)) {
                (Action::Fetch { .. }, Ok(())) if !self.yields.is_empty() => {
                    transfer.report_fetched(0);
                    assert_eq!(transfer.next(), action, "nothing fetched is no progress");
                    transfer.report_fetched(self.fds.len());
                    let after = transfer.next();
                    transfer.report_fetched(1);
                    assert_eq!(transfer.next(), after, "only a fetch is answered by a count");
                }
                (_, outcome) => transfer.report(outcome),
            }
        }
        transfer.report(Err(usize::MAX));
        assert_eq!(transfer.next(), Action::Finished, "a finished transfer stays so");

        let n = self.chunks.len();
        assert!(self.fds.is_empty() && self.handle.is_none(), "no fd and no handle is left: {:?} {:?}", self.fds, self.handle);
        match (transfer.into_result(), &self.failure) {
            (Ok(()), None) => {
                assert_eq!((self.mapped.len(), self.accessible.len()), (n, n));
                let fetches = if self.yields.is_empty() { n.div_ceil(self.batch.max(1)) } else { self.fetches };
                let minimum = fetches + 5 * n + self.runs(n).len();
                assert_eq!(self.actions, minimum);
            }
            (Err(Failure { step, chunk, error, stuck }), Some(expected)) => {
                assert_eq!((step, chunk, error), (expected.step, expected.chunk, expected.number));
                assert_eq!(stuck, self.mapped.len(), "what is left mapped is told");
                assert_eq!(self.actions - expected.number - 1, expected.undo, "each thing is undone by one action");
            }
            (result, expected) => panic!("{result:?}, but failed: {}", expected.is_some()),
        }
        self.actions
    }
}

fn cases(most: u32) -> impl Iterator<Item = (Vec<Found>, usize)> {
    (1..=most).flat_map(|n| (0..1_u32 << (n - 1)).flat_map(move |gaps| (1..=4).map(move |batch| (chunks(n, gaps), batch))))
}

#[test]
fn success_takes_the_least_number_of_actions() {
    for (chunks, batch) in cases(6) {
        World::new(&chunks, batch, []).check();
    }
}

#[test]
fn every_single_failure() {
    for (chunks, batch) in cases(6) {
        for failing in 0..World::new(&chunks, batch, []).check() {
            World::new(&chunks, batch, [failing]).check();
        }
    }
}

#[test]
fn every_pair_of_failures() {
    for (chunks, batch) in cases(6) {
        for first in 0..World::new(&chunks, batch, []).check() {
            for second in first + 1..World::new(&chunks, batch, [first]).check() {
                World::new(&chunks, batch, [first, second]).check();
            }
        }
    }
}

#[test]
fn every_failure_with_undoing_that_fails_altogether() {
    for (chunks, batch) in cases(6) {
        for failing in 0..World::new(&chunks, batch, []).check() {
            World { then_all: true, ..World::new(&chunks, batch, [failing]) }.check();
        }
    }
}

/// A source that gives fewer fds than it was asked for: the rest is asked for again, and undoing knows which are open.
#[test]
fn every_failure_with_fetches_that_fall_short() {
    for (chunks, batch) in cases(5) {
        for yields in [&[1][..], &[2], &[2, 1], &[1, 3, 2]] {
            let world = |failing: &[usize]| World { yields, ..World::new(&chunks, batch, failing.iter().copied()) };
            for first in 0..world(&[]).check() {
                for second in first + 1..world(&[first]).check() {
                    world(&[first, second]).check();
                }
            }
        }
    }
}

#[test]
fn short_fetches_take_as_many_as_needed() {
    let chunks = chunks(5, 0);
    let mut transfer = Transfer::<u8>::new(&chunks, 4);
    let mut fetches = Vec::new();
    while transfer.next() != Action::Finished {
        match transfer.next() {
            Action::Fetch { first, count } => {
                fetches.push((first, count));
                // More than was asked for cannot have been fetched.
                transfer.report_fetched([1, 2, 9][fetches.len() - 1]);
            }
            _ => transfer.report(Ok(())),
        }
    }
    assert_eq!(fetches, [(0, 4), (1, 4), (3, 2)]);
    assert_eq!(transfer.into_result(), Ok(()));
}

#[test]
fn sequence_of_two_chunks_and_a_gap() {
    let chunks = [found(0, 8, 1), found(1, 9, 2), found(2, 20, 1)];
    let mut transfer = Transfer::<u8>::new(&chunks, 2);
    let mut log = Vec::new();
    while transfer.next() != Action::Finished {
        log.push(transfer.next());
        transfer.report(Ok(()));
    }
    let per_chunk = |at| [Action::Recheck(at), Action::Import(at), Action::CloseFd(at), Action::Map(at), Action::Release(at)];
    let mut expected = vec![Action::Fetch { first: 0, count: 2 }];
    expected.extend(per_chunk(0));
    expected.extend(per_chunk(1));
    expected.push(Action::Fetch { first: 2, count: 1 });
    expected.extend(per_chunk(2));
    expected.extend([Action::SetAccess { first: 0, count: 2 }, Action::SetAccess { first: 2, count: 1 }]);
    assert_eq!(log, expected);
}

#[test]
fn nothing_to_do_and_odd_batches() {
    assert_eq!(Transfer::<()>::new(&[], 4).next(), Action::Finished);
    assert_eq!(Transfer::<()>::new(&[], 4).into_result(), Ok(()));
    for batch in [0, 5, 6, 253, usize::MAX - 1, usize::MAX] {
        for failing in 0..World::new(&chunks(5, 2), batch, []).check() {
            World::new(&chunks(5, 2), batch, [failing]).check();
        }
    }
}

proptest! {
    /// Whatever comes back, in whatever order the chunks are, the machine ends.
    #[test]
    fn always_ends(
        places in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..20),
        batch in prop_oneof![0..5_usize, Just(usize::MAX)],
        outcomes in proptest::collection::vec(proptest::bool::weighted(0.9), 0..200),
        rest in any::<bool>(),
    ) {
        let chunks: Vec<Found> = places
            .iter()
            .map(|(address, len)| {
                let (id, chunk) = found(0, 0, 1);
                (id, cuda_ipc_core::table::Chunk { address: *address, len: len.saturating_mul(GRANULE), ..chunk })
            })
            .collect();
        let mut transfer = Transfer::new(&chunks, batch);
        let mut outcomes = outcomes.into_iter().chain(core::iter::repeat(rest));
        let mut actions = 0;
        while transfer.next() != Action::Finished {
            transfer.report(outcomes.next().expect("endless").then_some(()).ok_or(actions));
            actions += 1;
            // Fetch and five steps for each, one access, one undo of anything.
            prop_assert!(actions <= 8 * chunks.len() + 2);
        }
    }
}
