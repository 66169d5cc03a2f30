//! A hostile table costs the importer an error, no more: no panic, no endless loop, and every chunk it gives is plausible.
//!
//! An honest writer fills a small table; the input then overwrites words of it, as its owner could.
#![no_main]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::{Chunk, ChunkKind, GRANULE, Layout, Reader, Writer};
use libfuzzer_sys::fuzz_target;

const NONCE: Nonce = Nonce(1);
const SMALL: Layout = Layout { entries: 8, root: 4, leaves: 2, leaf_len: 16 };

fuzz_target!(|bytes: &[u8]| {
    let words: Vec<AtomicU64> = (0..SMALL.words()).map(|_| AtomicU64::new(0)).collect();
    publish(&words);
    // Each six bytes write one word: two bytes say where, four what. Small values and single fields are what an attacker plays with.
    let (edits, _) = bytes.as_chunks::<6>();
    for &[at_low, at_high, a, b, c, d] in edits {
        let at = usize::from(u16::from_le_bytes([at_low, at_high]));
        let value = u64::from(u32::from_le_bytes([a, b, c, d]));
        // The high bit of the position shifts the value up, so that addresses and lengths of any size occur.
        let value = if at & 0x8000 == 0 { value } else { value << 32 | value };
        if let Some(word) = words.get(at & 0x7fff) {
            word.store(value, Relaxed);
        }
    }
    let _ = Reader::open(&words, SMALL, NONCE);
    let Some(reader) = Reader::resume(&words, SMALL) else { return };
    for slot in 0..=SMALL.entries {
        if let Ok(Some((id, chunk))) = reader.chunk_in(slot) {
            assert_eq!(id.slot, slot);
            assert!(chunk.fd.is_none_or(|fd| i32::try_from(fd).is_ok()), "{chunk:?}");
        }
    }
    let limit = SMALL.address_limit();
    for step in 0..limit / GRANULE {
        if let Ok((id, chunk)) = reader.chunk_at(step * GRANULE) {
            assert!(reader.is_live(id), "nobody writes meanwhile");
            assert!(chunk.address.is_multiple_of(GRANULE) && chunk.len.is_multiple_of(GRANULE) && chunk.end() <= limit, "{chunk:?}");
            assert!(chunk.len > 0 && chunk.address.checked_add(chunk.len).is_some(), "{chunk:?}");
            assert!(chunk.address <= step * GRANULE && step * GRANULE < chunk.end(), "{chunk:?}");
        }
    }
    // Skipping from chunk to chunk moves on each time, whatever the index says.
    let mut cursor = 0;
    while let Some((id, chunk)) = reader.next_chunk(cursor, u64::MAX) {
        assert!(reader.is_live(id) && chunk.address < limit && chunk.end() > cursor, "{chunk:?} from {cursor:#x}");
        cursor = chunk.end();
    }
    // From each granule on: the chunks are back to back, each entry appears once, and an error is the last item.
    for start in 0..limit / GRANULE {
        let mut cursor = start * GRANULE;
        let mut items = 0;
        let mut failed = false;
        for item in reader.chunks(cursor, limit) {
            assert!(!failed, "an item after an error");
            items += 1;
            match item {
                Ok((_, chunk)) => {
                    assert!(chunk.address == cursor || items == 1 && chunk.address < cursor, "{chunk:?} overlaps its neighbour");
                    assert!(chunk.end() > cursor, "{chunk:?} does not move on");
                    cursor = chunk.end();
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    failed = true;
                }
            }
        }
        assert!(items <= SMALL.entries + 1);
    }
});

/// Two neighbours, a hole, a large chunk; a pool and one allocation of it.
fn publish(words: &[AtomicU64]) {
    let mut writer = Writer::create(words, SMALL, NONCE).expect("the words are as many as the layout says");
    let vmm = |granule, granules| Chunk {
        kind: ChunkKind::Vmm,
        fd: Some(3),
        address: granule * GRANULE,
        len: granules * GRANULE,
        buffer_id: 1 + granule,
        device: [9; 16],
    };
    let pool = Chunk { kind: ChunkKind::Pool, address: 0, len: 0, ..vmm(0, 0) };
    let allocation = Chunk { kind: ChunkKind::PoolAllocation { pool: 3, blob: [5; 64] }, fd: None, ..vmm(40, 1) };
    for (slot, chunk) in (0..).zip([vmm(1, 1), vmm(2, 1), vmm(5, 20), pool, allocation]) {
        let _ = writer.publish(slot, &chunk);
    }
}
