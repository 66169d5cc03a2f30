//! Legacy handles of this process's own: their bytes do not say whose they are, and the driver refuses to open them here.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sys::per_life::PerLife;
use crate::sys::{SyscallError, fork};

/// First address and number of exports by handle.
type Handles = HashMap<[u8; 64], (u64, u64)>;

static HANDLES: PerLife<Mutex<Handles>> = PerLife::new();

/// One export of a handle; dropping it counts down, in the process life that made it.
#[derive(Debug)]
pub(crate) struct OwnHandle {
    handle: [u8; 64],
    token: u64,
}

impl OwnHandle {
    /// Remembers the handle of the allocation at `base`.
    pub(crate) fn new(handle: [u8; 64], base: u64) -> Result<Self, SyscallError> {
        let token = fork::token()?;
        let mut handles = lock()?;
        let entry = handles.entry(handle).or_insert((base, 0));
        // A handle that comes back for another address is a new allocation's.
        entry.0 = base;
        entry.1 += 1;
        Ok(Self { handle, token })
    }
}

impl Drop for OwnHandle {
    fn drop(&mut self) {
        if !fork::is_current(self.token) {
            return;
        }
        let Ok(mut handles) = lock() else { return };
        if let Some(entry) = handles.get_mut(&self.handle) {
            entry.1 -= 1;
            if entry.1 == 0 {
                handles.remove(&self.handle);
            }
        }
    }
}

/// First address of the allocation of this process that has this handle, while it is exported.
pub(crate) fn own_address(handle: &[u8; 64]) -> Option<u64> {
    lock().ok()?.get(handle).map(|entry| entry.0)
}

fn lock() -> Result<MutexGuard<'static, Handles>, SyscallError> {
    HANDLES.get().map(|handles| handles.lock().unwrap_or_else(PoisonError::into_inner))
}
