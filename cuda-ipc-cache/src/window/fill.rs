//! A miss: finds out what the exporter has in the range now, clears what is dead here, and imports what is missing.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use cuda_ipc_core::import::Found;
use cuda_ipc_core::importer::{Access, Deadline, ImportErrorKind, Placement};
use cuda_ipc_core::table::{GRANULE, LookupError};

use super::Window;
use super::reclaim::UnmapCause;
use super::state::{Entry, MappedChunk};
use crate::error::{CacheError, CacheErrorKind};
use crate::lease::Lease;

/// How often a range is filled for one lease while the exporter replaces its chunks.
const ATTEMPTS: u32 = 16;

/// What came of filling a range.
enum Filled {
    /// It is up to date, unless the exporter has changed it meanwhile.
    Ready,
    /// The chunk with this head is in the way, and leased.
    Leased(u32),
}

impl Window {
    /// The rest of [`Window::lease`] after a miss.
    #[cold]
    pub(super) fn lease_slow(&self, address: u64, len: u64, deadline: Deadline, holding: &[&Lease<'_>]) -> Result<Lease<'_>, CacheError> {
        if self.granules(address, len).is_none() {
            return Err(self.error(CacheErrorKind::OutsideWindow, address));
        }
        self.cache.count_miss();
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            let (found, _) = self.look_up(address, len)?;
            let range = self.extent(&found, address, len);
            match self.enter(range.0, range.1, deadline)? {
                Entry::Flying(flight) => match self.fill(range, address, len, deadline) {
                    Ok(Filled::Ready) => {
                        // Under the flight, so that nobody takes away what has just been imported.
                        if let Some(lease) = self.try_lease(address, len) {
                            return Ok(lease);
                        }
                        // What was imported for nothing may have died before it was published, which no sweep has seen.
                        self.cache.unsettle();
                        if self.is_full(range) {
                            return Err(self.error(CacheErrorKind::TooManyLeases, address));
                        }
                        attempts += 1;
                    }
                    Ok(Filled::Leased(head)) => {
                        // Not under the flight: others may fill what is next to it.
                        drop(flight);
                        self.wait_for_leases(head, range, deadline, holding)?;
                    }
                    Err(error) => return Err(flight.fail(error)),
                },
                // The same has just failed for somebody else.
                Entry::Landed(Some(error)) if self.is_within(error.address, range) => return Err(error),
                Entry::Landed(_) => {}
            }
            if deadline.is_over() {
                return Err(self.error(CacheErrorKind::DeadlineOver, address));
            }
        }
        Err(self.error(CacheErrorKind::KeptChanging, address))
    }

    /// The exporter's chunks over the range, and the epoch from before the look-up.
    fn look_up(&self, address: u64, len: u64) -> Result<(Vec<Found>, u64), CacheError> {
        let table = self.peer.table().ok_or_else(|| self.error(CacheErrorKind::Forked, address))?;
        let epoch = table.epoch();
        let found = match self.pool_slot {
            None => self.peer.lookup(address, len),
            Some(slot) => self.peer.lookup_pooled(slot, self.base, self.len).map(|found| vec![found]),
        };
        let found = found.map_err(|error| match error.kind {
            ImportErrorKind::Lookup(LookupError::NoChunk(hole)) => self.error(CacheErrorKind::NoChunk, hole),
            ImportErrorKind::Lookup(LookupError::Unsettled) => self.error(CacheErrorKind::KeptChanging, address),
            _ => self.error(CacheErrorKind::Import(error), address),
        })?;
        // A chunk that reaches out of the reservation belongs to another one, at an old address of this.
        let outside = found.iter().find(|(_, chunk)| chunk.address < self.base || chunk.end() - self.base > self.len);
        match outside {
            Some((_, chunk)) => Err(self.error(CacheErrorKind::NoChunk, chunk.address.max(address))),
            None => Ok((found, epoch)),
        }
    }

    /// First and last granule of all that filling the range may touch: the exporter's chunks there, and what is mapped here in their place.
    fn extent(&self, found: &[Found], address: u64, len: u64) -> (u32, u32) {
        let (mut first, mut last) = self.granules(address, len).unwrap_or_default();
        if let (Some((_, head)), Some((_, tail))) = (found.first(), found.last()) {
            first = first.min(self.granule(head.address));
            last = last.max(self.granule(tail.end() - 1));
        }
        let inner = self.lock();
        if let Some((&head, _)) = inner.mapped.range(..=first).next_back().filter(|(head, chunk)| *head + chunk.granules > first) {
            first = head;
        }
        if let Some((&head, chunk)) = inner.mapped.range(..=last).next_back() {
            last = last.max(head + chunk.granules - 1);
        }
        (first, last)
    }

    fn is_within(&self, address: u64, (first, last): (u32, u32)) -> bool {
        (self.address_of(first)..self.address_of(last) + GRANULE).contains(&address)
    }

    fn granule(&self, address: u64) -> u32 {
        // Inside the window by the caller's check, and the window has fewer granules than a u32 counts.
        u32::try_from((address - self.base) / GRANULE).unwrap_or(u32::MAX)
    }

    /// Brings the range up to date, under the caller's flight over it.
    fn fill(&self, (first, last): (u32, u32), address: u64, len: u64, deadline: Deadline) -> Result<Filled, CacheError> {
        if self.lock().closed {
            return Err(self.error(CacheErrorKind::Closed, address));
        }
        // Once more, now that nobody else changes the range here.
        let (found, epoch) = self.look_up(address, len)?;
        if self.extent(&found, address, len) != (first, last) {
            // Larger or smaller chunks have come meanwhile: the caller takes another flight.
            return Ok(Filled::Ready);
        }
        let (missing, dead) = self.compare(&found, (first, last), epoch);
        if let Some(head) = self.clear(&dead, UnmapCause::Replaced)? {
            return Ok(Filled::Leased(head));
        }
        if missing.is_empty() {
            return Ok(Filled::Ready);
        }
        let bytes = missing.iter().map(|(_, chunk)| chunk.len).sum();
        self.cache.claim(bytes, self);
        let imported = match self.pool_slot {
            None => self.address_space(address).and_then(|local_base| self.import(&missing, local_base, epoch, deadline)),
            Some(_) => self.import_pooled(&missing, epoch, deadline),
        };
        match imported {
            Ok(()) => Ok(Filled::Ready),
            Err(error) => {
                self.cache.unclaim(bytes);
                // A chunk that went while it was on its way may have a successor already.
                let retired = matches!(error.kind, CacheErrorKind::Import(error) if error.kind == ImportErrorKind::Retired);
                if retired { Ok(Filled::Ready) } else { Err(error) }
            }
        }
    }

    /// Which of the exporter's chunks are missing here, and which mapped ones are in their place or dead. What is current is marked as checked.
    fn compare(&self, found: &[Found], (first, last): (u32, u32), epoch: u64) -> (Vec<Found>, Vec<u32>) {
        let inner = self.lock();
        let (mut missing, mut kept) = (Vec::new(), Vec::new());
        for &(id, chunk) in found {
            let head = self.granule(chunk.address);
            match (inner.mapped.get(&head), self.slots.get(head as usize)) {
                (Some(mapped), Some(slot)) if mapped.id == id && mapped.retiring.is_none() => {
                    slot.mark_checked(epoch);
                    kept.push(head);
                }
                _ => missing.push((id, chunk)),
            }
        }
        let dead = inner.mapped.range(first..=last).map(|(&head, _)| head).filter(|head| kept.binary_search(head).is_err()).collect();
        (missing, dead)
    }

    fn import(&self, missing: &[Found], local_base: u64, epoch: u64, deadline: Deadline) -> Result<(), CacheError> {
        let devices = self.device_list();
        let access = Access { devices: &devices, writable: self.writable };
        let placement = Placement { remote_base: self.base, local_base };
        if let Err(error) = self.peer.import(self.cache.cuda(), missing, placement, access, deadline) {
            if error.stuck_bytes != 0 {
                let spans = missing.iter().map(|(_, chunk)| (self.granule(chunk.address), self.granule(chunk.end() - 1)));
                self.lock().stuck.extend(spans);
            }
            return Err(self.error(CacheErrorKind::Import(error), error.address));
        }
        self.publish(missing, epoch);
        Ok(())
    }

    pub(super) fn publish(&self, imported: &[Found], epoch: u64) {
        let mut inner = self.lock();
        for (id, chunk) in imported {
            let head = self.granule(chunk.address);
            let granules = u32::try_from(chunk.len.div_ceil(GRANULE)).unwrap_or(1);
            for back in 1..granules {
                if let Some(slot) = self.slots.get((head + back) as usize) {
                    slot.publish_interior(back);
                }
            }
            inner.mapped.insert(head, MappedChunk { id: *id, granules, retiring: None, drain: None });
            if let Some(slot) = self.slots.get(head as usize) {
                slot.publish(*id, granules, epoch);
            }
        }
        drop(inner);
        self.cache.count_imported(imported.len() as u64);
    }

    /// Whether a chunk with its head in `first..=last` cannot take one more lease.
    fn is_full(&self, (first, last): (u32, u32)) -> bool {
        self.lock().mapped.range(first..=last).any(|(&head, _)| self.slots.get(head as usize).is_some_and(|slot| slot.is_full()))
    }

    /// The window's address space here, reserved if there is none.
    pub(super) fn address_space(&self, address: u64) -> Result<u64, CacheError> {
        // Two flights may get here at once; the loser gives its reservation back.
        let existing = self.local_base.load(Acquire);
        if existing != 0 {
            return Ok(existing);
        }
        let fresh = self.cache.reserve(self.len, self).map_err(|kind| self.error(kind, address))?;
        match self.local_base.compare_exchange(0, fresh, AcqRel, Acquire) {
            Ok(_) => Ok(fresh),
            Err(theirs) => {
                self.cache.unreserve(fresh, self.len);
                Ok(theirs)
            }
        }
    }

    /// Gives `device` (an ordinal of this process) access to all that is mapped and all that will be.
    pub fn add_device(&self, device: i32, deadline: Deadline) -> Result<(), CacheError> {
        let bit = u32::try_from(device)
            .ok()
            .and_then(|bit| 1_u64.checked_shl(bit))
            .ok_or_else(|| self.error(CacheErrorKind::Device(device), self.base))?;
        while self.devices.load(Acquire) & bit == 0 {
            // How another's flight failed is no matter here.
            let Entry::Flying(_flight) = self.enter(0, self.last_granule(), deadline)? else { continue };
            if self.pool_slot.is_some() {
                self.open_pooled_to(device, deadline)?;
                self.devices.fetch_or(bit, Release);
                return Ok(());
            }
            let mut devices = self.device_list();
            devices.push(device);
            let (local_base, mut runs) = (self.local_base.load(Acquire), Vec::<(u64, u64)>::new());
            for (&head, chunk) in &self.lock().mapped {
                let (start, len) = (local_base + u64::from(head) * GRANULE, u64::from(chunk.granules) * GRANULE);
                match runs.last_mut() {
                    Some(run) if run.0 + run.1 == start => run.1 += len,
                    _ => runs.push((start, len)),
                }
            }
            for (start, len) in runs {
                self.cache
                    .cuda()
                    .with_relaxed_capture(|| self.cache.cuda().set_access(start, len, &devices, self.writable))
                    .map_err(|error| self.error(CacheErrorKind::Driver(error), self.base))?;
            }
            self.devices.fetch_or(bit, Release);
        }
        Ok(())
    }

    /// Ordinals of the devices that have access.
    pub(super) fn device_list(&self) -> Vec<i32> {
        let devices = self.devices.load(Acquire);
        (0..64).filter(|bit| devices >> bit & 1 != 0).collect()
    }
}
