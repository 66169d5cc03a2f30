//! The export table: a process's live list of shareable chunks, in memory that its importers read while it changes.
//!
//! One table is one sealed memory file. This module knows its words and the order in which they are written and read; it never maps, opens or waits
//! (that is `std`'s `table_file.rs`). Everything is a 64-bit word accessed atomically, so neither side needs a lock and no read tears.
//!
//! - [`layout`]: where each word stands.
//! - [`chunk`]: one entry, as values, and what makes it believable.
//! - [`writer`]: publish and retire, by the one writer.
//! - [`reader`]: look-ups and re-checks, by any number of readers who trust nothing.
//!
//! # Protocol
//! An entry is a seqlock whose sequence is its state word {generation, live or dead}. The writer publishes an entry last of all its words, then its index
//! words, then counts a *birth*. It retires one by marking it dead, then counting the *epoch*; only after that may the fd be closed and the memory go.
//! A reader copies the entry between two equal, live states; fetches the fd by its number; and reads the state once more. So a number that was reused
//! in between, or a slot that was, never reaches the driver. An epoch loaded *before* such a check and found unchanged later says that nothing
//! checked has died since.

pub mod chunk;
pub mod layout;
pub mod reader;
pub mod word;
pub mod writer;

pub use chunk::{Chunk, ChunkId, ChunkKind, InvalidEntry};
pub use layout::{GRANULE, Layout};
pub use reader::{HeaderError, LookupError, Reader};
pub use word::Word;
pub use writer::{PublishError, Writer};
