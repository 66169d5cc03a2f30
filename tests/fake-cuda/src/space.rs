//! The address space: reservations, and the mappings in them.
//!
//! A reservation is a PROT_NONE mapping of the process, so that nothing else lands there and nobody reads device memory by accident; what is mapped
//! in it is only known here. Memory that the host may touch (managed, pinned) has no reservation: its address is the memory. Every mapping has a
//! buffer id that this process never uses again. What a mapping is *of*, and who holds that, is the business of the files that make mappings.

use std::collections::BTreeMap;

use cuda_driver_sys::CUresult;

use crate::abi::INVALID;
use crate::chunks::ChunkId;
use crate::file;
use crate::layout::GRANULE;

/// A range of device addresses.
pub(crate) struct Reservation {
    pub(crate) size: u64,
    /// Made by `cuMemAddressReserve`, so the application may map into it.
    pub(crate) by_user: bool,
}

/// What is at some addresses.
pub(crate) struct Mapping {
    pub(crate) len: u64,
    pub(crate) place: Place,
    pub(crate) buffer_id: u64,
    pub(crate) access: Access,
    pub(crate) kind: Kind,
    /// Bytes at its end for which the mapping itself has taken the addresses: they are in no reservation.
    beyond: u64,
}

/// Where the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the arena of a physical device, from this offset.
    Arena { gpu: usize, offset: u64 },
    /// At the address itself.
    Here,
}

/// What made the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemMap` of this handle.
    Vmm { handle: u64 },
    /// `cuMemAlloc` in this context.
    Plain { context: u64, chunk: ChunkId },
    /// An allocation from this pool.
    Pooled { pool: u64, chunk: ChunkId },
    /// A pointer imported from this pool.
    PoolImport { pool: u64, chunk: ChunkId },
    /// `cuIpcOpenMemHandle` in this context.
    Legacy { context: u64, chunk: ChunkId },
    /// `cuMemAllocManaged` in this context.
    Managed { context: u64 },
    /// `cuMemHostAlloc`.
    HostAlloc { context: u64 },
    /// `cuMemHostRegister`.
    HostRegistered { context: u64 },
}

impl Kind {
    /// Whether the mapping is in a reservation, at addresses the host cannot touch.
    pub(crate) fn is_device(self) -> bool {
        !matches!(self, Self::Managed { .. } | Self::HostAlloc { .. } | Self::HostRegistered { .. })
    }
}

/// Access rights, four bits a device ordinal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Access(u64);

impl Access {
    pub(crate) const READ: u64 = 1;
    pub(crate) const WRITE: u64 = 2;
    /// Everything for every device.
    pub(crate) const ALL: Self = Self(0x3333_3333_3333_3333);

    /// Whether no device may do anything.
    pub(crate) fn is_none(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn of(self, device: usize) -> u64 {
        self.0 >> (4 * device) & 0xf
    }

    pub(crate) fn set(&mut self, device: usize, rights: u64) {
        self.0 = self.0 & !(0xf << (4 * device)) | (rights & 0xf) << (4 * device);
    }
}

/// All reservations and mappings of the process.
pub(crate) struct Space {
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    reserved_bytes: u64,
    /// Number and bytes of the reservations the application made.
    by_user: (u64, u64),
    budget: u64,
    next_buffer_id: u64,
}

impl Space {
    pub(crate) fn new(budget: u64) -> Self {
        Self { reservations: BTreeMap::new(), mappings: BTreeMap::new(), reserved_bytes: 0, by_user: (0, 0), budget, next_buffer_id: 1 }
    }

    /// Reserves `size` bytes, a multiple of the granularity, at `wish` if that is free.
    pub(crate) fn reserve(&mut self, size: u64, alignment: u64, wish: u64, by_user: bool) -> Result<u64, CUresult> {
        let total = self.reserved_bytes.checked_add(size).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        if total > self.budget {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let alignment = alignment.max(GRANULE);
        let base = match exactly(wish, size, alignment) {
            Some(base) => base,
            None => anywhere(size, alignment).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?,
        };
        self.reserved_bytes = total;
        if by_user {
            self.by_user = (self.by_user.0 + 1, self.by_user.1 + size);
        }
        self.reservations.insert(base, Reservation { size, by_user });
        Ok(base)
    }

    /// Ends a reservation in which nothing is mapped.
    pub(crate) fn unreserve(&mut self, base: u64) {
        if let Some(reservation) = self.reservations.remove(&base) {
            self.reserved_bytes -= reservation.size;
            if reservation.by_user {
                self.by_user = (self.by_user.0 - 1, self.by_user.1 - reservation.size);
            }
            file::unmap(usize::try_from(base).unwrap_or(0), reservation.size);
        }
    }

    /// The reservation that contains the address: its base and itself.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, &Reservation)> {
        let (&base, reservation) = self.reservations.range(..=address).next_back()?;
        (address - base < reservation.size).then_some((base, reservation))
    }

    /// The mapping that contains the address: its base and itself.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&base, mapping) = self.mappings.range(..=address).next_back()?;
        (address - base < mapping.len).then_some((base, mapping))
    }

