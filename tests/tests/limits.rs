//! Few file descriptors, on either side: what works within them works, what does not is named, and other code still finds a free number.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::os::fd::AsRawFd;

use cuda_ipc_core::import::Step;
use cuda_ipc_core::importer::{ImportErrorKind, ImportStep};
use cuda_ipc_tests::exporter::{Remote, Stats};
use cuda_ipc_tests::importer::enter;
use cuda_ipc_tests::snapshot::Snapshot;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pidfd_sys::Errno;

const MIB: u64 = 1 << 20;

fn limit_files(soft: u64) -> u64 {
    let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    before
}

#[test]
fn an_importer_of_400_chunks_needs_few_fds() {
    let Some((me, importer)) = enter("an_importer_of_400_chunks_needs_few_fds") else { return };
    let mut remote = Remote::start(&me);
    let chunks: Vec<_> = (0..400).map(|seed| (2 * MIB, seed)).collect();
    let memory = remote.memory(1 << 30, &chunks);
    remote.ask("exporter 64");
    let (_, rkey) = remote.export(&memory, 0, 800 * MIB);
    assert_eq!(remote.stats().fds, 400);
    let before = Snapshot::take(&importer.fake);
    // As high as needed for what is open, and four more.
    let lowest_free = File::open("/dev/null").unwrap().as_raw_fd();
    let limit = limit_files(16);
    assert!(lowest_free <= 12, "{lowest_free}");
    let import = importer.import(&rkey).unwrap();
    limit_files(limit);
    assert_eq!(import.chunks().len(), 400);
    memory.spot_check(&importer.cuda, import.address(), 0, 800 * MIB).unwrap();
    import.close().unwrap();
    before.assert_unchanged(&importer.fake, "400 chunks by few fds");
    println!("400 chunks with RLIMIT_NOFILE 16, {lowest_free} fds in use");
}

#[test]
fn an_exporter_leaves_fds_to_the_application() {
    // B29: within the budget, and past it without an fd; an unrelated open() always works.
    let Some((me, importer)) = enter("an_exporter_leaves_fds_to_the_application") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("limit 64");
    remote.ask("exporter 40");
    let chunks: Vec<_> = (0..200).map(|seed| (2 * MIB, seed)).collect();
    let memory = remote.memory(1 << 30, &chunks);
    let (export, rkey) = remote.export(&memory, 0, 400 * MIB);
    assert_eq!(remote.stats(), Stats { chunks: 200, fds: 24, published: 200, ..Stats::default() });
    let opened: Vec<u64> = (0..20).map(|_| remote.number("open /dev/null")).collect();
    opened.iter().for_each(|number| drop(remote.ask(&format!("close {number}"))));

    let peer = importer.connect(&rkey).unwrap();
    let before = Snapshot::take(&importer.fake);
    let entries = peer.lookup(rkey.base, rkey.len).unwrap();
    assert_eq!(entries.iter().filter(|(_, chunk)| chunk.fd.is_some()).count(), 24);
    let first_without = entries.iter().find(|(_, chunk)| chunk.fd.is_none()).unwrap().1.address;
    let error = importer.import_from(&peer, &rkey).map(drop).unwrap_err();
    assert_eq!((error.step, error.kind, error.address), (ImportStep::Chunk(Step::Fetch), ImportErrorKind::NoFd, first_without));
    assert!(error.other_route_may_work() && !error.retryable());
    before.assert_unchanged(&importer.fake, "a chunk without an fd");
    let with = importer.import_range(&peer, &rkey, rkey.base, first_without - rkey.base).unwrap();
    memory.spot_check(&importer.cuda, with.address(), 0, first_without - rkey.base).unwrap();

    // The budget is of fds held now: what is released makes room.
    remote.ask(&format!("release {export}"));
    let (_, rkey) = remote.export(&memory, 100 * MIB, 40 * MIB);
    assert_eq!(remote.stats().fds, 20);
    importer.verify(&rkey, &memory);
}

