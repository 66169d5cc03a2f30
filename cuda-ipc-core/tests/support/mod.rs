//! What several test programs share: an independent CRC-32C, golden files, memory for tables, chunks.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

use core::sync::atomic::AtomicU64;

use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE};

/// CRC-32C, bit by bit from its definition (reflected polynomial 0x82f63b78), so that a wrong table in the code under test shows.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

/// Bytes of a golden file: pairs of hex digits; `#` begins a comment.
pub fn hex(text: &str) -> Vec<u8> {
    let digits = text.lines().flat_map(|line| line.split('#').next().unwrap_or("").split_ascii_whitespace());
    digits.map(|pair| u8::from_str_radix(pair, 16).expect("a pair of hex digits")).collect()
}

/// Writes the right checksum over the last four bytes.
pub fn reseal(bytes: &mut [u8]) {
    let (covered, checksum) = bytes.split_at_mut(bytes.len() - 4);
    checksum.copy_from_slice(&crc32c(covered).to_le_bytes());
}

/// Overwrites the stack below the caller with a pattern: bytes that an encoder leaves undefined would change with it.
#[inline(never)]
pub fn poison_stack(pattern: u8) {
    let filler = core::hint::black_box([pattern; 4096]);
    core::hint::black_box(&filler);
}

/// Zeroed memory for a table.
pub fn zeroed(words: usize) -> Vec<AtomicU64> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

/// A VMM chunk of `granules` granules at granule number `at`, whose other fields follow from `buffer_id`.
pub fn vmm(at: u64, granules: u64, fd: u32, buffer_id: u64) -> Chunk {
    let device = u128::from(buffer_id).wrapping_mul(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef).to_le_bytes();
    Chunk { kind: ChunkKind::Vmm, fd: Some(fd), address: at * GRANULE, len: granules * GRANULE, buffer_id, device }
}

/// A found chunk for machines that do not look inside: slot and buffer id are `number`.
pub fn found(number: u32, at: u64, granules: u64) -> (ChunkId, Chunk) {
    (ChunkId { slot: number, generation: 1 }, vmm(at, granules, 100 + number, number.into()))
}
