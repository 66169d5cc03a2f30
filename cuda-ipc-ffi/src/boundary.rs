//! The border to C: no panic leaves it, no forked child gets past it, and pointers become values here.
//!
//! [`boundary!`] wraps the body of every function that can fail. Who owns what a pointer points to is said by the type that it is turned into: nothing here
//! keeps a caller's pointer beyond the call.
//!
//! | type | the caller's memory is | for |
//! |---|---|---|
//! | [`Out`] | written once, at the end | results |
//! | [`CStruct`] through [`read_struct`], [`write_struct`] | copied | structures that grow |
//! | [`Bytes`] | read during the call | keys |
//! | [`Buffer`] | written during the call | keys, text |
//!
//! # Safety
//! The unsafe here is reading and writing through the caller's pointers. That they are null or good for their declared size is what the header asks of the
//! caller; null is looked for, alignment is not needed, and no reference to the caller's memory outlives the call.

#![allow(unsafe_code)]

use core::ffi::{CStr, c_char};
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;

use cuda_ipc_core::sys::FirstLife;

use crate::failure::Failure;
use crate::last_error;
use crate::status::*;

/// The life of this process that has used the library. A child forked from it finds nothing here that it may use.
static LIFE: FirstLife = FirstLife::new();

/// The body of a C function: a `Result<(), Failure>`, whose status is the function's answer.
macro_rules! boundary {
    ($body:block) => {
        $crate::boundary::guard(|| $body)
    };
}
pub(crate) use boundary;

/// What [`boundary!`] does around a body.
#[inline]
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> cuda_ipc_status_t {
    if LIFE.is_of_a_parent() {
        return last_error::set(Failure::plain(CUDA_IPC_ERR_FORKED));
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => CUDA_IPC_OK,
        Ok(Err(failure)) => last_error::set(failure),
        Err(payload) => {
            // Its drop could panic too.
            core::mem::forget(payload);
            last_error::set(Failure::plain(CUDA_IPC_ERR_INTERNAL))
        }
    }
}

/// Uses the library in this life of the process. For what makes the first object.
pub(crate) fn enter_life() -> Result<(), Failure> {
    if LIFE.enter()? { Ok(()) } else { Err(Failure::plain(CUDA_IPC_ERR_FORKED)) }
}

/// Where a result goes: a pointer of the caller's that is not null.
pub(crate) struct Out<'a, T: Copy> {
    at: *mut T,
    call: PhantomData<&'a mut T>,
}

impl<T: Copy> Out<'_, T> {
    /// Errors: `CUDA_IPC_ERR_NULL`, which names the parameter.
    ///
    /// # Safety
    /// `at` is null or good for writing a `T` until the function returns.
    #[inline]
    pub(crate) unsafe fn new(at: *mut T, name: &'static str) -> Result<Self, Failure> {
        if at.is_null() { Err(null(name)) } else { Ok(Self { at, call: PhantomData }) }
    }

    /// As [`Out::new`], for a result that the caller may not want.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn optional(at: *mut T) -> Option<Self> {
        (!at.is_null()).then_some(Self { at, call: PhantomData })
    }

    #[inline]
    pub(crate) fn write(self, value: T) {
        // SAFETY: not null, and good for writing by the promise made to `new`. `T` is `Copy`, so nothing is dropped.
        unsafe { self.at.write_unaligned(value) };
    }
}

/// A structure of the header whose first field is its size, so that later versions can add fields at its end.
///
/// # Safety
/// `repr(C)`; the first field is a `usize`; any bytes are a value, zeros too.
pub(crate) unsafe trait CStruct: Copy {
    /// Its size in the first version that had it. A caller's structure is never smaller.
    const FIRST_SIZE: usize;
    /// Its name in the header.
    const NAME: &'static str;
}

/// No structure of any version will be larger; what claims to be is not initialised.
const LARGEST: usize = 4096;

/// The size that the caller's structure says it has.
///
/// # Safety
/// `from` is good for reading a `usize`.
unsafe fn size_of_theirs<T: CStruct>(from: *const T) -> Result<usize, Failure> {
    // SAFETY: the caller's promise.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    if (T::FIRST_SIZE..=LARGEST).contains(&size) { Ok(size) } else { Err(wrong_size::<T>()) }
}

/// A copy of the caller's structure; what its version does not have is 0. `None` for null.
///
/// Errors: `CUDA_IPC_ERR_STRUCT_SIZE`, also where a newer structure has something set that this version does not know.
///
/// # Safety
/// `from` is null or good for reading as many bytes as its first field says.
pub(crate) unsafe fn read_struct<T: CStruct>(from: *const T) -> Result<Option<T>, Failure> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the size is its first field.
    let size = unsafe { size_of_theirs(from) }?;
    let mut ours = MaybeUninit::<T>::zeroed();
    // SAFETY: `size` bytes are the caller's by its word, and `ours` has room for as many as are copied.
    unsafe { core::ptr::copy_nonoverlapping(from.cast::<u8>(), ours.as_mut_ptr().cast::<u8>(), size.min(size_of::<T>())) };
    for at in size_of::<T>()..size {
        // SAFETY: within the `size` bytes.
        let place = unsafe { from.cast::<u8>().add(at) };
        // SAFETY: as above.
        if unsafe { place.read() } != 0 {
            return Err(wrong_size::<T>());
        }
    }
    // SAFETY: any bytes are a value of a `CStruct`.
    Ok(Some(unsafe { ours.assume_init() }))
}

