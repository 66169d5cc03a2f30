//! Pids that come again: under the importer's eyes, at any point of an import, and in two PID namespaces that both begin with pid 1.
//!
//! These need a PID namespace of their own (CAP_SYS_ADMIN); without it they say that they are skipped.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_ipc_core::importer::{Deadline, ImportErrorKind, ImportStep};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::table::HeaderError;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, by_pidfd, key};
use cuda_ipc_tests::interleave::{Event, Way, World};
use cuda_ipc_tests::shim;
use nix::sched::{CloneFlags, unshare};

const MIB: u64 = 1 << 20;

/// Runs `body` on a thread whose children live in a PID namespace of their own, the first of them as pid 1. False if that is not allowed here.
fn in_new_namespace(body: impl FnOnce() + Send) -> bool {
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| match unshare(CloneFlags::CLONE_NEWPID) {
            Ok(()) => {
                body();
                true
            }
            Err(error) => {
                println!("skipped: no PID namespace of our own: {error}");
                false
            }
        });
        inside.join().unwrap()
    })
}

#[test]
fn a_pid_comes_again_between_any_two_steps() {
    let Some(me) = Inside::enter("a_pid_comes_again_between_any_two_steps", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "main" => {
            if !std::path::Path::new("/proc/sys/kernel/ns_last_pid").exists() {
                println!("skipped: this kernel does not let one choose the next pid");
                return;
            }
            in_new_namespace(|| me.spawn_with("first", shim::preload).unwrap().finish());
            return;
        }
        _ => assert_eq!(std::process::id(), 1),
    }
    let mut world = World::start(&me);
    let mut rounds = 0;
    for way in [Way::Key, Way::KnownPeer] {
        for point in world.points(way) {
            if point.before || point.name.starts_with("pidfd") {
                world.round(way, &[(point, Event::Restart)]);
                rounds += 1;
            }
        }
    }
    println!("{rounds} rounds: {:?}, {} doubles", world.outcomes, world.doubles);
    assert!(rounds >= 69 && world.doubles == rounds, "{rounds} rounds, {} new processes like the old one", world.doubles);
    for outcome in ["another table", "the exporter is gone", "the bytes of the life that is over"] {
        assert!(world.outcomes.contains_key(outcome), "{outcome}: {:?}", world.outcomes);
    }
}

/// An exporter that is the first process of its namespace: tells its key, and starts an importer beside it for a key that it is given.
fn export_as_first(me: &Inside) {
    assert_eq!(std::process::id(), 1);
    let importer = Importer::start();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let exporter = cuda_ipc_core::exporter::Exporter::new(importer.core, Default::default()).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    me.tell(&hex(&export.key().unwrap()));
    while let Some(other) = me.listen() {
        let mut beside = me.spawn("beside").unwrap();
        assert_eq!(beside.listen(), "ready");
        beside.tell(&other);
        me.tell(&beside.listen());
        beside.finish();
    }
}

/// An importer that connects to a key and says what came out.
fn import_beside(me: &Inside) {
    let _driver = Importer::start();
    me.tell("ready");
    let key = from_hex(&me.listen().unwrap());
    let outcome = by_pidfd(&key, Deadline::after(LONG)).map(|peer| peer.pid());
    me.tell(&match outcome {
        Ok(pid) => format!("reached {pid}"),
        Err(error) => match error.kind {
            ImportErrorKind::Table(HeaderError::Nonce { .. }) => format!("{:?}: another nonce", error.step),
            ImportErrorKind::OtherPidNamespace { .. } => format!("{:?}: another namespace", error.step),
            _ => error.to_string(),
        },
    });
}

#[test]
fn two_namespaces_begin_with_pid_1() {
    // B15, B16: two containers, both pid 1. A key of the one never reaches the other, and says why.
    let Some(me) = Inside::enter("two_namespaces_begin_with_pid_1", &FakeConfig::default()) else { return };
    match me.role() {
        "first" => return export_as_first(&me),
        "beside" => return import_beside(&me),
        _ => {}
    }
    let importer = Importer::start();
    let mut left = None;
    let allowed = in_new_namespace(|| {
        let mut first = me.spawn("first").unwrap();
        let one = from_hex(&first.listen());
        assert_eq!(one.pid, 1);
        // From outside it is pid 1 of this process's own namespace that answers to the name.
        let error = by_pidfd(&one, Deadline::after(LONG)).map(drop).unwrap_err();
        let ours = u32::try_from(pidfd_sys::pid_namespace(None).unwrap()).unwrap();
        assert_eq!((error.step, error.pid), (ImportStep::Key, 1));
        assert_eq!(error.kind, ImportErrorKind::OtherPidNamespace { theirs: one.pid_namespace, ours });
        assert!(error.other_route_may_work() && !error.retryable());
        // From beside it works.
        first.tell(&hex(&one));
        assert_eq!(first.listen(), "reached 1");
        left = Some((one, first));
    });
    if !allowed {
        return;
    }
    let (one, first) = left.unwrap();
    let again = in_new_namespace(|| {
        let mut second = me.spawn("first").unwrap();
        let two = from_hex(&second.listen());
        assert_eq!((two.pid, two.table_fd), (one.pid, one.table_fd), "alike but for namespace and nonce");
        assert_ne!(two.pid_namespace, one.pid_namespace);
        second.tell(&hex(&one));
        assert_eq!(second.listen(), "Key: another namespace");
        // Namespace numbers come again too, when the one before is gone: then only the nonce tells.
        first.kill().unwrap();
        second.tell(&hex(&Key { pid_namespace: two.pid_namespace, ..one }));
        assert_eq!(second.listen(), "OpenTable: another nonce");
        second.tell(&hex(&two));
        assert_eq!(second.listen(), "reached 1");
        second.finish();
    });
    assert!(again);
    // Here, where both are strangers, nothing is left.
    assert_eq!(importer.fake.device(0).used_bytes, 0);
}

#[test]
fn importers_see_exporters_in_their_own_namespace_only() {
    let Some(me) = Inside::enter("importers_see_exporters_in_their_own_namespace_only", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "beside" => return import_beside(&me),
        _ => {}
    }
    let importer = Importer::start();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * MIB);
    importer.verify(&rkey, &memory);
    in_new_namespace(|| {
        let mut inside = me.spawn("beside").unwrap();
        assert_eq!(inside.listen(), "ready");
        inside.tell(&hex(&key(&rkey)));
        assert_eq!(inside.listen(), "Key: another namespace");
        inside.finish();
    });
}

fn hex(key: &Key) -> String {
    key.encode().map(|byte| format!("{byte:02x}")).concat()
}

fn from_hex(text: &str) -> Key {
    let bytes: Vec<u8> = (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect();
    Key::decode(&bytes).unwrap()
}
