//! The interval index against a list that is searched from end to end, and under readers.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use cuda_ipc_cache::IntervalIndex;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Insert {
        start: u64,
        len: u64,
    },
    /// So many at once, each 3 behind the one before: enough to cut leaves in two, and to fill their halves again.
    Many {
        start: u64,
        len: u64,
        count: u64,
    },
    /// Of the ranges that are there, this one, modulo their number.
    Remove(usize),
    /// Keeps those whose number this does not divide.
    Retain(u64),
    Find {
        address: u64,
        len: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    // A small space, so that ranges overlap, touch and repeat.
    let range = || (0_u64..48, 1_u64..20);
    prop_oneof![
        4 => range().prop_map(|(start, len)| Step::Insert { start, len }),
        1 => (0_u64..48).prop_map(|start| Step::Insert { start: u64::MAX - start, len: 30 }),
        1 => (range(), 100_u64..400).prop_map(|((start, len), count)| Step::Many { start, len, count }),
        2 => any::<usize>().prop_map(Step::Remove),
        1 => (2_u64..5).prop_map(Step::Retain),
        6 => range().prop_map(|(address, len)| Step::Find { address, len }),
        1 => (0_u64..60).prop_map(|back| Step::Find { address: u64::MAX - back, len: 1 + back / 2 }),
    ]
}

/// A range as the list has it: start, end, number; newest last.
type Listed = (u64, u64, Arc<u64>);

fn newest(list: &[Listed], address: u64, len: u64) -> Option<u64> {
    let end = address.checked_add(len)?;
    list.iter().rev().find(|(start, last, _)| *start <= address && end <= *last).map(|(_, _, number)| **number)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_finds_what_a_list_finds(steps in proptest::collection::vec(step(), 1..100)) {
        let (index, mut list) = (IntervalIndex::default(), Vec::<Listed>::new());
        for (number, step) in (0_u64..).zip(steps) {
            match step {
                Step::Insert { start, len } => {
                    let value = Arc::new(number);
                    index.insert(start, len, value.clone());
                    list.push((start, start.saturating_add(len), value));
                }
                Step::Many { start, len, count } => {
                    for start in (0..count).map(|at| start + 3 * at) {
                        let value = Arc::new(number);
                        index.insert(start, len, value.clone());
                        list.push((start, start + len, value));
                    }
                }
                Step::Remove(at) if !list.is_empty() => {
                    let (start, _, value) = list.remove(at % list.len());
                    index.remove(start, &value);
                }
                Step::Remove(_) => {}
                Step::Retain(divisor) => {
                    index.retain(|value| !value.is_multiple_of(divisor));
                    list.retain(|(_, _, value)| !value.is_multiple_of(divisor));
                }
                Step::Find { address, len } => {
                    prop_assert_eq!(index.find(address, len, |value| **value), newest(&list, address, len));
                }
            }
            prop_assert_eq!((index.len(), index.is_empty()), (list.len(), list.is_empty()));
        }
        let mut values: Vec<u64> = index.values().iter().map(|value| **value).collect();
        let mut listed: Vec<u64> = list.iter().map(|(_, _, value)| **value).collect();
        values.sort_unstable();
        listed.sort_unstable();
        prop_assert_eq!(values, listed);
        for address in (0..70).chain((70..1300).step_by(7)) {
            for len in [1, 2, 9] {
                prop_assert_eq!(index.find(address, len, |value| **value), newest(&list, address, len));
            }
        }
    }
}

/// Readers beside a writer find what was always there, never find what does not cover, and never go back to an older range.
#[test]
fn readers_see_every_snapshot_whole() {
    const STABLE: u64 = 64;
    let index = IntervalIndex::<(u64, u64, u64)>::default();
    // Ranges [100 k, 100 k + 50) that stay, and one place at which ever newer ranges come and go.
    for at in 0..STABLE {
        index.insert(100 * at, 50, Arc::new((100 * at, 50, 0)));
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..3_u64 {
            let (index, done) = (&index, &done);
            scope.spawn(move || {
                let (mut newest, mut random) = (0, reader + 1);
                while !done.load(Ordering::Acquire) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = (random >> 33) % STABLE;
                    let found = index.find(100 * at + 7, 40, |value| **value).unwrap();
                    assert!(found.0 <= 100 * at + 7 && 100 * at + 47 <= found.0 + found.1, "{found:?} does not cover {at}");
                    if let Some((start, len, age)) = index.find(1_000_010, 5, |value| **value) {
                        assert!(start <= 1_000_010 && 1_000_015 <= start + len);
                        assert!(newest <= age, "went back from {newest} to {age}");
                        newest = age;
                    }
                    assert_eq!(index.find(100 * at + 50, 1, |value| **value), None);
                }
            });
        }
        let mut old = None::<(u64, Arc<(u64, u64, u64)>)>;
        for age in 1..1000_u64 {
            let start = 1_000_000 + age % 10;
            let value = Arc::new((start, 40, age));
            index.insert(start, 40, value.clone());
            if let Some((start, value)) = old.replace((start, value)) {
                index.remove(start, &value);
            }
        }
        done.store(true, Ordering::Release);
    });
    assert_eq!(index.len() as u64, STABLE + 1);
}
