//! The structures of the header that grow: their sizes in the first version that had them, which later fields never change.
//!
//! # Safety
//! The unsafe here is the promise that any bytes are a value of these types, and that their size comes first: all are `repr(C)` and have numbers, arrays of
//! numbers, pointers and optional function pointers as their fields.

#![allow(unsafe_code)]

use crate::boundary::CStruct;
use crate::config::cuda_ipc_config_t;
use crate::export::cuda_ipc_export_info_t;
use crate::import::{cuda_ipc_import_options_t, cuda_ipc_window_info_t};
use crate::last_error::cuda_ipc_error_t;
use crate::probe::cuda_ipc_probe_t;
use crate::stats::cuda_ipc_stats_t;

macro_rules! c_structs {
    ($($name:ident, $first_size:expr;)*) => {
        $(
            // SAFETY: see the module's chapter.
            unsafe impl CStruct for $name {
                const FIRST_SIZE: usize = $first_size;
                const NAME: &'static str = stringify!($name);
            }
            // All versions so far are the first one. A structure that has grown has its first size as a number here, and a larger one.
            const _: () = assert!(size_of::<$name>() == $first_size && core::mem::offset_of!($name, size) == 0);
        )*
    };
}

c_structs! {
    cuda_ipc_config_t, 112;
    cuda_ipc_error_t, 424;
    cuda_ipc_export_info_t, 80;
    cuda_ipc_import_options_t, 16;
    cuda_ipc_window_info_t, 72;
    cuda_ipc_probe_t, 96;
    cuda_ipc_stats_t, 232;
}
