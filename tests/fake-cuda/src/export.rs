//! Exported fds: what leaves the process and pins a chunk from outside.
//!
//! All fds of one device are of one file, so that they share an inode as they do on a GPU. Each has its own open file description, which carries the
//! chunk's slot and generation in its offset and holds a read lock on the byte numbered by the slot. Duplicates (`dup`, `SCM_RIGHTS`,
//! `pidfd_getfd`, fork) share the description, so "is any fd of this chunk open anywhere" is "is that byte locked".

use core::ffi::c_int;
use core::mem::ManuallyDrop;
use std::fs::File;
use std::io::{Error, Result, Seek, SeekFrom};
use std::os::fd::{FromRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

use crate::chunks::ChunkId;
use crate::file::{self, Lock};
use crate::registry::Registry;

const SLOT_BITS: u32 = 18;
/// Offsets stay below 2^42, which every file system takes.
const GENERATION_MASK: u64 = (1 << 24) - 1;

/// Makes an fd for the chunk. The caller holds the chunk and marks it exported.
pub(crate) fn make(registry: &Registry, id: ChunkId) -> Result<RawFd> {
    let (path, _) = registry.exports.get(id.gpu).ok_or_else(|| Error::from_raw_os_error(libc::ENODEV))?;
    let mut fd = file::open_again(path)?;
    fd.seek(SeekFrom::Start((id.generation & GENERATION_MASK) << SLOT_BITS | u64::from(id.slot)))?;
    file::try_lock(&fd, Lock::Shared, u64::from(id.slot), 1)?;
    Ok(fd.into_raw_fd())
}

/// The chunk behind an fd that somebody passed in: device, slot and the low bits of the generation; `None` for a foreign fd.
pub(crate) fn read(registry: &Registry, fd: RawFd) -> Option<(usize, u32, u64)> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the caller's fd is only looked at and not closed: the `File` is never dropped.
    let mut fd = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let metadata = fd.metadata().ok()?;
    let gpu = registry.exports.iter().position(|(_, file)| *file == (metadata.dev(), metadata.ino()))?;
    let word = fd.stream_position().ok()?;
    let slot = u32::try_from(word & ((1 << SLOT_BITS) - 1)).ok()?;
    Some((gpu, slot, word >> SLOT_BITS))
}

/// Whether the low bits found in an fd are those of this generation.
pub(crate) fn same_generation(low: u64, generation: u64) -> bool {
    low == generation & GENERATION_MASK
}

/// The fd a shareable handle argument carries: its value, cast to a pointer.
pub(crate) fn fd_of_handle(handle: u64) -> RawFd {
    c_int::try_from(handle).unwrap_or(-1)
}

/// Asks whether fds of chunks are open.
pub(crate) struct Probe {
    file: File,
    any: bool,
}

impl Probe {
    /// `None` where this process has no fd to spare.
    pub(crate) fn open(registry: &Registry, gpu: usize) -> Option<Self> {
        let file = file::open_again(&registry.exports.get(gpu)?.0).ok()?;
        let any = file::is_locked(&file, 0, 0);
        Some(Self { file, any })
    }

    /// Whether an fd of the chunk in this slot is open in any process.
    pub(crate) fn is_open(&self, slot: u32) -> bool {
        self.any && file::is_locked(&self.file, u64::from(slot), 1)
    }
}
