//! cuda-driver-sys: loading, which needs the dynamic loader and no driver.

use cuda_driver_sys::{Driver, ENTRY_POINTS, LoadError};

use crate::text::Text;

pub(crate) fn missing_library() -> bool {
    match Driver::load_from(c"libcuda-that-is-not-here.so.1") {
        Err(error @ LoadError::LibraryNotFound(_)) => Text::of(error).contains("libcuda-that-is-not-here"),
        _ => false,
    }
}

/// Resolves every row, in a library that is no driver.
pub(crate) fn table() -> bool {
    let first = ENTRY_POINTS.first().map(|row| row.symbol);
    matches!(Driver::load_from(c"libc.so.6"), Err(LoadError::MissingEntryPoint(name)) if Some(name) == first)
}
