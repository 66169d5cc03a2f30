//! Every libc call and every driver call that the preload library makes while UCX exports, imports and copies fails once, in every plausible way.
//!
//! UCX either gets its lane, with the right bytes, or is told no by a function that may say no, and then the reason is said; what it does next works, and the
//! process has afterwards what it would have had.

#![allow(clippy::unwrap_used, reason = "tests")]

mod children;
mod lives;
mod races;

use core::cell::RefCell;
use core::ptr::null_mut;
use std::rc::Rc;
use std::sync::Arc;

use cuda_ipc_core::importer::{Deadline, Import, PooledImport};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_tests::driver::{FakeConfig, Inside, Peer};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, READ, by_pidfd, key};
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::points::{Point, Verdict};
use cuda_ipc_tests::sweep::names;
use cuda_ipc_tests::uct::{KEY_LEN, Stopped};
use cuda_ipc_tests::{shim, uct};

use lives::{Begin, Life, Operation, Place, Told, sweep};

const MIB: u64 = 1 << 20;

/// Enters a test in a process with the shim and the preload library, in which nothing was used yet, with an exporter in another.
fn enter(test: &str) -> Option<(Inside, Remote)> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    match me.role() {
        exporter::ROLE => exporter::serve(&me),
        CHECKER => check(&me),
        "main" => {
            let both = |command: &mut std::process::Command| {
                shim::preload(command);
                uct::preload(command);
            };
            me.spawn_with("watched", both).unwrap().finish();
        }
        _ => {
            let mut remote = Remote::start(&me);
            remote.ask("exporter_with reserve=64");
            return Some((me, remote));
        }
    }
    None
}

/// Whether it is right that the lane is lost where this failed so: what failed is the driver's own answer to UCX, or it is said.
fn judge(place: &Place, verdict: Verdict, told: &Told) -> bool {
    let point = Point { number: 0, callee: place.callee, name: place.name, before: true };
    let own_answer = verdict == Verdict::Fail(told.stopped_with()) && told.stopped_at() == place.name;
    // The standard library's own, for its hash maps, where the kernel answers what it never does. It panics, in words; no panic leaves a handler.
    let panicked = place.name == "getrandom" && told.said.contains("failed to generate random data");
    // The table's number is closed there: as after an exec.
    let gone = (place.name, verdict) == ("pidfd_getfd", Verdict::Fail(libc::EBADF)) && told.said.contains("the exporter has exited");
    // The driver is shut down, and with it the process: nothing is lost that anybody would miss.
    let over = (place.name, verdict) == ("cuPointerGetAttributes", Verdict::Fail(4));
    // The driver's functions are called by the names of their versions.
    let said = told.said.replace("_v2 failed", " failed");
    own_answer || panicked || over || said.contains("WARN") && (gone || names(&said, &point, verdict))
}

/// Copies by UCX into memory of this process, and compares.
fn copy(life: &Life, local: u64, from: u64, len: u64, seed: u64) -> Result<(), Stopped> {
    let cuda = &life.importer.cuda;
    cuda.fill(local, 0xee, usize::try_from(len).unwrap()).unwrap();
    life.uct.copy(local, from, len)?;
    cuda.stream_synchronize(null_mut()).unwrap();
    pattern::check(cuda, local, 0, len, seed).unwrap();
    Ok(())
}

#[test]
fn an_import_keeps_the_lane_or_says_why_not() {
    let Some((_me, mut remote)) = enter("an_import_keeps_the_lane_or_says_why_not") else { return };
    let memory = remote.marked_memory_at(64 * MIB, 0, &[(2 * MIB, 1), (4 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, 0, 8 * MIB);
    let (bytes, base, len) = (key(&rkey).encode(), key(&rkey).base, key(&rkey).len);
    let make = || -> Box<Begin<'_>> {
        let memory = memory.clone();
        Box::new(move |life: Life| -> Operation<'_> {
            let local = life.importer.cuda.mem_alloc(4096).unwrap();
            let offset = memory.base - base;
            Box::new(move || {
                let imported = life.uct.import(&bytes, len)?;
                let copied = copy(&life, local, imported.address + offset, 4096, 1)
                    .and_then(|()| copy(&life, local, imported.address + offset + 6 * MIB, 4096, 3));
                life.uct.close(imported).unwrap();
                copied
            })
        })
    };
    let report = sweep(&make, &judge);
    println!("import by the preload library: {report:?}");
    assert!(report.places >= 54 && report.runs >= 514 && report.kept >= 200, "{report:?}");
    remote.finish();
}

#[test]
fn an_import_of_a_pool_keeps_the_lane_or_says_why_not() {
    let Some((_me, mut remote)) = enter("an_import_of_a_pool_keeps_the_lane_or_says_why_not") else { return };
    let pool = remote.number("pool 0 1");
    let rkeys = [1, 2].map(|seed| {
        let address = remote.number(&format!("pool_alloc {pool} {} {seed}", 2 * MIB));
        remote.export_at(address, 2 * MIB).1
    });
    let pointers = rkeys.map(|rkey| key(&rkey).encode());
    // As the exporter's preload library says it: the driver's number of the pool stands where the base does.
    let of_pool = Key { kind: KeyKind::Pool, base: 0x1000, len: 1, ..key(&rkeys[0]) }.encode();
    let make = || -> Box<Begin<'_>> {
        Box::new(move |life: Life| -> Operation<'_> {
            let local = life.importer.cuda.mem_alloc(4096).unwrap();
            let mut opened = None;
            Box::new(move || {
                // UCX keeps a pool that it has opened.
                let pool = match opened {
                    Some(pool) => pool,
                    None => *opened.insert(life.uct.import_pool(&of_pool, &pointers[0])?),
                };
                for (pointer, seed) in pointers.iter().zip(1..) {
                    let address = life.uct.import_pointer(pool, pointer)?;
                    let copied = copy(&life, local, address, 4096, seed);
                    life.uct.free_pointer(address).unwrap();
                    copied?;
                }
                Ok(())
            })
        })
    };
    let report = sweep(&make, &judge);
    println!("import of a pool by the preload library: {report:?}");
    assert!(report.places >= 59 && report.runs >= 550 && report.kept >= 200, "{report:?}");
    remote.finish();
}

