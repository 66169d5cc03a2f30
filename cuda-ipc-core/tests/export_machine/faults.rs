//! All small worlds with no fault, one fault and two.

use cuda_ipc_core::export::{Action, ChunkFacts, Event, Walk};
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::table::GRANULE;

use crate::world::{BASE, Before, FAULTS, Fault, LEN, World, refusal};

/// All mixtures of `n` chunks.
fn mixtures(n: u32) -> impl Iterator<Item = Vec<Before>> {
    let kinds = [Before::Unknown, Before::Known, Before::Stale];
    (0..3_usize.pow(n)).map(move |mixture| (0..n).map(|number| kinds[mixture / 3_usize.pow(number) % 3]).collect())
}

fn cases(most: u32) -> impl Iterator<Item = (Vec<Before>, u64)> {
    (1..=most).flat_map(mixtures).flat_map(|chunks| [0, 1, GRANULE - 1].map(|margin| (chunks.clone(), margin))).filter(
        |(chunks, margin)| {
            // A single chunk of one granule has no middle beyond these margins.
            chunks.len() > 1 || *margin <= 1
        },
    )
}

#[test]
fn success_takes_the_least_number_of_actions() {
    for (chunks, margin) in cases(6) {
        let (result, world) = World::new(&chunks, margin, []).check();
        assert_eq!(result, Ok((BASE, LEN)));
        world.assert_all_counted();
        let each = chunks.iter().map(|before| match before {
            // Find, compare, count.
            Before::Known => 3,
            // Find, describe, retain, export, release, compare, publish.
            Before::Unknown => 7,
            // Find, compare, retire, then as if unknown but for the look-up.
            Before::Stale => 9,
        });
        assert_eq!(world.actions, 1 + each.sum::<usize>());
    }
}

#[test]
fn every_refusal_is_named_and_undone() {
    for (chunks, margin) in cases(6) {
        for at in 0..World::new(&chunks, margin, []).check().1.actions {
            let (result, world) = World::new(&chunks, margin, [(at, Fault::Refuse)]).check();
            // Only retiring a dead chunk may fail without consequence.
            match result {
                Ok(_) => world.assert_all_counted(),
                Err((cause, _)) => assert_eq!(cause, refusal(at)),
            }
        }
    }
}

#[test]
fn every_single_fault() {
    for (chunks, margin) in cases(4) {
        for at in 0..World::new(&chunks, margin, []).check().1.actions {
            for fault in FAULTS {
                let (result, world) = World::new(&chunks, margin, [(at, fault)]).check();
                // A change behind the walk's back shows at the next use; one that the walk can see is followed.
                if fault == Fault::PublishElsewhere {
                    assert_eq!(result, Ok((BASE, LEN)), "{chunks:?} {at}");
                    world.assert_all_counted();
                }
                if fault == Fault::Replace || fault == Fault::RetireElsewhere {
                    assert!(result.is_ok(), "{chunks:?} {fault:?} at {at}: {result:?}");
                }
            }
        }
    }
}

#[test]
fn every_pair_of_faults() {
    for (chunks, margin) in cases(3).filter(|(chunks, margin)| *margin == 0 || *margin == 1 && chunks.len() < 3) {
        for first in 0..World::new(&chunks, margin, []).check().1.actions {
            for fault in FAULTS {
                let (_, world) = World::new(&chunks, margin, [(first, fault)]).check();
                for second in first + 1..world.actions {
                    for other in FAULTS {
                        let (result, _) = World::new(&chunks, margin, [(first, fault), (second, other)]).check();
                        let follows = |fault| fault != Fault::Refuse && fault != Fault::Free;
                        assert!(result.is_ok() || !follows(fault) || !follows(other), "{chunks:?} {fault:?} {first} {other:?} {second}");
                    }
                }
            }
        }
    }
}

/// An allocator that replaces the chunk whenever it is looked at.
#[test]
fn a_chunk_that_keeps_changing_ends_the_walk() {
    let replaced_always = (0..200).map(|at| (at, Fault::Replace));
    let (result, world) = World::new(&[Before::Unknown, Before::Known], 0, replaced_always).check();
    assert_eq!(result, Err((Cause::KeptChanging, BASE)));
    // Reservation; four times find, describe, retain, export, release, compare, close; uncount.
    assert_eq!(world.actions, 1 + 4 * 7 + 1);
}

