//! What this thread's last driver calls were about: UCX says in several calls what belongs together.
//!
//! `const`-initialised and without Drop, so that they work in any thread at any time, also while it ends.

use core::cell::Cell;

use cuda_ipc_core::key::Key;

/// What a [`Note`] remembers of the last cuMemGetAddressRange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RangeNote {
    /// The address asked about.
    pub(crate) address: u64,
    /// The reservation or pool allocation that was the answer.
    pub(crate) base: u64,
    /// Its length in bytes.
    pub(crate) len: u64,
    /// Of a pool's allocation: the driver's number of the pool, and its buffer id.
    pub(crate) pool: Option<(u64, u64)>,
}

/// The notes of one thread.
pub(crate) struct Notes {
    /// cuMemGetAddressRange was answered with a reservation.
    pub(crate) range: Cell<Option<RangeNote>>,
    /// cuMemRetainAllocationHandle gave this handle for this address.
    pub(crate) retained: Cell<Option<(u64, u64)>>,
    /// cuMemGetAllocationPropertiesFromHandle was asked about memory at this address, and nothing else since: the caller is cuda_copy.
    pub(crate) properties: Cell<Option<u64>>,
    /// A key of ours was imported under this alias, and the window's address has not been asked for yet.
    pub(crate) imported: Cell<Option<(u64, Key)>>,
    /// The pool of an allocation was exported, and the allocation's own key has not been asked for yet.
    pub(crate) pooled: Cell<Option<Key>>,
}

thread_local! {
    static NOTES: Notes = const {
        Notes {
            range: Cell::new(None),
            retained: Cell::new(None),
            properties: Cell::new(None),
            imported: Cell::new(None),
            pooled: Cell::new(None),
        }
    };
}

/// Calls `with` on this thread's notes.
pub(crate) fn notes<R>(with: impl FnOnce(&Notes) -> R) -> R {
    // Cannot fail: there is no destructor, so the value is never gone.
    NOTES.with(with)
}
