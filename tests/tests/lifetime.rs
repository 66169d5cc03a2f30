//! What chunks do while they are shared: exports that overlap, growth, replacement, and the ways in which memory comes back.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::time::Duration;
use std::time::Instant;

use cuda_ipc_core::importer::{ImportErrorKind, ImportStep};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::table::LookupError;
use cuda_ipc_tests::exporter::{Remote, Stats};
use cuda_ipc_tests::importer::enter;
use cuda_ipc_tests::memory::STABLE;
use cuda_ipc_tests::snapshot::{Snapshot, wait_until};

const MIB: u64 = 1 << 20;

#[test]
fn exports_that_overlap_share_chunks_and_fds() {
    let Some((me, importer)) = enter("exports_that_overlap_share_chunks_and_fds") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2), (4 * MIB, 3), (2 * MIB, 4), (2 * MIB, 5)]);
    remote.ask("exporter 64");
    let fds = remote.number("fds");
    // Chunks 0 to 2, chunks 2 to 4, all of them twice, and one in the middle.
    let (left, _) = remote.export(&memory, MIB, 5 * MIB);
    let (right, right_key) = remote.export(&memory, 5 * MIB, 6 * MIB);
    let whole: Vec<u64> = (0..2).map(|_| remote.export(&memory, 0, 12 * MIB).0).collect();
    let (middle, _) = remote.export(&memory, 6 * MIB, MIB);
    assert_eq!(remote.stats(), Stats { chunks: 5, fds: 5, published: 5, ..Stats::default() });
    assert_eq!(remote.number("fds") - fds, 5, "one fd per chunk");
    assert_eq!(remote.number("calls cuMemExportToShareableHandle"), 5);

    for export in [left, whole[0], whole[1]] {
        remote.ask(&format!("release {export}"));
    }
    assert_eq!(remote.stats(), Stats { chunks: 3, fds: 3, published: 5, retired: 2, ..Stats::default() });
    assert_eq!(remote.number("fds") - fds, 3);
    let import = importer.verify(&right_key, &memory);
    let peer = importer.connect(&right_key).unwrap();
    let gone = importer.import_range(&peer, &right_key, memory.base, 2 * MIB).unwrap_err();
    assert_eq!(gone.kind, ImportErrorKind::Lookup(LookupError::NoChunk(memory.base)));

    remote.ask(&format!("release {right}"));
    assert!(!import.is_current(), "two of its chunks are retired");
    assert_eq!(remote.stats().chunks, 1);
    remote.ask(&format!("release {middle}"));
    assert_eq!(remote.stats(), Stats { published: 5, retired: 5, ..Stats::default() });
    assert_eq!(remote.number("fds"), fds);
}

#[test]
fn a_registration_inside_known_chunks_makes_no_export_call() {
    let Some((me, _)) = enter("a_registration_inside_known_chunks_makes_no_export_call") else { return };
    let mut remote = Remote::start(&me);
    let chunks: Vec<_> = (0..20).map(|seed| (2 * MIB, seed)).collect();
    let memory = remote.memory(64 * MIB, &chunks);
    remote.export(&memory, 0, 40 * MIB);
    let functions = ["cuMemExportToShareableHandle", "cuMemRetainAllocationHandle", "cuMemRelease", "cuMemGetAddressRange"];
    let calls: Vec<u64> = functions.iter().map(|name| remote.number(&format!("calls {name}"))).collect();
    let queries = remote.number("calls cuPointerGetAttribute");
    for (offset, len) in [(0, 40 * MIB), (MIB, 2 * MIB), (39 * MIB, MIB), (8 * MIB, 1)] {
        remote.export(&memory, offset, len);
    }
    let after: Vec<u64> = functions.iter().map(|name| remote.number(&format!("calls {name}"))).collect();
    assert_eq!(after, calls);
    assert_eq!(remote.number("calls cuPointerGetAttribute") - queries, 20 + 2 + 1 + 1, "one look at each chunk touched");
    assert_eq!(remote.stats().published, 20);
}

