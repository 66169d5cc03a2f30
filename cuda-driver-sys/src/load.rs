//! Finds `libcuda.so.1` at run time and resolves the table's rows.
//!
//! There is no link step: a machine without a driver gets a [`LoadError`], not a failed start. The library is opened `RTLD_NOW | RTLD_LOCAL` and
//! never closed: CUDA keeps threads and exit handlers that must not outlive their code.
//!
//! # Safety
//! The unsafe here is the dynamic loader (`dlopen`, `dlsym`, `dlerror`), the calls of `cuGetProcAddress_v2` and `cuDriverGetVersion`, and the
//! promise of [`Nullable::from_address`] that a symbol has its documented C signature. The promise rests on the pairing of name, version and
//! typedef in `table.rs`, which is NVIDIA's own naming rule for the typedefs.

#![allow(unsafe_code)]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt;

use crate::bindings::{CUdriverProcAddressQueryResult, CUresult, PFN_cuDriverGetVersion_v2020, PFN_cuGetProcAddress_v12000, cuuint64_t};
use crate::table::{Driver, EntryPoint, Nullable};

/// Name under which the CUDA driver is opened.
pub const LIBRARY: &CStr = c"libcuda.so.1";

/// Why no driver could be loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// `dlopen` failed; the text is the loader's own, cut to what fits.
    LibraryNotFound(LoaderText),
    /// The library lacks this required symbol: too old a driver, or not a CUDA driver.
    MissingEntryPoint(&'static str),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LibraryNotFound(text) => write!(f, "the CUDA driver could not be opened: {text}"),
            Self::MissingEntryPoint(name) => write!(f, "the CUDA driver has no entry point {name}: it is older than CUDA 11.2"),
        }
    }
}

impl fmt::Debug for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LibraryNotFound(text) => f.debug_tuple("LibraryNotFound").field(&text.as_str()).finish(),
            Self::MissingEntryPoint(name) => f.debug_tuple("MissingEntryPoint").field(name).finish(),
        }
    }
}

impl core::error::Error for LoadError {}

/// A copy of `dlerror`'s text, without allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LoaderText {
    bytes: [u8; LoaderText::CAPACITY],
    len: usize,
}

impl LoaderText {
    /// Holds the usual "libcuda.so.1: cannot open shared object file: No such file or directory", and keeps errors that carry it small.
    const CAPACITY: usize = 96;

    fn copy_of(text: &CStr) -> Self {
        let mut copy = Self { bytes: [0; Self::CAPACITY], len: 0 };
        // Cut at a character boundary, so that `as_str` never has to.
        for ch in text.to_bytes().utf8_chunks().flat_map(|chunk| chunk.valid().chars()) {
            let Some(room) = copy.bytes.get_mut(copy.len..copy.len + ch.len_utf8()) else { break };
            ch.encode_utf8(room);
            copy.len += ch.len_utf8();
        }
        copy
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.len]).unwrap_or("")
    }
}

impl fmt::Display for LoaderText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Driver {
    /// Opens `libcuda.so.1` by the loader's search path and resolves every row.
    ///
    /// Makes no CUDA call beyond `cuGetProcAddress_v2` and `cuDriverGetVersion`, which need no `cuInit`; the caller calls `cuInit`. May be called
    /// often and from any thread: the loader counts.
    /// Errors: [`LoadError`]. Source: dlopen(3), dlsym(3), cuGetProcAddress.
    pub fn load() -> Result<Self, LoadError> {
        Self::load_from(LIBRARY)
    }

    /// As [`Driver::load`], from a file of this name or path.
    pub fn load_from(file: &CStr) -> Result<Self, LoadError> {
        Self::resolve(&Lookup::open(file)?)
    }
}

/// The driver's library, for whoever needs its functions by their exported names and as they are: an interposer.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    handle: *mut c_void,
}

// SAFETY: a handle of the loader's may be used from any thread; it is never closed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `libcuda.so.1` by the loader's search path. Errors: [`LoadError::LibraryNotFound`].
    pub fn open() -> Result<Self, LoadError> {
        Lookup::open(LIBRARY).map(|lookup| Self { handle: lookup.handle })
    }

    /// Address of an exported symbol; null if the library has none of this name.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: `handle` is an open library that is never closed, and the name a C string; a missing symbol is null.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }
}

