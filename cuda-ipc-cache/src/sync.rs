//! The atomics of the hit path, so that its protocol also runs on a model checker's.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicU64;
pub(crate) use core::sync::atomic::Ordering;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64;
