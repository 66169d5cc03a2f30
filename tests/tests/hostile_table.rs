//! A process that makes its own export table and puts into it whatever it likes. That costs the importer an error, no more.
//!
//! Each case is built by a hostile process (`build`) and imported here; what must come out stands beside its name.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::time::Duration;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_core::import::Step;
use cuda_ipc_core::importer::{Deadline, Import, ImportError, ImportErrorKind, ImportStep};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::table::{HeaderError, InvalidEntry, LookupError};
use cuda_ipc_tests::driver::{Cuda, FakeConfig, Inside};
use cuda_ipc_tests::importer::{Importer, READ, by_pidfd};
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::raw_table::{HEADER, RawEntry, RawTable};
use cuda_ipc_tests::snapshot::Snapshot;

const MIB: u64 = 1 << 20;
/// Live, first generation.
const LIVE: u64 = 5;
const GOOD: RawEntry = RawEntry { state: LIVE, fd: 0, kind: 1, address: 0, len: 2 * MIB };

/// Serves keys to tables of the cases that it is asked for.
fn build(me: &Inside) {
    let cuda = Cuda::start();
    cuda.enter_primary(0);
    let mut memory = Memory::reserve(cuda, 64 * MIB, 0).unwrap();
    // Two chunks of one size, and a larger one.
    let mut fds = Vec::new();
    for (offset, len, seed) in [(0, 2 * MIB, 1), (2 * MIB, 2 * MIB, 2), (4 * MIB, 4 * MIB, 3)] {
        memory.map(offset, len, seed).unwrap();
        let handle = cuda.mem_retain(memory.base() + offset).unwrap();
        fds.push(cuda.mem_export_fd(handle).unwrap().cast_unsigned());
        cuda.mem_release(handle).unwrap();
    }
    let mut nonce = 1000;
    while let Some(case) = me.listen() {
        nonce += 1;
        let table = RawTable::new(nonce).unwrap();
        // Leaked: the table's fd stays open, and restless threads stay alive.
        let table: &'static RawTable = Box::leak(Box::new(table));
        let key = case_table(&case, table, memory.base(), &fds);
        me.tell(&key.encode().map(|byte| format!("{byte:02x}")).concat());
    }
}

