//! The handle types of the header. What they mean is `handle.rs`'s business; here stand who owns what, and until when.

#![allow(non_camel_case_types, reason = "their names in C")]

use crate::failure::Failure;
use crate::handle::{Id, Kind};

/// An exporter and a cache of imports, with their settings. The caller's until `cuda_ipc_context_destroy`. `id` 0 is none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cuda_ipc_context_t {
    /// The library's business.
    pub id: u64,
}

/// A range of this process's memory that others may import. The caller's until `cuda_ipc_export_release` or the end of its context. `id` 0 is none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cuda_ipc_export_t {
    /// The library's business.
    pub id: u64,
}

/// Another process's memory, seen from here. The caller's until `cuda_ipc_window_release` or the end of its context. `id` 0 is none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cuda_ipc_window_t {
    /// The library's business.
    pub id: u64,
}

/// The use of a part of a window: while it lasts, the memory stays mapped. The caller's until `cuda_ipc_lease_end`, also past the end of its window and context.
/// `id` 0 is none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cuda_ipc_lease_t {
    /// The library's business.
    pub id: u64,
}

impl cuda_ipc_window_t {
    #[inline]
    pub(crate) fn decode(self) -> Result<Id, Failure> {
        Id::decode(self.id, Kind::Window)
    }
}

impl cuda_ipc_lease_t {
    #[inline]
    pub(crate) fn decode(self) -> Result<Id, Failure> {
        Id::decode(self.id, Kind::Lease)
    }
}
