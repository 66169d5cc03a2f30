//! Forked children that live on, and programs that are executed: they pin nothing, own nothing, and make no driver call (B43).

#![allow(clippy::unwrap_used, reason = "tests")]

use core::sync::atomic::{AtomicBool, Ordering};
use std::io::{BufRead, BufReader, Write};

use cuda_ipc_core::exporter::{Exporter, ExporterOptions, ExporterStats};
use cuda_ipc_core::importer::{ImportErrorKind, ImportStep, own_nonces_contain};
use cuda_ipc_core::reason::Cause;
use cuda_ipc_core::sys::driver;
use cuda_ipc_core::table::HeaderError;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, key};
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::{self, Snapshot};
use cuda_ipc_tests::{hooked, shim};

const MIB: u64 = 1 << 20;

/// Forks; the child runs `body` and ends with its answer, or is killed after a while.
fn fork(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child allocates, which the C library's fork allows, and ends without running anything of the parent's.
    match unsafe { libc::fork() } {
        0 => end_of_child(body),
        child => {
            assert!(child > 0, "{}", std::io::Error::last_os_error());
            child
        }
    }
}

/// As [`fork`], by a bare system call: no handler runs.
fn raw_clone(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: as fork, with a copy of this stack.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => end_of_child(body),
        child => i32::try_from(child).unwrap(),
    }
}

fn end_of_child(body: impl FnOnce() -> bool) -> ! {
    // SAFETY: a number.
    unsafe { libc::alarm(30) };
    let good = std::panic::catch_unwind(core::panic::AssertUnwindSafe(body)).unwrap_or(false);
    // SAFETY: ends the child.
    unsafe { libc::_exit(i32::from(!good)) }
}

#[track_caller]
fn wait(child: i32, what: &str) {
    let mut status = -1;
    // SAFETY: a child of ours, and a live local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child of {what}");
}

/// The parent of a child that lives on: makes, exports, forks and frees at a word.
fn be_parent(me: &Inside) {
    let importer = Importer::start();
    let fds = snapshot::open_fds();
    // Other threads are there, and one of ours.
    let busy = std::thread::spawn(std::thread::park);
    let exporter = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
    let mut memory = Memory::reserve(importer.cuda, 64 * MIB, 0).unwrap();
    memory.map(0, 2 * MIB, 1).unwrap();
    memory.map(2 * MIB, 20 * MIB, 2).unwrap();
    let base = memory.base();
    let export = exporter.export(base, 22 * MIB).unwrap();
    assert_eq!((exporter.stats().fds, snapshot::threads() > 2), (2, true));

    let (commands, mut to_child) = std::io::pipe().unwrap();
    let (mut from_child, answers) = std::io::pipe().unwrap();
    let (mut held, nonce, parent) = (Some((exporter.clone(), export)), exporter.nonce(), std::process::id());
    let child = fork(|| {
        let mut answers = answers.try_clone().unwrap();
        for command in BufReader::new(commands).lines() {
            let good = match command.unwrap().as_str() {
                // Its own copy of the other end keeps it from ever seeing an end of input.
                "ends" => return true,
                "has no fds of its parent's" => {
                    let mut mine = snapshot::open_fds();
                    mine.retain(|_, link| !link.to_string_lossy().starts_with("pipe:"));
                    fds.iter().filter(|(_, link)| !link.to_string_lossy().starts_with("pipe:")).eq(mine.iter())
                }
                "cannot use its parent's exporter" => {
                    let (exporter, export) = held.as_ref().unwrap();
                    let refused = exporter.export(base, MIB).map(drop).unwrap_err();
                    refused.cause == Cause::Forked
                        && exporter.retire(base, 22 * MIB) == 0
                        && exporter.sweep() == 0
                        && exporter.stats() == ExporterStats::default()
                        && export.chunks().len() == 2
                }
                "drops it" => {
                    held = None;
                    true
                }
                "makes its own" => {
                    // The driver itself works in no forked child; a table needs none.
                    let own = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
                    let known = own_nonces_contain(own.nonce()) && !own_nonces_contain(nonce);
                    own.nonce() != nonce && std::process::id() != parent && known
                }
                _ => false,
            };
            writeln!(answers, "{good}").unwrap();
        }
        true
    });
    let mut read = BufReader::new(&mut from_child);
    me.tell(&child.to_string());
    while let Some(word) = me.listen() {
        match word.as_str() {
            "free" => {
                exporter.retire(base, 2 * MIB);
                memory.unmap(0).unwrap();
                drop(held.take());
                memory.unmap(2 * MIB).unwrap();
                me.tell("freed");
            }
            "export again" => {
                memory.map(0, 2 * MIB, 3).unwrap();
                let export = exporter.export(base, 2 * MIB).unwrap();
                let chunks = export.chunks().len();
                drop(export);
                memory.unmap(0).unwrap();
                me.tell(&chunks.to_string());
            }
            command => {
                writeln!(to_child, "{command}").unwrap();
                let mut answer = String::new();
                read.read_line(&mut answer).unwrap();
                me.tell(answer.trim());
            }
        }
    }
    writeln!(to_child, "ends").unwrap();
    wait(child, "a long life");
    busy.thread().unpark();
    busy.join().unwrap();
}

