//! The library's version, and the header's.
//!
//! # Safety
//! The unsafe here is the names of two functions without pointers.

#![allow(unsafe_code)]

use core::ffi::{CStr, c_char};

/// Version of this header: major.
pub const CUDA_IPC_VERSION_MAJOR: u32 = 0;
/// Version of this header: minor.
pub const CUDA_IPC_VERSION_MINOR: u32 = 1;
/// Version of this header: patch.
pub const CUDA_IPC_VERSION_PATCH: u32 = 0;

/// As text.
pub(crate) const TEXT: &str = env!("CARGO_PKG_VERSION");

/// The version of the library that was loaded, as major * 1000000 + minor * 1000 + patch. Usable from any thread, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_version() -> u32 {
    CUDA_IPC_VERSION_MAJOR * 1_000_000 + CUDA_IPC_VERSION_MINOR * 1000 + CUDA_IPC_VERSION_PATCH
}

/// The same as text, such as "0.1.0". The library's; it stays. Usable from any thread, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_version_string() -> *const c_char {
    const WITH_END: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    };
    WITH_END.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::{CUDA_IPC_VERSION_MAJOR, CUDA_IPC_VERSION_MINOR, CUDA_IPC_VERSION_PATCH, TEXT};

    #[test]
    fn the_header_has_the_manifests_version() {
        let header = format!("{CUDA_IPC_VERSION_MAJOR}.{CUDA_IPC_VERSION_MINOR}.{CUDA_IPC_VERSION_PATCH}");
        assert_eq!(header, TEXT, "change the constants of version.rs with the version of the workspace");
    }
}