/// An open library and, where it has one, its `cuGetProcAddress_v2`.
pub(crate) struct Lookup {
    handle: *mut c_void,
    get_proc_address: PFN_cuGetProcAddress_v12000,
    /// As `cuDriverGetVersion` says; 0 if it says nothing.
    driver_version: c_int,
}

impl Lookup {
    fn open(file: &CStr) -> Result<Self, LoadError> {
        // SAFETY: `file` is a valid C string. Constructors of the library run; that is what loading a driver means.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LoadError::LibraryNotFound(last_loader_error()));
        }
        let mut lookup = Self { handle, get_proc_address: None, driver_version: 0 };
        // SAFETY: the symbol's signature is PFN_cuGetProcAddress_v12000 by NVIDIA's naming rule; null gives `None`.
        lookup.get_proc_address = unsafe { PFN_cuGetProcAddress_v12000::from_address(lookup.by_symbol("cuGetProcAddress_v2")) };
        // SAFETY: the symbol's signature is PFN_cuDriverGetVersion_v2020 by the same rule; null gives `None`.
        let get_version = unsafe { PFN_cuDriverGetVersion_v2020::from_address(lookup.by_symbol("cuDriverGetVersion")) };
        if let Some(get_version) = get_version {
            let mut version = 0;
            // SAFETY: `version` is a live local, and the call needs no cuInit (cuDriverGetVersion).
            if unsafe { get_version(&raw mut version) } == CUresult::CUDA_SUCCESS {
                lookup.driver_version = version;
            }
        }
        Ok(lookup)
    }

    /// Looks one row up: by `cuGetProcAddress_v2` where there is one, else (or where that knows no such version) by `dlsym`.
    ///
    /// Neither may answer with another version's function; see `by_proc_address`.
    pub(crate) fn find<P: Nullable>(&self, row: &EntryPoint) -> Option<P::Fn> {
        let mut address = self.by_proc_address(row);
        if address.is_null() {
            address = self.by_symbol(row.symbol);
        }
        // SAFETY: `address` is null or what the driver gave for this name and version, whose signature is `P` (module doc).
        unsafe { P::from_address(address) }
    }

    fn by_proc_address(&self, row: &EntryPoint) -> *mut c_void {
        let mut address = core::ptr::null_mut();
        // Drivers of 12.x answer a version above their own with the newest ABI they know: another function signature than the row's. 13.x drivers
        // call such a question an error. So it is not asked; the suffixed symbol tells.
        if row.version > self.driver_version {
            return address;
        }
        let (Some(get), Some(name)) = (self.get_proc_address, Name::new(row.base)) else { return address };
        let mut status = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
        const DEFAULT_FLAGS: cuuint64_t = 0;
        // SAFETY: all pointers are to live locals; the call neither needs cuInit nor keeps the pointers (cuGetProcAddress).
        let result = unsafe { get(name.as_ptr(), &raw mut address, row.version, DEFAULT_FLAGS, &raw mut status) };
        if result == CUresult::CUDA_SUCCESS && status == CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS {
            address
        } else {
            core::ptr::null_mut()
        }
    }

    fn by_symbol(&self, symbol: &str) -> *mut c_void {
        match Name::new(symbol) {
            // SAFETY: `handle` is an open library that is never closed, and the name a C string; a missing symbol is null.
            Some(name) => unsafe { libc::dlsym(self.handle, name.as_ptr()) },
            None => core::ptr::null_mut(),
        }
    }
}

/// A NUL-terminated copy of a symbol name, without allocation.
struct Name([u8; 64]);

impl Name {
    fn new(name: &str) -> Option<Self> {
        let mut copy = [0; 64];
        // The last byte stays 0.
        copy[..63].get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        Some(Self(copy))
    }

    fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

fn last_loader_error() -> LoaderText {
    // SAFETY: dlerror returns null or a string that lives until this thread's next loader call; it is copied at once.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return LoaderText::copy_of(c"unknown loader error");
    }
    // SAFETY: not null, so a C string (dlerror(3)).
    LoaderText::copy_of(unsafe { CStr::from_ptr(text) })
}
