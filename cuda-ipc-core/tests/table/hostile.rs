//! Tables that no honest exporter writes. A reader copies, checks, ends; it never panics and never hands out what does not hold.

use core::cell::Cell;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{self, Relaxed};

use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE, Layout, LookupError, Reader, Word, Writer};
use proptest::prelude::*;

use crate::support::{vmm, zeroed};

const LAYOUT: Layout = Layout { entries: 4, root: 3, leaves: 2, leaf_len: 4 };
const WORDS: usize = 32 + 4 * 16 + 3 + 2 * 4;
const LIMIT: u64 = 12 * GRANULE;
const NONCE: Nonce = Nonce(5);

/// What an importer relies on in each chunk it is given.
fn believable(chunk: &Chunk) -> bool {
    let range = chunk.address != 0 && chunk.len != 0 && chunk.address.checked_add(chunk.len).is_some();
    let granules = chunk.address.is_multiple_of(GRANULE) && chunk.len.is_multiple_of(GRANULE);
    let kind = match chunk.kind {
        ChunkKind::Vmm => range && granules && chunk.end() <= LIMIT,
        ChunkKind::Pool => true,
        ChunkKind::PoolAllocation { pool, .. } => pool < LAYOUT.entries && range,
        _ => false,
    };
    kind && chunk.fd.is_none_or(|fd| fd <= 0x7fff_ffff)
}

/// Asks a table that does not change everything there is to ask.
fn interrogate(reader: &Reader<'_, AtomicU64>) -> Result<(), TestCaseError> {
    for slot in (0..LAYOUT.entries + 2).chain([u32::MAX]) {
        match reader.chunk_in(slot) {
            Ok(Some((id, chunk))) => {
                prop_assert!(believable(&chunk), "{chunk:?}");
                prop_assert!(id.slot == slot && slot < LAYOUT.entries && reader.is_live(id));
            }
            Ok(None) => {}
            Err(error) => prop_assert!(matches!(error, LookupError::Invalid { slot: at, .. } if at == slot), "{error:?}"),
        }
    }
    // Each chunk that skipping finds is one that looking up finds, the addresses before it have none, and skipping ends.
    let mut cursor = 0;
    for found in core::iter::from_fn(|| {
        let found = reader.next_chunk(cursor, u64::MAX);
        let from = cursor;
        cursor = found?.1.end();
        found.map(|found| (from, found))
    }) {
        let (from, (id, chunk)) = found;
        let at = chunk.address.max(from).next_multiple_of(GRANULE);
        let before = (from.next_multiple_of(GRANULE)..at).step_by(1 << 21);
        prop_assert!(before.clone().all(|address| reader.chunk_at(address).is_err()), "{from:#x} {chunk:?}");
        prop_assert!(believable(&chunk) && chunk.end() > from && reader.is_live(id), "{from:#x} {chunk:?}");
    }
    prop_assert!((cursor..LIMIT).step_by(1 << 21).all(|address| reader.chunk_at(address).is_err()), "nothing is left out");
    let addresses = (0..14).flat_map(|granule| [granule * GRANULE, granule * GRANULE + GRANULE - 1]);
    for address in addresses.chain([LIMIT - 1, LIMIT, u64::MAX]) {
        match reader.chunk_at(address) {
            Ok((id, chunk)) => {
                prop_assert!(believable(&chunk) && chunk.kind == ChunkKind::Vmm, "{chunk:?}");
                prop_assert!(chunk.address <= address && address < chunk.end() && reader.is_live(id));
            }
            Err(error) => prop_assert!(error != LookupError::Unsettled, "nothing moves here"),
        }
        let found: Vec<_> = reader.chunks(address, u64::MAX).collect();
        prop_assert!(found.len() <= LAYOUT.entries as usize + 1, "each entry has one address, so each appears once");
        let mut cursor = address;
        for (at, found) in found.iter().enumerate() {
            let Ok((_, chunk)) = found else { continue };
            prop_assert!(if at == 0 { chunk.address <= cursor } else { chunk.address == cursor }, "{chunk:?} at {cursor:#x}");
            prop_assert!(cursor < chunk.end());
            cursor = chunk.end();
        }
        prop_assert!(found.iter().rev().skip(1).all(Result::is_ok), "the first error is the last item");
    }
    Ok(())
}

