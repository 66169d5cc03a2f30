//! What the tests share: processes, drivers, machines.

pub mod driver;
