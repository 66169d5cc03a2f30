//! Ranges that cannot be exported: each has its own cause, and the exporter's process is afterwards what it was before.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, Stats};
use cuda_ipc_tests::importer::Importer;

const MIB: u64 = 1 << 20;

fn enter(test: &str, config: &FakeConfig) -> Option<(Remote, Importer)> {
    let me = Inside::enter(test, config)?;
    if me.role() == exporter::ROLE {
        exporter::serve(&me);
        return None;
    }
    let mut remote = Remote::start(&me);
    remote.ask("exporter 64");
    Some((remote, Importer::start()))
}

/// The cause of a refusal of `[address, address + len)`; the process has afterwards what it had before.
#[track_caller]
fn refused(remote: &mut Remote, address: u64, len: u64) -> String {
    let state = |remote: &mut Remote| {
        let Stats { chunks, fds, .. } = remote.stats();
        (remote.ask("snapshot"), chunks, fds)
    };
    let before = state(remote);
    let cause = remote.try_ask(&format!("export_at {address} {len}")).unwrap_err();
    assert_eq!(state(remote), before, "after {cause}");
    cause
}

#[test]
fn ranges_that_are_none() {
    let Some((mut remote, _)) = enter("ranges_that_are_none", &FakeConfig::default()) else { return };
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    for (address, len) in [(memory.base, 0), (0, 0), (u64::MAX, 2), (memory.base, u64::MAX), (u64::MAX, u64::MAX)] {
        assert_eq!(refused(&mut remote, address, len), "EmptyRange");
    }
    // Addresses that are nothing.
    for address in [0, 1, 4096, 1 << 40, 1 << 63, u64::MAX - 1] {
        assert_eq!(refused(&mut remote, address, 1), "NotDeviceMemory");
    }
    let leaves = format!("LeavesReservation {{ base: {}, len: {} }}", memory.base, memory.len);
    assert_eq!(refused(&mut remote, memory.base, memory.len + 1), leaves);
    assert_eq!(refused(&mut remote, memory.base + MIB, memory.len), leaves);
    assert_eq!(refused(&mut remote, memory.base + MIB, u64::MAX - memory.base - MIB), leaves);
}

#[test]
fn holes() {
    // B34: a hole is an error, at the first chunk, in the middle and at the end, and the chunks around it are as before.
    let Some((mut remote, importer)) = enter("holes", &FakeConfig::default()) else { return };
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
    memory.map(&mut remote, 6 * MIB, 2 * MIB, 3);
    let base = memory.base;
    for (offset, len) in [(0, 5 * MIB), (0, 8 * MIB), (3 * MIB, 4 * MIB), (6 * MIB, 3 * MIB), (0, 64 * MIB)] {
        assert_eq!(refused(&mut remote, base + offset, len), "Hole", "{len} bytes at {offset:#x}");
    }
    // One that begins in the hole has no memory to ask about.
    assert!(matches!(refused(&mut remote, base + 4 * MIB, MIB).as_str(), "Hole" | "NotDeviceMemory"));
    // What is published by another export stays when this one fails.
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    assert_eq!(refused(&mut remote, base, 8 * MIB), "Hole");
    importer.verify(&rkey, &memory);
    memory.map(&mut remote, 4 * MIB, 2 * MIB, 4);
    let (_, whole) = remote.export(&memory, 0, 8 * MIB);
    importer.verify(&whole, &memory);
}

#[test]
fn freed_memory() {
    let Some((mut remote, _)) = enter("freed_memory", &FakeConfig::default()) else { return };
    let mut memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2), (2 * MIB, 3)]);
    let (export, _) = remote.export(&memory, 0, 4 * MIB);
    memory.unmap(&mut remote, 0);
    assert_eq!(refused(&mut remote, memory.base + MIB, 1), "Freed", "published still, and no sweep has found it yet");
    remote.ask(&format!("release {export}"));
    memory.unmap(&mut remote, 2 * MIB);
    assert_eq!(refused(&mut remote, memory.base + 2 * MIB, 1), "Freed", "released, and freed later");
    memory.unmap(&mut remote, 4 * MIB);
    assert_eq!(refused(&mut remote, memory.base + 4 * MIB, 1), "Hole", "never exported");
    // What comes there again is as good as any.
    memory.map(&mut remote, 0, 2 * MIB, 4);
    remote.export(&memory, 0, 2 * MIB);
}

