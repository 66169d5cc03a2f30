//! Where each word of a table stands. Exporter and importer may be of different builds, so none may move.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::layout::EPOCH_FUTEX_BYTE_OFFSET;
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE, HeaderError, Layout, Reader, Writer};

use crate::support::zeroed;

const LAYOUT: Layout = Layout { entries: 5, root: 2, leaves: 2, leaf_len: 4 };
const NONCE: Nonce = Nonce(0x1122_3344_5566_7788);
const UUID_1: [u8; 16] = [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f];
const UUID_2: [u8; 16] = [0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d, 0x2e, 0x2f];

fn image() -> Vec<u64> {
    let mut words = vec![0; 122];
    for line in include_str!("../golden/table.words").lines() {
        if let [at, value] = line.split('#').next().unwrap_or("").split_ascii_whitespace().collect::<Vec<_>>()[..] {
            let value = u64::from_str_radix(value.trim_start_matches("0x"), 16).expect("a hexadecimal word");
            words[at.parse::<usize>().expect("a word number")] = value;
        }
    }
    words
}

fn atomics(words: &[u64]) -> Vec<AtomicU64> {
    words.iter().map(|word| AtomicU64::new(*word)).collect()
}

fn vmm(fd: Option<u32>, at: u64, granules: u64, buffer_id: u64) -> Chunk {
    Chunk { kind: ChunkKind::Vmm, fd, address: at * GRANULE, len: granules * GRANULE, buffer_id, device: UUID_1 }
}

/// The chunks of the golden table, live at the end except the last one, by slot.
fn chunks() -> [Chunk; 5] {
    let blob = core::array::from_fn(|at| u8::try_from(at + 1).expect("at most 64"));
    [
        Chunk { kind: ChunkKind::Pool, fd: Some(5), address: 0, len: 0, buffer_id: 0, device: UUID_2 },
        Chunk {
            kind: ChunkKind::PoolAllocation { pool: 0, blob },
            fd: None,
            address: 0x3_0200_0400,
            len: 0x1200,
            buffer_id: 0xb1,
            device: UUID_2,
        },
        vmm(Some(37), 3, 3, 0xb2),
        vmm(None, 1, 1, 0xb3),
        vmm(Some(0x7fff_ffff), 7, 1, 0xb4),
    ]
}

#[test]
fn writer_makes_the_golden_image() {
    let words = zeroed(122);
    let mut writer = Writer::create(&words, LAYOUT, NONCE).expect("long enough");
    // Slot 3 once held something that left a blob, a pool number and other bytes behind; slot 2 takes the first leaf, slot 4 the second.
    let leftovers = Chunk { kind: ChunkKind::PoolAllocation { pool: 4, blob: [0xee; 64] }, ..chunks()[1] };
    let old = writer.publish(3, &leftovers).expect("slot 3");
    for slot in [0_u32, 1, 2] {
        assert_eq!(writer.publish(slot, &chunks()[slot as usize]), Ok(ChunkId { slot, generation: 1 }));
    }
    let dead = writer.publish(4, &chunks()[4]).expect("slot 4");
    assert!(writer.retire(old));
    assert_eq!(writer.publish(3, &chunks()[3]), Ok(ChunkId { slot: 3, generation: 2 }));
    assert!(writer.retire(dead));
    let written: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
    assert_eq!(written, image());
}

#[test]
fn reader_understands_the_golden_image() {
    let words = atomics(&image());
    let reader = Reader::open(&words, LAYOUT, NONCE).expect("golden table");
    let generations = [1, 1, 1, 2];
    for (slot, (generation, chunk)) in (0..).zip(generations.into_iter().zip(chunks())) {
        assert_eq!(reader.chunk_in(slot), Ok(Some((ChunkId { slot, generation }, chunk))));
    }
    assert_eq!(reader.chunk_in(4), Ok(None));
    assert_eq!((reader.epoch(), reader.births()), (2, 6));
    let at = |granule: u64| reader.chunk_at(granule * GRANULE).ok().map(|(id, _)| id.slot);
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(at), [None, Some(3), None, Some(2), Some(2), Some(2), None, None, None]);
}

