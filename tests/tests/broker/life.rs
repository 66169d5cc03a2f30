//! Beginnings and ends: of the broker, of exporters in the middle of an answer, of forked children.

use cuda_ipc_core::importer::{ImportErrorKind, Route};
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::importer::key;
use cuda_ipc_tests::snapshot::wait_until;

use crate::importing::{Importing, import_of};
use crate::raw::Raw;
use crate::support::{MIB, SOON, assert_says, by, chunks, import, share};

#[test]
fn nothing_is_left_after_the_last_release() {
    let (me, importer) = enter!("nothing_is_left_after_the_last_release");
    let mut remote = Remote::start(&me);
    remote.ask("exporter_with sweep=50");
    let memory = remote.memory(64 * MIB, &chunks(8));
    let quiet = remote.ask("snapshot");
    for way in 0..4 {
        let (first, rkey) = remote.export(&memory, 0, 8 * MIB);
        let (second, _) = remote.export(&memory, 4 * MIB, 12 * MIB);
        let (peer, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
        drop(imported);
        assert!(remote.threads().iter().any(|name| name == "cuda-ipc-broker"), "{:?}", remote.threads());
        remote.ask(&format!("release {first}"));
        import(&importer, &rkey_of(&mut remote, &memory), &by(Route::Broker)).map(drop).unwrap();
        match way {
            0 => drop(remote.ask(&format!("retire {} 0 {}", memory.index, 64 * MIB))),
            _ => drop(remote.ask(&format!("release {second}"))),
        }
        remote.release_all();
        assert!(wait_until(SOON, || remote.ask("snapshot") == quiet), "{}\n{quiet}", remote.ask("snapshot"));
        assert!(peer.has_exited(), "the connection has ended");
        // A peer from before finds the next life of the same exporter.
        if way == 2 {
            let (_, rkey) = remote.export(&memory, 0, 8 * MIB);
            let imported = importer.import_from(&peer, &rkey).unwrap();
            importer.verify_import(&imported, &rkey, &memory);
            assert!(!peer.has_exited());
            remote.release_all();
            assert!(wait_until(SOON, || remote.ask("snapshot") == quiet));
        }
    }
    // As fast as one can: no beginning meets an end in the wrong order.
    for _ in 0..50 {
        let (export, rkey) = remote.export(&memory, 0, 2 * MIB);
        import(&importer, &rkey, &by(Route::Broker)).map(drop).unwrap();
        remote.ask(&format!("release {export}"));
        std::thread::sleep(core::time::Duration::from_millis(u64::from(key(&rkey).pid) % 7 * 40));
    }
    remote.ask("no_exporter");
    remote.finish();
}

fn rkey_of(remote: &mut Remote, memory: &cuda_ipc_tests::exporter::RemoteMemory) -> cuda_ipc_core::rkey::Rkey {
    remote.export(memory, 4 * MIB, 4 * MIB).1
}

#[test]
fn the_end_comes_in_the_middle_of_an_answer() {
    let (me, _importer) = enter!("the_end_comes_in_the_middle_of_an_answer");
    for (delay, after_ms) in [("cuMemExportToShareableHandle#*~20ms", 150), ("cuMemExportToShareableHandle#40~3s", 1000)] {
        let mut remote = Remote::start(&me);
        let (memory, rkey) = share(&mut remote, "reserve=1000000", 100);
        let mut process = Importing::start(&me);
        assert_eq!(process.verify(&rkey, &memory, "route=broker").unwrap(), "broker");
        remote.ask(&format!("fault {delay}"));
        process.tell(&import_of(&rkey, &memory));
        std::thread::sleep(core::time::Duration::from_millis(after_ms));
        remote.kill();
        assert_says(&process.answer().unwrap_err(), &["ExporterGone", "has exited"]);
        assert_eq!(process.ask("gone").unwrap(), "true true");
        process.finish();
    }
}

#[test]
fn an_importer_vanishes_in_the_middle_of_an_answer() {
    let (me, importer) = enter!("an_importer_vanishes_in_the_middle_of_an_answer");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "reserve=1000000", 40);
    let fds = remote.number("fds");
    remote.ask("fault cuMemExportToShareableHandle#*~5ms");
    for _ in 0..5 {
        let mut process = Importing::start(&me);
        assert_eq!(process.connect(&rkey, "route=broker").unwrap(), "broker");
        process.tell(&import_of(&rkey, &memory));
        std::thread::sleep(core::time::Duration::from_millis(60));
        process.kill();
    }
    let (_, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
    importer.verify_import(&imported, &rkey, &memory);
    drop(imported);
    assert!(wait_until(SOON, || remote.number("fds") == fds));
}

#[test]
fn memory_that_was_only_handed_out_is_free_when_it_is_released() {
    // Nothing that the broker made or sent pins anything.
    let (me, importer) = enter!("memory_that_was_only_handed_out_is_free_when_it_is_released");
    let mut remote = Remote::start(&me);
    for reserve in [256, 1_u64 << 40] {
        remote.ask(&format!("exporter_with reserve={reserve}"));
        let start = remote.number("free");
        let mut memory = remote.memory(64 * MIB, &chunks(8));
        let (export, rkey) = remote.export(&memory, 0, 16 * MIB);
        let (_, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
        drop(imported);
        remote.ask(&format!("release {export}"));
        for at in 0..8 {
            memory.unmap(&mut remote, at * 2 * MIB);
        }
        assert!(wait_until(SOON, || remote.number("free") == start));
        remote.ask(&format!("unreserve {}", memory.index));
    }
}

#[test]
fn a_forked_child_serves_nobody_and_holds_nothing() {
    // B43: it has no listener, no connection, and takes its parent's file away from nobody.
    let (me, importer) = enter!("a_forked_child_serves_nobody_and_holds_nothing");
    let dir = crate::support::machine().join("sockets");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, &format!("dir={}", dir.display()), 4);
    let (peer, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
    drop(imported);
    let ours = std::process::id();
    // The exporter's child lives on after its parent; ours holds our connection's number.
    let child = remote.number("fork");
    let sockets = || {
        let fds = std::fs::read_dir(format!("/proc/{child}/fd")).unwrap();
        let links = fds.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    };
    // fork may have returned in the parent first.
    assert!(wait_until(SOON, || sockets() == 0), "{} sockets", sockets());
    importer.verify_import(&importer.import_from(&peer, &rkey).unwrap(), &rkey, &memory);
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    remote.kill();
    assert!(wait_until(SOON, || peer.has_exited()), "the child keeps no connection open");
    assert!(matches!(importer.connect_with(&rkey, &by(Route::Broker)).map(drop).unwrap_err().kind, ImportErrorKind::Broker(_)));
    let child = nix::unistd::Pid::from_raw(i32::try_from(child).unwrap());
    nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert_eq!(ours, std::process::id());
}

#[test]
fn a_forked_importer_has_no_peer() {
    let (me, importer) = enter!("a_forked_importer_has_no_peer");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 4);
    let peer = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    let child = cuda_ipc_tests::child::fork(|| !peer.has_exited() && peer.lookup(rkey.base, rkey.len).is_err());
    cuda_ipc_tests::child::wait(child, "an importer");
    assert!(!peer.has_exited());
    importer.verify_import(&importer.import_from(&peer, &rkey).unwrap(), &rkey, &memory);
}

#[test]
fn an_exec_ends_it() {
    let (me, importer) = enter!("an_exec_ends_it");
    let mut remote = Remote::start(&me);
    let (_, rkey) = share(&mut remote, "", 4);
    let peer = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    remote.exec();
    assert!(wait_until(SOON, || peer.has_exited() && peer.is_gone()));
    assert_eq!(importer.import_from(&peer, &rkey).map(drop).unwrap_err().kind, ImportErrorKind::ExporterGone);
}

#[test]
fn an_application_that_closes_all_fds_ends_it_until_the_next_export() {
    let (me, importer) = enter!("an_application_that_closes_all_fds_ends_it_until_the_next_export");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 4);
    let raw = Raw::proven(&key(&rkey));
    let peer = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    let highest = remote.number("open /dev/null");
    remote.ask("close_from 3");
    assert!(wait_until(SOON, || raw.is_closed() && peer.has_exited()));
    // Its numbers are somebody else's now, and stay that.
    while remote.number("open /etc/passwd") < highest + 8 {}
    let open = remote.number("fds");
    // The thread notices when it next looks; the next export of a new exporter begins anew.
    let (_, rkey) = share(&mut remote, "", 4);
    importer.verify_import(&import(&importer, &rkey, &by(Route::Broker)).unwrap().1, &rkey, &memory_at(&memory, rkey.base));
    for number in 3..highest + 8 {
        let link = remote.ask(&format!("link {number}"));
        assert_eq!(link, "/etc/passwd", "{number}");
    }
    assert!(remote.number("fds") > open);
}

fn memory_at(memory: &cuda_ipc_tests::exporter::RemoteMemory, base: u64) -> cuda_ipc_tests::exporter::RemoteMemory {
    cuda_ipc_tests::exporter::RemoteMemory { base, ..memory.clone() }
}
