//! The writer at work between any two loads of a look-up, in one thread and for every position. Weaker orders are loom's business (`loom_table`).

use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering};
use std::rc::Rc;

use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::{Chunk, ChunkId, GRANULE, Layout, LookupError, Reader, Word, Writer};

use crate::support::vmm;

const LAYOUT: Layout = Layout { entries: 4, root: 2, leaves: 2, leaf_len: 8 };
const NONCE: Nonce = Nonce(1);

type Event = Box<dyn FnOnce()>;

thread_local! {
    /// What happens in the exporter after how many more loads, soonest last.
    static EVENTS: RefCell<Vec<(usize, Event)>> = const { RefCell::new(Vec::new()) };
}

/// A word whose loads let the exporter do something first.
struct Hooked(AtomicU64);

impl Word for Hooked {
    fn load(&self, order: Ordering) -> u64 {
        let due = EVENTS.with_borrow_mut(|events| match events.last_mut() {
            Some((0, _)) => events.pop(),
            Some((left, _)) => {
                *left -= 1;
                None
            }
            None => None,
        });
        if let Some((_, event)) = due {
            // The exporter's own loads do not count.
            let later = EVENTS.take();
            event();
            EVENTS.set(later);
        }
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn fence(order: Ordering) {
        core::sync::atomic::fence(order);
    }
}

type Words = Rc<Vec<Hooked>>;

fn table() -> Words {
    let words: Words = Rc::new((0..LAYOUT.words()).map(|_| Hooked(AtomicU64::new(0))).collect());
    assert!(Writer::create(&words, LAYOUT, NONCE).is_some());
    words
}

fn writer(words: &Words) -> Writer<'_, Hooked> {
    Writer::resume(words, LAYOUT).expect("long enough")
}

fn reader(words: &Words) -> Reader<'_, Hooked> {
    Reader::open(words, LAYOUT, NONCE).expect("a table")
}

/// Steps of the exporter's life, by slot.
#[derive(Clone, Copy, Debug)]
enum Step {
    Publish(u32, Chunk),
    Retire(u32),
}

fn act(words: &Words, step: Step) {
    let live = |slot| reader(words).chunk_in(slot).expect("honest").expect("live").0;
    match step {
        Step::Publish(slot, chunk) => assert!(writer(words).publish(slot, &chunk).is_ok()),
        Step::Retire(slot) => assert!(writer(words).retire(live(slot))),
    }
}

