//! How answers are collected, and the memory that most questions are about.

use core::fmt::Debug;
use std::os::fd::{FromRawFd, OwnedFd};

use cuda_driver_sys::{CUdeviceptr, CUresult};
use cuda_ipc_tests::driver::{Answer, Cuda, Fake};

use crate::{CHUNK, POSIX_FD, READ_WRITE};

/// Collects answers; dropping it fails the test if a known one was different.
pub(crate) struct Facts {
    pub(crate) cuda: Cuda,
    wrong: Vec<String>,
}

impl Facts {
    pub(crate) fn start() -> (Cuda, Self) {
        let cuda = Cuda::start();
        cuda.enter_primary(0);
        println!("conformance: driver = {}", if Fake::find().is_some() { "fake" } else { "real" });
        (cuda, Self::of(cuda))
    }

    pub(crate) fn of(cuda: Cuda) -> Self {
        Self { cuda, wrong: Vec::new() }
    }

    /// A fact that was measured.
    pub(crate) fn known<T: Debug + PartialEq>(&mut self, fact: &str, observed: T, expected: T) {
        println!("conformance: {fact} = {observed:?}");
        if observed != expected {
            self.wrong.push(format!("{fact} = {observed:?}, expected {expected:?}"));
        }
    }

    /// A code that was measured.
    pub(crate) fn code<T>(&mut self, fact: &str, observed: Answer<T>, expected: CUresult) {
        let observed = outcome(&observed);
        println!("conformance: {fact} = {}", self.name(observed));
        if observed != expected {
            self.wrong.push(format!("{fact} = {}, expected {}", self.name(observed), self.name(expected)));
        }
    }

    /// What is not asserted; the caller says why.
    pub(crate) fn open(&self, fact: &str, observed: impl Debug) {
        println!("conformance: open: {fact} = {observed:?}");
    }

    /// The code's name and number, as it is printed.
    pub(crate) fn name(&self, code: CUresult) -> String {
        let mut text = core::ptr::null();
        // SAFETY: a live out pointer.
        let found = unsafe { (self.cuda.raw.cuGetErrorName)(code, &raw mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return code.0.to_string();
        }
        // SAFETY: the driver's own static string.
        let name = unsafe { core::ffi::CStr::from_ptr(text) };
        format!("{} ({})", name.to_string_lossy(), code.0)
    }
}

impl Drop for Facts {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.wrong.is_empty(), "the driver differs:\n{}", self.wrong.join("\n"));
        }
    }
}

/// Chunks of `CHUNK` bytes one after another in one reservation, with access to all of them.
pub(crate) struct Row {
    cuda: Cuda,
    pub(crate) base: CUdeviceptr,
    reserved: usize,
    pub(crate) handles: Vec<u64>,
}

impl Row {
    pub(crate) fn new(cuda: Cuda, chunks: usize, reserved_chunks: usize) -> Self {
        let row = Self::without_access(cuda, chunks, reserved_chunks);
        cuda.mem_set_access(row.base, chunks * CHUNK, 0, READ_WRITE).expect("cuMemSetAccess over many mappings");
        row
    }

    pub(crate) fn without_access(cuda: Cuda, chunks: usize, reserved_chunks: usize) -> Self {
        let reserved = reserved_chunks * CHUNK;
        let base = cuda.mem_reserve(reserved).expect("cuMemAddressReserve");
        let handles: Vec<u64> = (0..chunks).map(|_| cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate")).collect();
        for (index, &handle) in handles.iter().enumerate() {
            cuda.mem_map(base + (index * CHUNK) as u64, CHUNK, 0, handle).expect("cuMemMap");
        }
        Self { cuda, base, reserved, handles }
    }

    pub(crate) fn at(&self, index: usize) -> CUdeviceptr {
        self.base + (index * CHUNK) as u64
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        // Chunk by chunk: a test may have unmapped some.
        for index in 0..self.handles.len() {
            let _ = self.cuda.mem_unmap(self.at(index), CHUNK);
            let _ = self.cuda.mem_release(self.handles[index]);
        }
        let _ = self.cuda.mem_address_free(self.base, self.reserved);
    }
}

fn outcome<T>(observed: &Answer<T>) -> CUresult {
    observed.as_ref().err().copied().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Large against what a process costs on a GPU; smaller where every byte is a test machine's memory.
pub(crate) fn big() -> usize {
    if Fake::find().is_some() { 32 << 20 } else { 256 << 20 }
}

/// Owns an fd that was made just now.
pub(crate) fn own(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the fd was made just now, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
