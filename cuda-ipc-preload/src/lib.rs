//! Preload library: gives unmodified UCX (from 1.18) and NIXL builds the cuda_ipc lane for memory of `cuMemCreate`.
//!
//! UCX's CUDA modules reach the driver through their PLT, so a preloaded library answers their calls. Towards cuda_ipc a reservation of POSIX_FD chunks is one
//! allocation with a fabric handle, and that handle's 64 bytes are a key of ours; the importing side recognises them and answers import, reserve, map and
//! set-access from a window. Everybody else gets the driver's own answers.
//!
//! - `stubs.rs`, `names.rs`: the interposed functions.
//! - `route.rs`, `callers.rs`: whose call it is, and where it goes on.
//! - `handlers.rs`, `copy_handlers.rs`: the answers to UCX, each with the signature of its driver function.
//! - `exporting.rs`, `importing.rs`: the two sides behind them, on top of cuda-ipc-core's exporter and cuda-ipc-cache's windows.
//! - `pool_handlers.rs`, `pooled.rs`: the same for memory of pools, as far as it differs.
//! - `streams.rs`: running copies. `parts.rs`: how a long one is submitted. `uuid.rs`: the device in a key. `ucm.rs`: frees that UCM reports.
//! - `notes.rs`: what belongs together of a thread's calls.
//! - `settings.rs`: what the environment decides. `report.rs`: what is said. `explain.rs`: the report at exit. `bypass.rs`: whether UCX's calls come here.
//!
//! Inert where libuct_cuda is not loaded: no thread, no socket, no output.

#![deny(unsafe_code)]

mod bypass;
mod callers;
mod copy_handlers;
mod explain;
mod exporting;
mod handlers;
mod importing;
mod names;
mod notes;
mod parts;
mod pool_handlers;
mod pooled;
mod report;
mod route;
mod settings;
mod state;
mod streams;
mod stubs;
mod ucm;
mod uuid;
