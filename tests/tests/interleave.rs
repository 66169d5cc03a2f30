//! Whatever happens in an exporter between any two steps of an import: the right bytes or a named error, and nothing left behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Instant;

use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter;
use cuda_ipc_tests::interleave::{CHUNKS, Event, Way, World};
use cuda_ipc_tests::points::Point;
use cuda_ipc_tests::random::Random;
use cuda_ipc_tests::shim;

/// How many random rounds, where more are wanted than [`LEAST`]. (The runner's limit is some minutes; `cargo test` has none.)
const ROUNDS: &str = "CUDA_IPC_RACE_ROUNDS";
/// Random rounds by default.
const LEAST: usize = 10_000;

/// Enters a test in a process with the shim.
fn enter(test: &str) -> Option<Inside> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        "main" => me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => return Some(me),
    }
    None
}

/// Lets each event happen at each point of each way to import, `least` rounds or more.
fn everywhere(world: &mut World<'_>, events: &[Event], least: usize) {
    let began = Instant::now();
    let mut rounds = 0;
    for way in [Way::Key, Way::KnownPeer, Way::Lease, Way::LeaseAgain] {
        let points = world.points(way);
        // A new process costs some time: it begins before each call, and after those whose answer names a process or a file.
        let matters = |point: &Point| point.before || point.name.starts_with("pidfd") || !events.iter().any(|event| event.ends_life());
        for point in points.into_iter().filter(matters) {
            for &event in events {
                world.round(way, &[(point, event)]);
                rounds += 1;
            }
        }
    }
    println!("{rounds} rounds in {:?}: {:?}, {} doubles", began.elapsed(), world.outcomes, world.doubles);
    assert!(rounds >= least, "{rounds}");
}

#[test]
fn chunks_come_and_go_between_any_two_steps() {
    let Some(me) = enter("chunks_come_and_go_between_any_two_steps") else { return };
    let mut world = World::start(&me);
    let of_each = |event: fn(u64) -> Event| (0..CHUNKS).map(event);
    let retired: Vec<Event> = of_each(Event::Retire).chain(of_each(Event::Replace)).collect();
    everywhere(&mut world, &retired, 1344);
    for outcome in ["the present bytes", "bytes of a chunk that is marked as gone", "retired", "no chunk there"] {
        assert!(world.outcomes.contains_key(outcome), "{outcome}");
    }
}

#[test]
fn slots_and_numbers_are_reused_between_any_two_steps() {
    let Some(me) = enter("slots_and_numbers_are_reused_between_any_two_steps") else { return };
    let mut world = World::start(&me);
    let of_each = |event: fn(u64) -> Event| (0..CHUNKS).map(event);
    let reused: Vec<Event> = of_each(Event::Reuse).chain(of_each(Event::PutChunk)).chain(of_each(Event::PutFile)).collect();
    everywhere(&mut world, &reused, 2016);
    for outcome in ["bytes of a chunk that is marked as gone", "retired", "no chunk there"] {
        assert!(world.outcomes.contains_key(outcome), "{outcome}");
    }
}

#[test]
fn an_exporter_execs_between_any_two_steps() {
    // Same pid, same addresses, same fd numbers, and a pidfd that notices nothing: B11.
    let Some(me) = enter("an_exporter_execs_between_any_two_steps") else { return };
    let mut world = World::start(&me);
    everywhere(&mut world, &[Event::Exec], 130);
    assert!(world.doubles >= 100, "the new life looks like the old one");
    for outcome in ["the bytes of the life that is over", "the exporter is gone", "another table"] {
        assert!(world.outcomes.contains_key(outcome), "{outcome}");
    }
}

#[test]
fn an_exporter_dies_between_any_two_steps() {
    let Some(me) = enter("an_exporter_dies_between_any_two_steps") else { return };
    let mut world = World::start(&me);
    everywhere(&mut world, &[Event::Kill], 130);
    for outcome in ["the bytes of the life that is over", "the exporter is gone", "no such process or fd"] {
        assert!(world.outcomes.contains_key(outcome), "{outcome}");
    }
}

#[test]
fn anything_at_any_time() {
    let Some(me) = enter("anything_at_any_time") else { return };
    let mut numbers = Random::from_environment();
    let mut random = |below: usize| usize::try_from(numbers.below(below as u64)).unwrap();
    let rounds = std::env::var(ROUNDS).map_or(LEAST, |rounds| rounds.parse().unwrap());
    let mut world = World::start(&me);
    let ways = [Way::Key, Way::KnownPeer, Way::Lease, Way::LeaseAgain].map(|way| (way, world.points(way)));
    let began = Instant::now();
    for _ in 0..rounds {
        let (way, points) = &ways[random(4)];
        // Up to three events, at most one of which is the last.
        let mut events: Vec<_> = (0..1 + random(3))
            .map(|_| {
                let chunk = random(usize::try_from(CHUNKS).unwrap()) as u64;
                let event = [Event::Retire, Event::Replace, Event::PutChunk, Event::PutFile][random(4)](chunk);
                (points[random(points.len())], event)
            })
            .collect();
        // A new life costs as much as a hundred other rounds.
        if random(60) == 0 {
            let end = if random(2) == 0 { Event::Exec } else { Event::Kill };
            events.truncate(1);
            events[0].1 = end;
        }
        world.round(*way, &events);
    }
    println!("{rounds} rounds in {:?}: {:?}", began.elapsed(), world.outcomes);
}
