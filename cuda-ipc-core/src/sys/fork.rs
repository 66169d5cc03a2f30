//! Process identity: which life of a process owns something, and what a forked child must let go.
//!
//! What tells is a random [`token`] in a page that the kernel wipes in every child, also of a raw `clone`. A `pthread_atfork` child handler closes the fds
//! that `process_fd.rs` has registered, before the child runs on.
//!
//! # Safety
//! The unsafe here is: mapping and reading the wiped page, and registering the handler, which runs in a child with one thread and does only what
//! signal-safety(7) allows: atomics, fstat and close.

#![allow(unsafe_code)]

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicPtr, AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{SyscallError, failed, process_fd};

/// The wiped page; null until first use. Never unmapped.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// A random number that names this process life: other in a forked child and after exec. Never 0.
///
/// Errors: where the page cannot be had (a kernel before 4.14, or no memory), or the kernel gives no random bytes.
pub(crate) fn token() -> Result<u64, SyscallError> {
    let page = page()?;
    match page.load(Acquire) {
        0 => {
            let fresh = random_nonzero()?;
            // Another thread may have been faster; then its token counts.
            Ok(page.compare_exchange(0, fresh, AcqRel, Acquire).map_or_else(
                |theirs| theirs,
                |_| {
                    // A child of a raw clone has run no handler, and these are its parent's.
                    forget_own_nonces();
                    fresh
                },
            ))
        }
        token => Ok(token),
    }
}

/// Whether the process life that got `token` is this one.
#[inline]
pub(crate) fn is_current(token: u64) -> bool {
    let page = PAGE.load(Acquire);
    // SAFETY: not null means a page mapped by `page()` and never unmapped; a forked child has it too, wiped.
    !page.is_null() && unsafe { &*page }.load(Acquire) == token
}

/// One life of a process, from its start or the fork that made it: what belongs to another life must be left alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessLife(u64);

impl ProcessLife {
    /// The present one.
    ///
    /// Errors: where the page that tells lives apart cannot be had.
    pub fn current() -> Result<Self, SyscallError> {
        token().map(Self)
    }

    /// Whether it still is: `false` in a forked child. Two loads.
    #[inline]
    pub fn is_current(self) -> bool {
        is_current(self.0)
    }
}

/// The process life that has used something first: for what a forked child must not touch at all, told without a lock and without an allocation.
#[derive(Debug)]
pub struct FirstLife(AtomicU64);

impl FirstLife {
    /// Nobody has used it.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Uses it in the present life. `false`: a life before this one has, so everything behind it belongs to a parent.
    ///
    /// Errors: as [`ProcessLife::current`].
    pub fn enter(&self) -> Result<bool, SyscallError> {
        let own = token()?;
        Ok(self.0.compare_exchange(0, own, AcqRel, Acquire).map_or_else(|first| first == own, |_| true))
    }

    /// Whether a life before this one has used it. Three loads.
    #[inline]
    pub fn is_of_a_parent(&self) -> bool {
        let first = self.0.load(Acquire);
        first != 0 && !is_current(first)
    }
}

impl Default for FirstLife {
    fn default() -> Self {
        Self::new()
    }
}

/// A random number other than 0, from getrandom(2).
pub(crate) fn random_nonzero() -> Result<u64, SyscallError> {
    loop {
        match u64::from_ne_bytes(super::random()?) {
            0 => continue,
            number => return Ok(number),
        }
    }
}

fn page() -> Result<&'static AtomicU64, SyscallError> {
    let existing = PAGE.load(Acquire);
    if !existing.is_null() {
        // SAFETY: as in `is_current`.
        return Ok(unsafe { &*existing });
    }
    const LEN: usize = 4096;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let mapped = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
        .map_err(failed("mmap"))?;
    let unmap = || {
        // SAFETY: the mapping was made above and nobody else knows it.
        let _ = unsafe { rustix::mm::munmap(mapped, LEN) };
    };
    // SAFETY: the range is the mapping made above.
    if let Err(errno) = unsafe { rustix::mm::madvise(mapped, LEN, Advice::LinuxWipeOnFork) } {
        unmap();
        return Err(failed("madvise(MADV_WIPEONFORK)")(errno));
    }
    // Before the page is there: whatever a child must let go is registered later. Twice, where two threads come here at once, does no harm.
    // SAFETY: the handler is a function of this library, which must stay loaded: a Rust library with threads cannot be unloaded safely anyway.
    let errno = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if errno != 0 {
        unmap();
        return Err(SyscallError { call: "pthread_atfork", errno });
    }
    if PAGE.compare_exchange(ptr::null_mut(), mapped.cast(), AcqRel, Acquire).is_err() {
        unmap();
    }
    // SAFETY: whoever won, the page is mapped, aligned, zeroed at start and never unmapped.
    Ok(unsafe { &*PAGE.load(Acquire) })
}

/// Nonces of this process's exporters; 0 is free. More exporters than this in one process only lose the friendlier error for their own keys.
static OWN_NONCES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// Remembers a nonce as this process life's own.
pub(crate) fn add_own_nonce(nonce: u64) {
    let _ = OWN_NONCES.iter().any(|slot| slot.compare_exchange(0, nonce, AcqRel, Relaxed).is_ok());
}

/// Forgets it.
pub(crate) fn remove_own_nonce(nonce: u64) {
    let _ = OWN_NONCES.iter().any(|slot| slot.compare_exchange(nonce, 0, AcqRel, Relaxed).is_ok());
}

fn forget_own_nonces() {
    for slot in &OWN_NONCES {
        slot.store(0, Relaxed);
    }
}

/// The nonces of this process's exporters; of a child's parent's no more.
pub(crate) fn own_nonces() -> impl Iterator<Item = u64> {
    OWN_NONCES.iter().map(|slot| slot.load(Acquire)).filter(|&nonce| nonce != 0)
}

/// Runs in a forked child before `fork` returns there.
extern "C" fn in_child() {
    forget_own_nonces();
    process_fd::close_inherited();
}