#[test]
fn growth_keeps_what_is_there() {
    // A6: the same base, and the range grows, shrinks and gets another middle without a new registration of what stays.
    let Some((me, importer)) = enter("growth_keeps_what_is_there") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    let (_, one) = remote.export(&memory, 0, 2 * MIB);
    let peer = importer.connect(&one).unwrap();
    let first = importer.import_from(&peer, &one).unwrap();
    memory.map(&mut remote, 2 * MIB, 2 * MIB, 2);
    memory.map(&mut remote, 4 * MIB, 20 * MIB, 3);
    let (_, three) = remote.export(&memory, 0, 24 * MIB);
    assert!(first.is_current());
    importer.verify_import(&first, &one, &memory);
    // By the old peer, and with the old key too.
    for key in [&three, &one] {
        let grown = importer.import_range(&peer, key, memory.base, 24 * MIB).unwrap();
        importer.verify_import(&grown, &three, &memory);
    }

    let whole = importer.import_from(&peer, &three).unwrap();
    memory.replace(&mut remote, 2 * MIB, 4);
    assert!(!whole.is_current());
    assert!(first.is_current(), "another chunk's death is nothing to it");
    importer.verify_import(&first, &one, &memory);
    let hole = importer.import_from(&peer, &three).unwrap_err();
    assert_eq!(hole.kind, ImportErrorKind::Lookup(LookupError::NoChunk(memory.base + 2 * MIB)), "the new chunk was not exported yet");
    remote.export(&memory, 0, 24 * MIB);
    importer.verify_import(&importer.import_from(&peer, &three).unwrap(), &three, &memory);

    memory.unmap(&mut remote, 4 * MIB);
    remote.ask("sweep");
    let shrunk = importer.import_from(&peer, &three).unwrap_err();
    assert_eq!(shrunk.kind, ImportErrorKind::Lookup(LookupError::NoChunk(memory.base + 4 * MIB)));
    importer.verify_import(&importer.import_range(&peer, &three, memory.base, 4 * MIB).unwrap(), &Rkey { len: 4 * MIB, ..three }, &memory);
}

#[test]
fn one_address_many_lives() {
    // B3, A10: freed and made again at one address, larger and smaller, with and without a word; the bytes are the present ones or there is an error.
    let Some((me, importer)) = enter("one_address_many_lives") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(16 * MIB, &[]);
    let start = Snapshot::take(&importer.fake);
    let mut known = None;
    for round in 0..200_u64 {
        let len = (1 + round % 4) * 2 * MIB;
        memory.map(&mut remote, 0, len, 1000 + round);
        let (export, rkey) = remote.export(&memory, 0, len);
        let peer = known.get_or_insert_with(|| importer.connect(&rkey).unwrap());
        let import = importer.import_from(peer, &rkey).unwrap();
        memory.verify(&importer.cuda, import.address(), 0, len).unwrap();
        match round % 3 {
            0 => drop(remote.ask(&format!("retire {} 0 {len}", memory.index))),
            1 => drop(remote.ask(&format!("release {export}"))),
            // Nobody tells: the next export finds the old entry stale.
            _ => {}
        }
        memory.unmap(&mut remote, 0);
        import.close().unwrap();
    }
    assert_eq!(remote.stats().published, 200);
    drop(known);
    start.assert_unchanged(&importer.fake, "200 lives of a chunk (A14)");
}

#[test]
fn an_exporter_that_restarts_is_another_exporter() {
    // B11, A10: same address, size and pid numbers may come again; the nonce does not.
    let Some((me, importer)) = enter("an_exporter_that_restarts_is_another_exporter") else { return };
    let mut first = Remote::start(&me);
    let old = first.memory_at(64 * MIB, STABLE, &[(4 * MIB, 1)]);
    let (_, old_key) = first.export(&old, 0, 4 * MIB);
    let peer = importer.connect(&old_key).unwrap();
    let import = importer.import_from(&peer, &old_key).unwrap();
    assert!(!peer.has_exited());
    first.kill();
    assert!(peer.has_exited());
    let mut second = Remote::start(&me);
    let new = second.memory_at(64 * MIB, old.base, &[(4 * MIB, 2)]);
    assert_eq!(new.base, old.base);
    let (_, new_key) = second.export(&new, 0, 4 * MIB);
    let gone = importer.import_from(&peer, &old_key).unwrap_err();
    assert_eq!((gone.step, gone.kind), (ImportStep::Chunk(cuda_ipc_core::import::Step::Fetch), ImportErrorKind::ExporterGone));
    importer.connect(&old_key).expect_err("the old process is gone");
    importer.verify(&new_key, &new);
    // What was mapped stays what it was.
    importer.verify_import(&import, &old_key, &old);
}

