//! By which way an exporter is reached, that the bytes are right by each, and what is said where none is open.

use cuda_ipc_core::importer::Route;
use cuda_ipc_tests::apart::{as_root_of_its_own, as_user, in_new_namespaces, without_users};
use cuda_ipc_tests::exporter::{Remote, RemoteMemory};
use cuda_ipc_tests::importer::key;
use cuda_ipc_tests::snapshot::Snapshot;
use nix::sched::CloneFlags;

use crate::importing::Importing;
use crate::support::{MIB, assert_says, by, chunks, import, machine, share};

#[test]
fn bytes_are_the_same_by_either_route() {
    let (me, importer) = enter!("bytes_are_the_same_by_either_route");
    let start = Snapshot::take(&importer.fake);
    for count in [1, 26, 400] {
        let mut remote = Remote::start(&me);
        // With an fd for each chunk, and with none.
        for reserve in [256, 1_u64 << 40] {
            let (memory, rkey) = share(&mut remote, &format!("reserve={reserve}"), count);
            assert_eq!(remote.stats().fds, if reserve == 256 { count } else { 0 });
            for (asked, taken) in [(Route::Auto, Route::Pidfd), (Route::Broker, Route::Broker)] {
                let (peer, imported) = import(&importer, &rkey, &by(asked)).unwrap();
                assert_eq!(peer.route(), taken);
                importer.verify_import(&imported, &rkey, &memory);
            }
        }
        remote.finish();
    }
    start.assert_unchanged(&importer.fake, "imports by the broker");
}

#[test]
fn chunks_with_and_without_an_fd_come_by_both_ways_at_once() {
    let (me, importer) = enter!("chunks_with_and_without_an_fd_come_by_both_ways_at_once");
    let mut remote = Remote::start(&me);
    // Room for some of them. Then one in three of these is replaced, and one in three of others, which come first.
    let limit = 256;
    remote.ask(&format!("limit {limit}"));
    remote.ask("exporter_with reserve=236");
    let mut memory = remote.memory(400 * MIB, &chunks(60));
    let (_, rkey) = remote.export(&memory, 0, 120 * MIB);
    assert_eq!(remote.stats().fds, 20);
    for at in (0..20).step_by(3) {
        memory.replace(&mut remote, at * 2 * MIB, 500 + at);
    }
    for at in (30..50).step_by(3) {
        memory.replace(&mut remote, at * 2 * MIB, 500 + at);
    }
    remote.export(&memory, 60 * MIB, 40 * MIB);
    let (_, rkey_now) = remote.export(&memory, 0, 120 * MIB);
    let peer = importer.connect_with(&rkey, &by(Route::Auto)).unwrap();
    let fds: Vec<bool> = peer.lookup(rkey.base, rkey.len).unwrap().iter().map(|(_, chunk)| chunk.fd.is_some()).collect();
    let changes = fds.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(fds.iter().filter(|has| **has).count() == 20 && changes >= 5, "{fds:?}");
    let imported = importer.import_from(&peer, &rkey_now).unwrap();
    importer.verify_import(&imported, &rkey_now, &memory);
    // Without the broker there is no such way.
    let peer = importer.connect_with(&rkey, &by(Route::Pidfd)).unwrap();
    assert_says(&importer.import_from(&peer, &rkey_now).unwrap_err().to_string(), &["holds no fd"]);
}

#[test]
fn a_filter_of_system_calls_leaves_the_broker() {
    // B22, B23, B26: each of the two calls, refused or missing.
    let (me, _importer) = enter!("a_filter_of_system_calls_leaves_the_broker");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 26);
    for (call, name) in [(pidfd_sys::numbers::PIDFD_OPEN, "pidfd_open"), (pidfd_sys::numbers::PIDFD_GETFD, "pidfd_getfd")] {
        for (errno, text) in [(libc::EPERM, "EPERM"), (libc::ENOSYS, "ENOSYS"), (libc::EACCES, "EACCES")] {
            let mut process = Importing::start(&me);
            assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "pidfd");
            process.ask(&format!("refuse {call} {errno}")).unwrap();
            assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "broker", "{name}: {text}");
            assert_says(&process.connect(&rkey, "route=pidfd").unwrap_err(), &[name, text]);
            process.finish();
        }
    }
    // Both ways closed: both causes.
    remote.ask("exporter 64");
    let (_, rkey) = remote.export(&memory, 0, 26 * 2 * MIB);
    let mut process = Importing::start(&me);
    process.ask(&format!("refuse {} {}", pidfd_sys::numbers::PIDFD_GETFD, libc::EPERM)).unwrap();
    let refused = process.connect(&rkey, "").unwrap_err();
    assert_says(
        &refused,
        &["NoRoute", "pidfd_getfd", "EPERM", "NoListener", "nobody listens under its abstract socket name", "no socket directory"],
    );
    process.finish();
}