/// Fills as much of the caller's structure as its version has, and stores in its first field how much that is.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`.
///
/// # Safety
/// `to` is null or good for reading and writing as many bytes as its first field says.
pub(crate) unsafe fn write_struct<T: CStruct>(to: *mut T, fill: impl FnOnce() -> Result<T, Failure>) -> Result<(), Failure> {
    if to.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: not null, and the size is its first field.
    let size = unsafe { size_of_theirs(to) }?.min(size_of::<T>());
    let value = fill()?;
    // SAFETY: `size` bytes are the caller's by its word, and no more than a `T` has. Padding of `value` may be copied, which writes bytes nobody reads.
    unsafe { core::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), to.cast::<u8>(), size) };
    // SAFETY: the first field, of the caller's structure.
    unsafe { to.cast::<usize>().write_unaligned(size) };
    Ok(())
}

/// Zeroes a structure of the caller's and stores its size in it.
///
/// # Safety
/// `to` is null or good for writing `size` bytes.
pub(crate) unsafe fn init_struct<T: CStruct>(to: *mut T, size: usize) -> Result<(), Failure> {
    if to.is_null() {
        return Err(null(T::NAME));
    }
    if !(T::FIRST_SIZE..=LARGEST).contains(&size) {
        return Err(wrong_size::<T>());
    }
    // SAFETY: the caller's promise.
    unsafe { core::ptr::write_bytes(to.cast::<u8>(), 0, size) };
    // SAFETY: at least the first field is there.
    unsafe { to.cast::<usize>().write_unaligned(size) };
    Ok(())
}

/// Bytes that are read during a call.
pub(crate) struct Bytes;

impl Bytes {
    /// Errors: `CUDA_IPC_ERR_NULL`; `CUDA_IPC_ERR_RANGE` for a length that no object has.
    ///
    /// # Safety
    /// `at` is null or good for reading `len` bytes until the function returns, and nobody writes them meanwhile.
    pub(crate) unsafe fn of<'a>(at: *const core::ffi::c_void, len: usize, name: &'static str) -> Result<&'a [u8], Failure> {
        if at.is_null() {
            return Err(null(name));
        }
        if isize::try_from(len).is_err() {
            return Err(Failure::about(CUDA_IPC_ERR_RANGE, name));
        }
        // SAFETY: the caller's promise; a length of an object's.
        Ok(unsafe { core::slice::from_raw_parts(at.cast::<u8>(), len) })
    }

    /// As [`Bytes::of`], of numbers; none for a count of 0.
    ///
    /// # Safety
    /// `at` is good for reading `count` values.
    pub(crate) unsafe fn values<T: Copy>(at: *const T, count: usize, name: &'static str) -> Result<Vec<T>, Failure> {
        /// More of anything that is handed over by array is a mistake.
        const MOST: usize = 1 << 16;
        if count == 0 {
            return Ok(Vec::new());
        }
        if at.is_null() {
            return Err(null(name));
        }
        if count > MOST {
            return Err(Failure::about(CUDA_IPC_ERR_ARGUMENT, name));
        }
        let value = |index| {
            // SAFETY: within the `count` values of the caller's promise.
            let place = unsafe { at.add(index) };
            // SAFETY: as above; alignment is not asked for.
            unsafe { place.read_unaligned() }
        };
        Ok((0..count).map(value).collect())
    }

    /// A C string of the caller's, as bytes; `None` for null.
    ///
    /// # Safety
    /// `at` is null or a C string.
    pub(crate) unsafe fn string(at: *const c_char) -> Option<Vec<u8>> {
        // SAFETY: not null, so a C string by the caller's promise.
        (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_bytes().to_vec())
    }
}

/// A buffer of the caller's for bytes or text.
pub(crate) struct Buffer<'a> {
    at: *mut u8,
    capacity: usize,
    call: PhantomData<&'a mut [u8]>,
}

impl Buffer<'_> {
    /// Null is a buffer without room, for asking how much would be needed.
    ///
    /// # Safety
    /// `at` is null or good for writing `capacity` bytes until the function returns.
    pub(crate) unsafe fn new(at: *mut u8, capacity: usize) -> Self {
        Self { at, capacity: if at.is_null() { 0 } else { capacity }, call: PhantomData }
    }

    /// Copies `bytes` whole, or nothing.
    ///
    /// Errors: `CUDA_IPC_ERR_BUFFER`.
    pub(crate) fn fill(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.len() > self.capacity {
            return Err(Failure::plain(CUDA_IPC_ERR_BUFFER));
        }
        // SAFETY: room for them by the check and the promise made to `new`; a buffer of the caller's is none of ours.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, bytes.len()) };
        Ok(())
    }
}

fn null(name: &'static str) -> Failure {
    Failure::about(CUDA_IPC_ERR_NULL, name)
}

fn wrong_size<T: CStruct>() -> Failure {
    Failure::about(CUDA_IPC_ERR_STRUCT_SIZE, T::NAME)
}
