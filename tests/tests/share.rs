//! Two separately executed processes share memory of many chunks: every byte, every way to cut a range, and what it costs.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_driver_sys::CUresult;
use cuda_ipc_core::importer::{Deadline, Import, ImportErrorKind, ImportStep};
use cuda_ipc_core::table::LookupError;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::importer::{LONG, WRITE, enter, key};
use cuda_ipc_tests::memory::STABLE;
use cuda_ipc_tests::snapshot::Snapshot;

const MIB: u64 = 1 << 20;

/// `count` chunks, one in `rate` of 20 MiB, from the second on, the others of 2 MiB; each with a seed of its own.
fn mixed(count: u64, rate: u64) -> Vec<(u64, u64)> {
    (0..count).map(|at| (if at % rate == 1 { 20 * MIB } else { 2 * MIB }, 100 + at)).collect()
}

#[test]
fn chunks_of_mixed_sizes_are_shared_byte_by_byte() {
    let Some((me, importer)) = enter("chunks_of_mixed_sizes_are_shared_byte_by_byte") else { return };
    let start = Snapshot::take(&importer.fake);
    for count in [1, 26, 400] {
        let mut remote = Remote::start(&me);
        let chunks = mixed(count, 25);
        let memory = remote.memory(4 << 30, &chunks);
        let (_, rkey) = remote.export(&memory, 0, memory.mapped_len());
        assert_eq!(remote.stats().chunks, count);

        let before = importer.fake.counters();
        let import = importer.verify(&rkey, &memory);
        let after = importer.fake.counters();
        assert_eq!(import.chunks().len() as u64, count);
        assert_eq!(after.imports_made - before.imports_made, count);
        assert_eq!((after.handles, after.mappings - before.mappings), (before.handles, count));
        assert_eq!(after.reserved_bytes - before.reserved_bytes, memory.mapped_len(), "exactly the mapped span is reserved (B30)");
        assert!(import.is_current());
        import.close().unwrap();
        remote.finish();
        start.assert_unchanged(&importer.fake, "an import that was closed");
    }
}

#[test]
fn a_range_may_begin_and_end_inside_chunks() {
    let Some((me, importer)) = enter("a_range_may_begin_and_end_inside_chunks") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(256 * MIB, &mixed(10, 8));
    // Chunks end at 2, 22, 24, 26, 28, 30, 32, 34, 36 and 56 MiB.
    for (offset, len, chunks) in [
        (0, 1, 1),
        (2 * MIB - 1, 1, 1),
        (2 * MIB - 1, 2, 2),
        (5 * MIB + 3, 7 * MIB + 11, 1),
        (MIB + 7, 24 * MIB, 4),
        (21 * MIB, 16 * MIB, 9),
        (36 * MIB, 20 * MIB, 1),
        (56 * MIB - 4097, 4097, 1),
        (0, 56 * MIB, 10),
    ] {
        let (export, rkey) = remote.export(&memory, offset, len);
        assert_eq!((rkey.base, rkey.len), (memory.base + offset, len));
        let import = importer.verify(&rkey, &memory);
        assert_eq!(import.chunks().len(), chunks, "{len} bytes at {offset:#x}");
        remote.ask(&format!("release {export}"));
    }
    // The key covers the reservation: parts of what is exported, asked for one by one (A18), and what lies outside it (A7).
    let (_, rkey) = remote.export(&memory, MIB, 30 * MIB);
    let peer = importer.connect(&rkey).unwrap();
    for (offset, len) in [(MIB, 1), (3 * MIB, 5 * MIB), (0, 2 * MIB), (24 * MIB - 1, 2), (30 * MIB, 2 * MIB)] {
        let import = importer.import_range(&peer, &rkey, memory.base + offset, len).unwrap();
        memory.verify(&importer.cuda, import.address(), offset, len).unwrap();
    }
    for (offset, hole) in [(36 * MIB, 36 * MIB), (31 * MIB, 32 * MIB)] {
        let error = importer.import_range(&peer, &rkey, memory.base + offset, 4 * MIB).unwrap_err();
        assert_eq!(error.step, ImportStep::Lookup);
        assert_eq!(error.kind, ImportErrorKind::Lookup(LookupError::NoChunk(memory.base + hole)), "not exported");
    }
    for (address, len) in
        [(memory.base - 1, 2), (memory.base + memory.len - 1, 2), (memory.base, memory.len + 1), (memory.base, 0), (0, u64::MAX)]
    {
        let error = importer.import_range(&peer, &rkey, address, len).unwrap_err();
        assert_eq!((error.step, error.kind), (ImportStep::Key, ImportErrorKind::OutsideReservation));
    }
}