#[test]
fn every_header_word_counts() {
    let opened = |at: usize, value: u64| {
        let words = atomics(&image());
        words[at].store(value, Relaxed);
        Reader::open(&words, LAYOUT, NONCE).map(|_| ())
    };
    for bit in 0..64 {
        let flipped = |at: usize| opened(at, image()[at] ^ 1 << bit);
        assert_eq!(flipped(0), Err(HeaderError::Magic(image()[0] ^ 1 << bit)));
        assert_eq!(flipped(1), Err(HeaderError::Version(1 ^ 1 << bit)));
        assert_eq!(flipped(2), Err(HeaderError::Nonce { expected: NONCE, found: Nonce(NONCE.0 ^ 1 << bit) }));
        for at in [3, 4, 5, 6] {
            assert_eq!(flipped(at), Err(HeaderError::Layout), "word {at}");
        }
    }
    let words = atomics(&image());
    assert_eq!(Reader::open(&words[..121], LAYOUT, NONCE).map(|_| ()), Err(HeaderError::Short { words: 121 }));
    assert!(Writer::create(&words[..121], LAYOUT, NONCE).is_none());
    assert!(Reader::open(&atomics(&[image(), vec![7; 9]].concat()), LAYOUT, NONCE).is_ok(), "a longer file holds the same table");
}

/// A table that is being made is not one yet: its magic comes last.
#[test]
fn zeroed_memory_is_not_a_table() {
    assert_eq!(Reader::open(&zeroed(122), LAYOUT, Nonce(0)).map(|_| ()), Err(HeaderError::Magic(0)));
}

/// The offsets of version 1 in a table of its real size, of which only the touched pages exist.
#[test]
fn standard_table() {
    let words = 32 + (1 << 20) * 16 + (1 << 17) + (1 << 12) * (1 << 14);
    assert_eq!((Layout::STANDARD.words(), Layout::STANDARD.bytes(), EPOCH_FUTEX_BYTE_OFFSET), (words, words * 8, 64));
    assert_eq!(Layout::STANDARD.address_limit(), 1 << 52);
    // Not `zeroed`: that would touch each page.
    let mut memory = vec![0_u64; words];
    // SAFETY: AtomicU64 has the size and alignment of u64 and any bytes are one; the vector is used through this view only while it lives.
    let table = unsafe { core::slice::from_raw_parts(memory.as_mut_ptr().cast::<AtomicU64>(), words) };
    let mut writer = Writer::create(table, Layout::STANDARD, NONCE).expect("long enough");
    let last = (1 << 20) - 1;
    let chunk = vmm(Some(3), (1 << 31) - 2, 2, 9);
    assert_eq!(writer.publish(last, &chunk), Ok(ChunkId { slot: last, generation: 1 }));
    let word = |at: usize| table[at].load(Relaxed);
    let entry = 32 + ((1 << 20) - 1) * 16;
    assert_eq!((word(entry), word(entry + 1), word(entry + 2)), (5, 3 | 1 << 32, (1 << 52) - (2 << 21)));
    let root = 32 + (1 << 20) * 16;
    assert_eq!(word(root + (1 << 17) - 1), 1, "the last root word has the first leaf");
    let leaf = root + (1 << 17);
    assert_eq!([word(leaf + (1 << 14) - 3), word(leaf + (1 << 14) - 2), word(leaf + (1 << 14) - 1)], [0, 1 << 20, 1 << 20]);
    let reader = Reader::open(table, Layout::STANDARD, NONCE).expect("a table");
    assert_eq!(reader.chunk_at((1 << 52) - 1), Ok((ChunkId { slot: last, generation: 1 }, chunk)));
}