#[test]
fn memory_of_other_kinds() {
    // A17, B35: the fact, and no attempt at a handle that cannot be had.
    let Some((mut remote, _)) = enter("memory_of_other_kinds", &FakeConfig { fabric: true, ..FakeConfig::default() }) else { return };
    for (kind, cause) in [
        ("host", "NotDeviceMemory"),
        ("pinned", "HostMemory"),
        ("managed", "Managed"),
        ("default_pool", "DefaultPool"),
        ("pool", "PoolWithoutHandle"),
    ] {
        let address = remote.number(&format!("allocate {kind}"));
        for (offset, len) in [(0, 1), (0, 4 * MIB), (MIB + 1, 17)] {
            assert_eq!(refused(&mut remote, address + offset, len), cause, "{kind}");
        }
    }
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    for (offset, types, cause) in [(2, 0, "NoHandleType"), (4, 8, "FabricOnly")] {
        remote.ask(&format!("map_types {} {} {} {types}", memory.index, offset * MIB, 2 * MIB));
        assert_eq!(refused(&mut remote, memory.base + offset * MIB, 2 * MIB), cause);
        assert_eq!(refused(&mut remote, memory.base, (offset + 2) * MIB), "NoHandleType", "the first one met");
    }
    assert_eq!(remote.stats().chunks, 0);
    let counted = "default-pool=3 fabric-only=1 host-memory=3 managed=3 no-handle-type=3 not-device-memory=3 pool-without-handle=3";
    assert_eq!(remote.ask("refusals"), counted);
    for call in ["cuMemPoolExportToShareableHandle", "cuMemPoolExportPointer", "cuIpcGetMemHandle"] {
        assert_eq!(remote.number(&format!("calls {call}")), 0, "B37: a type that was not asked for is never exported");
    }
    // Two of the chunk in front, and one trial, on the first memory that had nothing but fabric.
    assert_eq!(remote.number("calls cuMemExportToShareableHandle"), 3);
    // Memory with both types goes by the fd.
    remote.ask(&format!("map_types {} {} {} 9", memory.index, 6 * MIB, 2 * MIB));
    remote.export(&memory, 6 * MIB, 2 * MIB);
}

#[test]
fn fabric_handles_that_are_refused_are_asked_for_once() {
    // B40: the device's attribute says yes, each use is refused, and nobody is told but by the reason.
    let config = FakeConfig { fabric: true, ..FakeConfig::default() };
    let Some((mut remote, _)) = enter("fabric_handles_that_are_refused_are_asked_for_once", &config) else { return };
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    remote.ask(&format!("map_types {} {} {} 8", memory.index, 2 * MIB, 2 * MIB));
    remote.ask(&format!("map_types {} {} {} 9", memory.index, 4 * MIB, 2 * MIB));
    remote.ask("fault cuMemExportToShareableHandle#1=800");
    for _ in 0..3 {
        assert_eq!(refused(&mut remote, memory.base + 2 * MIB, 2 * MIB), "FabricRefused { code: 800 }");
    }
    assert_eq!(remote.number("calls cuMemExportToShareableHandle"), 1);
    remote.export(&memory, 4 * MIB, 2 * MIB);
}

#[test]
fn memory_of_two_devices() {
    let Some((mut remote, _)) = enter("memory_of_two_devices", &FakeConfig { devices: Some(2), ..FakeConfig::default() }) else { return };
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    remote.ask(&format!("map_device {} {} {} 1", memory.index, 2 * MIB, 2 * MIB));
    assert_eq!(refused(&mut remote, memory.base, 4 * MIB), "SeveralDevices");
    let (_, left) = remote.export(&memory, 0, 2 * MIB);
    let (_, right) = remote.export(&memory, 2 * MIB, 2 * MIB);
    assert_ne!(left.device, right.device);
    assert_eq!(refused(&mut remote, memory.base + MIB, 2 * MIB), "SeveralDevices", "also where both are published");
    assert_eq!(remote.stats().chunks, 2);
}
