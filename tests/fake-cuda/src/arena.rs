//! The physical memory: one sparse file per device, mapped once, readable and writable, for the driver's own copies.
//!
//! The mapping stays for the life of the process, so a copy into memory that has been given back meanwhile is a wrong copy, not a crash. It is not
//! inherited by fork.

use std::fs::File;
use std::io::Result;

use crate::file;
use crate::layout::GRANULE;

/// The mapped arenas of all physical devices.
pub(crate) struct Arenas {
    bases: Vec<*mut u8>,
    len: u64,
}

impl Arenas {
    /// Maps the arenas; with `fresh` they are emptied first.
    pub(crate) fn map(files: &[File], len: u64, fresh: bool) -> Result<Self> {
        let mut bases = Vec::new();
        for arena in files {
            if fresh {
                arena.set_len(0)?;
            }
            if arena.metadata()?.len() < len {
                arena.set_len(len)?;
            }
            let base = file::map_shared(arena, len)?;
            file::advise(base, len, libc::MADV_DONTFORK)?;
            bases.push(base);
        }
        Ok(Self { bases, len })
    }

    /// Address, in this process, of an offset of a device's arena.
    pub(crate) fn at(&self, gpu: usize, offset: u64) -> *mut u8 {
        let offset = usize::try_from(offset.min(self.len)).unwrap_or(0);
        self.bases[gpu].wrapping_add(offset)
    }

    /// Granules in one arena.
    pub(crate) fn granules(&self) -> usize {
        usize::try_from(self.len / GRANULE).unwrap_or(0)
    }

    /// Empties granules that are given back, so that their next owner reads zeros.
    pub(crate) fn clear(&self, gpu: usize, granule: u32, granules: u32) {
        if granules > 0 {
            let from = self.at(gpu, u64::from(granule) * GRANULE);
            // A file system without holes keeps the old bytes; that is as much as a GPU promises.
            let _ = file::advise(from, u64::from(granules) * GRANULE, libc::MADV_REMOVE);
        }
    }
}
