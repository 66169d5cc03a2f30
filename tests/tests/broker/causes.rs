//! The cause that is found where no way is open, by what really closes it.

use std::os::unix::process::CommandExt;

use cuda_ipc_core::diagnosis::{Cause, Yama};
use cuda_ipc_core::exporter::Exporter;
use cuda_ipc_core::importer::Witness;
use cuda_ipc_core::reason;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::apart::{as_root_of_its_own, as_user, in_new_namespaces, with_files, without_tracing, without_users};
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{Remote, without_broker};
use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::snapshot::wait_until;
use nix::sched::CloneFlags;

use crate::importing::{Importing, hex};
use crate::support::{MIB, SOON, assert_says, chunks, machine};

/// An exporter without a broker that exports two chunks.
fn alone(remote: &mut Remote) -> Rkey {
    remote.ask("exporter 64");
    let memory = remote.memory(8 * MIB, &chunks(2));
    remote.export(&memory, 0, 4 * MIB).1
}

/// The name of the cause that is found, of a line that says these words too.
#[track_caller]
fn cause(process: &mut Importing, rkey: &Rkey, options: &str, words: &[&str]) -> String {
    let said = process.ask(format!("explain {} {options}", hex(rkey)).trim_end()).unwrap();
    assert_says(&said, words);
    said.split(' ').next().unwrap().to_owned()
}

#[test]
fn a_filter_is_found() {
    // B22, B23, B26.
    let (me, _importer) = enter!("a_filter_is_found");
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    for (call, name) in [(pidfd_sys::numbers::PIDFD_OPEN, "pidfd_open"), (pidfd_sys::numbers::PIDFD_GETFD, "pidfd_getfd")] {
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            let mut process = Importing::start(&me);
            process.ask(&format!("refuse {call} {errno}")).unwrap();
            let stops = format!("stops {name} with errno {errno}");
            let words = [stops.as_str(), "--cap-add SYS_PTRACE", "system call filter: yes"];
            assert_eq!(cause(&mut process, &rkey, "route=pidfd", &words), "seccomp");
            // With the broker tried in vain, the other way is named too.
            assert_eq!(cause(&mut process, &rkey, "", &[stops.as_str(), "CUDA_IPC_SOCKET_DIR"]), "seccomp");
            // The same without an exporter: towards this test's process, which is no descendant.
            let said = process.ask(&format!("try {}", std::process::id())).unwrap();
            assert_says(&said, &["seccomp", &stops]);
            process.finish();
        }
    }
    // A filter of other calls is not blamed.
    let mut process = Importing::start(&me);
    process.ask(&format!("refuse {} {}", libc::SYS_kcmp, libc::EPERM)).unwrap();
    assert_eq!(process.ask(&format!("try {}", std::process::id())).unwrap(), "open");
    remote.kill();
    assert_eq!(cause(&mut process, &rkey, "", &["its process has exited"]), "exporter-gone");
    process.finish();
}

#[test]
fn users_and_their_rights_are_found() {
    // B21.
    let (me, _importer) = enter!("users_and_their_rights_are_found");
    let (ours, theirs) = (20_001, 20_002);
    let mut remote = Remote::start_with(&me, |command| as_user(command, ours));
    let rkey = alone(&mut remote);
    let mut process = Importing::start_with(&me, |command| as_user(command, theirs));
    let words = ["belongs to another user", "same user and group: no", "CAP_SYS_PTRACE: no", "readable: no"];
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &words), "other-uid");
    process.finish();
    // The same group is asked for as well.
    let mut process = Importing::start_with(&me, |command| {
        command.uid(ours).gid(theirs);
    });
    assert_eq!(cause(&mut process, &rkey, "", &["another user or group"]), "other-uid");
    process.finish();
    // The same user, and closed to others.
    let mut process = Importing::start_with(&me, |command| as_user(command, ours));
    assert_eq!(process.ask(&format!("try {}", remote.pid)).unwrap(), "open");
    remote.ask("dumpable 0");
    let words = ["is not dumpable", "same user and group: yes", "; dumpable: no"];
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &words), "not-dumpable");
    assert_says(&process.ask(&format!("try {}", remote.pid)).unwrap(), &["not-dumpable"]);
    process.finish();
    // Root without the one capability, and root with it.
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    let mut process = Importing::start_with(&me, without_tracing);
    let words = ["privileges (capabilities)", "CAP_SYS_PTRACE: no", "capabilities covered: no", "dumpable: unknown"];
    assert_eq!(cause(&mut process, &rkey, "", &words), "more-capabilities");
    process.finish();
}