/// Runs `look_up` with the groups of steps at all pairs of positions: the first `at` loads after the start, the others `gap` loads later each.
///
/// Each answer must be the answer of some moment between start and end, or `also`.
fn at_all_positions<T: PartialEq + core::fmt::Debug>(
    before: &[Step],
    groups: &[&[Step]],
    look_up: impl Fn(&Reader<'_, Hooked>) -> T,
    also: impl Fn(&T) -> bool,
) {
    let steps = groups.concat();
    let still = |steps: &[Step]| {
        let words = table();
        before.iter().chain(steps).for_each(|step| act(&words, *step));
        look_up(&reader(&words))
    };
    let moments: Vec<T> = (0..=steps.len()).map(|done| still(&steps[..done])).collect();
    let mut positions = 0;
    for gap in 0..24 {
        for at in 0..200 {
            let words = table();
            before.iter().for_each(|step| act(&words, *step));
            let reader = reader(&words);
            EVENTS.with_borrow_mut(|events| {
                for (number, group) in groups.iter().enumerate().rev() {
                    let (words, group) = (Rc::clone(&words), group.to_vec());
                    events.push((if number == 0 { at } else { gap }, Box::new(move || group.iter().for_each(|step| act(&words, *step)))));
                }
            });
            let answer = look_up(&reader);
            let left = EVENTS.take().len();
            assert!(moments.contains(&answer) || also(&answer), "{answer:?} at {at}+{gap}: {groups:?}; could be {moments:?}");
            if left == groups.len() {
                break;
            }
            positions += 1;
        }
    }
    assert!(positions >= 24 * 5, "the look-up has that many loads");
}

/// A chunk as look-ups give it: identity, buffer id, fd.
type Seen = Result<(ChunkId, u64, Option<u32>), LookupError>;

fn seen(found: Result<(ChunkId, Chunk), LookupError>) -> Seen {
    found.map(|(id, chunk)| (id, chunk.buffer_id, chunk.fd))
}

#[test]
fn chunk_at_sees_some_moment() {
    let old = Step::Publish(0, vmm(3, 2, 10, 1));
    let other_place = Step::Publish(0, vmm(6, 1, 10, 2));
    let same_place = Step::Publish(0, vmm(3, 2, 10, 3));
    let same_place_other_slot = Step::Publish(1, vmm(3, 2, 10, 4));
    let one = |address: u64| move |reader: &Reader<'_, Hooked>| seen(reader.chunk_at(address));
    let never = |_: &_| false;
    for address in [3 * GRANULE, 4 * GRANULE + 5, 6 * GRANULE] {
        let die = Step::Retire(0);
        at_all_positions(&[old], &[&[die]], one(address), never);
        at_all_positions(&[], &[&[old]], one(address), never);
        for new in [other_place, same_place, same_place_other_slot] {
            at_all_positions(&[old], &[&[die], &[new]], one(address), never);
        }
        // The slot moves away and comes back: step by step, and both times at once.
        at_all_positions(&[old], &[&[die], &[other_place], &[die], &[same_place]], one(address), never);
        at_all_positions(&[old], &[&[die, other_place], &[die, same_place]], one(address), never);
    }
}

#[test]
fn chunk_in_sees_some_moment() {
    let old = Step::Publish(0, vmm(3, 2, 10, 1));
    let new = Step::Publish(0, vmm(6, 1, 11, 2));
    let one = |reader: &Reader<'_, Hooked>| reader.chunk_in(0);
    let die = Step::Retire(0);
    at_all_positions(&[old], &[&[die], &[new]], one, |_| false);
    at_all_positions(&[old], &[&[die], &[new], &[die], &[old]], one, |_| false);
    at_all_positions(&[old], &[&[die, new], &[die, old]], one, |_| false);
}

/// Two chunks make room for one that covers both: a walk that has read the first finds the new one in the middle. That is a race, not a lie.
#[test]
fn walk_over_chunks_that_merge_is_unsettled_not_inconsistent() {
    let before = [Step::Publish(0, vmm(2, 2, 10, 1)), Step::Publish(1, vmm(4, 2, 11, 2))];
    let steps = [Step::Retire(0), Step::Retire(1), Step::Publish(2, vmm(2, 4, 10, 3))];
    let walk = |reader: &Reader<'_, Hooked>| reader.chunks(2 * GRANULE, 4 * GRANULE).map(seen).collect::<Vec<_>>();
    let first_then = |answer: &Vec<Seen>, end| {
        matches!(&answer[..], [Ok((ChunkId { slot: 0, .. }, ..)), Err(error)] if *error == end)
            || matches!(&answer[..], [Err(error)] if *error == end)
    };
    let hole = LookupError::NoChunk(4 * GRANULE);
    at_all_positions(&before, &[&steps[..1], &steps[1..2], &steps[2..]], walk, |answer| {
        first_then(answer, LookupError::Unsettled) || first_then(answer, hole)
    });

    // The plain case, without a search for the position.
    let words = table();
    before.iter().for_each(|step| act(&words, *step));
    let reader = reader(&words);
    let mut chunks = reader.chunks(2 * GRANULE, 4 * GRANULE);
    assert!(matches!(chunks.next(), Some(Ok((ChunkId { slot: 0, .. }, _)))));
    steps.iter().for_each(|step| act(&words, *step));
    assert_eq!(chunks.next(), Some(Err(LookupError::Unsettled)));
    assert_eq!(chunks.next(), None);
}

/// A fetch between the look-up and the re-check: whatever the exporter did meanwhile to the number, the re-check says no.
#[test]
fn recheck_fails_after_each_way_to_lose_the_number() {
    let words = table();
    act(&words, Step::Publish(0, vmm(3, 2, 10, 1)));
    let (id, chunk) = reader(&words).chunk_in(0).expect("honest").expect("live");
    assert!(reader(&words).is_live(id));

    let without = writer(&words).republish_without_fd(id, &chunk).expect("live");
    assert!(!reader(&words).is_live(id), "the old number is not to be trusted");
    assert_eq!(reader(&words).chunk_in(0), Ok(Some((without, Chunk { fd: None, ..chunk }))));
    assert_eq!(reader(&words).epoch(), 1, "a death was counted: leases look again");

    act(&words, Step::Retire(0));
    assert!(!reader(&words).is_live(without));
    act(&words, Step::Publish(0, chunk));
    assert!(!reader(&words).is_live(id) && !reader(&words).is_live(without), "the same bytes in the same slot are another life");
}