#[test]
fn a_child_that_lives_on_pins_nothing() {
    let Some(me) = Inside::enter("a_child_that_lives_on_pins_nothing", &FakeConfig::default()) else { return };
    if me.role() == "parent" {
        return be_parent(&me);
    }
    // This is the third process: it sees what is free.
    let importer = Importer::start();
    let free = || importer.cuda.mem_info().unwrap().0 as u64;
    let before = free();
    let mut parent = me.spawn("parent").unwrap();
    let child: u32 = parent.listen().parse().unwrap();
    let mut ask = |what: &str| {
        parent.tell(what);
        parent.listen()
    };
    assert_eq!(free(), before - 22 * MIB);
    assert_eq!(ask("has no fds of its parent's"), "true");
    assert_eq!(ask("cannot use its parent's exporter"), "true");
    assert_eq!(ask("free"), "freed");
    assert_eq!(free(), before, "the child lives, and pins nothing");
    assert_eq!(ask("drops it"), "true");
    assert_eq!(ask("makes its own"), "true");
    assert_eq!(ask("export again"), "1", "the parent is none the worse");
    assert!(pidfd_sys::process_stat(child).unwrap().state != b'Z', "all this while");
    let device = importer.fake.device(0);
    assert_eq!((device.calls_after_fork, device.orphans, free()), (0, 0, before));
    parent.finish();
}

/// Lets the busy threads end, also where the test fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn children_of_a_busy_parent_end_well() {
    // At each fork other threads are in the middle of something: a lock may be held, a list half changed. A child must neither wait for the one nor walk the other.
    let Some(_) = Inside::enter("children_of_a_busy_parent_end_well", &FakeConfig::default()) else { return };
    let importer = Importer::start();
    let exporter = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
    let mut memories: Vec<Memory> = (0..2).map(|_| Memory::reserve(importer.cuda, 256 * MIB, 0).unwrap()).collect();
    for memory in &mut memories {
        (0..64).for_each(|chunk| memory.map_types(chunk * 2 * MIB, 2 * MIB, 1).unwrap());
    }
    let stop = AtomicBool::new(false);
    const FORKS: usize = 600;
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for memory in &memories {
            let (exporter, stop, base) = (&exporter, &stop, memory.base());
            scope.spawn(move || {
                importer.cuda.enter_primary(0);
                while !stop.load(Ordering::Relaxed) {
                    let export = exporter.export(base, 128 * MIB).unwrap();
                    exporter.retire(base, 64 * MIB);
                    drop(export);
                }
            });
        }
        for _ in 0..FORKS {
            let child = fork(|| {
                let refused = exporter.export(0, 1).map(drop).unwrap_err();
                // SAFETY: a bitwise copy of the child's own copy of the parent's reference, which nobody uses or drops here any more. It is often the last one.
                drop(unsafe { core::ptr::read(&exporter) });
                refused.cause == Cause::Forked
            });
            wait(child, "a busy parent");
        }
    });
    assert_eq!(importer.fake.device(0).calls_after_fork, 0);
}

#[test]
fn an_importing_parent_keeps_what_its_child_drops() {
    let Some(me) = Inside::enter("an_importing_parent_keeps_what_its_child_drops", &FakeConfig::default()) else { return };
    if me.role() == exporter::ROLE {
        return exporter::serve(&me);
    }
    let importer = Importer::start();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    let before = snapshot::open_fds();
    let peer = importer.connect(&rkey).unwrap();
    let import = importer.import_from(&peer, &rkey).unwrap();
    let mut held = Some((peer, import));
    for by_fork in [true, false] {
        let snapshot = Snapshot::take(&importer.fake);
        let body = || {
            let (peer, import) = held.take().unwrap();
            let forked = matches!(peer.lookup(rkey.base, 1), Err(error) if error.kind == ImportErrorKind::Forked)
                && matches!(importer.import_from(&peer, &rkey), Err(error) if error.kind == ImportErrorKind::Forked)
                && !import.is_current();
            let closed = !by_fork || snapshot::open_fds() == before;
            drop((peer, import));
            forked && closed
        };
        wait(if by_fork { fork(body) } else { raw_clone(body) }, "an importing parent");
        snapshot.assert_unchanged(&importer.fake, "a child that dropped an import");
    }
    let (peer, import) = held.unwrap();
    importer.verify_import(&import, &rkey, &memory);
    importer.verify_import(&importer.import_from(&peer, &rkey).unwrap(), &rkey, &memory);
    assert_eq!(importer.fake.device(0).calls_after_fork, 0);
}

