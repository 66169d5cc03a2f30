//! The same questions to the fake driver and to a real one.
//!
//! Runs against the driver that the loader finds, and against the fake where it finds none. Every answer is printed as `conformance: FACT = ANSWER`. What
//! was measured on an H200 is asserted, and asserted of the fake too; the rest is printed with `open:`, so that two runs can be compared. Each test is a
//! process of its own, because a real driver may not recover from some of the questions. At most some hundred MiB of device memory are used.
//!
//! Last run on an NVIDIA H200 with driver 580.159.04 (CUDA 13.0) on 2026-12-01, one GPU visible, no IMEX daemon. Another GPU or driver may rightly answer
//! otherwise, in the device attributes for one; such a difference is news, and what the code has to do about it comes before the new value goes in here.
//! What stays open is a property of the machine (names, versions), or something that the fake does not imitate, for the reason given where it is asked.

mod contexts;
mod device;
mod facts;
mod mapping;
mod pointers;
mod pools;
mod sharing;
mod streams;

use cuda_driver_sys::CUresult;

const CHUNK: usize = 2 << 20;
const NONE: u32 = 0;
const POSIX_FD: u32 = 1;
const FABRIC: u32 = 8;
const READ: u32 = 1;
const READ_WRITE: u32 = 3;

const OK: CUresult = CUresult::CUDA_SUCCESS;
const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
const INVALID_CONTEXT: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;
const NOT_FOUND: CUresult = CUresult::CUDA_ERROR_NOT_FOUND;
const ILLEGAL_ADDRESS: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
const NOT_SUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;
const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;
