//! Random publications and retirements against a list that is scanned from end to end.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::collections::{BTreeSet, HashSet};

use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE, Layout, LookupError, PublishError, Reader, Writer};
use proptest::prelude::*;

use crate::support::zeroed;

/// 20 granules of address space, of which the leaves can cover 12.
const LAYOUT: Layout = Layout { entries: 6, root: 5, leaves: 3, leaf_len: 4 };
const NONCE: Nonce = Nonce(77);

#[derive(Clone, Debug)]
enum Op {
    /// Publish in a slot that may be live or not exist; chunks in the way are retired first, as an exporter must.
    Publish(u32, Chunk),
    /// Retire the n-th of all lives so far, live or not.
    Retire(usize),
    /// Withdraw the fd of the n-th of all lives so far.
    WithoutFd(usize),
}

fn chunk() -> impl Strategy<Value = Chunk> {
    let fd = prop_oneof![4 => (0..40_u32).prop_map(Some), 2 => Just(None), 1 => any::<u32>().prop_map(Some)];
    // Now and then beyond the index, empty, or off the granules.
    let range = prop_oneof![
        8 => (1..20_u64, 1..5_u64).prop_map(|(at, granules)| (at * GRANULE, granules * GRANULE)),
        1 => (0..22_u64, 0..24_u64).prop_map(|(at, granules)| (at * GRANULE, granules * GRANULE)),
        1 => (any::<u64>(), any::<u64>()),
        1 => (1..20_u64, 1..GRANULE).prop_map(|(at, off)| (at * GRANULE + off, GRANULE)),
        1 => (1..20_u64, 1..GRANULE).prop_map(|(at, off)| (at * GRANULE, GRANULE + off)),
    ];
    let kind = prop_oneof![
        8 => Just(ChunkKind::Vmm),
        1 => Just(ChunkKind::Pool),
        1 => (0..8_u32, any::<u8>()).prop_map(|(pool, fill)| ChunkKind::PoolAllocation { pool, blob: [fill; 64] }),
    ];
    (kind, fd, range, any::<u64>(), any::<u128>()).prop_map(|(kind, fd, (address, len), buffer_id, device)| Chunk {
        kind,
        fd: fd.filter(|fd| *fd != u32::MAX),
        address,
        len,
        buffer_id,
        device: device.to_le_bytes(),
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..8_u32, chunk()).prop_map(|(slot, chunk)| Op::Publish(slot, chunk)),
        3 => any::<usize>().prop_map(Op::Retire),
        1 => any::<usize>().prop_map(Op::WithoutFd),
    ]
}

/// What the table means, without index and without words.
#[derive(Default)]
struct Model {
    live: Vec<(ChunkId, Chunk)>,
    lives: Vec<(ChunkId, Chunk)>,
    /// Parts of the address space that have a leaf.
    covered: BTreeSet<u64>,
    deaths: u64,
    births: u64,
}

impl Model {
    fn is_live(&self, id: ChunkId) -> bool {
        self.live.iter().any(|(live, _)| *live == id)
    }

    fn kill(&mut self, id: ChunkId) {
        self.live.retain(|(live, _)| *live != id);
        self.deaths += 1;
    }

    fn at(&self, address: u64) -> Option<(ChunkId, Chunk)> {
        let covers = |chunk: &Chunk| chunk.kind == ChunkKind::Vmm && chunk.address <= address && address - chunk.address < chunk.len;
        self.live.iter().find(|(_, chunk)| covers(chunk)).copied()
    }

    fn walk(&self, address: u64, len: u64) -> Vec<Result<(ChunkId, Chunk), LookupError>> {
        let (mut cursor, mut walk) = (address, Vec::new());
        while cursor < address + len {
            let Some((id, chunk)) = self.at(cursor) else {
                walk.push(Err(LookupError::NoChunk(cursor)));
                break;
            };
            walk.push(Ok((id, chunk)));
            cursor = chunk.address + chunk.len;
        }
        walk
    }

    /// The chunk with the lowest address among those that touch `[from, to)`.
    fn next(&self, from: u64, to: u64) -> Option<(ChunkId, Chunk)> {
        let touches = |chunk: &Chunk| chunk.kind == ChunkKind::Vmm && chunk.address < to && from < chunk.address + chunk.len;
        self.live.iter().filter(|(_, chunk)| touches(chunk)).min_by_key(|(_, chunk)| chunk.address).copied()
    }

    /// What publishing must answer; takes leaves as the writer does.
    fn publish(&mut self, slot: u32, chunk: &Chunk) -> Result<ChunkId, PublishError> {
        if slot >= LAYOUT.entries || self.live.iter().any(|(id, _)| id.slot == slot) {
            return Err(PublishError::Slot(slot));
        }
        let aligned = chunk.address.is_multiple_of(GRANULE) && chunk.len.is_multiple_of(GRANULE);
        let end = u128::from(chunk.address) + u128::from(chunk.len);
        let fits = match chunk.kind {
            ChunkKind::Vmm => aligned && end <= u128::from(20 * GRANULE) && chunk.address != 0 && chunk.len != 0,
            ChunkKind::PoolAllocation { pool, .. } => {
                pool < LAYOUT.entries && end <= u128::from(u64::MAX) && chunk.address != 0 && chunk.len != 0
            }
            _ => true,
        };
        if !fits || chunk.fd.is_some_and(|fd| fd > 0x7fff_ffff) {
            return Err(PublishError::Range { address: chunk.address, len: chunk.len });
        }
        if chunk.kind == ChunkKind::Vmm {
            for part in chunk.address / (4 * GRANULE)..=(chunk.address + chunk.len - 1) / (4 * GRANULE) {
                if self.covered.len() == 3 && !self.covered.contains(&part) {
                    return Err(PublishError::IndexFull(chunk.address));
                }
                self.covered.insert(part);
            }
        }
        let generation = 1 + self.lives.iter().filter(|(id, _)| id.slot == slot).map(|(id, _)| id.generation).max().unwrap_or(0);
        let id = ChunkId { slot, generation };
        self.births += 1;
        self.live.push((id, *chunk));
        self.lives.push((id, *chunk));
        Ok(id)
    }

