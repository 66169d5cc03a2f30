//! What threads meet at, so that the protocols of the hit path and of the flights also run on a model checker.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicU64;
pub(crate) use core::sync::atomic::Ordering;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64;
#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
