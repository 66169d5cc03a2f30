//! What the words of `words.rs` are made of. Its model has another file in this one's place.

pub(crate) use core::sync::atomic::{AtomicU64, Ordering};

/// Nothing: both accesses are sequentially consistent. The model checker knows that order of fences only, and has one here.
#[inline]
pub(crate) const fn between_own_word_and_the_other() {}
