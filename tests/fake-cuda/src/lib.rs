//! A CUDA driver without a GPU, for tests: `libcuda.so.1`.
//!
//! Processes that use one directory (`FAKE_CUDA_DIR`) share a fake machine with one or more devices: what one allocates, exports or imports, the
//! others see in free memory, and can import. Device memory is a sparse file per device, device addresses are inaccessible reservations, and all bytes
//! move through the driver. It answers as an H200 with driver 580 does where that is known; `tests/tests/conformance` runs the same questions on
//! both. Faults, delays, counters and asynchronous completion are at a test's command (`fault.rs`, `control.rs`, `stream.rs`).
//!
//! Layers, each using the ones before: `file`, `layout`, `arena`, `registry`, `chunks`, `export` make the shared machine; `space`, `vmm`, `memory`,
//! `pool`, `legacy`, `copy`, `pointer`, `context`, `stream`, `event`, `capture`, `device` are the driver of one process, whose state is in `process`;
//! `exports` and `call` are the C boundary.
//!
//! What it does not do: kernels, graphs, arrays, textures, modules. Programs that need the CUDA runtime do not run on it.

mod abi;
mod arena;
mod blob;
mod call;
mod capture;
mod chunks;
mod config;
mod context;
mod control;
mod copy;
mod device;
mod event;
mod export;
mod exports;
mod fault;
mod file;
mod fork;
mod layout;
mod legacy;
mod memory;
mod names;
mod pointer;
mod pool;
mod process;
mod registry;
mod space;
mod stream;
mod vmm;
