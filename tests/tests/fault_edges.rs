//! Failures that a sweep over single points does not reach: time that runs out, undoing that fails too, a driver on its way out, a thousand refusals,
//! and the very first use in a process.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::cell::Cell;
use core::time::Duration;

use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::import::Step;
use cuda_ipc_core::importer::{Deadline, Import, ImportErrorKind, ImportStep, Placement};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside, TestDir};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::{Importer, LONG, READ, by_pidfd, key};
use cuda_ipc_tests::points::{Callee, Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::{self, Snapshot};
use cuda_ipc_tests::{hooked, shim};

const MIB: u64 = 1 << 20;

/// Enters a test in a process with the shim and a hooked driver.
fn enter(test: &str) -> Option<(Inside, Importer, Watch)> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        "main" => me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {
            let mut importer = Importer::start();
            importer.core = driver::Cuda::with(hooked::driver()).unwrap();
            return Some((me, importer, Watch::new()));
        }
    }
    None
}

fn three_chunks(me: &Inside) -> (Remote, RemoteMemory, Rkey) {
    let mut remote = Remote::start(me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    (remote, memory, rkey)
}

fn import_until(importer: &Importer, rkey: &Rkey, deadline: Deadline) -> Result<Import, cuda_ipc_core::importer::ImportError> {
    let peer = std::sync::Arc::new(by_pidfd(&key(rkey), deadline)?);
    Import::new(&importer.core, &peer, &key(rkey), rkey.base, rkey.len, READ, deadline)
}

#[test]
fn time_may_run_out_anywhere() {
    let Some((me, importer, watch)) = enter("time_may_run_out_anywhere") else { return };
    let (_remote, memory, rkey) = three_chunks(&me);
    const TIME: Duration = Duration::from_millis(20);
    let deadline = Cell::new(Deadline::after(TIME));
    let operation = || {
        deadline.set(Deadline::after(TIME));
        import_until(&importer, &rkey, deadline.get())
    };
    let long = || import_until(&importer, &rkey, Deadline::after(Duration::from_secs(60)));
    drop(long().unwrap());
    let before = Snapshot::take(&importer.fake);
    let (_, points) = watch.list(|| long().map(drop));
    let mut over = Vec::new();
    for at in &points {
        let hook = |point: &Point| {
            if point == at {
                std::thread::sleep(deadline.get().remaining() + Duration::from_millis(1));
            }
            Verdict::Go
        };
        match watch.run(hook, operation) {
            Err(error) => {
                assert_eq!(error.kind, ImportErrorKind::DeadlineOver, "{at:?}");
                assert!(error.retryable());
                over.push(error.step);
            }
            Ok(import) => memory.spot_check(&importer.cuda, import.address(), 0, 6 * MIB).unwrap(),
        }
        before.assert_unchanged(&importer.fake, &format!("time ran out at {at:?}"));
    }
    // Each place where the clock is looked at has been met: before the peer, before each fetch, before the access.
    for step in [ImportStep::OpenPeer, ImportStep::Chunk(Step::Fetch), ImportStep::Chunk(Step::SetAccess)] {
        assert!(over.contains(&step), "{step:?}: {over:?}");
    }
    println!("{} of {} points end in time over", over.len(), points.len());
    assert!(points.len() >= 41 && over.len() >= 30, "{} of {}", over.len(), points.len());

    // The driver's own delays, and no time at all.
    importer.fake.add_fault("cuMemImportFromShareableHandle#2~60ms");
    let late = import_until(&importer, &rkey, Deadline::after(Duration::from_millis(40))).unwrap_err();
    assert_eq!((late.kind, late.step, late.address), (ImportErrorKind::DeadlineOver, ImportStep::Chunk(Step::Fetch), rkey.base + 4 * MIB));
    importer.fake.clear_faults();
    let none = import_until(&importer, &rkey, Deadline::after(Duration::ZERO)).unwrap_err();
    assert_eq!((none.kind, none.step), (ImportErrorKind::DeadlineOver, ImportStep::OpenPeer));
    before.assert_unchanged(&importer.fake, "all of it");
}

fn refuse(names: &'static [&'static str], code: i32) -> impl FnMut(&Point) -> Verdict {
    move |point| if names.contains(&point.name) { Verdict::Fail(code) } else { Verdict::Go }
}

