//! One imported range in an address range of its own: the simplest use of an importer.

use std::sync::Arc;

use super::error::{Deadline, ImportError, ImportErrorKind, ImportStep};
use super::peer::Peer;
use super::transfer::{Access, Placement};
use crate::import::Found;
use crate::key::{Key, KeyKind};
use crate::sys::driver::{Cuda, DriverError};
use crate::sys::fork;

/// Memory of another process, mapped here until this is dropped.
///
/// Dropping unmaps at once: work that uses the memory must be complete. In a forked child, dropping does nothing.
#[derive(Debug)]
pub struct Import {
    cuda: Cuda,
    peer: Arc<Peer>,
    chunks: Vec<Found>,
    placement: Placement,
    /// The reservation here: all chunks, back to back.
    reserved: (u64, u64),
    address: u64,
    len: u64,
    token: u64,
}

impl Import {
    /// Imports `[address, address + len)`, addresses of the exporter, inside what `key` names.
    ///
    /// Whole chunks are mapped, in address space of exactly their length. Errors: [`ImportError`]; nothing is left behind.
    pub fn new(
        cuda: &Cuda,
        peer: &Arc<Peer>,
        key: &Key,
        address: u64,
        len: u64,
        access: Access<'_>,
        deadline: Deadline,
    ) -> Result<Self, ImportError> {
        let fail = |step, kind| ImportError { step, kind, pid: peer.pid(), address, stuck_bytes: 0 };
        if key.nonce != peer.nonce() || !matches!(key.kind, KeyKind::Reservation) {
            return Err(fail(ImportStep::Key, ImportErrorKind::KeyKind));
        }
        if len == 0 || !key.covers(address, len) {
            return Err(fail(ImportStep::Key, ImportErrorKind::OutsideReservation));
        }
        let token = fork::token().map_err(|error| fail(ImportStep::Key, ImportErrorKind::Syscall(error)))?;
        let chunks = peer.lookup(address, len)?;
        let (Some((_, first)), Some((_, last))) = (chunks.first(), chunks.last()) else {
            return Err(fail(ImportStep::Lookup, ImportErrorKind::OutsideReservation));
        };
        // A chunk that reaches out of the reservation belongs to another one, made at an old address.
        if !key.covers(first.address, last.end() - first.address) {
            return Err(fail(ImportStep::Lookup, ImportErrorKind::OutsideReservation));
        }
        let reserve_len = last.end() - first.address;
        let local_base = cuda.reserve(reserve_len).map_err(|error| fail(ImportStep::Reserve, ImportErrorKind::Driver(error)))?;
        let placement = Placement { remote_base: first.address, local_base };
        if let Err(error) = peer.import(cuda, &chunks, placement, access, deadline) {
            if error.stuck_bytes == 0 {
                let _ = cuda.free_reservation(local_base, reserve_len);
            }
            return Err(error);
        }
        let address = placement.local(address);
        Ok(Self { cuda: *cuda, peer: peer.clone(), chunks, placement, reserved: (local_base, reserve_len), address, len, token })
    }

    /// First address of the range in this process.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Never: a range has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// The chunks behind it.
    pub fn chunks(&self) -> &[Found] {
        &self.chunks
    }

    /// Whether every chunk is still what the exporter has at its address. If not, the mapping shows memory that the exporter has given up.
    pub fn is_current(&self) -> bool {
        self.peer.table().is_some_and(|table| self.chunks.iter().all(|(id, _)| table.is_live(*id)))
    }

    /// Where the exporter's address is here.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Unmaps and says how it went; what dropping does silently.
    ///
    /// Errors: the driver's; then the address space stays reserved, since something may still be mapped in it.
    pub fn close(mut self) -> Result<(), DriverError> {
        self.unmap()
    }

    fn unmap(&mut self) -> Result<(), DriverError> {
        let (base, len) = core::mem::take(&mut self.reserved);
        if len == 0 || !fork::is_current(self.token) {
            return Ok(());
        }
        self.cuda.with_relaxed_capture(|| {
            self.cuda.unmap(base, len)?;
            self.cuda.free_reservation(base, len)
        })
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let _ = self.unmap();
    }
}
