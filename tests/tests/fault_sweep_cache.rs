//! Every driver call and every libc call of a cache fails once, in every plausible way: of a lease that imports, one that finds chunks replaced, one that makes room for
//! others, of a trim that finds the dead, and of the cache's end. As in `fault_sweep.rs`, what fails is named, nothing is left, and the next use works.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::sync::atomic::{AtomicU32, Ordering};

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::importer::{ConnectOptions, Deadline, Route};
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::{Importer, LONG, key};
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::sweep::{Outcome, Sweep, names};
use cuda_ipc_tests::{hooked, shim};

const CHUNK: u64 = 2 << 20;

/// What a use of the cache may survive, besides an import in it.
fn judge(point: &Point, verdict: Verdict, outcome: &Outcome) -> bool {
    match (outcome, point.name, verdict) {
        (Ok(()), "cuThreadExchangeStreamCaptureMode" | "cuMemRelease" | "cuMemUnmap" | "cuMemAddressFree", _) => true,
        (Ok(()), "close" | "munmap" | "fcntl(F_SETFD)" | "fstat" | "poll", _) => true,
        (Ok(()), "open" | "getrandom", Verdict::Fail(libc::EINTR)) => true,
        (Ok(()), "statx", Verdict::Fail(libc::ENOSYS | libc::EPERM)) => true,
        // Idle windows make room, and the second try succeeds.
        (Ok(()), "cuMemAddressReserve", _) => true,
        // The look, in a trim, at whether the table is still there: the next one finds out. How often that may be is asserted.
        (Ok(()), "pidfd_getfd", _) => true,
        (Ok(()), ..) => false,
        (Err(text), "pidfd_getfd", Verdict::Fail(libc::EBADF)) if text.ends_with("the exporter has exited") => true,
        (Err(text), ..) => names(text, point, verdict),
    }
}

/// What happens in the exporter between two steps of the operation. A thread of its own talks with it, so that the talk is no point.
struct Elsewhere<'a> {
    wanted: &'a AtomicU32,
}

const REPLACE: u32 = 1;
const RETIRE: u32 = 2;
const RESTORE: u32 = 3;
const STOP: u32 = 4;

impl Drop for Elsewhere<'_> {
    fn drop(&mut self) {
        self.wanted.store(STOP, Ordering::Release);
    }
}

impl Elsewhere<'_> {
    fn happens(&self, what: u32) {
        self.wanted.store(what, Ordering::Release);
        // No call out of here: it would be a point.
        while self.wanted.load(Ordering::Acquire) != 0 {
            core::hint::spin_loop();
        }
    }
}

fn serve(remote: &mut Remote, memory: &mut RemoteMemory, wanted: &AtomicU32, seed: &AtomicU32) {
    let export = |remote: &mut Remote, memory: &RemoteMemory| {
        remote.export(memory, 0, 4 * CHUNK);
    };
    loop {
        match wanted.load(Ordering::Acquire) {
            REPLACE => {
                let next = seed.fetch_add(1, Ordering::Relaxed) + 1;
                memory.replace(remote, CHUNK, next.into());
                export(remote, memory);
            }
            RETIRE => drop(remote.ask(&format!("retire {} 0 {CHUNK}", memory.index))),
            RESTORE => export(remote, memory),
            STOP => return,
            _ => {
                std::thread::sleep(core::time::Duration::from_micros(20));
                continue;
            }
        }
        wanted.store(0, Ordering::Release);
    }
}

#[test]
fn a_cache_survives_or_names_every_failure() {
    let Some(me) = Inside::enter("a_cache_survives_or_names_every_failure", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "main" => return me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {}
    }
    let mut importer = Importer::start();
    importer.core = driver::Cuda::with(hooked::driver()).unwrap();
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (CHUNK, 2), (CHUNK, 3), (CHUNK, 4)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * CHUNK);
    let (wanted, seed) = (AtomicU32::new(0), AtomicU32::new(100));
    std::thread::scope(|scope| {
        let (wanted_there, seed_there, base) = (&wanted, &seed, memory.base);
        scope.spawn(move || serve(&mut remote, &mut memory, wanted_there, seed_there));
        let elsewhere = Elsewhere { wanted: &wanted };
        let check = |address: u64, seed: u64| cuda_ipc_tests::pattern::check(&importer.cuda, address, 0, 4096, seed).unwrap();
        let mut operation = || -> Outcome {
            elsewhere.happens(RESTORE);
            let text = |error: cuda_ipc_cache::CacheError| error.to_string();
            let deadline = Deadline::after(LONG);
            let mut options = CacheOptions::default();
            options.sweep = false;
            options.connect = ConnectOptions::default().with_route(Route::Pidfd);
            options.max_mapped_bytes = 2 * CHUNK;
            let cache = Cache::new(importer.core, options);
            let window = cache.window(&key(&rkey), 0, false, deadline).map_err(text)?;
            let lease = window.lease(base, 2 * CHUNK, deadline).map_err(text)?;
            check(lease.address(), 1);
            drop(lease);
            elsewhere.happens(REPLACE);
            let lease = window.lease(base, 2 * CHUNK, deadline).map_err(text)?;
            check(lease.address() + CHUNK, seed.load(Ordering::Relaxed).into());
            drop(lease);
            // Two others, for which these have to go; and back.
            let lease = window.lease(base + 2 * CHUNK, 2 * CHUNK, deadline).map_err(text)?;
            check(lease.address(), 3);
            drop(lease);
            let lease = window.lease(base, CHUNK, deadline).map_err(text)?;
            check(lease.address(), 1);
            drop(lease);
            elsewhere.happens(RETIRE);
            cache.trim();
            Ok(())
        };
        let mut sweep = Sweep { watch: Watch::new(), fake: importer.fake, operation: &mut operation, judge: &judge };
        let report = sweep.run();
        println!("cache: {report:?}");
        assert!(report.points >= 101 && report.runs >= 930, "{report:?}");
        assert_eq!(report.survived["pidfd_getfd"], 1, "of the trim");
    });
}