    fn agrees(&self, reader: &Reader<'_, AtomicU64>) -> Result<(), TestCaseError> {
        prop_assert_eq!((reader.epoch(), reader.births()), (self.deaths, self.births));
        for granule in 0..22 {
            for address in [granule * GRANULE, granule * GRANULE + 1, granule * GRANULE + GRANULE - 1] {
                prop_assert_eq!(reader.chunk_at(address), self.at(address).ok_or(LookupError::NoChunk(address)));
            }
            for granules in [1, 2, 5, 22] {
                let (address, len) = (granule * GRANULE + 7, granules * GRANULE);
                prop_assert_eq!(reader.chunks(address, len).collect::<Vec<_>>(), self.walk(address, len));
                // A walk that skips holes is by addresses, not by granules.
                for (from, to) in [(address, address + len), (address - 7, address + len - 7), (address, address), (address, address + 1)] {
                    let expected = if from < to { self.next(from, to) } else { None };
                    prop_assert_eq!(reader.next_chunk(from, to), expected, "{:#x}..{:#x}", from, to);
                }
            }
        }
        for slot in 0..LAYOUT.entries + 2 {
            let live = self.live.iter().find(|(id, _)| id.slot == slot).copied();
            prop_assert_eq!(reader.chunk_in(slot), Ok(live));
        }
        for (id, _) in &self.lives {
            prop_assert_eq!(reader.is_live(*id), self.is_live(*id));
        }
        Ok(())
    }
}

/// All words but the index and the count of leaves: what an error must leave alone.
fn outside_index(words: &[AtomicU64]) -> Vec<u64> {
    let entries_end = 32 + LAYOUT.entries as usize * 16;
    words[..entries_end].iter().enumerate().map(|(at, word)| if at == 24 { 0 } else { word.load(Relaxed) }).collect()
}

fn publish(
    model: &mut Model,
    writer: &mut Writer<'_, AtomicU64>,
    words: &[AtomicU64],
    slot: u32,
    chunk: &Chunk,
) -> Result<(), TestCaseError> {
    let before = outside_index(words);
    let expected = model.publish(slot, chunk);
    prop_assert_eq!(writer.publish(slot, chunk), expected);
    if expected.is_err() {
        prop_assert_eq!(outside_index(words), before, "an error changes nothing");
    }
    Ok(())
}

fn overlap(left: &Chunk, right: &Chunk) -> bool {
    let both_vmm = left.kind == ChunkKind::Vmm && right.kind == ChunkKind::Vmm;
    both_vmm && left.address < right.end() && right.address < left.end()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn table_means_what_a_list_means(ops in proptest::collection::vec(op(), 1..40)) {
        let words = zeroed(LAYOUT.words());
        let mut writer = Writer::create(&words, LAYOUT, NONCE).expect("long enough");
        let reader = Reader::open(&words, LAYOUT, NONCE).expect("a table");
        let mut model = Model::default();
        for op in ops {
            match op {
                Op::Publish(slot, chunk) => {
                    let in_the_way: Vec<_> = model.live.iter().filter(|(_, live)| overlap(live, &chunk)).map(|(id, _)| *id).collect();
                    for id in in_the_way {
                        prop_assert!(writer.retire(id));
                        model.kill(id);
                    }
                    publish(&mut model, &mut writer, &words, slot, &chunk)?;
                }
                Op::Retire(nth) if !model.lives.is_empty() => {
                    let (id, _) = model.lives[nth % model.lives.len()];
                    let live = model.is_live(id);
                    prop_assert_eq!(writer.is_live(id), live);
                    prop_assert_eq!(writer.retire(id), live);
                    if live {
                        model.kill(id);
                    }
                }
                Op::WithoutFd(nth) if !model.lives.is_empty() => {
                    let (id, chunk) = model.lives[nth % model.lives.len()];
                    if model.is_live(id) {
                        model.kill(id);
                        prop_assert_eq!(writer.republish_without_fd(id, &chunk), model.publish(id.slot, &Chunk { fd: None, ..chunk }));
                    } else {
                        prop_assert_eq!(writer.republish_without_fd(id, &chunk), Err(PublishError::Slot(id.slot)));
                    }
                }
                Op::Retire(_) | Op::WithoutFd(_) => {}
            }
            model.agrees(&reader)?;
        }
        let ids: HashSet<ChunkId> = model.lives.iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(ids.len(), model.lives.len(), "no identity is used twice");
    }
}

#[test]
fn retiring_what_never_was_is_refused() {
    let words = zeroed(LAYOUT.words());
    let mut writer = Writer::create(&words, LAYOUT, NONCE).expect("long enough");
    for id in [ChunkId { slot: 0, generation: 0 }, ChunkId { slot: 0, generation: 1 }, ChunkId { slot: 6, generation: 1 }] {
        assert!(!writer.retire(id));
    }
    assert_eq!(words[8].load(Relaxed), 0, "no death was counted");
    assert_eq!(writer.capacity(), 6);
}
