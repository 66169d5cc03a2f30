//! A window of a pool's allocation: one chunk, which the driver maps where it likes.
//!
//! All of this is done under the flight over the whole window, so nobody else imports, unmaps or gives access meanwhile. The window's address is that of the
//! mapping and comes and goes with it.

use core::sync::atomic::Ordering::Release;
use core::time::Duration;

use cuda_ipc_core::import::Found;
use cuda_ipc_core::importer::{Deadline, ImportErrorKind};
use cuda_ipc_core::sys::driver::DriverError;

use super::Window;
use crate::error::{CacheError, CacheErrorKind};

/// How often it is looked whether what is in the way has gone.
const POLL: Duration = Duration::from_micros(500);

impl Window {
    /// Imports the allocation and makes it leasable, if it is missing.
    pub(super) fn import_pooled(&self, missing: &[Found], epoch: u64, deadline: Deadline) -> Result<(), CacheError> {
        let Some(found) = missing.first() else { return Ok(()) };
        self.cache.admit(self);
        let devices = self.device_list();
        let imported = loop {
            match self.peer.import_pooled(self.cache.cuda(), found, &devices, deadline) {
                // Another window has what was there before. Where it is idle it goes now; else when its leases end.
                Err(error) if error.kind == ImportErrorKind::StillInUse && !deadline.is_over() => {
                    self.cache.clear_dead();
                    std::thread::sleep(POLL.min(deadline.remaining()));
                }
                other => break other,
            }
        };
        match imported {
            Ok(imported) => {
                self.local_base.store(imported.address(), Release);
                self.lock().pooled = Some(Box::new(imported));
                self.publish(missing, epoch);
                Ok(())
            }
            Err(error) => {
                self.cache.dismiss();
                let busy = error.kind == ImportErrorKind::StillInUse;
                Err(self.error(if busy { CacheErrorKind::Busy } else { CacheErrorKind::Import(error) }, error.address))
            }
        }
    }

    /// Gives one more device access to what is imported. A device that cannot have it is refused here, and spoils nothing for the others.
    pub(super) fn open_pooled_to(&self, device: i32, deadline: Deadline) -> Result<(), CacheError> {
        // Where the allocation is gone, a lease says so.
        if let Some(Ok(found)) = self.pool_slot.map(|slot| self.peer.lookup_pooled(slot, self.base, self.len)) {
            let may = self.peer.may_use_pooled(self.cache.cuda(), &found, device);
            may.map_err(|error| self.error(CacheErrorKind::Import(error), self.base))?;
        }
        // Out of the state meanwhile: no lock is held across a driver call.
        let Some(pooled) = self.lock().pooled.take() else { return Ok(()) };
        let opened = pooled.open_to(&[device], deadline);
        self.lock().pooled = Some(pooled);
        opened.map_err(|error| self.error(CacheErrorKind::Import(error), self.base))
    }

    /// Gives the allocation back. On an error it stays as it is.
    pub(super) fn close_pooled(&self) -> Result<(), DriverError> {
        let Some(mut pooled) = self.lock().pooled.take() else { return Ok(()) };
        match pooled.close() {
            Ok(()) => {
                self.local_base.store(0, Release);
                self.cache.dismiss();
                Ok(())
            }
            Err(error) => {
                self.lock().pooled = Some(pooled);
                Err(error)
            }
        }
    }
}