/// A valid table: a run of three chunks, a pool, with one dead slot.
fn valid() -> Vec<AtomicU64> {
    let words = zeroed(WORDS);
    let mut writer = Writer::create(&words, LAYOUT, NONCE).expect("long enough");
    writer.publish(0, &vmm(1, 2, 10, 1)).expect("room");
    writer.publish(1, &vmm(3, 1, 11, 2)).expect("room");
    writer.publish(2, &vmm(4, 3, 12, 3)).expect("room");
    let dead = writer.publish(3, &vmm(7, 1, 13, 4)).expect("room");
    writer.retire(dead);
    words
}

/// Values that mean something somewhere: states, kinds, slots, leaves, borders, or anything.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..9_u64,
        2 => (0..14_u64).prop_map(|granules| granules * GRANULE),
        2 => (0..5_u64, prop_oneof![Just(0), Just(37), Just(0x8000_0000), Just(0xffff_ffff)]).prop_map(|(kind, fd)| kind << 32 | fd),
        1 => proptest::sample::select(vec![u64::MAX, u64::MAX - GRANULE + 1, 1 << 32, (1 << 32) + 1, 1 << 63]),
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn mutated_tables(changes in proptest::collection::vec((32..WORDS, word()), 1..12)) {
        let words = valid();
        for (at, value) in changes {
            words[at].store(value, Relaxed);
        }
        interrogate(&Reader::open(&words, LAYOUT, NONCE).expect("the header is untouched"))?;
    }

    #[test]
    fn random_tables(body in proptest::collection::vec(word(), WORDS - 7)) {
        let words = valid();
        for (word, value) in words[7..].iter().zip(body) {
            word.store(value, Relaxed);
        }
        interrogate(&Reader::open(&words, LAYOUT, NONCE).expect("the header is untouched"))?;
    }

    #[test]
    fn absurd_headers_do_not_open(at in 0..7_usize, value in word()) {
        let words = valid();
        let before = words[at].swap(value, Relaxed);
        prop_assert_eq!(Reader::open(&words, LAYOUT, NONCE).is_ok(), value == before);
    }

    /// A wild write of the exporter's own process must not take the exporter down: no panic, no endless loop, and readers stay safe.
    #[test]
    fn writer_survives_wild_writes(
        changes in proptest::collection::vec((7..WORDS, word()), 1..12),
        ops in proptest::collection::vec((0..5_u32, 1..12_u64, 1..3_u64, any::<bool>()), 1..8),
    ) {
        let words = valid();
        for (at, value) in changes {
            words[at].store(value, Relaxed);
        }
        let mut writer = Writer::resume(&words, LAYOUT).expect("long enough");
        let reader = Reader::open(&words, LAYOUT, NONCE).expect("the header is untouched");
        for (slot, at, granules, retire) in ops {
            let state = if slot < 4 { words[32 + slot as usize * 16].load(Relaxed) } else { 0 };
            if retire {
                let id = ChunkId { slot, generation: state >> 2 };
                prop_assert_eq!(writer.retire(id), slot < 4 && state & 3 == 1);
            } else if let Ok(id) = writer.publish(slot, &vmm(at, granules, 1, 1)) {
                prop_assert!(slot < 4 && state & 3 != 1, "only free slots are given");
                prop_assert!(id.generation == (state >> 2) + 1 && at + granules <= 12);
            }
            interrogate(&reader)?;
        }
    }
}