/// Fills the table. The importer will ask for the first 4 MiB of what the key names.
fn case_table(case: &str, table: &'static RawTable, base: u64, fds: &[u32]) -> Key {
    let first = RawEntry { fd: fds[0], address: base, ..GOOD };
    let second = RawEntry { fd: fds[1], address: base + 2 * MIB, ..GOOD };
    let both = |first: RawEntry, second: RawEntry| {
        for (slot, entry, address) in [(0, first, base), (1, second, base + 2 * MIB)] {
            table.entry(slot, &entry);
            table.index(address, slot);
        }
    };
    both(first, second);
    let (root, leaf) = RawTable::index_words(base);
    let mut key = table.key(base, 64 * MIB);
    match case {
        "honest" => {}
        // The header.
        header if HEADER.iter().any(|&(name, _)| name == header) => {
            let (_, at) = HEADER.into_iter().find(|&(name, _)| name == header).unwrap();
            table.put(at, table.get(at).wrapping_mul(1 << 20).wrapping_add(7));
        }
        // The index.
        "no index" => table.put(leaf, 0),
        "no root" => table.put(root, 0),
        "root beyond" => table.put(root, u64::MAX),
        "root just beyond" => table.put(root, (1 << 12) + 1),
        "slot beyond" => table.put(leaf, u64::MAX),
        "slot just beyond" => table.put(leaf, (1 << 20) + 1),
        "index of another" => table.put(leaf, 2),
        "index swapped" => {
            table.put(leaf, 2);
            table.put(leaf + 1, 1);
        }
        // One entry.
        "dead" => both(RawEntry { state: 6, ..first }, second),
        "neither" => both(RawEntry { state: 4, ..first }, second),
        "both states" => both(RawEntry { state: 7, ..first }, second),
        "kind" => both(RawEntry { kind: 9, ..first }, second),
        "pool kind" => both(RawEntry { kind: 2, ..first }, second),
        "fd beyond" => both(RawEntry { fd: 1 << 31, ..first }, second),
        "no fd" => both(first, RawEntry { fd: u32::MAX, ..second }),
        "address zero" => both(RawEntry { address: 0, ..first }, second),
        "address unaligned" => both(RawEntry { address: base + 4096, ..first }, second),
        "length zero" => both(RawEntry { len: 0, ..first }, second),
        "length unaligned" => both(RawEntry { len: 2 * MIB + 4096, ..first }, second),
        "length most" => both(RawEntry { len: u64::MAX, ..first }, second),
        "length wraps" => both(RawEntry { len: u64::MAX << 21, ..first }, second),
        "address beyond" => both(RawEntry { address: 1 << 62, ..first }, second),
        // Two entries that contradict each other.
        "overlap" => both(first, RawEntry { address: base, len: 4 * MIB, ..second }),
        "swallow" => both(RawEntry { len: 4 * MIB, ..first }, second),
        "begins outside" => {
            both(RawEntry { address: base - 2 * MIB, len: 4 * MIB, ..first }, second);
        }
        "ends outside" => {
            key.len = 4 * MIB;
            both(first, RawEntry { len: 4 * MIB, fd: fds[2], ..second });
        }
        "length absurd" => {
            key.len = 1 << 46;
            both(first, RawEntry { len: 1 << 46, ..second });
            key.len = (1 << 46) + 2 * MIB;
        }
        // Fds that are something else.
        "other chunk" => both(RawEntry { fd: fds[1], ..first }, RawEntry { fd: fds[0], ..second }),
        "larger chunk" => both(first, RawEntry { fd: fds[2], ..second }),
        "the table" => both(first, RawEntry { fd: table.number(), ..second }),
        "closed" => both(first, RawEntry { fd: 5000, ..second }),
        "pipe" => {
            let (read, write) = std::io::pipe().unwrap();
            let _ = write.into_raw_fd();
            both(first, RawEntry { fd: read.into_raw_fd().cast_unsigned(), ..second });
        }
        "socket" => {
            let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
            let _ = other.into_raw_fd();
            both(first, RawEntry { fd: one.into_raw_fd().cast_unsigned(), ..second });
        }
        path if path.starts_with('/') => {
            let file = std::fs::File::open(path).unwrap();
            both(first, RawEntry { fd: file.as_raw_fd().cast_unsigned(), ..second });
            let _ = file.into_raw_fd();
        }
        // Tables that never stand still.
        "restless state" => {
            let at = RawTable::entry_start(1);
            restless(move |round| table.put(at, (round + 2) << 2 | 1));
        }
        "restless births" => {
            table.put(leaf, 0);
            restless(move |round| table.put(16, round));
        }
        "restless length" => {
            let at = RawTable::entry_start(1) + 3;
            restless(move |round| table.put(at, (round % 3) * 2 * MIB));
        }
        // Thousands of entries for one fd.
        "crowd" => {
            let base = 1 << 40;
            for slot in 0..16_000_u32 {
                let address = base + u64::from(slot) * 2 * MIB;
                table.entry(slot, &RawEntry { address, ..first });
                table.index(address, slot);
            }
            key.base = base;
            key.len = 32_000 * MIB;
        }
        other => panic!("no case {other}"),
    }
    key
}

/// Changes something as fast as it can until the process ends.
fn restless(change: impl Fn(u64) + Send + 'static) {
    std::thread::spawn(move || {
        let mut round = 0;
        loop {
            round += 1;
            change(round);
        }
    });
}

fn import(importer: &Importer, key: &Key, len: u64, limit: Duration) -> Result<Import, ImportError> {
    let deadline = Deadline::after(limit);
    let peer = Arc::new(by_pidfd(key, deadline)?);
    Import::new(&importer.core, &peer, key, key.base, len, READ, deadline)
}