#[test]
fn released_memory_is_free_again() {
    let Some((me, importer)) = enter("released_memory_is_free_again") else { return };
    let mut observer = Remote::start(&me);
    let free = observer.number("free");
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (20 * MIB, 2)]);
    remote.ask("exporter 64");
    let fds = remote.number("fds");
    let (export, rkey) = remote.export(&memory, 0, 22 * MIB);
    assert_eq!(observer.number("free"), free - 22 * MIB);
    remote.ask(&format!("release {export}"));
    assert_eq!(remote.number("fds"), fds);
    memory.unmap(&mut remote, 2 * MIB);
    assert_eq!(observer.number("free"), free - 2 * MIB, "nothing of the exporter's pins it");

    // With an importer in between: its mapping pins, and nothing else (B1).
    memory.map(&mut remote, 2 * MIB, 20 * MIB, 3);
    remote.export(&memory, 0, 22 * MIB);
    let import = importer.verify(&rkey, &memory);
    assert_eq!(remote.number(&format!("retire {} 0 {}", memory.index, 64 * MIB)), 2);
    memory.unmap(&mut remote, 0);
    memory.unmap(&mut remote, 2 * MIB);
    assert!(!import.is_current());
    assert_eq!(observer.number("free"), free - 22 * MIB);
    import.close().unwrap();
    assert_eq!(observer.number("free"), free);
    assert_eq!((remote.number("fds"), remote.stats().chunks), (fds, 0));
}

#[test]
fn retiring_before_the_unmapping_frees_at_once() {
    let Some((me, importer)) = enter("retiring_before_the_unmapping_frees_at_once") else { return };
    let mut observer = Remote::start(&me);
    let free = observer.number("free");
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, 0, 8 * MIB);
    let peer = importer.connect(&rkey).unwrap();
    let epoch = peer.table().unwrap().epoch();
    // One byte of the middle chunk is enough to name it.
    assert_eq!(remote.number(&format!("retire {} {} 1", memory.index, 3 * MIB)), 1);
    assert_eq!(peer.table().unwrap().epoch(), epoch + 1);
    memory.unmap(&mut remote, 2 * MIB);
    assert_eq!(observer.number("free"), free - 4 * MIB, "no wait: an allocator that is short of memory tries again at once");
    assert_eq!(remote.number(&format!("retire {} {} 1", memory.index, 3 * MIB)), 0, "once");
    let error = importer.import_from(&peer, &rkey).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::Lookup(LookupError::NoChunk(memory.base + 2 * MIB)));
    for (offset, len) in [(0, 2 * MIB), (6 * MIB, 2 * MIB)] {
        let import = importer.import_range(&peer, &rkey, memory.base + offset, len).unwrap();
        memory.verify(&importer.cuda, import.address(), offset, len).unwrap();
    }
}

#[test]
fn a_sweep_finds_what_nobody_tells() {
    let Some((me, importer)) = enter("a_sweep_finds_what_nobody_tells") else { return };
    let mut observer = Remote::start(&me);
    let free = observer.number("free");
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64 100");
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (20 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 22 * MIB);
    let peer = importer.connect(&rkey).unwrap();
    let import = importer.import_range(&peer, &rkey, memory.base, 2 * MIB).unwrap();
    let began = Instant::now();
    memory.unmap(&mut remote, 2 * MIB);
    let back = wait_until(Duration::from_secs(10), || observer.number("free") == free - 2 * MIB);
    let took = began.elapsed();
    assert!(back && took <= Duration::from_millis(500), "{took:?}");
    assert_eq!(remote.stats(), Stats { chunks: 1, fds: 1, published: 2, retired: 1, swept: 1 });
    assert!(import.is_current(), "what lives is left alone");
    importer.import_from(&peer, &rkey).expect_err("one chunk is gone");
    println!("memory was back after {took:?}");
}