#[test]
fn namespaces_are_found() {
    // B15, B16.
    let (me, _importer) = enter!("namespaces_are_found");
    let mut outside = Remote::start(&me);
    let rkey = alone(&mut outside);
    let below = |rkey: &Rkey| {
        in_new_namespaces(CloneFlags::CLONE_NEWPID, || {
            let mut process = Importing::start(&me);
            for route in ["route=pidfd", ""] {
                let words = ["another PID namespace", "CUDA_IPC_SOCKET_DIR", "same PID namespace: no"];
                assert_eq!(cause(&mut process, rkey, route, &words), "other-pid-namespace");
            }
            process.finish();
        })
    };
    if below(&rkey).is_none() {
        return;
    }
    // Exporter and importer both pid 1, and an importer above.
    let (mut inside, rkey_inside) = in_new_namespaces(CloneFlags::CLONE_NEWPID, || {
        let mut inside = Remote::start(&me);
        let rkey = alone(&mut inside);
        (inside, rkey)
    })
    .unwrap();
    assert_eq!(inside.number("pid"), 1);
    below(&rkey_inside).unwrap();
    let mut above = Importing::start(&me);
    assert_eq!(cause(&mut above, &rkey_inside, "", &["another PID namespace"]), "other-pid-namespace");
    above.finish();

    // A client whose user does not exist where the exporter lives.
    let mut process = Importing::start_with(&me, without_users);
    let words = ["another user namespace", "same user namespace: no", "the call on itself: works"];
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &words), "other-user-namespace");
    process.finish();
    // The broker's word for the same, where nothing else was tried.
    outside.ask("exporter_with");
    let memory = outside.memory(8 * MIB, &chunks(2));
    let (_, served) = outside.export(&memory, 0, 4 * MIB);
    let mut process = Importing::start_with(&me, without_users);
    assert_eq!(cause(&mut process, &served, "route=broker", &[]), "other-user-namespace");
    assert_eq!(cause(&mut process, &served, "", &[]), "other-user-namespace");
    process.finish();
    // And the exporter in such a one.
    let mut remote = Remote::start_with(&me, |command| as_root_of_its_own(command, 20_003));
    let rkey = alone(&mut remote);
    let mut process = Importing::start_with(&me, |command| as_user(command, 20_004));
    assert_eq!(cause(&mut process, &rkey, "", &["same user namespace: no"]), "other-user-namespace");
    process.finish();
}

#[test]
fn a_lack_of_fds_is_found() {
    // A16.
    let (me, _importer) = enter!("a_lack_of_fds_is_found");
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    let mut process = Importing::start_with(&me, |command| with_files(command, 64));
    let filled: u64 = process.ask("fill").unwrap().parse().unwrap();
    assert!((1..64).contains(&filled), "{filled}");
    assert_eq!(cause(&mut process, &rkey, "", &["may not open more files (its limit is 64)", "ulimit -n"]), "fd-limit");
    assert_eq!(cause(&mut process, &rkey, "route=broker", &["its limit is 64"]), "fd-limit");
    process.finish();
}

