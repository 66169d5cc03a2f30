//! Process identity, and fds that a forked child must not keep.
//!
//! A data loader that forks and never execs inherits every fd of its parent: exported chunk fds would pin GPU memory for the child's life, after the parent
//! has freed it. So fds of ours are [`ProcessFd`]s: their numbers stand in plain static memory, where a `pthread_atfork` child handler finds and closes them
//! without a lock. Which process owns something is told by a random [`token`] in a page that the kernel wipes in every child, also of a raw `clone`.
//!
//! # Safety
//! The unsafe here is: mapping and reading the wiped page, registering the handler, the handler itself (it runs in a child with one thread and does only
//! what signal-safety(7) allows: atomics and close), and turning registered numbers back into owned fds. Each registered number is owned by exactly one
//! `ProcessFd` of the process life whose token it carries; whoever clears the slot first closes the number.

#![allow(unsafe_code)]

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{SyscallError, failed};

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
            Ok(page.compare_exchange(0, fresh, AcqRel, Acquire).map_or_else(|theirs| theirs, |_| fresh))
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

/// A random number other than 0, from getrandom(2).
pub(crate) fn random_nonzero() -> Result<u64, SyscallError> {
    loop {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|error| SyscallError { call: "getrandom", errno: error.raw_os_error().unwrap_or(0) })?;
        match u64::from_ne_bytes(bytes) {
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
    match PAGE.compare_exchange(ptr::null_mut(), mapped.cast(), AcqRel, Acquire) {
        Ok(_) => {
            // SAFETY: the handler is a function of this library, which must stay loaded: a Rust library with threads cannot be unloaded safely anyway.
            unsafe { libc::pthread_atfork(None, None, Some(close_inherited)) };
        }
        Err(_) => unmap(),
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

/// The nonces of this process's exporters. In a child of fork the parent's are forgotten by the handler.
pub(crate) fn own_nonces() -> impl Iterator<Item = u64> {
    OWN_NONCES.iter().map(|slot| slot.load(Acquire)).filter(|&nonce| nonce != 0)
}

/// Slots of one block of the registry.
const BLOCK: usize = 512;

/// A block of registered fd numbers; a slot holds the number plus one, or 0 when free. Blocks are never freed, so a child can walk them at any time.
struct Block {
    slots: [AtomicI32; BLOCK],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Self { slots: [const { AtomicI32::new(0) }; BLOCK], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Block> {
        let next = self.next.load(Acquire);
        // SAFETY: null or a leaked block.
        (!next.is_null()).then(|| unsafe { &*next })
    }
}

static REGISTRY: Block = Block::new();
/// The block in which a free slot was last found, and where in it: keeps registering thousands of fds from rescanning full blocks.
static HINT: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());
static HINT_SLOT: AtomicUsize = AtomicUsize::new(0);

/// An fd of this process life only: CLOEXEC, and closed in a forked child before the child runs on.
#[derive(Debug)]
pub(crate) struct ProcessFd {
    fd: RawFd,
    token: u64,
    slot: &'static AtomicI32,
}

impl ProcessFd {
    /// Takes `fd` into the registry.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, SyscallError> {
        let token = token()?;
        let fd = fd.into_raw_fd();
        let slot = register(fd);
        Ok(Self { fd, token, slot })
    }

    /// The number.
    pub(crate) fn number(&self) -> u32 {
        self.fd.cast_unsigned()
    }

    /// Lets go of the number without closing it: somebody else has closed it under us.
    pub(crate) fn forget(self) {
        self.unregister();
        core::mem::forget(self);
    }

    /// Takes the number out of the registry; `false` if a fork handler or nobody of this life has it.
    fn unregister(&self) -> bool {
        is_current(self.token) && self.slot.compare_exchange(self.fd + 1, 0, AcqRel, Relaxed).is_ok()
    }
}

impl AsFd for ProcessFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: in the process life that made it the number stays open until drop. In a child the number is closed or foreign, and every owner of a
        // ProcessFd checks `is_current` before it uses one; a call with a closed number fails with EBADF.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for ProcessFd {
    fn drop(&mut self) {
        if self.unregister() {
            // SAFETY: the slot said that this life still owns the number, and now nobody else will close it.
            unsafe { libc::close(self.fd) };
        }
    }
}

fn register(fd: RawFd) -> &'static AtomicI32 {
    let hint = HINT.load(Acquire);
    // SAFETY: null or a leaked block.
    let start = if hint.is_null() { &REGISTRY } else { unsafe { &*hint } };
    let mut block = start;
    loop {
        let from = HINT_SLOT.load(Relaxed) % BLOCK;
        let (before, after) = block.slots.split_at(from);
        let take = |slot: &AtomicI32| slot.load(Relaxed) == 0 && slot.compare_exchange(0, fd + 1, AcqRel, Relaxed).is_ok();
        if let Some((at, slot)) = after.iter().chain(before).enumerate().find(|(_, slot)| take(slot)) {
            HINT.store(ptr::from_ref(block).cast_mut(), Release);
            HINT_SLOT.store(from + at + 1, Relaxed);
            return slot;
        }
        block = match block.next() {
            Some(next) => next,
            None => grow(block),
        };
    }
}

/// The block after `last`, made if there is none. A new search begins at the front once blocks run out, so freed slots are found again.
fn grow(last: &'static Block) -> &'static Block {
    let mut block = &REGISTRY;
    loop {
        if block.slots.iter().any(|slot| slot.load(Relaxed) == 0) {
            return block;
        }
        match block.next() {
            Some(next) => block = next,
            None => break,
        }
    }
    let fresh = Box::into_raw(Box::new(Block::new()));
    match last.next.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
        // SAFETY: just leaked.
        Ok(_) => unsafe { &*fresh },
        Err(theirs) => {
            // SAFETY: ours was not published, and theirs is a leaked block.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: not null, so a leaked block.
            unsafe { &*theirs }
        }
    }
}

/// Runs in a forked child before `fork` returns there.
extern "C" fn close_inherited() {
    for slot in &OWN_NONCES {
        slot.store(0, Relaxed);
    }
    let mut block = Some(&REGISTRY);
    while let Some(current) = block {
        for slot in &current.slots {
            let fd = slot.swap(0, AcqRel) - 1;
            if fd >= 0 {
                // SAFETY: the child's copy of a number that the parent owned; the child's objects for it are of another token and never close it.
                unsafe { libc::close(fd) };
            }
        }
        block = current.next();
    }
}

/// Device and inode of the file behind an fd number; `None` if there is none.
pub(crate) fn stat_number(fd: u32) -> Option<(u64, u64)> {
    // SAFETY: only used for one fstat, which answers EBADF where the number is not open.
    let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd.cast_signed()) }).ok()?;
    Some((stat.st_dev, stat.st_ino))
}
