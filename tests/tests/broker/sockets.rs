//! The names of a broker's socket: files that are left behind, links, directories of others, names that are taken.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use cuda_ipc_core::importer::{ConnectOptions, Route};
use cuda_ipc_core::key::Nonce;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::snapshot::wait_until;
use nix::unistd::{chown, mkfifo};

use crate::raw::{address, listen_at, name};
use crate::support::{MIB, SOON, assert_says, by, chunks, import, machine, share};

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn by_file(dir: &Path) -> ConnectOptions {
    let mut options = by(Route::Broker);
    options.socket_dir = Some(dir.to_owned());
    options
}

#[test]
fn a_socket_file_has_a_directory_and_a_life() {
    let (me, importer) = enter!("a_socket_file_has_a_directory_and_a_life");
    // A path longer than an address can hold.
    let dir = machine().join("a".repeat(120)).join("sockets");
    std::fs::create_dir(dir.parent().unwrap()).unwrap();
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, &format!("dir={}", dir.display()), 2);
    assert_eq!(remote.ask("broker_failures").matches("None").count(), 3, "{}", remote.ask("broker_failures"));
    assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o7777, 0o700, "made for this user");
    let file = dir.join(name(Nonce(remote.number("nonce"))).file_name());
    let metadata = std::fs::symlink_metadata(&file).unwrap();
    assert!(metadata.file_type().is_socket() && metadata.mode() & 0o777 == 0o600);
    assert_eq!(entries(&dir).len(), 1, "and nothing else");
    // The abstract name is tried first; without it the file is the way.
    let (_, imported) = import(&importer, &rkey, &by_file(&dir)).unwrap();
    importer.verify_import(&imported, &rkey, &memory);
    // The last export ends it, the next one begins it anew.
    remote.ask("release 0");
    assert!(wait_until(SOON, || entries(&dir).is_empty()));
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    assert_eq!(entries(&dir).len(), 1);
    import(&importer, &rkey, &by_file(&dir)).unwrap();
    // Somebody else's file in its place is not removed.
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, "not a socket").unwrap();
    remote.ask("no_exporter");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "not a socket");
    remote.finish();
}

#[test]
fn what_others_left_behind_is_cleared_away_with_care() {
    let (me, importer) = enter!("what_others_left_behind_is_cleared_away_with_care");
    let dir = machine().join("sockets");
    // Killed: nobody removes its file.
    let mut killed = Remote::start(&me);
    share(&mut killed, &format!("dir={}", dir.display()), 1);
    killed.kill();
    let stale = entries(&dir);
    assert_eq!(stale.len(), 1);
    // What looks like one and is none, or is not deserted, or is somebody else's, or of another machine.
    let file = |nonce: u64| dir.join(name(Nonce(nonce)).file_name());
    let target = machine().join("target");
    std::fs::write(&target, "precious").unwrap();
    symlink(&target, file(1)).unwrap();
    std::fs::write(file(2), "a file").unwrap();
    mkfifo(&file(3), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::create_dir(file(4)).unwrap();
    let deserted = |path: &Path| drop(UnixListener::bind(path).unwrap());
    deserted(&file(5));
    chown(&file(5), Some(20_001.into()), None).unwrap();
    let elsewhere = dir.join(file(6).file_name().unwrap().to_str().unwrap().replace(|c: char| c.is_ascii_digit(), "0"));
    deserted(&elsewhere);
    deserted(&dir.join("something.sock"));
    let unfinished = dir.join(format!("{}.new", name(Nonce(7)).file_name()));
    deserted(&unfinished);
    deserted(&file(8));
    symlink(file(8), file(9)).unwrap();
    // Another exporter that lives.
    let mut alive = Remote::start(&me);
    let (memory, rkey) = share(&mut alive, &format!("dir={}", dir.display()), 2);
    let mut remote = Remote::start(&me);
    let mut before = entries(&dir);
    share(&mut remote, &format!("dir={}", dir.display()), 1);
    let own = name(Nonce(remote.number("nonce"))).file_name().to_owned();
    let mut after = entries(&dir);
    after.retain(|name| *name != own);
    before.retain(|name| !stale.contains(name) && dir.join(name) != file(8));
    assert_eq!(after, before);
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    import(&importer, &rkey, &by_file(&dir)).map(|(_, imported)| importer.verify_import(&imported, &rkey, &memory)).unwrap();
}

#[test]
fn a_link_in_the_sockets_place_is_not_followed() {
    let (me, importer) = enter!("a_link_in_the_sockets_place_is_not_followed");
    let dir = machine().join("sockets");
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o700)).unwrap();
    let target = machine().join("target");
    std::fs::write(&target, "precious").unwrap();
    let mut remote = Remote::start(&me);
    remote.ask(&format!("exporter_with dir={} uids=0,20001", dir.display()));
    let name = name(Nonce(remote.number("nonce")));
    for place in [name.file_name().to_owned(), format!("{}.new", name.file_name())] {
        symlink(&target, dir.join(place)).unwrap();
    }
    let memory = remote.memory(64 * MIB, &chunks(2));
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    let metadata = std::fs::symlink_metadata(dir.join(name.file_name())).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.mode() & 0o777, 0o666, "others are listed: credentials decide");
    assert_eq!(std::fs::metadata(&target).unwrap().mode() & 0o777, 0o644, "the link's target is as it was");
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    assert_eq!(entries(&dir).len(), 1);
    import(&importer, &rkey, &by_file(&dir)).unwrap();
}

