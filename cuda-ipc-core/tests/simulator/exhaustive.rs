//! Small worlds: each event at each place, cut in two at each of its own steps; and all pairs of events.

use std::collections::BTreeSet;

use crate::exporter::World;
use crate::importer::{Manner, Proof};
use crate::run::{Event, Report, honest, run, steps};

/// What a search has seen.
#[derive(Default)]
struct Seen {
    runs: usize,
    imported: usize,
    /// Names of failures, without numbers.
    names: BTreeSet<String>,
    errors: Vec<String>,
    foreign: usize,
}

impl Seen {
    fn add(&mut self, report: Report, what: impl FnOnce() -> String) {
        self.runs += 1;
        self.foreign += report.foreign.len();
        match report.outcome {
            Ok(()) => self.imported += 1,
            Err(name) => drop(self.names.insert(name.chars().filter(|c| !c.is_ascii_hexdigit() || c.is_ascii_lowercase()).collect())),
        }
        let what = if report.errors.is_empty() { String::new() } else { what() };
        self.errors.extend(report.errors.into_iter().map(|error| format!("{what}: {error}")));
    }
}

/// Begins the event at position `at` with some of its steps, and does the rest at each later position.
fn cut_in_two(chunks: &[u64], manner: Manner, event: Event, seen: &mut Seen) {
    let positions = run(chunks, manner, |_, _| {}).positions;
    let all_steps = {
        let mut world = World::new(chunks, 8);
        let steps = steps(event, &world);
        world.start(steps);
        world.finish()
    };
    for at in 0..positions {
        for begun in 1..=all_steps {
            for rest in at + 1..=positions {
                let report = run(chunks, manner, |position, world: &mut World| {
                    if position == at {
                        let steps = steps(event, world);
                        world.start(steps);
                        (0..begun).for_each(|_| world.step_first());
                    } else if position == rest {
                        world.finish();
                    }
                });
                // An import that has failed before the rest is done does not see it, now or later.
                let same_from_here = begun == all_steps || report.positions <= rest;
                seen.add(report, || format!("{event:?} at {at}, {begun} steps, the rest at {rest}, {manner:?}"));
                if same_from_here {
                    break;
                }
            }
        }
    }
}

/// Does one event at one position and another at the same or a later one.
fn pairs(chunks: &[u64], manner: Manner, events: &[Event], seen: &mut Seen) {
    let positions = run(chunks, manner, |_, _| {}).positions;
    for (one, other) in events.iter().flat_map(|one| events.iter().map(move |other| (one, other))) {
        for first in 0..positions {
            for second in first..positions {
                let report = run(chunks, manner, |position, world: &mut World| {
                    for (at, event) in [(first, one), (second, other)] {
                        if position == at {
                            let steps = steps(*event, world);
                            world.start(steps);
                            world.finish();
                        }
                    }
                });
                let same_from_here = report.positions <= second;
                seen.add(report, || format!("{one:?} at {first}, {other:?} at {second}, {manner:?}"));
                if same_from_here {
                    break;
                }
            }
        }
    }
}

fn assert_none(errors: &[String]) {
    assert!(errors.is_empty(), "{} errors, the first: {}", errors.len(), errors[0]);
}

#[test]
fn undisturbed_imports_succeed() {
    for chunks in [&[1][..], &[2, 1], &[3, 2, 1], &[1, 1, 1, 1, 1, 1]] {
        for batch in 1..=4 {
            let report = run(chunks, Manner::right(batch), |_, _| {});
            assert_eq!((report.outcome, report.errors), (Ok(()), vec![]));
        }
    }
}

#[test]
fn every_event_cut_in_two_at_every_place() {
    let mut seen = Seen::default();
    for batch in [1, 2] {
        for event in honest(2) {
            let before = seen.foreign;
            cut_in_two(&[2, 1], Manner::right(batch), event, &mut seen);
            let outlives_its_table = matches!(event, Event::Exec | Event::CloseFrom);
            assert!(seen.foreign == before || outlives_its_table, "{event:?} lets foreign fds reach the driver");
        }
    }
    assert_none(&seen.errors);
    // The search has been where it should have been.
    let named = |part: &str| seen.names.iter().any(|name| name.contains(part));
    let parts = [
        "retired",
        "no such fd",
        "process is gone",
        "no live chunk",
        "not a table",
        "another process life",
        "no process",
        "not there any more",
    ];
    for part in parts {
        assert!(named(part), "never failed as {part:?}: {:?}", seen.names);
    }
    assert!(seen.imported > seen.runs / 20 && seen.runs > 20_000, "{} of {}", seen.imported, seen.runs);
}

#[test]
fn every_pair_of_events_at_every_two_places() {
    let mut seen = Seen::default();
    let events: Vec<Event> = honest(1).into_iter().chain([Event::Replace(1), Event::ReuseForChunk(1)]).collect();
    pairs(&[2, 1], Manner::right(2), &events, &mut seen);
    assert_none(&seen.errors);
    assert!(seen.imported > 0 && seen.runs > 20_000, "{} of {}", seen.imported, seen.runs);
}

#[test]
fn three_chunks_in_one_batch_and_in_single_fetches() {
    let mut seen = Seen::default();
    for (batch, event) in [(1, Event::ReuseForChunk(1)), (3, Event::ReuseForChunk(1)), (3, Event::Replace(2)), (3, Event::Merge(1))] {
        cut_in_two(&[1, 2, 1], Manner::right(batch), event, &mut seen);
    }
    assert_none(&seen.errors);
}

#[test]
fn with_a_proof_for_each_batch_no_foreign_fd_reaches_the_driver() {
    let mut seen = Seen::default();
    for event in [Event::Exec, Event::CloseFrom, Event::Restart, Event::ReuseForChunk(0)] {
        cut_in_two(&[2, 1], Manner { proof: Proof::EachBatch, ..Manner::right(1) }, event, &mut seen);
    }
    assert_none(&seen.errors);
    assert_eq!(seen.foreign, 0);
}

/// The simulator notices what it is there for: each of these is a way to do it wrong.
#[test]
fn without_the_recheck_foreign_memory_is_imported() {
    let mut seen = Seen::default();
    cut_in_two(&[2, 1], Manner { rechecks: false, ..Manner::right(1) }, Event::ReuseForChunk(0), &mut seen);
    assert_foreign(&seen);
}

#[test]
fn closing_an_fd_before_the_death_of_its_chunk_lets_foreign_memory_in() {
    let mut seen = Seen::default();
    cut_in_two(&[2, 1], Manner::right(1), Event::CloseBeforeDeath(0), &mut seen);
    assert_foreign(&seen);
}

/// After exec the importer's mapping of the old table still says that everything is live, for good, and the pidfd still works: fd numbers then lead into
/// the new program. Only the table's own number tells.
#[test]
fn without_proving_the_table_exec_and_closefrom_let_foreign_memory_in() {
    let careless = Manner { proof: Proof::Never, ..Manner::right(1) };
    for event in [Event::Exec, Event::CloseFrom] {
        let mut seen = Seen::default();
        cut_in_two(&[2, 1], careless, event, &mut seen);
        assert_foreign(&seen);
    }
}

/// Foreign memory was mapped, made accessible, and called a success.
fn assert_foreign(seen: &Seen) {
    assert!(seen.foreign > 0 && seen.errors.iter().any(|error| error.contains("is mapped to")), "{:?}", seen.errors);
}
