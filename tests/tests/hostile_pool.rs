//! A process that says of its pools whatever it likes. That costs the importer an error, no more.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::ptr::null_mut;
use core::time::Duration;
use std::os::fd::IntoRawFd;
use std::sync::Arc;

use cuda_ipc_core::import::Step;
use cuda_ipc_core::importer::{Deadline, ImportErrorKind, ImportStep, LegacyImport, PooledImport};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_core::sys::driver;
use cuda_ipc_core::table::LookupError;
use cuda_ipc_tests::driver::{Cuda, FakeConfig, Inside};
use cuda_ipc_tests::importer::{Importer, by_pidfd};
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::raw_table::{RawEntry, RawTable};
use cuda_ipc_tests::snapshot::Snapshot;

const MIB: u64 = 1 << 20;
const POOL: u8 = 2;
const ALLOCATION: u8 = 3;
/// Live and dead, first generation.
const LIVE: u64 = 5;
const DEAD: u64 = 6;
/// Words of an entry.
const POOL_SLOT: usize = 5;
const DEVICE: usize = 6;
const DATA: usize = 8;

/// Serves keys to tables of the cases that it is asked for: the pool in slot 0, its allocation in slot 1.
fn build(me: &Inside) {
    let cuda = Cuda::start();
    cuda.enter_primary(0);
    let uuid = driver::Cuda::open().unwrap().device_uuid(0).unwrap();
    let pool = cuda.pool_create(0, 1).unwrap();
    let pool_fd = cuda.pool_export_fd(pool).unwrap().cast_unsigned();
    let address = cuda.alloc_from_pool(2 << 20, pool, null_mut()).unwrap();
    pattern::fill(&cuda, address, 2 * MIB, 1).unwrap();
    let (handle, _) = cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let chunk_fd = cuda.mem_export_fd(handle).unwrap().cast_unsigned();
    let data = cuda.pool_export_pointer(address).unwrap();
    let mut nonce = 1000;
    while let Some(case) = me.listen() {
        nonce += 1;
        // Leaked: the table's fd stays open.
        let table: &'static RawTable = Box::leak(Box::new(RawTable::new(nonce).unwrap()));
        let mut len = 2 * MIB;
        let mut the_pool = RawEntry { state: LIVE, fd: pool_fd, kind: POOL, address: 0, len: 0 };
        let mut allocation = RawEntry { state: LIVE, fd: u32::MAX, kind: ALLOCATION, address, len };
        let (mut slot, mut device, mut blob) = (0_u64, uuid, data);
        match case.as_str() {
            "honest" => {}
            "long" => (len, allocation.len) = (64 * MIB, 64 * MIB),
            "longest" => (len, allocation.len) = (u64::MAX - address, u64::MAX - address),
            "pool dead" => the_pool.state = DEAD,
            "pool is memory" => the_pool.kind = ALLOCATION,
            "pool of itself" => slot = 1,
            "pool beyond" => slot = 1 << 20,
            "pool nowhere" => slot = 77,
            "pool without fd" => the_pool.fd = u32::MAX,
            "pool of another gpu" => device = [7; 16],
            "fd of a chunk" => the_pool.fd = chunk_fd,
            "fd of a file" => the_pool.fd = std::fs::File::open("/dev/null").unwrap().into_raw_fd().cast_unsigned(),
            "fd closed" => the_pool.fd = 987,
            "data" => blob[20] ^= 1,
            "no data" => blob = [0; 64],
            "dead" => allocation.state = DEAD,
            "kind" => allocation.kind = POOL,
            "other address" => allocation.address += MIB,
            other => panic!("no case {other}"),
        }
        for (at, entry, uuid) in [(0, the_pool, uuid), (1, allocation, device)] {
            let start = RawTable::entry_start(at);
            for (word, bytes) in uuid.as_chunks().0.iter().enumerate() {
                table.put(start + DEVICE + word, u64::from_le_bytes(*bytes));
            }
            table.put(start + POOL_SLOT, slot);
            for (word, bytes) in blob.as_chunks().0.iter().enumerate() {
                table.put(start + DATA + word, u64::from_le_bytes(*bytes));
            }
            table.entry(at, &entry);
        }
        let key = Key { kind: KeyKind::PoolAllocation { slot: 1 }, ..table.key(address, len) };
        me.tell(&key.encode().map(|byte| format!("{byte:02x}")).concat());
    }
}

/// Whether a kind of error is the right one.
type Judge<'a> = &'a dyn Fn(&ImportErrorKind) -> bool;

