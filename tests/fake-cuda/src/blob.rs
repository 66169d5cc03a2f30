//! Handle bytes that name a chunk: legacy IPC handles, pool pointer export data, fabric handles. 64 bytes each.

use core::ffi::c_void;

use crate::abi::{Answer, Out};
use crate::chunks::ChunkId;

/// A fabric handle.
pub(crate) const FABRIC: u32 = 1;
/// A legacy IPC handle.
pub(crate) const LEGACY: u32 = 2;
/// Pool pointer export data; `extra` names the pool.
pub(crate) const POOL_POINTER: u32 = 3;

const MAGIC: u32 = u32::from_le_bytes(*b"FkCu");

/// What the 64 bytes say.
#[derive(Clone, Copy)]
pub(crate) struct Blob {
    pub(crate) what: u32,
    pub(crate) chunk: ChunkId,
    pub(crate) extra: [u64; 3],
}

impl Blob {
    pub(crate) fn to_bytes(self) -> [u8; 64] {
        let words = [
            u64::from(MAGIC) << 32 | u64::from(self.what),
            self.chunk.gpu as u64,
            u64::from(self.chunk.slot),
            self.chunk.generation,
            self.extra[0],
            self.extra[1],
            self.extra[2],
            0,
        ];
        let mut bytes = [0; 64];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` for bytes of another kind.
    pub(crate) fn from_bytes(bytes: &[u8; 64], what: u32) -> Option<Self> {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * index..8 * index + 8]);
            u64::from_le_bytes(word)
        };
        if word(0) != u64::from(MAGIC) << 32 | u64::from(what) {
            return None;
        }
        let chunk = ChunkId { gpu: usize::try_from(word(1)).ok()?, slot: u32::try_from(word(2)).ok()?, generation: word(3) };
        Some(Self { what, chunk, extra: [word(4), word(5), word(6)] })
    }
}

/// Stores the bytes where a caller wants a 64-byte handle.
pub(crate) fn write(out: Out<c_void>, blob: &Blob) -> Answer {
    Out::<[u8; 64]>::cast(out).set(blob.to_bytes())
}

/// Reads a caller's 64-byte handle.
pub(crate) fn read(bytes: Out<c_void>, what: u32) -> Option<Blob> {
    Blob::from_bytes(&Out::<[u8; 64]>::cast(bytes).get().ok()?, what)
}
