//! The importer: reaches an exporter, finds the chunks of a range in its table, and maps them here.
//!
//! - [`Peer`] (`peer.rs`): another process with a verified identity, reached by pidfd or by its broker (`broker.rs`) and kept.
//! - [`ConnectOptions`] and [`Route`] (`route.rs`): which of these ways may be taken.
//! - [`Placement`] and [`Peer::import`] (`transfer.rs`): import some chunks to their places in an address range of the caller's.
//! - [`Import`] (`range.rs`): the simplest use, one range in an address range of its own.
//! - [`PooledImport`] (`pooled.rs`): one allocation of an exporter's pool, on top of all that this process has imported of pools (`pools.rs`).
//! - [`LegacyImport`] (`legacy.rs`): memory by its legacy handle, which needs no peer.
//! - [`wait_for_deaths`] (`wait.rs`): sleep until a peer retires something.
//! - [`ImportError`] (`error.rs`), and [`Witness`] (`witness.rs`), which finds the cause behind one.
//!
//! Nothing is kept between two imports but the peer, and mappings that have a user still; windows, leases and limits are cuda-ipc-cache's.

mod broker;
mod broker_error;
mod error;
mod legacy;
mod peer;
mod pooled;
mod pools;
mod range;
mod route;
mod spare_fds;
mod transfer;
mod wait;
mod witness;

pub use crate::sys::table_file::NotATableFile;
pub use broker_error::{BrokerError, PidfdRefusal};
pub use error::{Deadline, ImportError, ImportErrorKind, ImportStep};
pub use legacy::LegacyImport;
pub use peer::{Peer, own_nonces_contain};
pub use pooled::PooledImport;
pub use range::Import;
pub use route::{ConnectOptions, Route, UnknownRoute};
pub use transfer::{Access, Placement};
pub use wait::{Bell, wait_for_deaths};
pub use witness::Witness;
