//! Values of a process that a forked child must not share: its copy may be half changed, and its locks may be held by threads that are not there.
//!
//! # Safety
//! The unsafe here is following a pointer to a leaked box: never null when followed, never freed, and only ever shared.

#![allow(unsafe_code)]

use core::ptr;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{AcqRel, Acquire};

use super::{SyscallError, fork};

/// One `T` for each life of the process, made when it is first asked for. A child's parent's is leaked there.
pub(crate) struct PerLife<T> {
    current: AtomicPtr<Life<T>>,
}

struct Life<T> {
    token: u64,
    value: T,
}

impl<T: Default + Send + Sync + 'static> PerLife<T> {
    pub(crate) const fn new() -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()) }
    }

    /// This life's.
    ///
    /// Errors: where lives cannot be told apart; see [`fork::token`].
    pub(crate) fn get(&'static self) -> Result<&'static T, SyscallError> {
        let token = fork::token()?;
        loop {
            let current = self.current.load(Acquire);
            // SAFETY: null, which gives `None`, or a box that was leaked below and is only ever shared.
            if let Some(life) = unsafe { current.as_ref() }
                && life.token == token
            {
                return Ok(&life.value);
            }
            let fresh: &'static mut Life<T> = Box::leak(Box::new(Life { token, value: T::default() }));
            // Another thread may be faster; then the box here stays leaked: it happens once or twice in a process's life.
            let _ = self.current.compare_exchange(current, fresh, AcqRel, Acquire);
        }
    }
}
