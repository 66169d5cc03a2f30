//! Many importers at once.

use std::time::Instant;

use cuda_ipc_core::importer::Route;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::snapshot::wait_until;

use crate::importing::{Importing, import_of};
use crate::support::{SOON, by, import, share};

#[test]
fn fifty_processes_at_once() {
    let (me, _importer) = enter!("fifty_processes_at_once");
    let mut remote = Remote::start(&me);
    let before = remote.number("fds");
    let (memory, rkey) = share(&mut remote, "reserve=19990", 26);
    let mut processes: Vec<Importing> = (0..50).map(|_| Importing::start(&me)).collect();
    let start = Instant::now();
    for process in &mut processes {
        process.tell_to_connect(&rkey, "route=broker");
        process.tell(&import_of(&rkey, &memory));
    }
    for process in &mut processes {
        assert_eq!(process.answer().unwrap(), "broker");
        process.answer().unwrap();
    }
    println!("50 processes, 26 chunks each: {:?}", start.elapsed());
    // They stay connected, and each sees the end.
    for process in &mut processes {
        assert_eq!(process.ask("gone").unwrap(), "false false");
    }
    remote.ask("no_exporter");
    for process in &mut processes {
        assert!(wait_until(SOON, || process.ask("gone").unwrap() == "true true"));
    }
    assert!(wait_until(SOON, || remote.number("fds") == before));
}

#[test]
fn threads_share_one_connection() {
    let (me, importer) = enter!("threads_share_one_connection");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "reserve=1000000", 40);
    let peer = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    let fds = cuda_ipc_tests::snapshot::open_fds().len();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                importer.cuda.enter_primary(0);
                for _ in 0..5 {
                    let imported = importer.import_from(&peer, &rkey).unwrap();
                    memory.spot_check(&importer.cuda, imported.address(), 0, rkey.len).unwrap();
                }
            });
        }
    });
    assert_eq!(cuda_ipc_tests::snapshot::open_fds().len(), fds);
    // One of them does not wait for long where another one does.
    remote.stop();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| importer.import_from(&peer, &rkey).map(drop));
        std::thread::sleep(core::time::Duration::from_millis(50));
        let start = Instant::now();
        let found = peer.lookup(rkey.base, rkey.len).unwrap();
        let placement = cuda_ipc_core::importer::Placement { remote_base: rkey.base, local_base: importer.core.reserve(rkey.len).unwrap() };
        let deadline = cuda_ipc_core::importer::Deadline::after(core::time::Duration::from_millis(100));
        let error = peer.import(&importer.core, &found, placement, cuda_ipc_tests::importer::READ, deadline).unwrap_err();
        assert_eq!(error.kind, cuda_ipc_core::importer::ImportErrorKind::DeadlineOver);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert!(!peer.has_exited(), "a stopped exporter is none that is gone");
        remote.go_on();
        slow.join().unwrap().unwrap();
    });
    let (_, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
    importer.verify_import(&imported, &rkey, &memory);
}

#[test]
fn there_is_a_most() {
    let (me, importer) = enter!("there_is_a_most");
    let mut remote = Remote::start(&me);
    remote.ask("limit 400");
    let (memory, rkey) = share(&mut remote, "reserve=1000000", 2);
    let peers: Vec<_> = (0..100).map(|_| importer.connect_with(&rkey, &by(Route::Broker)).unwrap()).collect();
    let error = importer.connect_with(&rkey, &by(Route::Broker)).map(drop).unwrap_err();
    crate::support::assert_says(&error.to_string(), &["it serves 100 importers already"]);
    assert!(error.retryable());
    drop(peers);
    assert!(wait_until(SOON, || importer.connect_with(&rkey, &by(Route::Broker)).is_ok()));
    let (_, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
    importer.verify_import(&imported, &rkey, &memory);
}
