//! What a process has open: fds, driver objects, memory files that are mapped, threads of ours. Equal before and after, or something leaks.

use core::time::Duration;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use crate::driver::{Fake, FakeCounters};

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Open fds and what they are.
    pub fds: BTreeMap<i32, PathBuf>,
    /// Handles, mappings, reservations and pools that the fake driver counts.
    pub driver: [(&'static str, u64); 6],
    /// Mappings of memory files.
    pub memory_files: Vec<String>,
    /// Threads, of anybody.
    pub threads: usize,
}

impl Snapshot {
    /// Takes one of this process.
    pub fn take(fake: &Fake) -> Self {
        let FakeCounters { handles, mappings, mapped_bytes, reservations, reserved_bytes, pools, internal_errors, .. } = fake.counters();
        assert_eq!(internal_errors, 0, "the fake driver has a bug");
        Self {
            fds: open_fds(),
            driver: [
                ("handles", handles),
                ("mappings", mappings),
                ("mapped bytes", mapped_bytes),
                ("reservations", reservations),
                ("reserved bytes", reserved_bytes),
                ("pools", pools),
            ],
            memory_files: memory_files(),
            threads: threads(),
        }
    }

    /// Without pipes, where processes come and go with which this one talks.
    pub fn without_pipes(mut self) -> Self {
        self.fds.retain(|_, link| !link.to_string_lossy().starts_with("pipe:"));
        self
    }

    /// Panics unless the process has now what it had then.
    #[track_caller]
    pub fn assert_unchanged(&self, fake: &Fake, after: &str) {
        let now = Self::take(fake);
        assert_eq!(*self, now, "something is left, or gone, after {after}");
    }

    /// As [`Snapshot::assert_unchanged`], once threads that are ending have ended.
    #[track_caller]
    pub fn assert_settles(&self, fake: &Fake, after: &str) {
        let settled = wait_until(Duration::from_secs(5), || Self::take(fake) == *self);
        if !settled {
            self.assert_unchanged(fake, after);
        }
    }
}

/// Polls `condition` until it holds or `limit` is over; whether it held.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The open fds of this process, but for the one that lists them.
pub fn open_fds() -> BTreeMap<i32, PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("/proc/self/fd");
    let numbers: Vec<i32> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.into_iter().filter_map(|number| Some((number, std::fs::read_link(format!("/proc/self/fd/{number}")).ok()?))).collect()
}

fn memory_files() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc/self/maps");
    let mut found: Vec<String> = maps.lines().filter_map(|line| line.find("/memfd:").map(|at| line[at..].to_owned())).collect();
    found.sort();
    found
}

/// Threads of this process. (Their names say nothing: a new thread has its maker's until it runs.)
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("/proc/self/task").count()
}
