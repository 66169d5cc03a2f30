//! The cache on the fake driver, with exporters in processes of their own.

#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
mod support;

mod chunks;
mod faults;
mod flights;
mod life;
mod limits;
mod model;
mod opened;
mod peers;
mod pooled;