#[test]
fn what_cannot_be_undone_is_said() {
    let Some((me, importer, watch)) = enter("what_cannot_be_undone_is_said") else { return };
    let (_remote, memory, rkey) = three_chunks(&me);
    let peer = importer.connect(&rkey).unwrap();
    let before = Snapshot::take(&importer.fake);
    let len = usize::try_from(6 * MIB).unwrap();
    // Access is refused, and so is every unmapping.
    let chunks = peer.lookup(rkey.base, 6 * MIB).unwrap();
    let local_base = importer.core.reserve(6 * MIB).unwrap();
    let placement = Placement { remote_base: rkey.base, local_base };
    let import = || peer.import(&importer.core, &chunks, placement, READ, Deadline::after(LONG));
    let error = watch.run(refuse(&["cuMemSetAccess", "cuMemUnmap"], 999), import).unwrap_err();
    assert_eq!((error.step, error.stuck_bytes), (ImportStep::Chunk(Step::SetAccess), 6 * MIB));
    assert!(error.to_string().contains("6291456 bytes could not be unmapped"), "{error}");
    importer.cuda.mem_unmap(local_base, len).expect("they are mapped");
    importer.core.free_reservation(local_base, 6 * MIB).unwrap();
    before.assert_unchanged(&importer.fake, "a failure that was undone by hand");

    // As an import with addresses of its own: what holds something stays reserved.
    watch.run(refuse(&["cuMemSetAccess", "cuMemUnmap"], 999), || importer.import_from(&peer, &rkey)).unwrap_err();
    let left = importer.fake.counters();
    assert_eq!((left.mapped_bytes - before.driver[2].1, left.reserved_bytes - before.driver[4].1), (12 * MIB - 6 * MIB, 6 * MIB));

    // A mapping that does not go away when it is closed.
    let before = Snapshot::take(&importer.fake);
    let import = importer.import_from(&peer, &rkey).unwrap();
    let address = import.address();
    let error = watch.run(refuse(&["cuMemUnmap"], 999), || import.close()).unwrap_err();
    assert_eq!((error.call, error.code), ("cuMemUnmap", 999));
    memory.spot_check(&importer.cuda, address, 0, 6 * MIB).expect("it is still mapped");
    importer.cuda.mem_unmap(address, len).unwrap();
    importer.cuda.mem_address_free(address, len).unwrap();
    before.assert_unchanged(&importer.fake, "a close that was made good by hand");
}

#[test]
fn a_driver_on_its_way_out_has_released_everything() {
    // B42: DEINITIALIZED, CONTEXT_IS_DESTROYED and INVALID_CONTEXT mean that it is gone already: no error and not a word.
    let Some((me, importer, watch)) = enter("a_driver_on_its_way_out_has_released_everything") else { return };
    if me.role() == "leaver" {
        return leave(&me, &importer, &watch);
    }
    let (_remote, _, rkey) = three_chunks(&me);
    let peer = importer.connect(&rkey).unwrap();
    let len = usize::try_from(6 * MIB).unwrap();
    for code in [4, 201, 709] {
        let import = importer.import_from(&peer, &rkey).unwrap();
        let address = import.address();
        watch.run(refuse(&["cuMemUnmap", "cuMemAddressFree"], code), || import.close()).expect("released");
        importer.cuda.mem_unmap(address, len).unwrap();
        importer.cuda.mem_address_free(address, len).unwrap();
        // A release inside an import: the handle is gone, the import goes on.
        let import = watch.run(refuse(&["cuMemRelease"], code), || importer.import_from(&peer, &rkey)).unwrap();
        drop(import);

        let dir = TestDir::new().unwrap();
        let log = dir.path().join("stderr");
        let stderr = std::fs::File::create(&log).unwrap();
        let hex: String = rkey.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut leaver = me
            .spawn_with("leaver", |command| {
                command.stderr(stderr).env("LEAVER_CODE", code.to_string()).env("LEAVER_RKEY", hex);
            })
            .unwrap();
        assert_eq!(leaver.listen(), "leaving");
        leaver.finish();
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "");
    }
}

/// Ends with everything still there, and a driver that answers only this code.
fn leave(me: &Inside, importer: &Importer, watch: &Watch) {
    let code = std::env::var("LEAVER_CODE").unwrap().parse().unwrap();
    let rkey = std::env::var("LEAVER_RKEY").unwrap();
    let bytes: Vec<u8> = (0..rkey.len() / 2).map(|at| u8::from_str_radix(&rkey[2 * at..2 * at + 2], 16).unwrap()).collect();
    let rkey = Rkey::decode(&bytes).unwrap();
    let import = importer.import(&rkey).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let exporter = Exporter::new(importer.core, exporter::without_broker()).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    me.tell("leaving");
    watch.run(
        |point| if point.callee == Callee::Driver { Verdict::Fail(code) } else { Verdict::Go },
        || {
            exporter.sweep();
            exporter.export(address, 2 * MIB).unwrap_err();
            drop((import, export, exporter));
        },
    );
}