    /// Adds a mapping; the addresses are free.
    pub(crate) fn insert(&mut self, base: u64, len: u64, place: Place, access: Access, kind: Kind) {
        let buffer_id = self.next_buffer_id;
        self.next_buffer_id += 1;
        self.mappings.insert(base, Mapping { len, place, buffer_id, access, kind, beyond: 0 });
    }

    /// Adds a mapping that starts in a reservation of the application's. It may end outside, as on a GPU, where the addresses there are free.
    pub(crate) fn insert_vmm(&mut self, base: u64, len: u64, place: Place, handle: u64) -> Result<(), CUresult> {
        let end = base.checked_add(len).ok_or(INVALID)?;
        let beyond = end.saturating_sub(self.reserved_until(base).ok_or(INVALID)?);
        if self.is_mapped(base, len) {
            return Err(INVALID);
        }
        if beyond > 0 {
            file::map_none(usize::try_from(end - beyond).map_err(|_| INVALID)?, beyond, true).map_err(|_| INVALID)?;
        }
        self.insert(base, len, place, Access::default(), Kind::Vmm { handle });
        if let Some(mapping) = self.mappings.get_mut(&base) {
            mapping.beyond = beyond;
        }
        Ok(())
    }

    /// Removes the mapping that starts here.
    pub(crate) fn remove(&mut self, base: u64) -> Option<Mapping> {
        let mapping = self.mappings.remove(&base)?;
        if mapping.beyond > 0 {
            file::unmap(usize::try_from(base + mapping.len - mapping.beyond).unwrap_or(0), mapping.beyond);
        }
        Some(mapping)
    }

    /// Whether anything is mapped in the range.
    pub(crate) fn is_mapped(&self, from: u64, len: u64) -> bool {
        self.mappings.range(..from.saturating_add(len)).next_back().is_some_and(|(&base, mapping)| base + mapping.len > from)
    }

    /// Where the application's reservations end that contain the address and follow each other from there on.
    fn reserved_until(&self, address: u64) -> Option<u64> {
        let mut end = None;
        while let Some((base, reservation)) = self.reservation_at(end.unwrap_or(address)).filter(|(_, reservation)| reservation.by_user) {
            end = Some(base + reservation.size);
        }
        end
    }

    /// Bases of the mappings in a range that starts in a reservation of the application's, and how many bytes they have. A mapping that is only in
    /// part in the range is refused.
    pub(crate) fn mappings_in(&self, from: u64, len: u64) -> Result<(Vec<u64>, u64), CUresult> {
        let end = from.checked_add(len).filter(|_| len > 0 && self.reserved_until(from).is_some()).ok_or(INVALID)?;
        let is_cut = |at: u64| self.mapping_at(at).is_some_and(|(base, _)| base < at);
        let inside = || self.mappings.range(from..end);
        if is_cut(from) || is_cut(end) || inside().any(|(_, mapping)| !matches!(mapping.kind, Kind::Vmm { .. })) {
            return Err(INVALID);
        }
        Ok((inside().map(|(&base, _)| base).collect(), inside().map(|(_, mapping)| mapping.len).sum()))
    }

    /// Sets rights on a mapping.
    pub(crate) fn set_access(&mut self, base: u64, device: usize, rights: u64) {
        if let Some(mapping) = self.mappings.get_mut(&base) {
            mapping.access.set(device, rights);
        }
    }

    /// Bases of all mappings whose kind passes the test.
    pub(crate) fn bases_of(&self, test: impl Fn(Kind) -> bool) -> Vec<u64> {
        self.mappings.iter().filter(|(_, mapping)| test(mapping.kind)).map(|(&base, _)| base).collect()
    }

    /// Sets rights on every mapping whose kind passes the test.
    pub(crate) fn set_access_of(&mut self, device: usize, rights: u64, test: impl Fn(Kind) -> bool) {
        for mapping in self.mappings.values_mut().filter(|mapping| test(mapping.kind)) {
            mapping.access.set(device, rights);
        }
    }

    /// Number and bytes of the reservations the application made.
    pub(crate) fn reserved_by_user(&self) -> (u64, u64) {
        self.by_user
    }
}

fn exactly(wish: u64, size: u64, alignment: u64) -> Option<u64> {
    if wish == 0 || !wish.is_multiple_of(alignment) {
        return None;
    }
    file::map_none(usize::try_from(wish).ok()?, size, true).ok().map(|base| base as u64)
}

/// Maps more than asked for and trims it to the alignment.
fn anywhere(size: u64, alignment: u64) -> Option<u64> {
    let slack = if alignment > 4096 { alignment } else { 0 };
    let raw = file::map_none(0, size.checked_add(slack)?, false).ok()? as u64;
    // The upper end: the kernel fills the address space from above, so neighbours then lie next to each other, as they do on a GPU.
    let base = (raw + slack) / alignment * alignment;
    if base > raw {
        file::unmap(usize::try_from(raw).ok()?, base - raw);
    }
    let (end, raw_end) = (base + size, raw + size + slack);
    if raw_end > end {
        file::unmap(usize::try_from(end).ok()?, raw_end - end);
    }
    Some(base)
}
