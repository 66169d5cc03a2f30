//! The export table: its words at their offsets, its meaning against a naive list, and what a hostile one can do.
#![cfg(not(loom))]

mod golden;
mod hostile;
mod model;
mod races;
#[path = "../support/mod.rs"]
mod support;