#[test]
fn a_hostile_table_costs_an_error_and_no_more() {
    let Some(me) = Inside::enter("a_hostile_table_costs_an_error_and_no_more", &FakeConfig::default()) else { return };
    if me.role() == "hostile" {
        return build(&me);
    }
    let importer = Importer::start();
    let mut hostile = me.spawn("hostile").unwrap();
    let mut ask = |case: &str| {
        hostile.tell(case);
        let hex = hostile.listen();
        let bytes: Vec<u8> = (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
        Key::decode(&bytes).unwrap()
    };
    let limit = Duration::from_secs(20);
    // What is right is imported, from such a table too.
    let honest = import(&importer, &ask("honest"), 4 * MIB, limit).unwrap();
    pattern::check(&importer.cuda, honest.address(), 0, 2 * MIB, 1).unwrap();
    pattern::check(&importer.cuda, honest.address() + 2 * MIB, 0, 2 * MIB, 2).unwrap();
    drop(honest);

    let before = Snapshot::take(&importer.fake);
    let mut refused = |case: &str| {
        let began = Instant::now();
        let error = import(&importer, &ask(case), 4 * MIB, limit).map(drop).unwrap_err();
        println!("{case}: {error}");
        before.assert_unchanged(&importer.fake, case);
        assert!(began.elapsed() < limit, "{case} took {:?}", began.elapsed());
        error
    };
    use ImportErrorKind as Kind;
    let header = |error: ImportError| match error {
        ImportError { step: ImportStep::OpenTable, kind: Kind::Table(error), .. } => error,
        other => panic!("{other}"),
    };
    let lookup = |error: ImportError| match error {
        ImportError { step: ImportStep::Lookup, kind: Kind::Lookup(error), .. } => error,
        other => panic!("{other}"),
    };
    assert!(matches!(header(refused("magic")), HeaderError::Magic(_)));
    assert!(matches!(header(refused("version")), HeaderError::Version(_)));
    assert!(matches!(header(refused("nonce")), HeaderError::Nonce { .. }));
    for capacity in ["entries", "root", "leaves", "leaf_len"] {
        assert_eq!(header(refused(capacity)), HeaderError::Layout);
    }
    for case in
        ["no index", "no root", "root beyond", "root just beyond", "slot beyond", "slot just beyond", "dead", "neither", "both states"]
    {
        assert!(matches!(lookup(refused(case)), LookupError::NoChunk(_)), "{case}");
    }
    for case in ["index of another", "index swapped", "overlap", "pool kind"] {
        assert!(matches!(lookup(refused(case)), LookupError::Inconsistent { .. }), "{case}");
    }
    assert!(matches!(lookup(refused("kind")), LookupError::Invalid { slot: 0, what: InvalidEntry::Kind(9) }));
    assert!(matches!(lookup(refused("fd beyond")), LookupError::Invalid { slot: 0, what: InvalidEntry::Fd(_) }));
    for case in ["address zero", "address unaligned", "length zero", "length unaligned", "length most", "length wraps", "address beyond"] {
        assert!(matches!(lookup(refused(case)), LookupError::Invalid { slot: 0, what: InvalidEntry::Range { .. } }), "{case}");
    }
    for case in ["begins outside", "ends outside"] {
        let error = refused(case);
        assert_eq!((error.step, error.kind), (ImportStep::Lookup, Kind::OutsideReservation), "{case}");
    }
    let driver = |error: ImportError| match error.kind {
        Kind::Driver(reason) => (error.step, reason.call, reason.code),
        _ => panic!("{error}"),
    };
    // More addresses than there are.
    assert_eq!(driver(refused("length absurd")), (ImportStep::Reserve, "cuMemAddressReserve", 2));
    // A chunk of another length than the entry says: the driver maps whole chunks only.
    for case in ["swallow", "larger chunk"] {
        assert_eq!(driver(refused(case)), (ImportStep::Chunk(Step::Map), "cuMemMap", 801), "{case}");
    }
    // Fds that are no chunk.
    for case in ["the table", "pipe", "socket", "/dev/null", "/dev/zero", "/", "/proc/self/mem", "/etc/passwd"] {
        assert_eq!(driver(refused(case)), (ImportStep::Chunk(Step::Import), "cuMemImportFromShareableHandle", 999), "{case}");
    }
    let error = refused("closed");
    assert_eq!(error.step, ImportStep::Chunk(Step::Fetch));
    assert!(matches!(error.kind, Kind::Pidfd(reason) if reason.errno.0 == libc::EBADF));
    assert_eq!(refused("no fd").kind, Kind::NoFd);

    // An entry that lies about which chunk it is costs the liar's own data.
    let other = import(&importer, &ask("other chunk"), 4 * MIB, limit).unwrap();
    pattern::check(&importer.cuda, other.address(), 0, 2 * MIB, 2).unwrap();
    drop(other);

    // Tables that never stand still: an end in time, and a named one.
    for case in ["restless state", "restless births", "restless length", "births"] {
        let key = ask(case);
        for _ in 0..200 {
            match import(&importer, &key, 4 * MIB, limit) {
                Err(error) => assert!(
                    matches!(error.kind, Kind::Lookup(_) | Kind::Retired | Kind::Driver(_) | Kind::OutsideReservation),
                    "{case}: {error}"
                ),
                Ok(import) => drop(import),
            }
        }
        before.assert_unchanged(&importer.fake, case);
    }
    // More chunks than there is time for.
    let key = ask("crowd");
    let error = import(&importer, &key, key.len, Duration::from_millis(30)).map(drop).unwrap_err();
    assert_eq!((error.kind, error.stuck_bytes), (Kind::DeadlineOver, 0), "{error}");
    before.assert_unchanged(&importer.fake, "a crowd");
    hostile.kill().unwrap();
}
