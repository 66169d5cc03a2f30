//! ffi.
