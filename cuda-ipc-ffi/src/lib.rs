//! The C ABI of cuda-ipc: libcuda_ipc.so and libcuda_ipc.a, header `include/cuda_ipc.h`.
//!
//! Nothing is decided here that the crates below decide; this crate turns C's handles, pointers and structures into theirs and back.
//!
//! | file | what it owns |
//! |---|---|
//! | `boundary.rs` | the border: panics, forks, pointers |
//! | `handle.rs`, `handles.rs` | what a handle is, and the types in the header |
//! | `table.rs`, `windows.rs`, `leases.rs`, `blocks.rs` | objects by handle |
//! | `words.rs`, `sync.rs` | how a hit and a release agree without a lock |
//! | `context.rs`, `export.rs`, `import.rs`, `lease.rs`, `probe.rs`, `stats.rs`, `version.rs` | the functions, by topic |
//! | `status.rs`, `failure.rs`, `last_error.rs` | what is answered |
//! | `config.rs`, `log.rs`, `text.rs` | settings, and what is said |
//! | `structs.rs` | the sizes of structures that grow |
//!
//! The header is generated from these files by `cargo xtask gen-headers`; their documentation is its documentation.

#![deny(unsafe_code)]
#![warn(clippy::indexing_slicing)]

mod blocks;
mod boundary;
pub mod config;
pub mod context;
pub mod export;
mod failure;
mod handle;
pub mod handles;
pub mod import;
pub mod last_error;
pub mod lease;
mod leases;
pub mod log;
pub mod probe;
pub mod stats;
pub mod status;
mod structs;
mod sync;
mod table;
mod text;
pub mod version;
mod windows;
mod words;
