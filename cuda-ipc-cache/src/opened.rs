//! What an rkey names, whatever carries it: the same two steps, open and lease, for any device memory.

use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use cuda_driver_sys::CUdevice;
use cuda_ipc_core::importer::{Deadline, ImportError, ImportErrorKind, LegacyImport, own_nonces_contain};
use cuda_ipc_core::rkey::{Payload, Rkey};

use crate::cache::{Cache, Shared};
use crate::error::{CacheError, CacheErrorKind};
use crate::lease::Lease;
use crate::window::Window;

/// See the module's documentation. Usable from any thread; keep it for as long as the rkey is of use.
#[derive(Debug)]
#[non_exhaustive]
pub enum Opened {
    /// Chunks of a reservation, or an allocation of a pool.
    Window(Arc<Window>),
    /// An allocation of `cuMemAlloc`, mapped for as long as anything that was opened by its handle lives. Nothing tells when its exporter frees it.
    Legacy(Box<OpenedLegacy>),
    /// Memory of this very process: its addresses are good as they are.
    Own {
        /// First address of what the rkey names.
        base: u64,
        /// Its length in bytes.
        len: u64,
    },
}

/// An open legacy handle of a cache's user.
#[derive(Debug)]
pub struct OpenedLegacy {
    import: LegacyImport,
    cache: Arc<Shared>,
}

/// Use of a range; see [`Opened::lease`].
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenedLease<'o> {
    /// Of a window.
    Window(Lease<'o>),
    /// Of memory that stays where it is for as long as what it was leased of lives.
    Fixed {
        /// Address of the range in this process.
        address: u64,
    },
}

impl Opened {
    pub(crate) fn new(cache: &Cache, rkey: &Rkey, device: CUdevice, writable: bool, deadline: Deadline) -> Result<Self, CacheError> {
        let fail = |kind| CacheError { kind, pid: 0, address: rkey.base };
        if !cache.shared().is_current() {
            return Err(fail(CacheErrorKind::Forked));
        }
        match rkey.payload {
            Payload::Posix(key) if own_nonces_contain(key.nonce) => Ok(Self::Own { base: key.base, len: key.len }),
            Payload::Posix(key) => cache.window(&key, device, writable, deadline).map(Self::Window),
            Payload::Legacy(_) => match LegacyImport::open(cache.shared().cuda(), rkey, device, deadline) {
                Ok(import) => {
                    cache.shared().counters.legacy_handles.fetch_add(1, Relaxed);
                    Ok(Self::Legacy(Box::new(OpenedLegacy { import, cache: cache.shared().clone() })))
                }
                Err(ImportError { kind: ImportErrorKind::OwnProcess, .. }) => Ok(Self::Own { base: rkey.base, len: rkey.len }),
                Err(error) => Err(fail(CacheErrorKind::Import(error))),
            },
            _ => Err(fail(CacheErrorKind::NoIpc)),
        }
    }

    /// Leases `[address, address + len)`, addresses of the exporter; see [`Window::lease`]. End it when the work that uses it is complete.
    #[inline]
    pub fn lease(&self, address: u64, len: u64, deadline: Deadline) -> Result<OpenedLease<'_>, CacheError> {
        let fixed = |(base, all): (u64, u64), here: u64| match address.checked_sub(base) {
            Some(offset) if len != 0 && offset < all && len <= all - offset => Ok(OpenedLease::Fixed { address: here + offset }),
            _ => Err(CacheError { kind: CacheErrorKind::OutsideWindow, pid: 0, address }),
        };
        match self {
            Self::Window(window) => window.lease(address, len, deadline).map(OpenedLease::Window),
            Self::Legacy(legacy) if !legacy.cache.is_current() => Err(CacheError { kind: CacheErrorKind::Forked, pid: 0, address }),
            Self::Legacy(legacy) => fixed(legacy.import.range(), legacy.import.address()),
            &Self::Own { base, len: all } => fixed((base, all), base),
        }
    }

    /// Where there is no window: first address in the exporter, length in bytes, and first address here, which stay as they are.
    pub fn fixed(&self) -> Option<(u64, u64, u64)> {
        match self {
            Self::Window(_) => None,
            Self::Legacy(legacy) => {
                let (base, len) = legacy.import.range();
                Some((base, len, legacy.import.address()))
            }
            &Self::Own { base, len } => Some((base, len, base)),
        }
    }

    /// The window, where there is one.
    pub const fn window(&self) -> Option<&Arc<Window>> {
        match self {
            Self::Window(window) => Some(window),
            _ => None,
        }
    }
}

impl OpenedLease<'_> {
    /// Address of the range in this process.
    #[inline]
    pub const fn address(&self) -> u64 {
        match self {
            Self::Window(lease) => lease.address(),
            &Self::Fixed { address } => address,
        }
    }
}

impl Drop for OpenedLegacy {
    fn drop(&mut self) {
        self.cache.counters.legacy_handles.fetch_sub(1, Relaxed);
    }
}
