//! Runners that answer anything at all: the walk ends, and what it took it gives back.

use cuda_ipc_core::export::{Action, ChunkFacts, Event, Walk};
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::table::GRANULE;
use proptest::prelude::*;

/// Granules of the walked range; small, so that arbitrary chunks often touch the cursor.
const GRANULES: u64 = 12;

fn facts() -> impl Strategy<Value = ChunkFacts> {
    let place = prop_oneof![
        6 => (0..GRANULES + 4, 0..4_u64).prop_map(|(at, granules)| (at * GRANULE, granules * GRANULE)),
        1 => (any::<u64>(), any::<u64>()),
        1 => (0..GRANULES * GRANULE, 0..3_u64),
    ];
    (place, 0..3_u64).prop_map(|((base, len), buffer_id)| ChunkFacts { base, len, buffer_id })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => (0..3_u64, 0..20_u64).prop_map(|(base, len)| Event::Reservation(base * GRANULE, len * GRANULE)),
        2 => proptest::option::weighted(0.8, facts()).prop_map(Event::Known),
        2 => proptest::option::weighted(0.8, 0..3_u64).prop_map(Event::Id),
        2 => proptest::option::weighted(0.8, facts()).prop_map(Event::Chunk),
        2 => Just(Event::Done),
        1 => Just(Event::Gone),
        1 => Just(Event::Refused(Cause::TableFull)),
    ]
}

/// Whether the event is one of those that the action's documentation names.
fn answers(action: Action, event: Event) -> bool {
    match action {
        Action::QueryReservation(_) => matches!(event, Event::Reservation(..) | Event::Refused(_)),
        Action::Find(_) => matches!(event, Event::Known(_)),
        Action::QueryId(_) => matches!(event, Event::Id(_) | Event::Refused(_)),
        Action::QueryChunk(_) => matches!(event, Event::Chunk(_) | Event::Refused(_)),
        Action::Count(_) | Action::Publish(_) => matches!(event, Event::Done | Event::Gone | Event::Refused(_)),
        _ => matches!(event, Event::Done | Event::Refused(_)),
    }
}

/// Plays `events` in order, from the start again when they run out; `strict` leaves out those that do not answer the action.
fn play(events: &[Event], strict: bool) -> Result<(), TestCaseError> {
    let mut walk = Walk::new(GRANULE, GRANULES * GRANULE);
    let (mut handle, mut fd, mut counting, mut used) = (false, false, false, 0);
    let mut cursors = vec![];
    for actions in 0.. {
        let action = walk.next();
        if action == Action::Finished {
            break;
        }
        // A chunk moves the cursor beyond itself, so each event does it at most once, and in between are four attempts of at most ten actions.
        prop_assert!(actions < events.len() * 40 + 50, "{action:?} again and again: {cursors:?}");
        let event = if strict {
            let Some(at) = (used..used + events.len()).find(|at| answers(action, events[at % events.len()])) else { return Ok(()) };
            used = at + 1;
            events[at % events.len()]
        } else {
            used += 1;
            events[(used - 1) % events.len()]
        };
        match action {
            Action::Find(cursor) => cursors.push(cursor),
            Action::Retain(_) => {
                prop_assert!(!handle && !fd);
                handle = event == Event::Done;
            }
            Action::ExportHandle(_) => {
                prop_assert!(handle && !fd);
                fd = event == Event::Done;
            }
            Action::ReleaseHandle(_) => {
                prop_assert!(core::mem::take(&mut handle), "released once");
            }
            Action::Publish(_) => {
                prop_assert!(!handle && core::mem::take(&mut fd), "published with the fd at hand");
                counting = true;
            }
            Action::CloseFd => prop_assert!(core::mem::take(&mut fd), "closed once"),
            Action::Count(_) => counting = true,
            Action::Uncount => counting = false,
            _ => {}
        }
        walk.report(event);
    }
    prop_assert!(!handle && !fd, "no handle and no fd is left");
    prop_assert!(cursors.is_sorted(), "the walk never goes back");
    prop_assert!(walk.into_result().is_ok() || !counting, "a failed walk takes its counts back");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_events(events in proptest::collection::vec(event(), 1..40)) {
        play(&events, false)?;
    }

    #[test]
    fn any_events_of_the_right_kind(events in proptest::collection::vec(event(), 1..40)) {
        play(&events, true)?;
    }
}

/// A look-up that finds a chunk behind the cursor, and is confirmed by the driver each time.
#[test]
fn a_known_chunk_that_does_not_move_the_cursor_ends_the_walk() {
    for (base, len) in [(0, GRANULE), (GRANULE, 0), (2 * GRANULE, GRANULE), (u64::MAX, u64::MAX)] {
        let mut walk = Walk::new(GRANULE, GRANULE);
        walk.report(Event::Reservation(0, 4 * GRANULE));
        walk.report(Event::Known(Some(ChunkFacts { base, len, buffer_id: 1 })));
        assert_eq!(walk.next(), Action::Uncount);
        walk.report(Event::Done);
        assert_eq!(walk.into_result(), Err((Cause::KeptChanging, GRANULE)));
    }
}
