//! Work that may still use memory after its lease: what a caller submits and does not wait for.
//!
//! A lease ends when its owner says so, and the owner should say so when the work is complete. Whoever cannot know that (an interposer, that sees copies being
//! submitted but not their end) ends the lease after submitting, and gives the cache a [`Drain`]: nothing is unmapped before the work that was submitted
//! until then is complete.

use core::fmt::Debug;

/// Knows the work that has been submitted and may still run. Called by the cache without any of its locks, from any thread.
pub trait Drain: Send + Sync + Debug {
    /// Takes note of all work submitted so far and returns a ticket for it; the same ticket as before if nothing was submitted since.
    fn mark(&self) -> u64;

    /// Whether all of a ticket's work is complete. Must become true without anybody's doing.
    fn is_complete(&self, ticket: u64) -> bool;
}
