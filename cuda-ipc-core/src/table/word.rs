//! The atomic word that tables are made of, abstract so that the protocol also runs on a model checker's atomics.

use core::sync::atomic::{AtomicU64, Ordering};

/// A 64-bit atomic cell of a table. Implemented by `AtomicU64`; the model tests implement it for theirs.
pub trait Word {
    /// As `AtomicU64::load`.
    fn load(&self, order: Ordering) -> u64;
    /// As `AtomicU64::store`.
    fn store(&self, value: u64, order: Ordering);
    /// As `core::sync::atomic::fence`.
    fn fence(order: Ordering);
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    #[inline]
    fn fence(order: Ordering) {
        core::sync::atomic::fence(order);
    }
}
