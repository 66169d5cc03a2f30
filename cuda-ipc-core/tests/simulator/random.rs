//! Long runs of one exporter with many events at once, by a seed that is printed.

use cuda_ipc_core::key::Key;
use cuda_ipc_core::table::GRANULE;

use crate::exporter::{BASE, LEN, World};
use crate::importer::{Importer, Manner};
use crate::kernel::{Object, recycle};
use crate::run::{Event, honest, steps};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }

    fn chance(&mut self, in_hundred: u64) -> bool {
        self.next() % 100 < in_hundred
    }
}

/// An event for the world as it is: rare ones for the process, otherwise anything for any chunk.
fn event(random: &mut Random, world: &World) -> Event {
    let has_table = world.key().is_some_and(|key| matches!(world.process.fds.get(&key.table_fd), Some(Object::Table(_))));
    if !world.process.alive || !has_table && random.chance(50) {
        return Event::Restart;
    }
    if world.memory.len() < 2 || random.chance(20) {
        return Event::Grow;
    }
    let events = honest(world.memory.len());
    let event = events[random.below(events.len())];
    let rare = matches!(event, Event::Exec | Event::Exit | Event::Restart | Event::CloseFrom);
    if rare && !random.chance(25) { Event::Retire(0) } else { event }
}

/// Lets threads of the exporter do some steps: many or few, as `unrest` says.
fn disturb(random: &mut Random, world: &mut World, unrest: u64) {
    while random.chance(unrest) {
        if world.tasks() < 3 && random.chance(30) {
            let steps = steps(event(random, world), world);
            world.start(steps);
        }
        if world.tasks() != 0 {
            let task = random.below(world.tasks());
            world.step(task);
        }
    }
}

/// Some of what is mapped back to back now; sometimes more than that.
fn range(random: &mut Random, world: &World) -> (u64, u64) {
    let mapped = world.mapped();
    let Some((first, granules)) = mapped.get(random.below(mapped.len().max(1))) else { return (BASE, GRANULE) };
    let run = mapped.iter().skip_while(|(base, _)| base < first).skip(1).take(random.below(4));
    let end = run.fold(first + granules * GRANULE, |end, (base, granules)| if *base == end { end + granules * GRANULE } else { end });
    let end = if random.chance(10) { end + GRANULE } else { end };
    (*first, end.min(BASE + LEN) - first)
}

#[test]
fn ten_thousand_rounds() {
    let seed = match std::env::var("SIMULATOR_SEED") {
        Ok(seed) => seed.parse().expect("SIMULATOR_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.as_secs() ^ u64::from(now.subsec_nanos()) << 32),
    };
    println!("SIMULATOR_SEED={seed}");
    let mut random = Random(seed);
    let (mut imported, mut rounds) = (0, 0);
    while rounds < 10_000 {
        // Some exporters are past their fd budget, and some chunks then have no fd.
        let mut world = World::new(&[2, 1, 3], if random.chance(20) { 3 } else { 8 });
        let mut keys: Vec<Key> = world.key().into_iter().collect();
        for _ in 0..200 {
            rounds += 1;
            // Often the exporter comes to rest between two imports.
            if random.chance(60) {
                world.finish();
            }
            keys.extend(world.key().filter(|key| keys.last().is_none_or(|last| last.nonce != key.nonce)));
            // Mostly the newest key, now and then one of an earlier program.
            let key = if random.chance(90) { keys.last() } else { keys.get(random.below(keys.len())) };
            let range = range(&mut random, &world);
            let unrest = [5, 20, 45][random.below(3)];
            let manner = Manner::right(1 + random.below(4));
            let mut importer = Importer::new(*key.expect("one at least"), range, manner);
            let mut steps = 0;
            let outcome = loop {
                disturb(&mut random, &mut world, unrest);
                if let Some(outcome) = importer.step(&mut world) {
                    break outcome;
                }
                steps += 1;
                assert!(steps < 1000, "SIMULATOR_SEED={seed}: the importer ends");
            };
            importer.verify(&mut world, &outcome);
            imported += usize::from(outcome.is_ok());
            assert!(world.errors.is_empty(), "SIMULATOR_SEED={seed}, round {rounds}: {:?}", world.errors);
        }
        world.finish();
        assert!(world.errors.is_empty(), "SIMULATOR_SEED={seed}: {:?}", world.errors);
        recycle(world.tables);
    }
    assert!(imported > 3000, "SIMULATOR_SEED={seed}: only {imported} imports of {rounds} succeeded");
    println!("{imported} of {rounds} imports succeeded");
}