#[test]
fn a_thousand_refusals_cost_nothing_lasting() {
    // A13, B21, B23, B26, B27: each refusal names step and errno, leaves nothing, and the next attempt is as good as the first.
    let Some((me, importer, watch)) = enter("a_thousand_refusals_cost_nothing_lasting") else { return };
    let (_remote, memory, rkey) = three_chunks(&me);
    drop(importer.import(&rkey).unwrap());
    let before = Snapshot::take(&importer.fake);
    for (name, step) in [("pidfd_getfd", ImportStep::FetchTable), ("pidfd_open", ImportStep::OpenPeer)] {
        for errno in [libc::EPERM, libc::ENOSYS] {
            for round in 0..250 {
                let mut seen = Vec::new();
                let hook = |point: &Point| {
                    seen.push(point.name);
                    if point.name == name { Verdict::Fail(errno) } else { Verdict::Go }
                };
                let error = watch.run(hook, || importer.import(&rkey)).unwrap_err();
                assert_eq!(error.step, step);
                let ImportErrorKind::Pidfd(reason) = error.kind else { panic!("{error}") };
                assert_eq!((reason.errno.0, reason.step.name()), (errno, name));
                assert!(error.other_route_may_work() && !error.retryable());
                assert_eq!(seen.contains(&"pidfd_getfd"), name == "pidfd_getfd", "no fetch without a process to fetch from");
                if round % 50 == 0 {
                    before.assert_unchanged(&importer.fake, "a refusal");
                }
            }
        }
    }
    before.assert_unchanged(&importer.fake, "a thousand refusals");
    memory.spot_check(&importer.cuda, importer.import(&rkey).unwrap().address(), 0, 6 * MIB).unwrap();
}

#[test]
fn the_first_use_in_a_process_may_fail_too() {
    // What is made once and kept (the page that tells lives apart, the fork handler) is made at the first use: each process here has its first use.
    let Some((me, importer, watch)) = enter("the_first_use_in_a_process_may_fail_too") else { return };
    let open = || Exporter::new(importer.core, exporter::without_broker());
    if me.role() == "first" {
        let before = Snapshot::take(&importer.fake);
        let fail = std::env::var("FIRST_FAIL").unwrap();
        let Some((number, errno)) = fail.split_once(' ') else {
            let (_, points) = watch.list(|| open().map(drop));
            let points: Vec<String> = points.iter().map(|point| format!("{} {}", point.number, point.name)).collect();
            return me.tell(&points.join(","));
        };
        let (number, errno): (usize, i32) = (number.parse().unwrap(), errno.parse().unwrap());
        let hook = |point: &Point| if point.number == number { Verdict::Fail(errno) } else { Verdict::Go };
        let outcome = watch.run(hook, || open().map(drop)).map_err(|error| error.to_string());
        before.assert_unchanged(&importer.fake, &format!("{fail}: {outcome:?}"));
        // The handler is there, whatever happened before: a child has none of our fds.
        let exporter = open().expect("a second use");
        assert!(snapshot::open_fds().len() > before.fds.len());
        // SAFETY: the child only lists its fds and exits.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child.
            0 => unsafe { libc::_exit(i32::from(snapshot::open_fds() != before.fds)) },
            child => {
                let mut status = -1;
                // SAFETY: waits for the child made above.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!(status, 0, "{fail}: the child has fds of its parent's exporter");
            }
        }
        drop(exporter);
        return me.tell(&format!("{outcome:?}"));
    }
    let ask = |what: &str| {
        let mut first = me
            .spawn_with("first", |command| {
                command.env("FIRST_FAIL", what);
            })
            .unwrap();
        let answer = first.listen();
        first.finish();
        answer
    };
    let points = ask("list");
    println!("{points}");
    let mut tried = 0;
    let mut names = Vec::new();
    // From the unmapping on it is the exporter's end, which no error can stop.
    let points = points.split(',').map(|point| point.split_once(' ').unwrap()).take_while(|&(_, name)| name != "munmap");
    for (number, name) in points {
        let is_probe = name == "getrandom" && !names.contains(&name);
        names.push(name);
        if is_probe || matches!(name, "close" | "fcntl(F_GETFD)" | "fcntl(F_SETFD)") {
            continue;
        }
        for errno in [libc::ENOMEM, libc::EAGAIN] {
            let outcome = ask(&format!("{number} {errno}"));
            assert!(outcome.starts_with("Err") && outcome.contains(&format!("({errno})")), "{number} {name} with {errno}: {outcome}");
            tried += 1;
        }
    }
    for made_once in ["mmap", "posix_madvise", "__register_atfork", "getrandom"] {
        assert!(names.contains(&made_once), "{made_once}: {names:?}");
    }
    assert!(tried >= 30, "{tried}");
}
