//! The importing side of a test: a driver, and imports that are verified and leave nothing behind.

use core::time::Duration;
use std::sync::Arc;

use cuda_ipc_core::importer::{Access, ConnectOptions, Deadline, Import, ImportError, Peer, Route};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_core::sys::driver;

use crate::driver::{Cuda, Fake, FakeConfig, Inside};
use crate::exporter::{self, RemoteMemory};

/// More than any call here takes.
pub const LONG: Duration = Duration::from_secs(60);
/// Access for the first device, to read.
pub const READ: Access<'static> = Access { devices: &[0], writable: false };
/// Access for the first device, to read and write.
pub const WRITE: Access<'static> = Access { devices: &[0], writable: true };

/// Enters a test that imports here and exports in processes of their own; `None` in the runner's process and in an exporter's, when it is over.
pub fn enter(test: &str) -> Option<(Inside, Importer)> {
    enter_with(test, &FakeConfig::default())
}

/// As [`enter`], on a machine of another kind.
pub fn enter_with(test: &str, config: &FakeConfig) -> Option<(Inside, Importer)> {
    let me = Inside::enter(test, config)?;
    if me.role() == exporter::ROLE {
        exporter::serve(&me);
        return None;
    }
    Some((me, Importer::start()))
}

/// An importing process.
#[derive(Clone, Copy, Debug)]
pub struct Importer {
    /// Plain driver calls.
    pub cuda: Cuda,
    /// The driver as the library under test has it.
    pub core: driver::Cuda,
    /// Counters and faults.
    pub fake: Fake,
}

impl Importer {
    /// Loads the fake driver and makes the first device's primary context current.
    pub fn start() -> Self {
        let cuda = Cuda::start();
        cuda.enter_primary(0);
        Self { cuda, core: driver::Cuda::open().expect("a driver"), fake: Fake::find().expect("the fake driver") }
    }

    /// Reaches the exporter of `rkey` by pidfd.
    pub fn connect(&self, rkey: &Rkey) -> Result<Arc<Peer>, ImportError> {
        by_pidfd(&key(rkey), Deadline::after(LONG)).map(Arc::new)
    }

    /// Reaches the exporter of `rkey` as the options say.
    pub fn connect_with(&self, rkey: &Rkey, options: &ConnectOptions) -> Result<Arc<Peer>, ImportError> {
        Peer::connect_with(&key(rkey), options, Deadline::after(LONG)).map(Arc::new)
    }

    /// Imports what `rkey` says, from a known peer.
    pub fn import_from(&self, peer: &Arc<Peer>, rkey: &Rkey) -> Result<Import, ImportError> {
        self.import_range(peer, rkey, rkey.base, rkey.len)
    }

    /// Imports a range, from a known peer.
    pub fn import_range(&self, peer: &Arc<Peer>, rkey: &Rkey, address: u64, len: u64) -> Result<Import, ImportError> {
        Import::new(&self.core, peer, &key(rkey), address, len, READ, Deadline::after(LONG))
    }

    /// Reaches the exporter and imports.
    pub fn import(&self, rkey: &Rkey) -> Result<Import, ImportError> {
        self.import_from(&self.connect(rkey)?, rkey)
    }

    /// Imports what `rkey` says and compares every byte with what is in `memory`.
    #[track_caller]
    pub fn verify(&self, rkey: &Rkey, memory: &RemoteMemory) -> Import {
        let import = self.import(rkey).expect("an import");
        self.verify_import(&import, rkey, memory);
        import
    }

    /// Compares every byte of an import of `rkey` with what is in `memory`.
    #[track_caller]
    pub fn verify_import(&self, import: &Import, rkey: &Rkey, memory: &RemoteMemory) {
        assert_eq!(import.len(), rkey.len);
        memory.verify(&self.cuda, import.address(), rkey.base - memory.base, rkey.len).expect("the exporter's bytes");
    }
}

/// Reaches the exporter of a key by pidfd, and by no other way where that is closed.
pub fn by_pidfd(key: &Key, deadline: Deadline) -> Result<Peer, ImportError> {
    Peer::connect_with(key, &ConnectOptions::default().with_route(Route::Pidfd), deadline)
}

/// The key in an rkey of ours.
pub fn key(rkey: &Rkey) -> Key {
    match rkey.payload {
        Payload::Posix(key) => key,
        other => panic!("not a key: {other:?}"),
    }
}
