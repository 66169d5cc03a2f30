//! Bytes that say where they belong: each 2 MiB granule of each chunk has its own, so a granule in a wrong place, of another chunk or of another
//! life never passes for the right one.

use std::sync::LazyLock;

use crate::driver::{Answer, Cuda};

/// Size of a granule in bytes: the allocation granularity.
pub const GRANULE: u64 = 2 << 20;
const LEN: usize = 2 << 20;

/// Random bytes, twice the same, so that each of `LEN` rotations is one slice.
static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut once = Vec::with_capacity(2 * LEN);
    while once.len() < LEN {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        once.extend_from_slice(&state.to_le_bytes());
    }
    once.extend_from_within(..);
    once
});

/// The bytes of granule `index` of a chunk that was filled with `seed`.
pub fn granule(seed: u64, index: u64) -> &'static [u8] {
    let mixed = (seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ index.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let start = usize::try_from(mixed >> 43).expect("21 bits");
    &BYTES[start..start + LEN]
}

/// Fills a chunk of `len` bytes at `address`.
pub fn fill(cuda: &Cuda, address: u64, len: u64, seed: u64) -> Answer {
    (0..len.div_ceil(GRANULE)).try_for_each(|index| {
        let part = usize::try_from((len - index * GRANULE).min(GRANULE)).expect("a granule at most");
        cuda.write(address + index * GRANULE, &granule(seed, index)[..part])
    })
}

/// How many bytes of each granule [`mark`] fills.
pub const MARK: usize = 4096;

/// Fills the start of each granule of a chunk.
pub fn mark(cuda: &Cuda, address: u64, len: u64, seed: u64) -> Answer {
    (0..len / GRANULE).try_for_each(|index| cuda.write(address + index * GRANULE, &granule(seed, index)[..MARK]))
}

/// Reads `len` bytes at `address`, which begin at `offset` of a chunk filled with `seed`; says what differs, if anything.
pub fn check(cuda: &Cuda, address: u64, offset: u64, len: u64, seed: u64) -> Result<(), String> {
    let mut read = vec![0; usize::try_from(len.min(GRANULE)).expect("small")];
    let mut at = offset;
    while at < offset + len {
        let within = at % GRANULE;
        let part = (GRANULE - within).min(offset + len - at);
        let (from, count) = (usize::try_from(within).expect("small"), usize::try_from(part).expect("small"));
        let (read, expected) = (&mut read[..count], &granule(seed, at / GRANULE)[from..from + count]);
        cuda.read(read, address + (at - offset)).map_err(|code| format!("reading {part} bytes at {at:#x} of the chunk: {code:?}"))?;
        if read != expected {
            let first = read.iter().zip(expected).position(|(left, right)| left != right).unwrap_or(0);
            return Err(format!("wrong byte at {:#x} of the chunk with seed {seed}", at + first as u64));
        }
        at += part;
    }
    Ok(())
}
