//! A lease: counted use of a range of a window.

use crate::window::Window;

/// While this lives, every chunk of its range stays mapped, whatever the exporter, the limits or a purge do.
///
/// The address is good for as long as the lease is: end it when the work that uses the memory is *complete*, not when it was submitted. Dropping ends
/// it. Ends may happen on any thread.
///
/// A lease cannot outlive its window:
///
/// ```compile_fail,E0505
/// # use cuda_ipc_cache::{Lease, Window};
/// # use std::sync::Arc;
/// fn keep(window: Arc<Window>, lease: impl Fn(&Window) -> Lease<'_>) -> u64 {
///     let lease = lease(&window);
///     drop(window);
///     lease.address()
/// }
/// ```
#[derive(Debug)]
pub struct Lease<'w> {
    window: &'w Window,
    /// Granule of the first chunk's head.
    first: u32,
    /// Number of chunks.
    chunks: u32,
    address: u64,
}

impl<'w> Lease<'w> {
    #[inline]
    pub(crate) fn new(window: &'w Window, first: u32, chunks: u32, address: u64) -> Self {
        Self { window, first, chunks, address }
    }

    /// Address of the range in this process.
    #[inline]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// How many chunks the range touches.
    pub const fn chunks(&self) -> u32 {
        self.chunks
    }

    /// The window it is a lease of.
    pub const fn window(&self) -> &'w Window {
        self.window
    }

    /// Gives the lease up as plain numbers, for a caller who cannot keep a borrow. The lease stays; [`Lease::from_parts`] takes it back to end it.
    pub fn into_parts(self) -> LeaseParts {
        let parts = LeaseParts { first: self.first, chunks: self.chunks, address: self.address };
        core::mem::forget(self);
        parts
    }

    /// Takes back a lease of this window that [`Lease::into_parts`] gave up. Parts of another window, or used twice, end leases of others: memory stays safe
    /// on this side, but a mapping may go while it is in use.
    pub const fn from_parts(window: &'w Window, parts: LeaseParts) -> Self {
        Self { window, first: parts.first, chunks: parts.chunks, address: parts.address }
    }

    pub(crate) const fn first_head(&self) -> u32 {
        self.first
    }
}

impl Drop for Lease<'_> {
    #[inline]
    fn drop(&mut self) {
        self.window.end(self.first, self.chunks);
    }
}

/// A lease as plain numbers; see [`Lease::into_parts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseParts {
    first: u32,
    chunks: u32,
    /// Address of the range in this process.
    pub address: u64,
}

impl LeaseParts {
    /// As two words, for a keeper of atomics. [`LeaseParts::from_words`] takes them back.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [self.address, (self.chunks as u64) << 32 | self.first as u64]
    }

    /// From what [`LeaseParts::to_words`] gave.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "the halves of a word")]
    pub const fn from_words([address, rest]: [u64; 2]) -> Self {
        Self { first: rest as u32, chunks: (rest >> 32) as u32, address }
    }
}