#[test]
fn a_getfd_that_is_refused_later_leaves_the_broker() {
    // The pidfd route worked once; then somebody installs a filter.
    let (me, _importer) = enter!("a_getfd_that_is_refused_later_leaves_the_broker");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 26);
    let mut process = Importing::start(&me);
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "pidfd");
    process.ask(&format!("refuse {} {}", pidfd_sys::numbers::PIDFD_GETFD, libc::EPERM)).unwrap();
    process.import(&rkey, &memory).unwrap();
    process.finish();
}

#[test]
fn pid_namespaces_leave_the_broker() {
    // B15, B16: an importer in a namespace below the exporter's, beside it, and above it; exporter and importer both pid 1.
    let (me, importer) = enter!("pid_namespaces_leave_the_broker");
    let mut outside = Remote::start(&me);
    let (memory, rkey) = share(&mut outside, "", 26);
    let below = |rkey, memory: &RemoteMemory| {
        in_new_namespaces(CloneFlags::CLONE_NEWPID, || {
            let mut process = Importing::start(&me);
            assert_eq!(process.verify(rkey, memory, "").unwrap(), "broker");
            assert_says(&process.connect(rkey, "route=pidfd").unwrap_err(), &["PID namespace"]);
            process.finish();
        })
    };
    if below(&rkey, &memory).is_none() {
        return;
    }
    let inside = in_new_namespaces(CloneFlags::CLONE_NEWPID, || {
        let mut inside = Remote::start(&me);
        let shared = share(&mut inside, "", 26);
        (inside, shared)
    });
    let (mut inside, (memory, rkey)) = inside.unwrap();
    assert_eq!((key(&rkey).pid, inside.number("pid")), (1, 1));
    below(&rkey, &memory).unwrap();
    let (peer, imported) = import(&importer, &rkey, &by(Route::Auto)).unwrap();
    assert_eq!(peer.route(), Route::Broker);
    importer.verify_import(&imported, &rkey, &memory);
    // Its end is seen by the connection.
    assert!(!peer.has_exited() && !peer.is_gone());
    inside.kill();
    assert!(peer.has_exited() && peer.is_gone());
}

#[test]
fn network_namespaces_leave_the_file() {
    // A20: the abstract name does not cross, and the error says so; the file in a shared directory does.
    let (me, _importer) = enter!("network_namespaces_leave_the_file");
    let dir = machine().join("sockets");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, &format!("dir={}", dir.display()), 26);
    let done = in_new_namespaces(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWPID, || {
        let mut process = Importing::start(&me);
        let refused = process.connect(&rkey, "").unwrap_err();
        assert_says(&refused, &["PID namespace", "in this network namespace (ECONNREFUSED", "no socket directory is set"]);
        let refused = process.connect(&rkey, &format!("dir={}", machine().join("nowhere").display())).unwrap_err();
        assert_says(&refused, &["nor in the socket directory (ENOENT"]);
        assert_eq!(process.verify(&rkey, &memory, &format!("dir={}", dir.display())).unwrap(), "broker");
        process.finish();
    });
    if done.is_none() {
        return;
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    remote.ask("no_exporter");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "the file goes with the exporter");
}