#[test]
fn a_limit_below_the_reserve_means_no_fds_at_all() {
    let Some((me, importer)) = enter("a_limit_below_the_reserve_means_no_fds_at_all") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("limit 200");
    remote.ask("exporter 256");
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    assert_eq!(remote.stats(), Stats { chunks: 2, published: 2, ..Stats::default() });
    assert_eq!(importer.import(&rkey).map(drop).unwrap_err().kind, ImportErrorKind::NoFd);
}

#[test]
fn an_exporter_without_a_free_number_says_so() {
    // A16, B29: not "out of memory". And no lasting verdict.
    let Some((me, importer)) = enter("an_exporter_without_a_free_number_says_so") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2), (2 * MIB, 3)]);
    remote.ask("exporter 0");
    remote.ask("limit 100");
    remote.ask("fill 0");
    let full = remote.try_export(&memory, 0, 6 * MIB).unwrap_err();
    assert_eq!(full, "TooManyFiles { limit: 100 }");
    assert_eq!(remote.stats(), Stats::default());
    // Room for one chunk, but the export is of three: nothing of it stays.
    remote.ask("close 99");
    assert_eq!(remote.try_export(&memory, 0, 6 * MIB).unwrap_err(), "TooManyFiles { limit: 100 }");
    let stats = remote.stats();
    assert_eq!((stats.chunks, stats.fds), (0, 0));
    assert_eq!(remote.number("open /dev/null"), 99, "the number is free again");
    for number in [97, 98, 99] {
        remote.ask(&format!("close {number}"));
    }
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    importer.verify(&rkey, &memory);
    // A new exporter needs a number for its table, and one before that to read this machine's boot id.
    remote.ask("no_exporter");
    remote.ask("fill 0");
    let error = remote.try_ask("exporter 0").unwrap_err();
    assert_eq!(error, "SyscallError { call: \"read(/proc/sys/kernel/random/boot_id)\", errno: 24 }");
    remote.ask("close 99");
    remote.ask("exporter 0");
    assert_eq!(remote.try_export(&memory, 0, 6 * MIB).unwrap_err(), "TooManyFiles { limit: 100 }");
}

#[test]
fn an_importer_without_a_free_number_says_where() {
    // A16: EMFILE at pidfd_open, at the table and at a chunk: three true messages, and success as soon as there is room.
    let Some((me, importer)) = enter("an_importer_without_a_free_number_says_where") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    importer.verify(&rkey, &memory);
    let limit = limit_files(100);
    let before = Snapshot::take(&importer.fake);
    let mut fill: Vec<File> = core::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let emfile = |error: cuda_ipc_core::importer::ImportError, step, call: &str| {
        let ImportErrorKind::Pidfd(reason) = error.kind else { panic!("{error}") };
        assert_eq!((error.step, reason.step.name(), reason.errno), (step, call, Errno::EMFILE), "{error}");
        assert!(error.retryable(), "{error}");
        error.to_string()
    };
    let mut said = Vec::new();
    // None free: this machine's boot id cannot be read.
    said.push(emfile(importer.connect(&rkey).unwrap_err(), ImportStep::Key, "read(/proc/sys/kernel/random/boot_id)"));
    // One: for the pidfd, but then not for the table.
    fill.pop();
    said.push(emfile(importer.connect(&rkey).unwrap_err(), ImportStep::FetchTable, "pidfd_getfd"));
    // Two: the peer is reached, and one stays free.
    fill.pop();
    let peer = importer.connect(&rkey).unwrap();
    fill.push(File::open("/dev/null").unwrap());
    said.push(emfile(importer.import_from(&peer, &rkey).map(drop).unwrap_err(), ImportStep::Chunk(Step::Fetch), "pidfd_getfd"));
    assert!(said[0] != said[1] && said[1] != said[2], "{said:?}");
    // Two for two chunks and a look at the table, whatever their number.
    fill.truncate(fill.len() - 2);
    let import = importer.import_from(&peer, &rkey).unwrap();
    memory.verify(&importer.cuda, import.address(), 0, 4 * MIB).unwrap();
    drop((import, peer, fill));
    before.assert_unchanged(&importer.fake, "all of it");
    limit_files(limit);
}
