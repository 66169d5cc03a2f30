//! The export machine against a modelled driver: every refusal and every replacement at every action, and runners that answer nonsense.
#![cfg(not(loom))]

mod adversary;
mod faults;
#[path = "../support/mod.rs"]
mod support;
mod world;