#[test]
fn a_table_that_lies_about_pools_costs_an_error() {
    let Some(me) = Inside::enter("a_table_that_lies_about_pools_costs_an_error", &FakeConfig::default()) else { return };
    if me.role() == "hostile" {
        return build(&me);
    }
    let importer = Importer::start();
    let mut hostile = me.spawn("hostile").unwrap();
    let start = Snapshot::take(&importer.fake);
    let mut import = |case: &str| {
        hostile.tell(case);
        let hex = hostile.listen();
        let bytes: Vec<u8> = (0..64).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
        let key = Key::decode(&bytes).unwrap();
        let deadline = Deadline::after(Duration::from_secs(20));
        let peer = Arc::new(by_pidfd(&key, deadline).unwrap());
        PooledImport::new(&importer.core, &peer, &key, &[0], deadline)
    };
    let honest = import("honest").unwrap();
    pattern::check(&importer.cuda, honest.address(), 0, 2 * MIB, 1).unwrap();
    drop(honest);
    let at = |step| ImportStep::Chunk(step);
    let is_driver = |kind: &ImportErrorKind, call: &str| matches!(kind, ImportErrorKind::Driver(error) if error.call == call);
    let is_nothing = |kind: &ImportErrorKind| matches!(kind, ImportErrorKind::Lookup(LookupError::NoChunk(_)));
    let is_invalid = |kind: &ImportErrorKind| matches!(kind, ImportErrorKind::Lookup(LookupError::Invalid { .. }));
    let is_contradiction = |kind: &ImportErrorKind| matches!(kind, ImportErrorKind::Lookup(LookupError::Inconsistent { .. }));
    let of_pool = |kind: &ImportErrorKind| is_driver(kind, "cuMemPoolImportFromShareableHandle");
    let of_pointer = |kind: &ImportErrorKind| is_driver(kind, "cuMemPoolImportPointer");
    let too_short = |kind: &ImportErrorKind| *kind == ImportErrorKind::TooShort { mapped: 2 * MIB };
    let cases: [(&str, ImportStep, Judge<'_>); 17] = [
        ("long", at(Step::Map), &too_short),
        ("longest", at(Step::Map), &too_short),
        ("pool dead", ImportStep::Lookup, &is_contradiction),
        ("pool is memory", ImportStep::Lookup, &|kind| is_contradiction(kind) || is_invalid(kind)),
        ("pool of itself", ImportStep::Lookup, &is_contradiction),
        ("pool beyond", ImportStep::Lookup, &is_invalid),
        ("pool nowhere", ImportStep::Lookup, &is_contradiction),
        ("pool without fd", at(Step::Fetch), &|kind| *kind == ImportErrorKind::NoFd),
        ("pool of another gpu", ImportStep::Lookup, &is_contradiction),
        ("fd of a chunk", at(Step::Import), &of_pool),
        ("fd of a file", at(Step::Import), &of_pool),
        ("fd closed", at(Step::Fetch), &|kind| matches!(kind, ImportErrorKind::Pidfd(_))),
        ("data", at(Step::Map), &of_pointer),
        ("no data", at(Step::Map), &of_pointer),
        ("dead", ImportStep::Lookup, &is_nothing),
        ("kind", ImportStep::Lookup, &is_nothing),
        ("other address", ImportStep::Lookup, &is_nothing),
    ];
    for (case, step, is_right) in cases {
        let error = import(case).map(drop).unwrap_err();
        assert!(error.step == step && is_right(&error.kind), "{case}: {error:?}");
        start.assert_unchanged(&importer.fake, case);
    }
    drop(import("honest").unwrap());
    hostile.finish();
}

#[test]
fn an_rkey_that_lies_about_the_length_of_plain_memory_costs_an_error() {
    let test = "an_rkey_that_lies_about_the_length_of_plain_memory_costs_an_error";
    let Some(me) = Inside::enter(test, &FakeConfig::default()) else { return };
    if me.role() == cuda_ipc_tests::exporter::ROLE {
        return cuda_ipc_tests::exporter::serve(&me);
    }
    let importer = Importer::start();
    let mut remote = cuda_ipc_tests::exporter::Remote::start(&me);
    let address = remote.number(&format!("alloc {} 1", 2 * MIB));
    let (_, rkey) = remote.export_at(address, 2 * MIB);
    let deadline = Deadline::after(Duration::from_secs(20));
    for len in [2 * MIB + 1, 64 * MIB] {
        let error = LegacyImport::open(&importer.core, &Rkey { len, ..rkey }, 0, deadline).unwrap_err();
        assert_eq!(error.kind, ImportErrorKind::TooShort { mapped: 2 * MIB });
        assert_eq!(importer.fake.counters().mappings, 0);
    }
    let Payload::Legacy(mut handle) = rkey.payload else { panic!("another payload") };
    handle[17] ^= 1;
    let error = LegacyImport::open(&importer.core, &Rkey { payload: Payload::Legacy(handle), ..rkey }, 0, deadline).unwrap_err();
    assert!(matches!(error.kind, ImportErrorKind::Driver(driver) if driver.call == "cuIpcOpenMemHandle"), "{error}");
    remote.finish();
}