#[test]
fn a_child_of_a_bare_clone_is_another_process_too() {
    // No handler runs in it, so it has its parent's fds until it ends; it uses none and closes none.
    let Some(_) = Inside::enter("a_child_of_a_bare_clone_is_another_process_too", &FakeConfig::default()) else { return };
    let importer = Importer::start();
    let exporter = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    let (mut held, nonce) = (Some(export), exporter.nonce());
    let child = raw_clone(|| {
        let fds = snapshot::open_fds();
        let refused = exporter.export(address, 2 * MIB).map(drop).unwrap_err();
        drop(held.take());
        let own = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
        let known = own_nonces_contain(own.nonce()) && !own_nonces_contain(nonce);
        let other = own.nonce() != nonce;
        drop(own);
        refused.cause == Cause::Forked && known && other && snapshot::open_fds() == fds
    });
    wait(child, "a bare clone");
    let export = held.unwrap();
    assert_eq!((exporter.stats().chunks, export.chunks().len()), (1, 1));
    assert!(own_nonces_contain(nonce));
    assert_eq!(importer.fake.device(0).calls_after_fork, 0);
}

#[test]
fn nothing_leaks_into_an_executed_program() {
    let Some(me) = Inside::enter("nothing_leaks_into_an_executed_program", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "fresh" => {
            let links: Vec<String> = snapshot::open_fds().values().map(|link| link.display().to_string()).collect();
            return me.tell(&links.into_iter().filter(|link| !link.starts_with("pipe:")).collect::<Vec<_>>().join(","));
        }
        _ => {}
    }
    let fresh = || {
        let mut fresh = me.spawn("fresh").unwrap();
        let links = fresh.listen();
        fresh.finish();
        links
    };
    let before = fresh();
    let importer = Importer::start();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * MIB);
    let import = importer.verify(&rkey, &memory);
    let exporter = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    assert_eq!(fresh(), before, "an executed program has none of our fds");
    drop((import, export));

    // In place, too: the old key leads to the same pid, and no further.
    remote.exec();
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 2)]);
    let (_, new) = remote.export(&memory, 0, 2 * MIB);
    assert_eq!((key(&new).pid, key(&new).table_fd), (key(&rkey).pid, key(&rkey).table_fd));
    let error = importer.connect(&rkey).map(drop).unwrap_err();
    let kind = ImportErrorKind::Table(HeaderError::Nonce { expected: key(&rkey).nonce, found: key(&new).nonce });
    assert_eq!((error.step, error.kind), (ImportStep::OpenTable, kind));
    importer.verify(&new, &memory);
}

/// Forks before each call of an operation; each child must have the fds that were there before the operation, and no other. A file below `/proc` that is
/// just being read pins nothing. With `in_flight` fds, one that is about to be closed has been let go of already.
fn fork_everywhere(watch: &Watch, in_flight: bool, mut operation: impl FnMut()) -> usize {
    let open = || {
        let mut fds = snapshot::open_fds();
        fds.retain(|_, link| !link.starts_with("/proc"));
        fds
    };
    operation();
    let fds = open();
    let mut forks = 0;
    let hook = |point: &Point| {
        // After a call that makes an fd, its number is in no Rust hand yet: nobody can know of it.
        if point.before {
            forks += 1;
            let more = usize::from(in_flight && point.name == "close");
            let good = || {
                let now = open();
                fds.iter().all(|(number, link)| now.get(number) == Some(link)) && now.len() <= fds.len() + more
            };
            wait(fork(good), &format!("a fork before {point:?}"));
        }
        Verdict::Go
    };
    watch.run(hook, operation);
    assert_eq!(open(), fds);
    forks
}

#[test]
fn a_fork_at_any_step_inherits_nothing() {
    // A14 and section 5 of the design: fds in flight too.
    let Some(me) = Inside::enter("a_fork_at_any_step_inherits_nothing", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "main" => return me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {}
    }
    let mut importer = Importer::start();
    importer.core = driver::Cuda::with(hooked::driver()).unwrap();
    let watch = Watch::new();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    let imports = fork_everywhere(&watch, true, || {
        let import = importer.import(&rkey).unwrap();
        memory.spot_check(&importer.cuda, import.address(), 0, 4 * MIB).unwrap();
    });
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    // Without a broker, whose thread opens and closes fds in its own time.
    let exports = fork_everywhere(&watch, false, || {
        let exporter = Exporter::new(importer.core, exporter::without_broker()).unwrap();
        drop(exporter.export(address, 2 * MIB).unwrap());
    });
    println!("{imports} forks in an import, {exports} in an export");
    assert!(imports >= 35 && exports >= 30);
    assert_eq!(importer.fake.device(0).calls_after_fork, 0);
}
