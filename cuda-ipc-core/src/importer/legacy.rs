//! Memory of another process by its legacy handle. Opening one handle twice in a context gives the same address, so opens are counted here, process-wide.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cuda_driver_sys::CUdevice;

use super::error::{Deadline, ImportError, ImportErrorKind, ImportStep};
use super::pooled::reaches;
use crate::import::Step;
use crate::own_handles::own_address;
use crate::rkey::{Payload, Rkey};
use crate::sys::driver::{Context, Cuda, DriverError, HeldContext};
use crate::sys::fork;
use crate::sys::per_life::PerLife;

static OPENED: PerLife<OpenedHandles> = PerLife::new();

/// All of this process, by context and handle.
#[derive(Debug, Default)]
struct OpenedHandles {
    state: Mutex<State>,
    /// A handle's opening or closing is over.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    handles: HashMap<(Context, [u8; 64]), Handle>,
    /// Threads that wait: where there are none, nobody is woken, which is a system call.
    waiting: usize,
}

#[derive(Clone, Copy, Debug)]
enum Handle {
    /// Somebody opens or closes it.
    Busy,
    /// Where it is, the context that it is kept in, and how many use it.
    Open { address: u64, held: HeldContext, users: u64 },
}

/// The allocation that a legacy handle stands for, mapped here until the last of its users is dropped.
///
/// Nothing says whether the exporter has freed it since: the mapping keeps the memory alive. It is readable and writable, whatever was meant. In a forked child, dropping does nothing.
#[derive(Debug)]
pub struct LegacyImport {
    cuda: Cuda,
    key: (Context, [u8; 64]),
    address: Option<u64>,
    /// The allocation's first address in the exporter, and its length in bytes.
    range: (u64, u64),
    token: u64,
}

impl LegacyImport {
    /// Opens the legacy handle in `rkey` for `device`, an ordinal of this process; in the calling thread's context if that is the device's, else in the device's
    /// primary context.
    ///
    /// Errors: [`ImportErrorKind::KeyKind`] for another handle type, [`ImportErrorKind::OwnProcess`] for a handle of this process's own; nothing is left
    /// behind. Source: cuIpcOpenMemHandle.
    pub fn open(cuda: &Cuda, rkey: &Rkey, device: CUdevice, deadline: Deadline) -> Result<Self, ImportError> {
        // Nothing in such a handle says whose it is.
        let fail = |step, kind| ImportError { step, kind, pid: 0, address: rkey.base, stuck_bytes: 0 };
        let Payload::Legacy(handle) = rkey.payload else { return Err(fail(ImportStep::Key, ImportErrorKind::KeyKind)) };
        if own_address(&handle).is_some() {
            return Err(fail(ImportStep::Key, ImportErrorKind::OwnProcess));
        }
        let token = fork::token().map_err(|error| fail(ImportStep::Key, ImportErrorKind::Syscall(error)))?;
        let opened = OPENED.get().map_err(|error| fail(ImportStep::Key, ImportErrorKind::Syscall(error)))?;
        let at_open = |kind| fail(ImportStep::Chunk(Step::Import), kind);
        let driver = |error: DriverError| at_open(ImportErrorKind::of_import(error, rkey.device));
        cuda.with_relaxed_capture(|| {
            // Asked first: the driver says of a handle of an invisible GPU what it says of others that it cannot open.
            if cuda.device_with_uuid(rkey.device).map_err(driver)?.is_none() {
                return Err(at_open(ImportErrorKind::DeviceNotVisible { uuid: rkey.device }));
            }
            let held = cuda.hold_context(device).map_err(driver)?;
            let key = (held.context(), handle);
            let result = opened.take(key, Some(deadline)).map_err(at_open).and_then(|found| match found {
                Some((address, kept, users)) => {
                    opened.put(key, Some(Handle::Open { address, held: kept, users: users + 1 }));
                    Ok((address, true))
                }
                None => match cuda.open_legacy(key.0, &handle) {
                    Ok(address) => {
                        opened.put(key, Some(Handle::Open { address, held, users: 1 }));
                        Ok((address, false))
                    }
                    Err(error) => {
                        opened.put(key, None);
                        Err(driver(error))
                    }
                },
            });
            // The first one's hold keeps the context for all.
            if !matches!(result, Ok((_, false))) {
                let _ = cuda.let_go(held);
            }
            let (address, _) = result?;
            let mut import = Self { cuda: *cuda, key, address: Some(address), range: (rkey.base, rkey.len), token };
            if let Err(kind) = reaches(cuda, device, address, rkey.len) {
                let _ = import.close();
                return Err(at_open(kind));
            }
            Ok(import)
        })
    }

    /// Address here of the allocation's first byte; 0 once it was given back.
    pub fn address(&self) -> u64 {
        self.address.unwrap_or(0)
    }

    /// The allocation's first address in the exporter, and its length in bytes.
    pub const fn range(&self) -> (u64, u64) {
        self.range
    }

    /// Gives it back and says how it went; what dropping does silently. Errors: the driver's; then it is kept for another try.
    pub fn close(&mut self) -> Result<(), DriverError> {
        let Some(address) = self.address.filter(|_| fork::is_current(self.token)) else { return Ok(()) };
        let Ok(opened) = OPENED.get() else { return Ok(()) };
        let Ok(Some((_, held, users))) = opened.take(self.key, None) else { return Ok(()) };
        self.address = None;
        if users > 1 {
            opened.put(self.key, Some(Handle::Open { address, held, users: users - 1 }));
            return Ok(());
        }
        self.cuda.with_relaxed_capture(|| match self.cuda.close_legacy(self.key.0, address) {
            // "No such memory": somebody else has closed it.
            Err(error) if !error.is_no_such_memory() => {
                opened.put(self.key, Some(Handle::Open { address, held, users }));
                self.address = Some(address);
                Err(error)
            }
            _ => {
                opened.put(self.key, None);
                self.cuda.let_go(held)
            }
        })
    }
}

impl Drop for LegacyImport {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

impl OpenedHandles {
    /// Takes the handle's place: what is open there. Waits while another thread opens or closes it. [`OpenedHandles::put`] has to follow.
    #[allow(clippy::type_complexity, reason = "address, context and number of users, taken apart at once")]
    fn take(&self, key: (Context, [u8; 64]), deadline: Option<Deadline>) -> Result<Option<(u64, HeldContext, u64)>, ImportErrorKind> {
        let mut state = self.lock();
        loop {
            match state.handles.insert(key, Handle::Busy) {
                None => return Ok(None),
                Some(Handle::Open { address, held, users }) => return Ok(Some((address, held, users))),
                Some(Handle::Busy) => {}
            }
            if deadline.is_some_and(|deadline| deadline.is_over()) {
                return Err(ImportErrorKind::DeadlineOver);
            }
            state.waiting += 1;
            state = match deadline {
                Some(deadline) => self.changed.wait_timeout(state, deadline.remaining()).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            state.waiting -= 1;
        }
    }

    fn put(&self, key: (Context, [u8; 64]), handle: Option<Handle>) {
        let mut state = self.lock();
        match handle {
            Some(handle) => state.handles.insert(key, handle),
            None => state.handles.remove(&key),
        };
        let somebody_waits = state.waiting != 0;
        drop(state);
        if somebody_waits {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