#[test]
fn a_directory_of_somebody_else_is_not_used() {
    let (me, importer) = enter!("a_directory_of_somebody_else_is_not_used");
    let dir = machine().join("sockets");
    let mut remote = Remote::start(&me);
    let mut try_with = |options: &str| {
        let (memory, rkey) = share(&mut remote, &format!("dir={} {options}", dir.display()), 1);
        // The export succeeds all the same, and the abstract name is there.
        import(&importer, &rkey, &by(Route::Broker)).map(|(_, imported)| importer.verify_import(&imported, &rkey, &memory)).unwrap();
        remote.ask("broker_failures")
    };
    std::fs::write(&dir, "a file").unwrap();
    assert_says(&try_with(""), &["abstract_name: None", "socket_dir: Some", "open", "errno: 20"]);
    std::fs::remove_file(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    let set = |mode: u32, owner: u32| {
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).unwrap();
        chown(&dir, Some(owner.into()), None).unwrap();
    };
    set(0o700, 20_001);
    assert_says(&try_with(""), &["checking the socket directory", "errno: 1"]);
    set(0o777, 0);
    assert_says(&try_with(""), &["checking the socket directory", "errno: 1"]);
    assert_says(&try_with("mode=755"), &["checking the socket directory", "errno: 1"]);
    assert_says(&try_with("mode=777"), &["socket_dir: None"]);
    assert!(wait_until(SOON, || entries(&dir).len() <= 1));
    set(0o755, 0);
    assert_says(&try_with("mode=755"), &["socket_dir: None"]);
}

#[test]
fn a_name_that_is_taken_beforehand_costs_one_way_only() {
    let (me, importer) = enter!("a_name_that_is_taken_beforehand_costs_one_way_only");
    let dir = machine().join("sockets");
    for options in [String::new(), format!("dir={}", dir.display())] {
        let mut remote = Remote::start(&me);
        remote.ask(format!("exporter_with {options}").trim_end());
        let squatter = listen_at(&address(Nonce(remote.number("nonce")))).unwrap();
        let memory = remote.memory(64 * MIB, &chunks(2));
        let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
        assert_says(&remote.ask("broker_failures"), &["abstract_name: Some", "bind", "errno: 98"]);
        let (peer, imported) = import(&importer, &rkey, &by(Route::Auto)).unwrap();
        assert_eq!(peer.route(), Route::Pidfd);
        importer.verify_import(&imported, &rkey, &memory);
        let mut short = by(Route::Broker);
        short.socket_dir = (!options.is_empty()).then(|| dir.clone());
        let deadline = cuda_ipc_core::importer::Deadline::after(core::time::Duration::from_secs(2));
        let reached = cuda_ipc_core::importer::Peer::connect_with(&cuda_ipc_tests::importer::key(&rkey), &short, deadline);
        if options.is_empty() {
            // It listens and never says anything.
            assert_says(&reached.map(drop).unwrap_err().to_string(), &["no answer before the deadline"]);
            drop(squatter);
            // Free again: the next export takes it, after a moment.
            assert!(wait_until(SOON, || {
                remote.export(&memory, 0, 2 * MIB);
                import(&importer, &rkey, &by(Route::Broker)).is_ok()
            }));
        } else {
            // Half of the time for the name, then the file.
            assert_eq!(reached.unwrap().route(), Route::Broker);
        }
        remote.finish();
    }
}
