//! What the tests share: processes, drivers, machines.

pub mod driver;
pub mod exporter;
pub mod importer;
pub mod memory;
pub mod pattern;
pub mod snapshot;
