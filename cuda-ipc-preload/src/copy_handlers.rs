//! The answers to UCX's copies: each leases what it touches of exporters' memory until the driver has taken the copy, and is sent to where that memory is.
//!
//! # Safety
//! As in `handlers.rs`: reading the arrays that UCX passes as the driver would, and calling the driver's functions with the signatures that cuda-driver-sys has
//! for their names. Addresses that are put in the place of UCX's are of leased memory, at the same offsets.

#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the driver's names")]

use cuda_driver_sys::*;

use crate::handlers::{not_cuda_copy, ours, real, values};
use crate::importing::Moved;
use crate::parts::in_parts;
use crate::report;

pub(crate) unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) -> CUresult {
    not_cuda_copy();
    leased([(to, len as u64), (from, len as u64)].into_iter(), stream, |chunks, moved| {
        let [to, from] = placed([to, from], moved);
        let part = |at, len| real!(cuMemcpyDtoDAsync_v2: PFN_cuMemcpyDtoDAsync_v3020, to.wrapping_add(at as u64), from.wrapping_add(at as u64), len, stream);
        in_parts(len, chunks, part)
    })
}

pub(crate) unsafe extern "C" fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) -> CUresult {
    not_cuda_copy();
    leased([(to, len as u64), (from, len as u64)].into_iter(), stream, |chunks, moved| {
        let [to, from] = placed([to, from], moved);
        let part =
            |at, len| real!(cuMemcpyAsync: PFN_cuMemcpyAsync_v4000, to.wrapping_add(at as u64), from.wrapping_add(at as u64), len, stream);
        in_parts(len, chunks, part)
    })
}

pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes_v1,
    attribute_indices: *mut usize,
    attribute_count: usize,
    fail_index: *mut usize,
    stream: CUstream,
) -> CUresult {
    let copy = |to, from| {
        real!(cuMemcpyBatchAsync: PFN_cuMemcpyBatchAsync_v12080, to, from, sizes, count, attributes, attribute_indices, attribute_count,
            fail_index, stream)
    };
    // SAFETY: the caller passes `count` addresses and sizes.
    unsafe { leased_batch(to, from, sizes, count, stream, copy) }
}

pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes_v1,
    attribute_indices: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> CUresult {
    let copy = |to, from| {
        real!(cuMemcpyBatchAsync_v2: PFN_cuMemcpyBatchAsync_v13000, to, from, sizes, count, attributes, attribute_indices, attribute_count,
            stream)
    };
    // SAFETY: the caller passes `count` addresses and sizes.
    unsafe { leased_batch(to, from, sizes, count, stream, copy) }
}

/// Makes a batch of copies as [`leased`] does one; `copy` is given the addresses to use.
///
/// # Safety
/// The first three pointers are to `count` values, or null.
unsafe fn leased_batch(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *const usize,
    count: usize,
    stream: CUstream,
    copy: impl Fn(*mut CUdeviceptr, *mut CUdeviceptr) -> CUresult,
) -> CUresult {
    not_cuda_copy();
    // SAFETY: by the function's contract.
    let ranges = unsafe { batch(to, from, sizes, count) };
    leased(ranges, stream, |_, moved| {
        // SAFETY: as above.
        let mut own = unsafe { placed_batch(to, from, count, moved) };
        let (to, from) = own.as_mut().map_or((to, from), |(to, from)| (to.as_mut_ptr(), from.as_mut_ptr()));
        copy(to, from)
    })
}

/// The two addresses of a copy, the second ones where memory has been leased at another address than UCX has.
fn placed(mut addresses: [CUdeviceptr; 2], moved: &[Moved]) -> [CUdeviceptr; 2] {
    for &(number, address) in moved {
        if let Some(place) = addresses.get_mut(number) {
            *place = address;
        }
    }
    addresses
}

/// As [`placed`], for the addresses of a batch; `None` where all are right as they are.
///
/// # Safety
/// Both pointers are to `count` values, or null.
unsafe fn placed_batch(
    to: *const CUdeviceptr,
    from: *const CUdeviceptr,
    count: usize,
    moved: &[Moved],
) -> Option<(Vec<CUdeviceptr>, Vec<CUdeviceptr>)> {
    if moved.is_empty() {
        return None;
    }
    // SAFETY: by the function's contract.
    let mut to = unsafe { values(to, count) }.to_vec();
    // SAFETY: as above.
    let mut from = unsafe { values(from, count) }.to_vec();
    for &(number, address) in moved {
        let side = if number % 2 == 0 { &mut to } else { &mut from };
        if let Some(place) = side.get_mut(number / 2) {
            *place = address;
        }
    }
    Some((to, from))
}

/// The ranges that a batch of copies touches.
///
/// # Safety
/// Each of the three pointers is to `count` values that stay for as long as the iterator is used, or is null.
unsafe fn batch<'a>(
    to: *const CUdeviceptr,
    from: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
) -> impl Iterator<Item = (u64, u64)> + 'a {
    // SAFETY: by the function's contract.
    let to = unsafe { values(to, count) };
    // SAFETY: as above.
    let from = unsafe { values(from, count) };
    // SAFETY: as above.
    let sizes = unsafe { values(sizes, count) };
    to.iter().zip(from).zip(sizes).flat_map(|((&to, &from), &size)| [(to, size as u64), (from, size as u64)])
}

/// Makes a copy with those of its ranges leased that are in windows, of which it is told how many chunks they touch and where they are; an error if one of them is dead.
fn leased(ranges: impl Iterator<Item = (u64, u64)>, stream: CUstream, copy: impl Fn(u32, &[Moved]) -> CUresult) -> CUresult {
    match ours(|state| state.importing.copy(ranges, stream.into(), &copy)) {
        Some(Ok(result)) => result,
        Some(Err(error)) => {
            report::warn(report::Cause::DeadRange, &format_args!("a copy was refused: {error}"));
            CUresult::CUDA_ERROR_INVALID_VALUE
        }
        None => copy(0, &[]),
    }
}
