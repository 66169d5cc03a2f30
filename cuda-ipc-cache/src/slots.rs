//! A window's slots: in the window itself where they are few, else on pages of their own.
//!
//! With thousands of windows in use a hit is as slow as the memory that it waits for. The slots of a small window lie in the line behind the fields that a hit
//! reads anyway, so their address is known at once, processors fetch both lines together, and no other window's leases are counted on it.

use core::ops::Deref;

use crate::slot::Slot;

/// One line of a processor's cache.
const FEW: usize = 2;

/// See the module's documentation. At least as many slots as were asked for.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Slots {
    /// Empty if `few` are enough.
    many: Box<[Slot]>,
    few: [Slot; FEW],
}

impl Slots {
    /// Empty slots; `None` if there is no memory for so many.
    pub(crate) fn new(count: u64) -> Option<Self> {
        let count = usize::try_from(count).ok()?;
        let many = if count <= FEW { Some(Box::default()) } else { many(count) };
        Some(Self { many: many?, few: core::array::from_fn(|_| Slot::new()) })
    }
}

impl Deref for Slots {
    type Target = [Slot];

    #[inline]
    fn deref(&self) -> &[Slot] {
        if self.many.is_empty() { &self.few } else { &self.many }
    }
}

#[cfg(not(loom))]
fn many(count: usize) -> Option<Box<[Slot]>> {
    // Zeroed pages of the kernel's, touched only where chunks are: a window of 161 GB takes no memory to speak of until it is used.
    use zerocopy::FromZeros;
    <[Slot]>::new_box_zeroed_with_elems(count).ok()
}

#[cfg(loom)]
fn many(count: usize) -> Option<Box<[Slot]>> {
    Some((0..count).map(|_| Slot::new()).collect())
}
