//! What the tests of the cache share: a process with a cache, and exporters at its command.

use core::time::Duration;
use std::process::{Command, Stdio};
use std::sync::Arc;

use cuda_ipc_cache::{Cache, CacheError, CacheOptions, Lease, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::key::Key;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::driver::{FakeConfig, FakeCounters, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::{self, Importer, LONG};
use cuda_ipc_tests::snapshot::Snapshot;

/// A chunk of the smallest size.
pub(crate) const CHUNK: u64 = 2 << 20;

/// The full name of a test of this file, as the test runner knows it.
macro_rules! test_name {
    ($test:ident) => {
        concat!(module_path!(), "::", stringify!($test))
    };
}

/// The main process of a test.
pub(crate) struct World {
    pub(crate) me: Inside,
    pub(crate) importer: Importer,
    /// What the process had before the test.
    pub(crate) start: Snapshot,
}

/// Enters a test; `None` in the runner's process, and in the exporters' when they are over.
pub(crate) fn enter(test: &str) -> Option<World> {
    enter_with(test, &FakeConfig::default())
}

/// As [`enter`], on a machine of these settings.
pub(crate) fn enter_with(test: &str, config: &FakeConfig) -> Option<World> {
    let (_, test) = test.split_once("::").expect("crate::module::test");
    let me = Inside::enter(test, config)?;
    if me.role() == exporter::ROLE {
        exporter::serve(&me);
        return None;
    }
    let importer = Importer::start();
    Some(World { start: Snapshot::take(&importer.fake), me, importer })
}

impl World {
    pub(crate) fn remote(&self) -> Remote {
        Remote::start(&self.me)
    }

    pub(crate) fn remote_with(&self, change: impl FnOnce(&mut Command)) -> Remote {
        Remote::start_with(&self.me, change)
    }

    /// A cache whose settings `change` has had its way with.
    pub(crate) fn cache(&self, change: impl FnOnce(&mut CacheOptions)) -> Cache {
        let mut options = CacheOptions::default();
        change(&mut options);
        Cache::new(self.importer.core, options)
    }

    /// A cache that does nothing by itself.
    pub(crate) fn quiet_cache(&self) -> Cache {
        self.cache(|options| options.sweep = false)
    }

    pub(crate) fn counters(&self) -> FakeCounters {
        self.importer.fake.counters()
    }

    /// Leases a part of what is in `memory`, and compares every byte.
    #[track_caller]
    pub(crate) fn verify<'w>(&self, window: &'w Window, memory: &RemoteMemory, offset: u64, len: u64) -> Lease<'w> {
        let lease = window.lease(memory.base + offset, len, soon()).expect("a lease");
        memory.verify(&self.importer.cuda, lease.address(), offset, len).expect("the exporter's bytes");
        lease
    }

    /// Panics unless what the driver has, what the cache says and `chunks` agree.
    #[track_caller]
    pub(crate) fn assert_mapped(&self, cache: &Cache, chunks: u64) {
        let (counters, stats) = (self.counters(), cache.stats());
        assert_eq!((counters.mappings, counters.mapped_bytes), (stats.chunks, stats.bytes), "{stats:?}");
        assert_eq!((counters.reservations, counters.reserved_bytes), (stats.windows, stats.address_space), "{stats:?}");
        assert_eq!(counters.handles, 0);
        assert_eq!(stats.chunks, chunks, "{stats:?}");
    }

    /// Ends the test: nothing is left once the cache is gone.
    #[track_caller]
    pub(crate) fn close(&self, cache: Cache) {
        drop(cache);
        self.start.assert_settles(&self.importer.fake, "the end of the cache");
    }
}

/// Far enough away for anything that does not hang.
pub(crate) fn soon() -> Deadline {
    Deadline::after(LONG)
}

pub(crate) fn in_ms(ms: u64) -> Deadline {
    Deadline::after(Duration::from_millis(ms))
}

pub(crate) fn key(rkey: &Rkey) -> Key {
    importer::key(rkey)
}

/// The window of an rkey, readable by the first device.
#[track_caller]
pub(crate) fn window(cache: &Cache, rkey: &Rkey) -> Arc<Window> {
    try_window(cache, rkey).expect("a window")
}

pub(crate) fn try_window(cache: &Cache, rkey: &Rkey) -> Result<Arc<Window>, CacheError> {
    cache.window(&key(rkey), 0, false, soon())
}

const UNSHARE: [&str; 6] = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"];

/// Whether this process may make PID namespaces; says so where a test is skipped because it may not.
pub(crate) fn can_make_pid_namespaces() -> bool {
    let made = Command::new("unshare").args(UNSHARE).arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !made {
        println!("skipped: no PID namespace can be made here");
    }
    made
}

/// Makes the command run as pid 1 of a PID namespace of its own.
pub(crate) fn in_pid_namespace(command: &mut Command) {
    let mut under = Command::new("unshare");
    under.args(UNSHARE).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => under.env(name, value),
            None => under.env_remove(name),
        };
    }
    *command = under;
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
}
