//! Forked children that live on: they pin nothing, own nothing, and make no driver call (B43).

#![allow(clippy::unwrap_used, reason = "tests")]

use core::sync::atomic::{AtomicBool, Ordering};
use std::io::{BufRead, BufReader, Write};

use cuda_ipc_core::exporter::{Exporter, ExporterOptions, ExporterStats};
use cuda_ipc_core::importer::own_nonces_contain;
use cuda_ipc_core::reason::Cause;
use cuda_ipc_tests::child::{fork, raw_clone, wait};
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::snapshot;

const MIB: u64 = 1 << 20;

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
