//! How C arguments become Rust ones: checked out and in pointers, and the type every driver call answers with.
//!
//! # Safety
//! A driver call trusts its caller's pointers; the C API leaves it nothing else. That trust is taken once, in [`FromC::from_c`], which only the
//! generated entry points call; the implementations then need no unsafe of their own for their arguments.

use cuda_driver_sys::CUresult;

/// What an implementation returns: nothing, or the code for the caller.
pub(crate) type Answer = Result<(), CUresult>;

/// Shorthand for the most frequent refusal.
pub(crate) const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// A C parameter and what the implementation sees of it.
pub(crate) trait FromC {
    /// The parameter's type in the C signature.
    type C;
    /// Takes the argument as the caller passed it.
    ///
    /// # Safety
    /// A pointer is null or valid, for the duration of the call, for what the C API documents.
    unsafe fn from_c(c: Self::C) -> Self;
}

macro_rules! plain {
    ($($ty:ty),*) => { $(impl FromC for $ty {
        type C = $ty;
        unsafe fn from_c(c: $ty) -> $ty { c }
    })* };
}

plain!(i32, u8, u32, u64, usize, cuda_driver_sys::CUdevice_attribute, cuda_driver_sys::CUpointer_attribute);
plain!(
    cuda_driver_sys::CUmemAllocationHandleType,
    cuda_driver_sys::CUmemAllocationGranularity_flags,
    cuda_driver_sys::CUmem_range_attribute
);
plain!(cuda_driver_sys::CUmemPool_attribute, cuda_driver_sys::CUstreamCaptureMode, cuda_driver_sys::CUipcMemHandle_v1, CUresult);
plain!(cuda_driver_sys::CUstreamCallback, cuda_driver_sys::CUhostFn);

/// A pointer through which the driver answers.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> FromC for Out<T> {
    type C = *mut T;
    unsafe fn from_c(c: *mut T) -> Self {
        Self(c)
    }
}

impl<T> Out<T> {
    /// Stores the answer; a null pointer is the caller's error.
    pub(crate) fn set(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(INVALID);
        }
        self.set_if_given(value);
        Ok(())
    }

    /// Stores the answer where the caller wants it: for optional outputs.
    pub(crate) fn set_if_given(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid for one `T` by the contract of `from_c`; C callers may pass any alignment the C type allows.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Stores value number `index` of an array that the caller said is long enough.
    pub(crate) fn set_at(self, index: usize, value: T) -> Answer {
        self.check()?;
        // SAFETY: not null, and the C contract of the call says that the array has room for more than `index` values.
        let place = unsafe { self.0.add(index) };
        // SAFETY: as above; unaligned because C callers promise no more than the C type's alignment.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }

    /// Fails before anything is done where the output is missing.
    pub(crate) fn check(self) -> Answer {
        if self.0.is_null() { Err(INVALID) } else { Ok(()) }
    }

    /// A pointer that the caller passed inside of something else.
    pub(crate) fn of(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// An output nobody wants.
    pub(crate) fn none() -> Self {
        Self(core::ptr::null_mut())
    }

    /// The bare pointer, for outputs whose type depends on another argument.
    pub(crate) fn raw(self) -> *mut T {
        self.0
    }
}

impl<T> Out<T> {
    /// The same pointer for the type that another argument says is there.
    pub(crate) fn cast<U>(from: Out<U>) -> Self {
        Self(from.0.cast())
    }
}

impl<T: Copy> Out<T> {
    /// The value before the call, for parameters that go both ways.
    pub(crate) fn get(self) -> Result<T, CUresult> {
        In(self.0.cast_const()).get()
    }
}

/// A pointer through which the caller passes one value, or the first of several.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> FromC for In<T> {
    type C = *const T;
    unsafe fn from_c(c: *const T) -> Self {
        Self(c)
    }
}

impl<T> In<T> {
    /// The bare pointer, for copies.
    pub(crate) fn raw(self) -> *const T {
        self.0
    }
}

impl<T: Copy> In<T> {
    /// The value; a null pointer is the caller's error.
    pub(crate) fn get(self) -> Result<T, CUresult> {
        self.at(0)
    }

    /// The value number `index` of an array that the caller said is long enough.
    pub(crate) fn at(self, index: usize) -> Result<T, CUresult> {
        if self.0.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, and the C contract of the call says that the array holds more than `index` values.
        let place = unsafe { self.0.add(index) };
        // SAFETY: as above; unaligned because C callers promise no more than the C type's alignment.
        Ok(unsafe { place.read_unaligned() })
    }
}

/// An array the caller lends for the call, behind a `*mut` that the call only reads.
pub(crate) type List<T> = Out<T>;

impl<T: Copy> List<T> {
    /// The value number `index`.
    pub(crate) fn at(self, index: usize) -> Result<T, CUresult> {
        In(self.0.cast_const()).at(index)
    }
}

/// An opaque handle (`CUcontext`, `CUstream`, ...): a number in the fake, a pointer in C.
pub(crate) struct Handle<T>(*mut T);

impl<T> FromC for Handle<T> {
    type C = *mut T;
    unsafe fn from_c(c: *mut T) -> Self {
        Self(c)
    }
}

impl<T> Handle<T> {
    /// The number behind it.
    pub(crate) fn id(self) -> u64 {
        self.0.addr() as u64
    }
}

/// The opaque pointer for a number.
pub(crate) fn handle<T>(id: u64) -> *mut T {
    core::ptr::without_provenance_mut(usize::try_from(id).unwrap_or(0))
}
