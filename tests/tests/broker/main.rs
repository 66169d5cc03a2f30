//! The broker on the fake driver, with exporters and importers in processes of their own, kept apart by what really keeps processes apart.

#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
mod support;

mod causes;
mod crowd;
mod hostile;
mod importing;
mod life;
mod limits;
mod raw;
mod routes;
mod sockets;