/// The role of a process that imports what it is told to, and compares.
const CHECKER: &str = "checker";

/// One line asks: the key, an address in the exporter, and the seed of the bytes that are at the start of an allocation there.
fn check(me: &Inside) {
    let importer = Importer::start();
    me.tell("ready");
    while let Some(request) = me.listen() {
        let words: Vec<&str> = request.split(' ').collect();
        let &[key, address, seed] = &words[..] else { panic!("{request}") };
        let bytes: Vec<u8> = (0..KEY_LEN).map(|at| u8::from_str_radix(&key[2 * at..2 * at + 2], 16).unwrap()).collect();
        let key = Key::decode(bytes.first_chunk::<KEY_LEN>().unwrap()).unwrap();
        let (address, seed): (u64, u64) = (address.parse().unwrap(), seed.parse().unwrap());
        let peer = Arc::new(by_pidfd(&key, Deadline::after(LONG)).unwrap());
        if key.kind == KeyKind::Reservation {
            let import = Import::new(&importer.core, &peer, &key, address, 4096, READ, Deadline::after(LONG)).unwrap();
            pattern::check(&importer.cuda, import.address(), 0, 4096, seed).unwrap();
        } else {
            let import = PooledImport::new(&importer.core, &peer, &key, &[0], Deadline::after(LONG)).unwrap();
            pattern::check(&importer.cuda, import.address() + (address - key.base), address - key.base, 4096, seed).unwrap();
        }
        me.tell("right");
    }
}

/// Has the checker look at what a key of this process names.
fn verify(checker: &RefCell<Peer>, key: &[u8; KEY_LEN], address: u64, seed: u64) {
    let mut checker = checker.borrow_mut();
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    checker.tell(&format!("{hex} {address} {seed}"));
    assert_eq!(checker.listen(), "right");
}

fn start_checker(me: &Inside) -> RefCell<Peer> {
    let mut checker = me.spawn(CHECKER).unwrap();
    assert_eq!(checker.listen(), "ready");
    RefCell::new(checker)
}

#[test]
fn an_export_keeps_the_lane_or_says_why_not() {
    let Some((me, _)) = enter("an_export_keeps_the_lane_or_says_why_not") else { return };
    let make = || -> Box<Begin<'_>> {
        let checker = Rc::new(start_checker(&me));
        Box::new(move |life: Life| -> Operation<'_> {
            let checker = checker.clone();
            let mut memory = Memory::reserve(life.importer.cuda, 64 * MIB, 0).unwrap();
            for (offset, len, seed) in [(0, 2 * MIB, 1), (2 * MIB, 4 * MIB, 2), (6 * MIB, 2 * MIB, 3)] {
                memory.mark(offset, len, seed).unwrap();
            }
            let base = memory.base();
            let mut first = None;
            Box::new(move || {
                let _kept = &memory;
                for (offset, seed) in [(0, 1), (6 * MIB, 3)] {
                    let exported = life.uct.export(base + offset)?;
                    // What UCX remembers of a reservation never changes.
                    assert_eq!(*first.get_or_insert(exported), exported);
                    assert_eq!((exported.base, exported.len), (base, 64 * MIB));
                    verify(&checker, &exported.handle, base + offset, seed);
                }
                Ok(())
            })
        })
    };
    let report = sweep(&make, &judge);
    println!("export by the preload library: {report:?}");
    assert!(report.places >= 110 && report.runs >= 975 && report.kept >= 500, "{report:?}");
}

#[test]
fn an_export_of_a_pool_keeps_the_lane_or_says_why_not() {
    let Some((me, _)) = enter("an_export_of_a_pool_keeps_the_lane_or_says_why_not") else { return };
    let make = || -> Box<Begin<'_>> {
        let checker = Rc::new(start_checker(&me));
        Box::new(move |life: Life| -> Operation<'_> {
            let checker = checker.clone();
            let cuda = life.importer.cuda;
            let pool = cuda.pool_create(0, 1).unwrap();
            let addresses = [1, 2].map(|seed| {
                let address = cuda.alloc_from_pool(2 << 20, pool, null_mut()).unwrap();
                cuda.stream_synchronize(null_mut()).unwrap();
                pattern::mark(&cuda, address, 2 * MIB, seed).unwrap();
                address
            });
            Box::new(move || {
                for (address, seed) in addresses.into_iter().zip(1..) {
                    let exported = life.uct.export_pooled(address)?;
                    assert_eq!((exported.base, exported.len), (address, 2 * MIB));
                    verify(&checker, &exported.pointer, address, seed);
                }
                Ok(())
            })
        })
    };
    let report = sweep(&make, &judge);
    println!("export of a pool by the preload library: {report:?}");
    assert!(report.places >= 82 && report.runs >= 757 && report.kept >= 400, "{report:?}");
}
