//! What the tests of the broker share.

use core::time::Duration;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use cuda_ipc_core::importer::{ConnectOptions, Import, ImportError, Peer, Route};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::table::ChunkId;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::Importer;

use crate::importing;

pub(crate) const MIB: u64 = 1 << 20;
/// More than anything takes that is not waited for in vain.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// Enters a test: its process and an importer in it. Returns from the test in the runner's process, and in other roles when they are over.
macro_rules! enter {
    ($test:expr) => {
        enter!($test, &cuda_ipc_tests::driver::FakeConfig::default())
    };
    ($test:expr, $config:expr) => {
        match $crate::support::enter(&format!("{}::{}", module_path!(), $test), $config) {
            Some(entered) => entered,
            None => return,
        }
    };
}

pub(crate) fn enter(test: &str, config: &FakeConfig) -> Option<(Inside, Importer)> {
    let (_, test) = test.split_once("::").expect("crate::module::test");
    let me = Inside::enter(test, config)?;
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        importing::ROLE => importing::serve(&me),
        _ => {
            let importer = Importer::start();
            // Other users come to this machine, too.
            std::fs::set_permissions(machine(), PermissionsExt::from_mode(0o777)).unwrap();
            return Some((me, importer));
        }
    }
    None
}

/// The directory of the fake machine, which goes with the test.
pub(crate) fn machine() -> PathBuf {
    std::env::var_os("FAKE_CUDA_DIR").unwrap().into()
}

/// Chunks of 2 MiB with seeds from 1 on.
pub(crate) fn chunks(count: u64) -> Vec<(u64, u64)> {
    (1..=count).map(|seed| (2 * MIB, seed)).collect()
}

/// Lets an exporter process have a broker and export `count` chunks of 2 MiB.
#[track_caller]
pub(crate) fn share(remote: &mut Remote, options: &str, count: u64) -> (RemoteMemory, Rkey) {
    remote.ask(format!("exporter_with {options}").trim_end());
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

/// The chunks of an export, as its importers name them.
pub(crate) fn ids(importer: &Importer, rkey: &Rkey) -> Vec<ChunkId> {
    let peer = importer.connect_with(rkey, &by(Route::Auto)).unwrap();
    peer.lookup(rkey.base, rkey.len).unwrap().iter().map(|(id, _)| *id).collect()
}

/// Panics unless each of the words is in the text.
#[track_caller]
pub(crate) fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    println!("{text}");
}
