//! Shares memory of `cuMemCreate` in a cudarc context with another process, and uses it there by cudarc: `cargo run --package cudarc-example`.
//!
//! The exporting process allocates some chunks side by side, as allocators of expandable segments do, fills them by cudarc and starts this program again as the
//! importer. The key goes through a pipe; nothing else does. The importer copies the memory out of its lease by cudarc and compares every byte.
//! `exporter.rs` and `importer.rs` are the two sides; `memory.rs` is the allocation.
//!
//! # Safety
//! Unsafe is cudarc's own in `memory.rs` (its driver API has no safe form of virtual memory management) and where a lease's address becomes a slice of cudarc's.

// A program has std; the lint is for the libraries.
#![allow(clippy::std_instead_of_core)]

mod exporter;
mod importer;
mod memory;

use std::process::ExitCode;

/// What anything here may fail with.
type Outcome = Result<(), Box<dyn std::error::Error>>;

/// First argument of the process that imports.
const IMPORTER: &str = "importer";

fn main() -> ExitCode {
    let side: fn() -> Outcome = if std::env::args().nth(1).as_deref() == Some(IMPORTER) { importer::run } else { exporter::run };
    match side() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cudarc-example: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The byte that the exporter puts at an offset.
fn pattern(offset: usize) -> u8 {
    (offset.wrapping_mul(31) ^ (offset >> 12)).to_le_bytes()[0]
}
