//! The judgement in every world of the model: complete where all is known, true where some is not.

use std::collections::BTreeSet;

use cuda_ipc_core::diagnosis::{Facts, Life, Trial, find};

use crate::world::World;

#[test]
fn where_all_is_known_each_remedy_leads_further_until_the_lane_is_there() {
    let (mut failing, mut steps, mut named) = (0, 0, BTreeSet::new());
    World::for_each(|start| {
        let mut world = start;
        failing += u32::from(world.failure().is_some());
        for step in 0.. {
            let Some(failure) = world.failure() else { break };
            assert!(step < 12, "remedies without an end in {start:?}");
            let cause = find(&world.facts(failure)).name();
            assert_ne!(cause, "unknown", "{world:?}: {}", world.facts(failure));
            let before = world.barriers().len();
            world = world.repaired(cause);
            assert!(world.barriers().len() < before, "the remedy for {cause} changes nothing: {world:?}");
            named.insert(cause);
            steps += 1;
        }
    });
    println!("{failing} worlds without a lane, {steps} remedies: {named:?}");
    assert!(failing > 80_000, "{failing}");
    assert_eq!(named.len(), 12, "{named:?}");
}

/// How many facts [`hide`] knows.
const FACTS: u32 = 13;

fn hide(facts: &Facts, hidden: u32) -> Facts {
    let mut facts = *facts;
    let is = |at: u32| hidden >> at & 1 == 1;
    let peer = &mut facts.peer;
    if is(0) {
        facts.kernel = None;
    }
    if is(1) {
        facts.filtered = None;
    }
    if is(2) {
        facts.yama = None;
    }
    if is(3) {
        facts.on_self = Trial::NotDone;
    }
    if is(4) {
        facts.on_neighbour = Trial::NotDone;
    }
    if is(5) {
        facts.may_trace = None;
    }
    if is(6) {
        peer.life = Life::Unknown;
    }
    let answers = [
        &mut peer.same_ids,
        &mut peer.dumpable,
        &mut peer.capabilities_covered,
        &mut peer.readable,
        &mut peer.same_pid_namespace,
        &mut peer.same_user_namespace,
    ];
    for (at, answer) in (7..).zip(answers) {
        if is(at) {
            *answer = None;
        }
    }
    facts
}

#[test]
fn where_some_is_not_known_nothing_untrue_is_said() {
    // Up to three facts hidden, or all but three.
    let masks: Vec<u32> = (0..1_u32 << FACTS).filter(|mask| mask.count_ones() <= 3 || FACTS - mask.count_ones() <= 3).collect();
    assert_eq!(masks.len(), 2 * (1 + 13 + 78 + 286));
    let (mut found, mut unknown) = (0_u64, 0_u64);
    World::for_each(|world| {
        let Some(failure) = world.failure() else { return };
        let (facts, barriers) = (world.facts(failure), world.barriers());
        for &mask in &masks {
            match find(&hide(&facts, mask)).name() {
                "unknown" => unknown += 1,
                cause => {
                    assert!(barriers.contains(&cause), "{cause} is not what stops it in {world:?}: {}", hide(&facts, mask));
                    found += 1;
                }
            }
        }
    });
    println!("{found} verdicts, {unknown} times nothing was proven");
    assert!(found > 0 && unknown > 0);
}