/// Each chunk has its own attempts: three replacements of one do not count against the next.
#[test]
fn attempts_are_counted_for_each_chunk() {
    // Find, describe, retain, export, release, compare, close: the comparison is the sixth after the reservation's query, and so on. The fourth attempt
    // ends with the publication, at 28.
    let three_times = |start: usize| [6, 13, 20].map(|at| (start + at, Fault::Replace));
    let (result, world) = World::new(&[Before::Unknown; 3], 0, [0, 28, 56].into_iter().flat_map(three_times)).check();
    assert_eq!((result, world.actions), (Ok((BASE, LEN)), 1 + 3 * 28));
    world.assert_all_counted();
}

#[test]
fn a_range_that_cannot_be() {
    for (address, len) in [(BASE, 0), (u64::MAX, 2), (u64::MAX - 5, u64::MAX)] {
        let walk = Walk::new(address, len);
        assert_eq!(walk.next(), Action::Finished);
        assert_eq!(walk.into_result(), Err((Cause::EmptyRange, address)));
    }
}

/// Answers the first action, and returns the walk after it.
fn entered(address: u64, len: u64, reservation: (u64, u64)) -> Walk {
    let mut walk = Walk::new(address, len);
    assert_eq!(walk.next(), Action::QueryReservation(address));
    walk.report(Event::Reservation(reservation.0, reservation.1));
    walk
}

#[test]
fn a_range_that_leaves_its_reservation() {
    let (base, len) = (4 * GRANULE, 4 * GRANULE);
    for (address, reach) in [(base - 1, 2), (base, len + 1), (base + len - 1, 2), (base + len, 1)] {
        let mut walk = entered(address, reach, (base, len));
        assert_eq!(walk.next(), Action::Uncount);
        walk.report(Event::Done);
        assert_eq!(walk.into_result(), Err((Cause::LeavesReservation { base, len }, address)));
    }
    assert_eq!(entered(base, len, (base, len)).next(), Action::Find(base));
    let wraps = entered(base, len, (base, u64::MAX));
    assert_eq!(wraps.into_result(), Err((Cause::LeavesReservation { base, len: u64::MAX }, base)));
}

/// Describes the chunk around a cursor in the middle of a reservation, as the driver answers it, and says what the walk does next.
fn described(facts: ChunkFacts) -> Action {
    let mut walk = entered(6 * GRANULE + 5, GRANULE, (4 * GRANULE, 8 * GRANULE));
    assert_eq!(walk.next(), Action::Find(6 * GRANULE + 5));
    walk.report(Event::Known(None));
    assert_eq!(walk.next(), Action::QueryChunk(6 * GRANULE + 5));
    walk.report(Event::Chunk(Some(facts)));
    walk.next()
}

#[test]
fn only_a_chunk_around_the_cursor_and_inside_the_reservation_is_taken() {
    let chunk = |base, len| ChunkFacts { base, len, buffer_id: 1 };
    for good in [chunk(6 * GRANULE, GRANULE), chunk(4 * GRANULE, 8 * GRANULE)] {
        assert_eq!(described(good), Action::Retain(good));
    }
    let again = Action::Find(6 * GRANULE + 5);
    for elsewhere in
        [chunk(7 * GRANULE, GRANULE), chunk(5 * GRANULE, GRANULE), chunk(3 * GRANULE, 8 * GRANULE), chunk(5 * GRANULE, 8 * GRANULE)]
    {
        assert_eq!(described(elsewhere), again, "{elsewhere:?}");
    }
    for unaligned in [chunk(6 * GRANULE + 1, GRANULE), chunk(6 * GRANULE, GRANULE + 4096)] {
        assert_eq!(described(unaligned), Action::Uncount, "{unaligned:?}");
    }
}

/// Only the first chunk may begin before the cursor: a later one that does has replaced its neighbour, which was counted before.
#[test]
fn a_later_chunk_begins_where_its_neighbour_ends() {
    let chunk = |base, len| ChunkFacts { base: base * GRANULE, len: len * GRANULE, buffer_id: 1 };
    let mut walk = entered(5 * GRANULE, 3 * GRANULE, (4 * GRANULE, 8 * GRANULE));
    walk.report(Event::Known(Some(chunk(4, 2))));
    walk.report(Event::Id(Some(1)));
    assert_eq!(walk.next(), Action::Count(chunk(4, 2)));
    walk.report(Event::Done);
    for _ in 0..2 {
        assert_eq!(walk.next(), Action::Find(6 * GRANULE));
        walk.report(Event::Known(None));
        walk.report(Event::Chunk(Some(chunk(4, 4))));
    }
    walk.report(Event::Known(None));
    walk.report(Event::Chunk(Some(chunk(6, 2))));
    assert_eq!(walk.next(), Action::Retain(chunk(6, 2)));
}
