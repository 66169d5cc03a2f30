//! Whose call it is: the address ranges of UCX's CUDA modules.
//!
//! Only `libuct_cuda*` is answered; every other caller, `libucm_cuda` included, gets the driver's own answer. Ranges come from `dl_iterate_phdr`, which unlike
//! dladdr and dlopen does not wait for other threads' constructors. They are read again when the loader says that something was loaded since.
//!
//! # Safety
//! The unsafe here is dl_iterate_phdr, reading what it hands to its callback for the time of the callback, and pinning a module by dlopen.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation, reason = "addresses of this 64-bit process")]

use core::ffi::{CStr, c_int, c_void};
use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

/// UCX modules remembered at most; a process has one, or two where a framework brings its own.
const MOST: usize = 8;

/// First and last-plus-one address of each module's segments; a start of 0 is free.
static STARTS: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
static ENDS: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
/// How many objects the loader had loaded when the ranges were read.
static SEEN: AtomicU64 = AtomicU64::new(0);

/// Whether `address` is in a UCX CUDA module.
#[inline]
pub(crate) fn is_ucx(address: usize) -> bool {
    if known(address) {
        return true;
    }
    // Not a known UCX module: unless something has been loaded since, it is not one.
    let loaded = loads();
    if SEEN.load(Acquire) == loaded {
        return false;
    }
    read();
    SEEN.store(loaded, Release);
    known(address)
}

/// Whether a UCX CUDA module has been seen, or is there now.
pub(crate) fn is_loaded() -> bool {
    read();
    STARTS.iter().any(|start| start.load(Acquire) != 0)
}

fn known(address: usize) -> bool {
    STARTS.iter().zip(&ENDS).any(|(start, end)| {
        let start = start.load(Acquire);
        start != 0 && start <= address && address < end.load(Relaxed)
    })
}

/// The loader's count of loaded objects.
fn loads() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _size: usize, out: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid record for the time of the call, and `out` is the local of `loads`.
        let adds = unsafe { (*info).dlpi_adds };
        // SAFETY: as above.
        unsafe { *out.cast::<u64>() = adds };
        1
    }
    let mut adds = 0_u64;
    // SAFETY: the callback has the right signature, and `adds` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut adds).cast()) };
    adds
}

/// Reads the ranges of all UCX modules that are loaded now, and pins what is new.
#[cold]
fn read() {
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _size: usize, _: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid record for the time of the call.
        let info = unsafe { &*info };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: not null, so a C string for the time of the call.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        if !is_ucx_module(name.to_bytes()) {
            return 0;
        }
        // SAFETY: the record's program headers, as many as it says.
        let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
        let base = info.dlpi_addr as usize;
        let start = loaded.clone().map(|header| base + header.p_vaddr as usize).min();
        let end = loaded.map(|header| base + header.p_vaddr as usize + header.p_memsz as usize).max();
        if let (Some(start), Some(end)) = (start, end) {
            remember(start, end, name);
        }
        0
    }
    // SAFETY: the callback has the right signature and ignores its data.
    unsafe { libc::dl_iterate_phdr(Some(each), ptr::null_mut()) };
}

fn remember(start: usize, end: usize, name: &CStr) {
    if STARTS.iter().any(|known| known.load(Relaxed) == start) {
        return;
    }
    for (slot, slot_end) in STARTS.iter().zip(&ENDS) {
        if slot.load(Relaxed) == 0 {
            slot_end.store(end, Relaxed);
            if slot.compare_exchange(0, start, AcqRel, Relaxed).is_ok() {
                PIN.store(name.as_ptr().cast_mut().cast(), Relaxed);
                return;
            }
        }
    }
}

/// Name of the module found last, to be pinned outside of the loader's callback.
static PIN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Keeps the module found last loaded for the life of the process, so that its range never becomes another module's. Called from a call of that module, which
/// is therefore loaded, and once.
pub(crate) fn pin() {
    let name = PIN.swap(ptr::null_mut(), AcqRel);
    if !name.is_null() {
        // SAFETY: the name is the loader's own, of a module whose code is running; nothing is loaded by NOLOAD.
        unsafe { libc::dlopen(name.cast_const().cast(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

/// A symbol of the first loaded module whose file name begins with `module`; null if there is none. For the first call of a UCX module only: it may wait for
/// the loader.
pub(crate) fn symbol_of(module: &'static [u8], symbol: &CStr) -> *mut c_void {
    struct Search {
        module: &'static [u8],
        path: *const libc::c_char,
    }
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid record for the time of the call.
        let name = unsafe { (*info).dlpi_name };
        // SAFETY: the local of `symbol_of`.
        let search = unsafe { &mut *search.cast::<Search>() };
        if name.is_null() {
            return 0;
        }
        // SAFETY: not null, so a C string for the time of the call.
        let path = unsafe { CStr::from_ptr(name) }.to_bytes();
        let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        // Not `libucm_cuda` when `libucm` is wanted.
        if file.strip_prefix(search.module).is_some_and(|rest| rest.starts_with(b".so") || rest.starts_with(b"-")) {
            search.path = name;
            return 1;
        }
        0
    }
    let mut search = Search { module, path: ptr::null() };
    // SAFETY: the callback has the right signature, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut search).cast()) };
    if search.path.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: the loader's own name of a module that UCX's CUDA module depends on, so it stays; nothing is loaded by NOLOAD.
    let handle = unsafe { libc::dlopen(search.path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: an open handle, which is never closed, and a C string.
    unsafe { libc::dlsym(handle, symbol.as_ptr()) }
}

/// `libuct_cuda.so…`, also with a suffix before `.so`, but no other module.
pub(crate) fn is_ucx_module(path: &[u8]) -> bool {
    let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    file.starts_with(b"libuct_cuda") && file.windows(3).any(|part| part == b".so")
}