#[test]
fn a_broker_that_is_not_there_is_found() {
    // A20.
    let (me, _importer) = enter!("a_broker_that_is_not_there_is_found");
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    let mut process = Importing::start(&me);
    assert_eq!(cause(&mut process, &rkey, "route=broker", &["in this network namespace", "CUDA_IPC_SOCKET_DIR"]), "no-listener");
    let options = format!("route=broker dir={}", machine().display());
    assert_eq!(cause(&mut process, &rkey, &options, &["nor in the socket directory", "the same socket directory mounted"]), "no-listener");
    // It is there, behind a network namespace.
    remote.ask("exporter_with");
    let memory = remote.memory(8 * MIB, &chunks(2));
    let (_, served) = remote.export(&memory, 0, 4 * MIB);
    in_new_namespaces(CloneFlags::CLONE_NEWNET, || {
        let mut process = Importing::start(&me);
        assert_eq!(cause(&mut process, &served, "route=broker", &["different network namespaces"]), "no-listener");
        process.finish();
    });
    assert_eq!(process.connect(&served, "route=broker").unwrap(), "broker");
    process.finish();
}

#[test]
fn the_end_of_an_exporter_is_found_and_not_taken_for_another() {
    let (me, _importer) = enter!("the_end_of_an_exporter_is_found_and_not_taken_for_another");
    let mut process = Importing::start(&me);
    // Killed and waited for; killed and not waited for.
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    remote.kill();
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &["its process has exited"]), "exporter-gone");
    // Just killed: it may be anywhere between a full life and a zombie, and whatever is said of it, it is not that it lives on without a thread.
    for _ in 0..20 {
        let mut remote = Remote::start(&me);
        let rkey = alone(&mut remote);
        let pid = nix::unistd::Pid::from_raw(i32::try_from(remote.pid).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        match process.ask(&format!("explain {} route=pidfd", hex(&rkey))) {
            Ok(said) => assert!(said.starts_with("exporter-gone "), "{said}"),
            // The kill has not come to it yet.
            Err(reached) => assert_eq!(reached, "reached by pidfd"),
        }
    }
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(remote.pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(wait_until(SOON, || pidfd_sys::process_stat(remote.pid).is_ok_and(|stat| stat.state == b'Z')));
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &["exporter: has exited"]), "exporter-gone");
    drop(remote);
    // Another program under its pid.
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    remote.exec();
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &["has become another program"]), "exporter-gone");
    // It lives, without its first thread: getfd answers ESRCH, which is no death.
    let rkey = alone(&mut remote);
    remote.ask("lose_first_thread");
    let words = ["first thread has exited", "lives, its first thread does not"];
    assert_eq!(cause(&mut process, &rkey, "route=pidfd", &words), "first-thread-exited");
    assert_eq!(cause(&mut process, &rkey, "", &words), "first-thread-exited");
    process.finish();
}