#[test]
fn other_users_are_refused_by_name_or_listed() {
    let (me, _importer) = enter!("other_users_are_refused_by_name_or_listed");
    let (ours, theirs) = (20_001, 20_002);
    let dir = machine().join("sockets");
    let mut remote = Remote::start_with(&me, |command| as_user(command, ours));
    let mut process = Importing::start_with(&me, |command| as_user(command, theirs));
    let (memory, rkey) = share(&mut remote, "", 26);
    assert_says(&process.connect(&rkey, "").unwrap_err(), &["NoRoute", "EPERM", &format!("OtherUser {{ uid: {ours} }}")]);
    // One side is not enough.
    let refused = process.connect(&rkey, &format!("uids={ours}")).unwrap_err();
    assert_says(&refused, &[&format!("Refused(Uid({theirs}))"), &format!("does not serve user {theirs}")]);
    let (_, rkey) = share(&mut remote, &format!("uids=1,{theirs} dir={} mode=755", dir.display()), 26);
    assert_says(&process.connect(&rkey, "").unwrap_err(), &["OtherUser"]);
    assert_eq!(process.connect(&rkey, &format!("uids={ours}")).unwrap(), "broker");
    let (memory, rkey) = (RemoteMemory { base: rkey.base, ..memory }, rkey);
    process.import(&rkey, &memory).unwrap();
    // By the file too, whose mode and directory have to let them in.
    in_new_namespaces(CloneFlags::CLONE_NEWNET, || {
        let mut process = Importing::start_with(&me, |command| as_user(command, theirs));
        let route = process.verify(&rkey, &memory, &format!("uids={ours} dir={}", dir.display())).unwrap();
        assert_eq!(route, "broker");
        process.finish();
    });
    // Root is nobody special.
    let mut root = Importing::start(&me);
    assert_says(&root.connect(&rkey, &format!("route=broker uids={ours}")).unwrap_err(), &["Refused(Uid(0))"]);
    root.finish();
    process.finish();
}

#[test]
fn users_of_nowhere_are_refused() {
    // An unmapped user looks like the overflow uid, which another unmapped user looks like, too.
    let (me, _importer) = enter!("users_of_nowhere_are_refused");
    let mut remote = Remote::start(&me);
    let (_, rkey) = share(&mut remote, "", 2);
    let mut process = Importing::start_with(&me, without_users);
    assert_says(
        &process.connect(&rkey, "route=broker").unwrap_err(),
        &["UnmappedUser { uid: 65534 }", "does not exist in this user namespace"],
    );
    assert_says(&process.connect(&rkey, "route=broker uids=65534").unwrap_err(), &["UnmappedUser"]);
    process.finish();
    // The exporter's side of the same: it lives where the importer's user does not exist, and is asked to serve whoever looks like that.
    let inner = 20_003;
    let mut remote = Remote::start_with(&me, |command| as_root_of_its_own(command, inner));
    let (_, rkey) = share(&mut remote, "uids=65534", 2);
    let mut process = Importing::start(&me);
    let refused = process.connect(&rkey, &format!("route=broker uids={inner}")).unwrap_err();
    assert_says(&refused, &["Refused(UnmappedUid(65534))", "does not exist in its user namespace"]);
    // Who is of the same user outside is the same inside.
    let mut process = Importing::start_with(&me, |command| as_root_of_its_own(command, inner));
    assert_eq!(process.connect(&rkey, "route=broker").err().map(|text| text.contains("UnmappedUser")), None, "the same user");
}

#[test]
fn a_process_that_may_not_be_looked_into_can_be_asked() {
    // B21: not dumpable. Without CAP_SYS_PTRACE even the same user gets nothing out of it.
    let (me, _importer) = enter!("a_process_that_may_not_be_looked_into_can_be_asked");
    let mut remote = Remote::start_with(&me, |command| as_user(command, 20_001));
    let mut process = Importing::start_with(&me, |command| as_user(command, 20_001));
    let (memory, rkey) = share(&mut remote, "", 26);
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "pidfd");
    remote.ask("dumpable 0");
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "broker");
    assert_says(&process.connect(&rkey, "route=pidfd").unwrap_err(), &["pidfd_getfd", "EPERM"]);
    // It can begin when it already is like that, in a directory too.
    let dir = machine().join("sockets");
    std::fs::create_dir(&dir).unwrap();
    nix::unistd::chown(&dir, Some(20_001.into()), Some(20_001.into())).unwrap();
    std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let (memory, rkey) = share(&mut remote, &format!("dir={}", dir.display()), 2);
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "broker");
    assert_eq!(remote.ask("broker_failures").matches("None").count(), 3, "{}", remote.ask("broker_failures"));
    process.finish();
}

#[test]
fn an_exporter_without_its_first_thread_can_be_asked() {
    let (me, _importer) = enter!("an_exporter_without_its_first_thread_can_be_asked");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 26);
    let mut process = Importing::start(&me);
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "pidfd");
    remote.ask("lose_first_thread");
    // A known peer, and a new one.
    process.import(&rkey, &memory).unwrap();
    assert_eq!(process.ask("gone").unwrap(), "false false");
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "broker");
    // One that begins after that. (Its namespace was read before.)
    process.finish();
    remote.kill();
}