#[test]
fn access_is_what_was_asked_for() {
    let Some((me, importer)) = enter("access_is_what_was_asked_for") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    let peer = importer.connect(&rkey).unwrap();

    let readable = importer.import_from(&peer, &rkey).unwrap();
    let refused = importer.cuda.write(readable.address() + MIB, &[0; 64]);
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_VALUE), "a write through a read-only import");
    importer.verify_import(&readable, &rkey, &memory);

    // One memory: what is written here is read there, and by the other import of the same chunks.
    let writable = Import::new(&importer.core, &peer, &key(&rkey), rkey.base, rkey.len, WRITE, Deadline::after(LONG)).unwrap();
    cuda_ipc_tests::pattern::fill(&importer.cuda, writable.address() + 2 * MIB, 4 * MIB, 77).unwrap();
    memory.chunks.insert(2 * MIB, (4 * MIB, 77));
    importer.verify_import(&readable, &rkey, &memory);
    assert_eq!(remote.ask(&format!("check {} {} {} 77", memory.index, 2 * MIB, 4 * MIB)), "");
}

#[test]
fn a_reservation_has_one_key_for_ever() {
    // A3, B19, B33: equal reservation, equal bytes, whatever is exported of it and whatever happened to its chunks.
    let Some((me, importer)) = enter("a_reservation_has_one_key_for_ever") else { return };
    let mut remote = Remote::start(&me);
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (20 * MIB, 2), (2 * MIB, 3)]);
    let (export, first) = remote.export(&memory, 0, 24 * MIB);
    let bytes = key(&first).encode();
    for (offset, len) in [(0, 24 * MIB), (3, 1), (21 * MIB, 2 * MIB), (0, 24 * MIB)] {
        assert_eq!(key(&remote.export(&memory, offset, len).1).encode(), bytes);
    }
    memory.map(&mut remote, 24 * MIB, 2 * MIB, 4);
    assert_eq!(key(&remote.export(&memory, 0, 26 * MIB).1).encode(), bytes, "grown");
    memory.replace(&mut remote, 2 * MIB, 5);
    let (_, last) = remote.export(&memory, 0, 26 * MIB);
    assert_eq!(key(&last).encode(), bytes, "a chunk was replaced");
    remote.ask(&format!("release {export}"));
    assert_eq!((key(&last).base, key(&last).len), (memory.base, memory.len));
    // A key from the very beginning leads to what is there now.
    let import = importer.import_range(&importer.connect(&first).unwrap(), &first, memory.base, 26 * MIB).unwrap();
    memory.verify(&importer.cuda, import.address(), 0, 26 * MIB).unwrap();
}

#[test]
fn reservations_side_by_side_are_never_merged() {
    let Some((me, importer)) = enter("reservations_side_by_side_are_never_merged") else { return };
    let mut remote = Remote::start(&me);
    let left = remote.memory_at(4 * MIB, STABLE, &[(2 * MIB, 1), (2 * MIB, 2)]);
    let right = remote.memory_at(4 * MIB, left.base + 4 * MIB, &[(4 * MIB, 3)]);
    assert_eq!(right.base, left.base + left.len, "adjacent");
    let (_, left_key) = remote.export(&left, 0, 4 * MIB);
    let (_, right_key) = remote.export(&right, 0, 4 * MIB);
    assert_ne!(key(&left_key), key(&right_key));
    assert_eq!((key(&left_key).len, key(&right_key).base), (4 * MIB, right.base));
    let refused = remote.try_export(&left, 2 * MIB, 4 * MIB).unwrap_err();
    assert_eq!(refused, format!("LeavesReservation {{ base: {}, len: {} }}", left.base, left.len));
    importer.verify(&left_key, &left);
    importer.verify(&right_key, &right);
    // All chunks are in one table, but a key reaches its own reservation only.
    let peer = importer.connect(&left_key).unwrap();
    let error = importer.import_range(&peer, &left_key, left.base + 2 * MIB, 4 * MIB).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::OutsideReservation);
}

#[test]
fn own_keys_are_refused_by_name() {
    let Some((_, importer)) = enter("own_keys_are_refused_by_name") else { return };
    let exporter = cuda_ipc_core::exporter::Exporter::new(importer.core, Default::default()).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    let error = importer.connect(&export.rkey()).unwrap_err();
    assert_eq!((error.step, error.kind, error.pid), (ImportStep::Key, ImportErrorKind::OwnProcess, std::process::id()));
}