#[test]
fn yama_is_found_by_its_setting() {
    let (me, _importer) = enter!("yama_is_found_by_its_setting");
    let scope = |text: &str| {
        let file = machine().join(format!("ptrace_scope_{text}"));
        std::fs::write(&file, format!("{text}\n")).unwrap();
        file
    };
    for (text, want) in [("0", Some(Yama::Scope(0))), ("1", Some(Yama::Scope(1))), ("3", Some(Yama::Scope(3))), ("x", None), ("", None)] {
        assert_eq!(Witness::default().with_ptrace_scope(scope(text)).yama(), want, "{text:?}");
    }
    // Not there although the folder above is; and not a word about it where that is missing as well.
    assert_eq!(Witness::default().with_ptrace_scope(machine().join("yama/ptrace_scope")).yama(), Some(Yama::Absent));
    assert_eq!(Witness::default().with_ptrace_scope(machine().join("no/yama/ptrace_scope")).yama(), None);

    // Closed for all fds of others, as by Yama: everything else that could be the cause is seen to be none.
    let siblings = || {
        let mut remote = Remote::start_with(&me, |command| as_user(command, 20_001));
        let rkey = alone(&mut remote);
        let mut process = Importing::start_with(&me, |command| as_user(command, 20_001));
        remote.ask("dumpable 1");
        process.ask("refuse_fds").unwrap();
        (remote, process, rkey)
    };
    let option = |text: &str| format!("route=pidfd scope={}", scope(text).display());
    let (remote, mut process, rkey) = siblings();
    let words =
        ["own descendants only", "sysctl -w kernel.yama.ptrace_scope=0", "dumpable: yes", "readable: yes", "the call on itself: works"];
    assert_eq!(cause(&mut process, &rkey, &option("1"), &words), "yama-scope-1");
    assert_eq!(cause(&mut process, &rkey, &option("2"), &["administrators"]), "yama-scope-2");
    assert_eq!(cause(&mut process, &rkey, &option("3"), &["boot again"]), "yama-scope-3");
    // Scope 0 stops nothing.
    assert_eq!(cause(&mut process, &rkey, &option("0"), &["Yama ptrace_scope 0"]), "unknown");
    process.finish();
    remote.finish();
    // In a PID namespace whose /proc is not mounted: strangers' facts are not taken for the exporter's.
    in_new_namespaces(CloneFlags::CLONE_NEWPID, || {
        let (remote, mut process, rkey) = siblings();
        assert_eq!(cause(&mut process, &rkey, &option("2"), &["on its parent: not tried"]), "yama-scope-2");
        assert_eq!(cause(&mut process, &rkey, &option("1"), &["same user and group: unknown", "readable: unknown"]), "unknown");
        process.finish();
        remote.kill();
    });
}

#[test]
fn a_gpu_that_is_not_visible_is_found() {
    // B39.
    let config = FakeConfig { faults: Some("cuMemImportFromShareableHandle#*=999".to_owned()), ..FakeConfig::default() };
    let (me, _importer) = enter!("a_gpu_that_is_not_visible_is_found", &config);
    let mut remote = Remote::start(&me);
    let rkey = alone(&mut remote);
    let mut process = Importing::start(&me);
    let said = |process: &mut Importing, gpu: &str| process.ask(&format!("explain_import {} gpu={gpu}", hex(&rkey))).unwrap();
    assert_says(&said(&mut process, "no"), &["gpu-not-visible", "CUDA_VISIBLE_DEVICES"]);
    // A driver's error alone is none.
    assert_says(&said(&mut process, "yes"), &["unknown | ", "the driver: CUresult 999"]);
    process.finish();
}

#[test]
fn what_the_allocator_asked_for_is_found() {
    // A17.
    let config = FakeConfig { fabric: true, ..FakeConfig::default() };
    let (_me, importer): (Inside, Importer) = enter!("what_the_allocator_asked_for_is_found", &config);
    let exporter = Exporter::new(importer.core, without_broker()).unwrap();
    let mut memory = Memory::reserve(importer.cuda, 8 * MIB, 0).unwrap();
    let witness = Witness::default();
    let cases = [(0, Some(Cause::NoHandleType)), (8, Some(Cause::FabricOnly)), (1, None)];
    for (at, (types, want)) in (0..).zip(cases) {
        memory.map_types(at * 2 * MIB, 2 * MIB, types).unwrap();
        let found = match exporter.export(memory.base() + at * 2 * MIB, 2 * MIB) {
            Ok(_) => None,
            Err(no_ipc) => Some(witness.explain_export(&no_ipc).unwrap_or_else(|| panic!("{no_ipc}")).cause),
        };
        assert_eq!(found, want, "handle types {types}");
    }
    // A hole is no setting of anybody's.
    let hole = exporter.export(memory.base() + 6 * MIB, 2 * MIB).unwrap_err();
    assert!(!matches!(hole.cause, reason::Cause::NoHandleType | reason::Cause::FabricOnly), "{hole}");
    assert_eq!(witness.explain_export(&hole), None);
}
