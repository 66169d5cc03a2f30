//! What the tests share: processes, drivers, machines.

pub mod apart;
pub mod child;
pub mod driver;
pub mod exporter;
pub mod follow;
pub mod hooked;
pub mod importer;
pub mod interleave;
pub mod memory;
pub mod pattern;
pub mod points;
pub mod random;
pub mod raw_table;
pub mod shim;
pub mod snapshot;
pub mod sweep;
pub mod trace;
pub mod uct;