/// The length of a chunk decides how much index its death clears; the standard table has room for a loop of hours.
#[test]
fn a_wild_length_does_not_hang_the_exporter() {
    let words = valid();
    words[32 + 3].store(u64::MAX, Relaxed);
    let mut writer = Writer::resume(&words, LAYOUT).expect("long enough");
    assert!(writer.retire(ChunkId { slot: 0, generation: 1 }));
    let reader = Reader::open(&words, LAYOUT, NONCE).expect("a table");
    assert_eq!(reader.chunk_at(GRANULE), Err(LookupError::NoChunk(GRANULE)));
    assert_eq!(reader.chunk_at(3 * GRANULE).map(|(id, _)| id.slot), Ok(1), "its neighbour stays found");
}

#[test]
fn two_entries_that_overlap_are_not_both_given() {
    let words = valid();
    // Slot 1 grows over slot 2's first granule; the index still says slot 2 there.
    words[32 + 16 + 3].store(2 * GRANULE, Relaxed);
    let reader = Reader::open(&words, LAYOUT, NONCE).expect("a table");
    let found: Vec<_> = reader.chunks(GRANULE, 6 * GRANULE).map(|found| found.map(|(id, _)| id.slot)).collect();
    assert_eq!(found, [Ok(0), Ok(1), Err(LookupError::Inconsistent { address: 5 * GRANULE, slot: 2 })]);
}

#[test]
fn an_index_that_leads_elsewhere_is_named() {
    let words = valid();
    let leaf = 32 + 4 * 16 + 3;
    words[leaf + 2].store(3, Relaxed);
    let reader = Reader::open(&words, LAYOUT, NONCE).expect("a table");
    assert_eq!(reader.chunk_at(2 * GRANULE), Err(LookupError::Inconsistent { address: 2 * GRANULE, slot: 2 }));
    // Both parts of the address space in one leaf: the second finds the first one's chunks.
    words[leaf + 2].store(1, Relaxed);
    words[leaf - 2].store(1, Relaxed);
    assert_eq!(reader.chunk_at(5 * GRANULE), Err(LookupError::Inconsistent { address: 5 * GRANULE, slot: 0 }));
}

thread_local! {
    static LOADS: Cell<u64> = const { Cell::new(0) };
}

/// A word whose hostile owner rewrites it before each load, from a few plausible values.
struct Restless(u64);

impl Word for Restless {
    fn load(&self, _: Ordering) -> u64 {
        let count = LOADS.get() + 1;
        LOADS.set(count);
        let random = (count ^ self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
        match random % 8 {
            0 => GRANULE,
            1 => 2 * GRANULE,
            2 => 1 << 32 | 9,
            value => value - 2,
        }
    }

    fn store(&self, _: u64, _: Ordering) {}

    fn fence(_: Ordering) {}
}

#[test]
fn a_table_that_never_rests_ends_every_look_up() {
    let mut outcomes = [0_u32; 4];
    for seed in 0..2000 {
        let words: Vec<Restless> = (0..WORDS as u64).map(|at| Restless(at ^ seed << 20)).collect();
        let reader = Reader::resume(&words, LAYOUT).expect("long enough");
        LOADS.set(0);
        for address in [0, GRANULE, 3 * GRANULE] {
            match reader.chunk_at(address) {
                Ok((_, chunk)) => {
                    assert!(believable(&chunk) && chunk.address <= address && address < chunk.end());
                    outcomes[0] += 1;
                }
                Err(LookupError::Unsettled) => outcomes[1] += 1,
                Err(LookupError::Invalid { .. }) => outcomes[2] += 1,
                Err(_) => outcomes[3] += 1,
            }
        }
        assert!(LOADS.get() < 3 * 64 * 64 * 16, "{} loads", LOADS.get());
        assert!(reader.chunks(GRANULE, 8 * GRANULE).count() <= 9, "each chunk is a granule or more");
        if let Some((_, chunk)) = reader.next_chunk(0, u64::MAX) {
            assert!(believable(&chunk));
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "each way to end was seen: {outcomes:?}");
}
