//! Copies of many chunks are submitted in parts, so that the device begins while the driver still looks the later chunks up.
//!
//! The driver's time to submit a copy grows with the number of mappings in it (H200: some 15 us for any size of one mapping, 50 to 130 us for 205), and nothing
//! runs meanwhile. A short first part hides that: by the time it is done the next one is submitted. The stream orders the parts, so its next event stands for
//! all of them, as for one copy.

use cuda_driver_sys::CUresult;

/// Copies that touch fewer chunks are submitted as they are: there is too little to hide.
const FEW_CHUNKS: u32 = 8;
/// Bytes of the first part. It takes an H200 15 us, longer than its own submission.
const FIRST: usize = 32 << 20;
/// How much longer each part is than the one before: its submission takes that much longer, too.
const GROWTH: usize = 4;

/// Calls `submit` with offset and length of each part of a copy of `len` bytes that touches `chunks` chunks; stops at the first error.
pub(crate) fn in_parts(len: usize, chunks: u32, submit: impl Fn(usize, usize) -> CUresult) -> CUresult {
    if chunks < FEW_CHUNKS {
        return submit(0, len);
    }
    let (mut at, mut part) = (0, FIRST);
    loop {
        // A rest smaller than a part goes with the last one.
        let rest = len - at;
        let now = if rest / 2 < part { rest } else { part };
        let result = submit(at, now);
        at += now;
        if result != CUresult::CUDA_SUCCESS || at == len {
            return result;
        }
        part = part.saturating_mul(GROWTH);
    }
}

#[cfg(test)]
mod tests {
    use core::cell::RefCell;

    use super::*;

    fn parts(len: usize, chunks: u32) -> Vec<(usize, usize)> {
        let parts = RefCell::new(Vec::new());
        let result = in_parts(len, chunks, |at, len| {
            parts.borrow_mut().push((at, len));
            CUresult::CUDA_SUCCESS
        });
        assert_eq!(result, CUresult::CUDA_SUCCESS);
        parts.into_inner()
    }

    #[test]
    fn few_chunks_are_one_copy() {
        for len in [0, 1, 4 << 30] {
            assert_eq!(parts(len, FEW_CHUNKS - 1), [(0, len)]);
        }
    }

    #[test]
    fn parts_cover_every_byte_once_and_in_order() {
        for len in [0, 1, FIRST, FIRST + 1, 2 * FIRST - 1, 2 * FIRST, 2 * FIRST + 1, 512 << 20, 4 << 30, (80 << 30) + 12345] {
            let mut end = 0;
            for (at, part) in parts(len, 400) {
                assert_eq!(at, end, "of {len}");
                end += part;
            }
            assert_eq!(end, len);
        }
        assert_eq!(parts(4 << 30, 400), [(0, 32 << 20), (32 << 20, 128 << 20), (160 << 20, 512 << 20), (672 << 20, 3424 << 20)]);
    }

    #[test]
    fn the_first_error_ends_it() {
        let calls = RefCell::new(0);
        let result = in_parts(4 << 30, 400, |_, _| {
            *calls.borrow_mut() += 1;
            if *calls.borrow() == 2 { CUresult::CUDA_ERROR_INVALID_VALUE } else { CUresult::CUDA_SUCCESS }
        });
        assert_eq!((result, calls.into_inner()), (CUresult::CUDA_ERROR_INVALID_VALUE, 2));
    }
}
