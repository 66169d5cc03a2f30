//! An array that grows and never moves: readers index it without a lock while somebody makes it longer.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

/// Items in the first block; each further block doubles what there is.
const FIRST: usize = 64;
/// Blocks at most: 2^24 items.
const BLOCKS: usize = 19;

/// See the module's documentation. Blocks are never given back.
#[derive(Debug)]
pub(crate) struct Blocks<T> {
    blocks: [OnceLock<Box<[T]>>; BLOCKS],
    made: AtomicUsize,
}

impl<T> Blocks<T> {
    pub(crate) const fn new() -> Self {
        Self { blocks: [const { OnceLock::new() }; BLOCKS], made: AtomicUsize::new(0) }
    }

    /// The item at `at`, if it has been made.
    #[inline]
    pub(crate) fn get(&self, at: u32) -> Option<&T> {
        let at = at as usize;
        // Block n begins at FIRST * (2^n - 1).
        let block = (at / FIRST + 1).ilog2() as usize;
        let start = FIRST * ((1 << block) - 1);
        self.blocks.get(block)?.get()?.get(at - start)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u32 {
        let made = self.made.load(Ordering::SeqCst);
        u32::try_from(FIRST * ((1 << made) - 1)).unwrap_or(u32::MAX)
    }

    /// All there are.
    ///
    /// Sees every block whose maker's [`Blocks::grow`] comes before this call in the one order of all sequentially consistent operations.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let made = self.made.load(Ordering::SeqCst);
        self.blocks.iter().take(made).filter_map(OnceLock::get).flat_map(|block| block.iter())
    }

    /// Makes it longer if it has `len` items still, and no longer than `most`. `false`: it is as long as it may be.
    pub(crate) fn grow(&self, len: u32, most: u32, make: impl Fn() -> T) -> bool {
        if self.len() > len {
            return true;
        }
        let block = (len as usize / FIRST + 1).ilog2() as usize;
        let size = FIRST << block;
        if len as usize + size > most as usize {
            return false;
        }
        let Some(place) = self.blocks.get(block) else { return false };
        place.get_or_init(|| (0..size).map(|_| make()).collect());
        // Another thread may have gone further already.
        self.made.fetch_max(block + 1, Ordering::SeqCst);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{Blocks, FIRST};

    #[test]
    fn items_stay_where_they_are() {
        let blocks = Blocks::<u32>::new();
        assert!(blocks.get(0).is_none());
        let mut number = core::cell::Cell::new(0);
        let mut firsts = Vec::new();
        for _ in 0..5 {
            let len = blocks.len();
            assert!(blocks.grow(len, 1 << 20, || number.replace(number.get() + 1)));
            assert!(blocks.len() > len);
            firsts.push(core::ptr::from_ref(blocks.get(0).expect("the first")));
        }
        assert!(firsts.windows(2).all(|pair| pair.first() == pair.last()));
        let len = u32::try_from(FIRST * 31).expect("small");
        assert_eq!((blocks.len(), *number.get_mut()), (len, len));
        assert!((0..len).all(|at| blocks.get(at) == Some(&at)));
        assert!(blocks.get(len).is_none());
        assert!(blocks.iter().copied().eq(0..len));
        assert!(!blocks.grow(len, len, || 0), "as long as it may be");
        assert!(blocks.grow(64, len, || 0), "somebody else was faster");
    }
}
