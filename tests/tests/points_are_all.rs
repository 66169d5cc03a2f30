//! The proof that the fault sweep misses nothing: its points are the system calls that the kernel sees, and the driver calls that the driver counts.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::{Deadline, LegacyImport, PooledImport};
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, key};
use cuda_ipc_tests::points::{Callee, Point, Verdict, Watch};
use cuda_ipc_tests::trace::{Mark, Trace, look};
use cuda_ipc_tests::{hooked, shim};

const MIB: u64 = 1 << 20;

/// Runs `operation` in a watched process, traced by the one that started it, and compares.
fn compare(test: &str, operation: impl Fn(&Inside, &Importer) -> Box<dyn FnMut()>) {
    let Some(me) = Inside::enter(test, &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        "main" => trace(&me),
        _ => {
            let mut importer = Importer::start();
            importer.core = driver::Cuda::with(hooked::driver()).unwrap();
            let operation = operation(&me, &importer);
            watched(&me, &importer, &Watch::new(), operation);
        }
    }
}

fn trace(me: &Inside) {
    let mut watched = me.spawn_with("watched", shim::preload).unwrap();
    let tid = watched.listen().parse().unwrap();
    let trace = match Trace::seize(tid) {
        Ok(trace) => trace,
        Err(error) => {
            println!("skipped: this process may not trace its child: {error}");
            return;
        }
    };
    watched.tell("go");
    let seen = trace.calls().unwrap();
    let points = watched.listen();
    watched.finish();
    let numbers: Vec<i64> = points.split(',').map(|name| number(name).unwrap_or_else(|| panic!("{name} is no system call"))).collect();
    println!("points: {points}");
    // The program break is the allocator's business, and getpid has no way to fail.
    let counts = |call: &i64| ![libc::SYS_brk, libc::SYS_getpid].contains(call);
    // C libraries differ in how they make an fstat.
    let seen = seen.into_iter().map(|call| if call == libc::SYS_newfstatat { libc::SYS_fstat } else { call });
    let seen: Vec<i64> = seen.filter(counts).collect();
    assert_eq!(numbers, seen, "points, and what the kernel saw");
    assert!(seen.len() >= 20, "{}", seen.len());
}

fn watched(me: &Inside, importer: &Importer, watch: &Watch, mut operation: Box<dyn FnMut()>) {
    // What is made once is made now.
    let (_, points) = watch.list(&mut operation);
    let mut libc_calls = Vec::with_capacity(2 * points.len());
    let mut driver_calls = 0;
    // SAFETY: asks for this thread's number.
    me.tell(&unsafe { libc::gettid() }.to_string());
    me.listen();
    let before = importer.fake.total_calls();
    watch.run(
        // What the driver asks of the kernel is its own business.
        |point: &Point| {
            match (point.callee, point.before) {
                (Callee::Libc, true) => libc_calls.push(point.name),
                (Callee::Driver, true) => {
                    driver_calls += 1;
                    look(Mark::Off);
                }
                (Callee::Driver, false) => look(Mark::On),
                (Callee::Libc, false) => {}
            }
            Verdict::Go
        },
        || {
            look(Mark::On);
            operation();
            look(Mark::End);
        },
    );
    assert_eq!(importer.fake.total_calls() - before, driver_calls, "driver calls");
    // The marks are calls too.
    let points: Vec<&str> = libc_calls.into_iter().filter(|&name| name != "syscall").collect();
    me.tell(&points.join(","));
}

/// The number of the system call behind a libc function, as this C library makes it.
fn number(name: &str) -> Option<i64> {
    Some(match name {
        "open" => libc::SYS_openat,
        "read" => libc::SYS_read,
        "close" => libc::SYS_close,
        "statx" => libc::SYS_statx,
        "fstat" => libc::SYS_fstat,
        "fstatfs" => libc::SYS_fstatfs,
        "ftruncate" => libc::SYS_ftruncate,
        name if name.starts_with("fcntl") => libc::SYS_fcntl,
        "memfd_create" => libc::SYS_memfd_create,
        "mmap" => libc::SYS_mmap,
        "munmap" => libc::SYS_munmap,
        "posix_madvise" | "madvise" => libc::SYS_madvise,
        "getrandom" => libc::SYS_getrandom,
        "getrlimit" => libc::SYS_prlimit64,
        "futex" => libc::SYS_futex,
        "pidfd_open" => libc::SYS_pidfd_open,
        "pidfd_getfd" => libc::SYS_pidfd_getfd,
        _ => return None,
    })
}

#[test]
fn points_of_an_import_are_all_its_calls() {
    compare("points_of_an_import_are_all_its_calls", |me, importer| {
        let mut remote = Remote::start(me);
        let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2), (2 * MIB, 3)]);
        let (_, rkey) = remote.export(&memory, MIB, 6 * MIB);
        let importer = *importer;
        Box::new(move || {
            let _alive = &remote;
            importer.import(&rkey).unwrap().close().unwrap();
        })
    });
}

#[test]
fn points_of_an_export_are_all_its_calls() {
    compare("points_of_an_export_are_all_its_calls", |_, importer| {
        let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
        let core = importer.core;
        // Without its threads: a thread is started by many calls of the C library's own.
        let mut options = exporter::without_broker();
        options.sweep_interval = None;
        Box::new(move || {
            let exporter = Exporter::new(core, options.clone()).unwrap();
            let export = exporter.export(address, 2 * MIB).unwrap();
            exporter.retire(address, MIB);
            drop((export, exporter));
        })
    });
}

#[test]
fn points_of_imports_of_other_memory_are_all_their_calls() {
    compare("points_of_imports_of_other_memory_are_all_their_calls", |me, importer| {
        let mut remote = Remote::start(me);
        let pool = remote.number("pool 0 1");
        let pooled = remote.number(&format!("pool_alloc {pool} {} 1", 2 * MIB));
        let plain = remote.number(&format!("alloc {} 1", 2 * MIB));
        let (pooled, legacy) = (remote.export_at(pooled, 2 * MIB).1, remote.export_at(plain, 2 * MIB).1);
        let importer = *importer;
        let operation = move || {
            let _alive = &remote;
            let peer = importer.connect(&pooled).unwrap();
            let deadline = Deadline::after(LONG);
            let mut import = PooledImport::new(&importer.core, &peer, &key(&pooled), &[0], deadline).unwrap();
            let mut opened = LegacyImport::open(&importer.core, &legacy, 0, deadline).unwrap();
            import.close().unwrap();
            opened.close().unwrap();
        };
        // What is kept process-wide is made once.
        operation();
        Box::new(operation)
    });
}

#[test]
fn points_of_exports_of_other_memory_are_all_their_calls() {
    compare("points_of_exports_of_other_memory_are_all_their_calls", |_, importer| {
        let cuda = importer.cuda;
        let pool = cuda.pool_create(0, 1).unwrap();
        let pooled = cuda.alloc_from_pool(2 << 20, pool, core::ptr::null_mut()).unwrap();
        let plain = cuda.mem_alloc(2 << 20).unwrap();
        let core = importer.core;
        let mut options = exporter::without_broker();
        options.sweep_interval = None;
        let operation = move || {
            let exporter = Exporter::new(core, options.clone()).unwrap();
            let exports = [pooled, plain].map(|address| exporter.export(address, MIB).unwrap());
            drop((exports, exporter));
        };
        operation();
        Box::new(operation)
    });
}
