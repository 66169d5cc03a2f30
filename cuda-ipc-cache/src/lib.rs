//! Windows that mirror an exporter's reservations and pool allocations: imports of CUDA memory of other processes that are cached, leased and bounded.
//!
//! - [`Cache`] (`cache.rs`): peers, their windows, and limits.
//! - [`Window`] (`window.rs`): the mirror of one reservation; [`Window::lease`] is the use of it.
//! - [`Lease`] (`lease.rs`): counted use of a range.
//! - [`Opened`] (`opened.rs`): whatever an rkey names, for users who do not care what carries it.
//! - [`Drain`] (`drain.rs`): for users who end leases before the work is complete.
//! - `slot.rs`, `slots.rs`: the lock-free state behind a hit; `flight.rs`: who may change it.
//! - [`IntervalIndex`] (`index.rs`): windows by address.
//! - [`CacheStats`] (`stats.rs`), [`CacheError`] (`error.rs`).
//! - [`Environment`] (`environment.rs`): the variables that libraries on top take settings from.
//!
//! A lease is of the memory that the exporter has *now*: before each use it is compared, at the cost of one load, whether anything of the exporter's has
//! died since the chunk was last checked. No lock, system call, driver call or allocation stands on that path.

#![deny(unsafe_code)]

mod cache;
mod drain;
mod environment;
mod error;
pub mod flight;
mod index;
mod lease;
mod opened;
pub mod slot;
mod slots;
mod stats;
mod sync;
mod window;

pub use cache::{Cache, CacheOptions, PeerWindows};
pub use drain::Drain;
pub use environment::{Environment, WrongVariable};
pub use error::{CacheError, CacheErrorKind};
pub use index::IntervalIndex;
pub use lease::{Lease, LeaseParts};
pub use opened::{Opened, OpenedLease, OpenedLegacy};
pub use stats::CacheStats;
pub use window::{Hold, UnmapCause, Window};

// The examples of the README are run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
