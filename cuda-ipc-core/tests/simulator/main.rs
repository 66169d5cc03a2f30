//! An exporter process and an importer process in one test, whose steps interleave in every way that fits into a few seconds.
//!
//! The exporter is the walk, the table's writer and a bookkeeper; the importer is the table's reader and the transfer. Kernel and driver are models:
//! fd numbers are reused lowest first, getfd gives what stands behind a number *now*, and memory has an identity that only the model can see. What must
//! hold: whatever is mapped for a (slot, generation) is the memory that was published under it, or the import has failed with a name and holds nothing.
#![cfg(not(loom))]

mod bookkeeper;
mod exhaustive;
mod exporter;
mod importer;
mod kernel;
mod random;
mod run;
