//! What the tests of the broker share.

use std::sync::Arc;

use cuda_ipc_core::importer::{ConnectOptions, Import, ImportError, Peer, Route};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::Importer;

pub(crate) const MIB: u64 = 1 << 20;

/// Enters a test: its process and an importer in it. Returns from the test in the runner's process, and in an exporter's when it is over.
macro_rules! enter {
    ($test:expr) => {
        match $crate::support::enter(concat!(module_path!(), "::", $test).split_once("::").unwrap().1) {
            Some(entered) => entered,
            None => return,
        }
    };
}

pub(crate) fn enter(test: &str) -> Option<(Inside, Importer)> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    if me.role() == exporter::ROLE {
        exporter::serve(&me);
        return None;
    }
    Some((me, Importer::start()))
}

/// Chunks of 2 MiB with seeds from 1 on.
pub(crate) fn chunks(count: u64) -> Vec<(u64, u64)> {
    (1..=count).map(|seed| (2 * MIB, seed)).collect()
}

/// An exporter process with a broker, and `count` chunks of 2 MiB that it exports.
#[track_caller]
pub(crate) fn share(remote: &mut Remote, options: &str, count: u64) -> (RemoteMemory, Rkey) {
    remote.ask(&format!("exporter_with {options}"));
    let memory = remote.memory((count + 8) * 2 * MIB, &chunks(count));
    let (_, rkey) = remote.export(&memory, 0, count * 2 * MIB);
    (memory, rkey)
}

pub(crate) fn by(route: Route) -> ConnectOptions {
    ConnectOptions::default().with_route(route)
}

/// Reaches an exporter and imports all of `rkey`.
pub(crate) fn import(importer: &Importer, rkey: &Rkey, options: &ConnectOptions) -> Result<(Arc<Peer>, Import), ImportError> {
    let peer = importer.connect_with(rkey, options)?;
    let import = importer.import_from(&peer, rkey)?;
    Ok((peer, import))
}
