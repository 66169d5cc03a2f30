//! Knows whether this process is a forked child of the one that initialised the driver.
//!
//! The kernel wipes one page in every child, of `fork` and of a bare `clone` alike; the C library's fork handlers would see only the first.

use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::Relaxed};
use std::io::Result;

use crate::file;

static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

/// Marks this process as the one that initialised.
pub(crate) fn mark() -> Result<()> {
    let address = file::map_private(4096)?;
    let page: *mut u8 = core::ptr::with_exposed_provenance_mut(address);
    file::advise(page, 4096, libc::MADV_WIPEONFORK)?;
    let page = page.cast::<AtomicU32>();
    // SAFETY: a page of our own, mapped readable and writable just now, aligned, and never unmapped.
    unsafe { &*page }.store(1, Relaxed);
    PAGE.store(page, Relaxed);
    Ok(())
}

/// Whether a process further up initialised the driver and this one did not.
pub(crate) fn in_child() -> bool {
    let page = PAGE.load(Relaxed);
    // SAFETY: as in `mark`; in a child the page exists and reads zero.
    !page.is_null() && unsafe { &*page }.load(Relaxed) == 0
}
