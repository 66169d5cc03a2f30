//! Holds: a window whose address stays, for a user who has handed the address on.
//!
//! A lease keeps chunks mapped for one use. A hold keeps the *address range* of a window reserved, so that addresses in it can be given to code that knows
//! nothing of leases; what is mapped behind them still comes and goes.

use core::sync::atomic::Ordering::Acquire;
use core::time::Duration;
use std::sync::Arc;

use cuda_ipc_core::importer::Deadline;

use super::Window;
use crate::error::{CacheError, CacheErrorKind};

/// Chunks that [`Window::map_all`] imports by one call: some milliseconds.
const MAP_AT_ONCE: usize = 64;
/// How long one such call may take before it is an error.
const PATIENCE: Duration = Duration::from_secs(10);

/// While this lives, its window keeps its address range: no limit, no idleness and no purge gives it back.
#[derive(Debug)]
pub struct Hold {
    window: Arc<Window>,
    address: u64,
}

impl Hold {
    /// Address here of the window's base.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// The window.
    pub const fn window(&self) -> &Arc<Window> {
        &self.window
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.window.cache.is_current() {
            self.window.lock().holds -= 1;
        }
    }
}

impl Window {
    /// Reserves the window's address range, if it has none, and keeps it until the hold is dropped.
    ///
    /// Errors: [`CacheError`] if the address space is refused, or the window is of a pool's allocation, whose address is the driver's choice.
    pub fn hold_address(self: &Arc<Self>) -> Result<Hold, CacheError> {
        if !self.cache.is_current() {
            return Err(self.error(CacheErrorKind::Forked, self.base));
        }
        if self.pool_slot.is_some() {
            return Err(self.error(CacheErrorKind::NoReservation, self.base));
        }
        self.lock().holds += 1;
        // From here on nobody gives the range back; the drop below takes the count off again if there is none to be had.
        let mut hold = Hold { window: self.clone(), address: 0 };
        hold.address = self.address_space(self.base)?;
        Ok(hold)
    }

    /// Imports what the exporter has in the reservation now and keeps it mapped as idle memory is kept, until all is mapped or `stop` is over.
    ///
    /// Returns the exporter's address up to which this has come. Errors: the first chunk that could not be imported; what was imported before stays.
    pub fn map_all(&self, from: u64, stop: Deadline) -> Result<u64, CacheError> {
        let end = self.base + self.len;
        let mut at = from.max(self.base);
        if self.pool_slot.is_some() {
            return self.lease(self.base, self.len, Deadline::after(PATIENCE)).map(|_| end);
        }
        loop {
            let Some(table) = self.peer.table() else { return Err(self.error(CacheErrorKind::Forked, at)) };
            let Some((_, first)) = table.next_chunk(at, end) else { return Ok(end) };
            if stop.is_over() {
                return Ok(at);
            }
            // A run at once, since its access is set by one call; a bounded one, so that `stop` is looked at often.
            let start = first.address.max(self.base);
            let run = table.chunks(start, end - start).map_while(Result::ok).take(MAP_AT_ONCE);
            at = run.map(|(_, chunk)| chunk.end()).last().unwrap_or(first.end()).min(end);
            match self.lease(start, at - start, Deadline::after(PATIENCE)) {
                Ok(lease) => drop(lease),
                // It died meanwhile: whoever uses it will be told.
                Err(error) if matches!(error.kind, CacheErrorKind::NoChunk | CacheErrorKind::KeptChanging) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Address here of the window's base, if it has any.
    pub fn local_address(&self) -> Option<u64> {
        let base = self.local_base.load(Acquire);
        (base != 0).then_some(base)
    }
}
