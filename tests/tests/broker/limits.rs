//! Few fds, on either side and on the way, and very many chunks.

use cuda_ipc_core::importer::Route;
use cuda_ipc_tests::apart::{as_user, with_files};
use cuda_ipc_tests::driver::FakeConfig;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::importer::key;
use cuda_ipc_tests::snapshot::wait_until;

use crate::importing::Importing;
use crate::raw::Raw;
use crate::support::{MIB, SOON, assert_says, by, chunks, ids, share};

/// Of nobody.
const USER: u32 = 20_001;

#[test]
fn few_fds_in_the_exporter() {
    few_fds("few_fds_in_the_exporter", Some(64), None, None);
}

#[test]
fn few_fds_in_the_importer() {
    few_fds("few_fds_in_the_importer", None, Some(64), None);
}

#[test]
fn few_fds_on_both_sides() {
    few_fds("few_fds_on_both_sides", Some(64), Some(64), None);
}

/// Not root: then fds in flight are counted, too.
#[test]
fn few_fds_in_the_exporter_of_a_user() {
    few_fds("few_fds_in_the_exporter_of_a_user", Some(64), None, Some(USER));
}

#[test]
fn few_fds_in_the_importer_of_a_user() {
    few_fds("few_fds_in_the_importer_of_a_user", None, Some(64), Some(USER));
}

#[test]
fn few_fds_on_both_sides_of_a_user() {
    few_fds("few_fds_on_both_sides_of_a_user", Some(64), Some(64), Some(USER));
}

/// Shares 400 chunks by each route, with these limits of open files.
fn few_fds(test: &str, exporter: Option<u64>, importer: Option<u64>, user: Option<u32>) {
    let (me, _importer) = enter!(test);
    let mut remote = Remote::start_with(&me, |command| {
        user.into_iter().for_each(|user| as_user(command, user));
        exporter.into_iter().for_each(|limit| with_files(command, limit));
    });
    let mut process = Importing::start_with(&me, |command| {
        user.into_iter().for_each(|user| as_user(command, user));
        importer.into_iter().for_each(|limit| with_files(command, limit));
    });
    for reserve in [256, 24] {
        let (memory, rkey) = share(&mut remote, &format!("reserve={reserve}"), 400);
        let held = remote.stats().fds;
        assert_eq!(held, exporter.map_or(400, |limit| limit.saturating_sub(reserve)));
        for (route, taken) in [("auto", "pidfd"), ("broker", "broker")] {
            let fds = (remote.number("fds"), process.ask("fds").unwrap());
            assert_eq!(process.verify(&rkey, &memory, &format!("route={route}")).unwrap(), taken);
            process.ask("drop").unwrap();
            assert_eq!(process.ask("fds").unwrap(), fds.1, "nothing is left of what was received");
            assert!(wait_until(SOON, || remote.number("fds") == fds.0), "nothing is left of what was made");
        }
        println!("{held} of 400 chunks with an fd");
    }
}

#[test]
fn an_importer_without_any_fd_says_so() {
    let (me, importer) = enter!("an_importer_without_any_fd_says_so");
    let mut remote = Remote::start(&me);
    let (_, rkey) = share(&mut remote, "reserve=1000000", 4);
    let peer = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 1, hard).unwrap();
    let error = importer.import_from(&peer, &rkey).map(drop).unwrap_err();
    let unreachable = importer.connect_with(&rkey, &by(Route::Broker)).map(drop).unwrap_err();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_says(&error.to_string(), &["recvmsg: EMFILE"]);
    assert_says(&unreachable.to_string(), &["EMFILE"]);
    assert!(error.retryable() && unreachable.retryable(), "B29, A16: no lasting verdict");
    importer.import_from(&peer, &rkey).unwrap();
}

#[test]
fn an_exporter_without_any_fd_says_so() {
    let (me, importer) = enter!("an_exporter_without_any_fd_says_so");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "reserve=1000000", 4);
    let peer = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    remote.ask("limit 48");
    remote.ask("fill 0");
    let short = |key| cuda_ipc_core::importer::Peer::connect_with(key, &by(Route::Broker), deadline(200));
    let unreachable = short(&key(&rkey)).map(drop).unwrap_err();
    assert_says(&unreachable.to_string(), &["it lacks resources (errno 24)"]);
    let found = peer.lookup(rkey.base, rkey.len).unwrap();
    let placement = cuda_ipc_core::importer::Placement { remote_base: rkey.base, local_base: importer.core.reserve(rkey.len).unwrap() };
    let error = peer.import(&importer.core, &found, placement, cuda_ipc_tests::importer::READ, deadline(200)).unwrap_err();
    assert_says(&error.to_string(), &["had no fd to give before the deadline (EMFILE"]);
    assert!(error.retryable() && unreachable.retryable());
    // While it waits, somebody closes files.
    let waiting = std::thread::spawn({
        let (peer, importer) = (peer.clone(), importer);
        move || importer.import_from(&peer, &rkey)
    });
    std::thread::sleep(core::time::Duration::from_millis(100));
    remote.ask("limit 100");
    let imported = waiting.join().unwrap().unwrap();
    importer.verify_import(&imported, &rkey, &memory);
}

fn deadline(ms: u64) -> cuda_ipc_core::importer::Deadline {
    cuda_ipc_core::importer::Deadline::after(core::time::Duration::from_millis(ms))
}

#[test]
fn what_some_leave_on_the_way_others_get_past() {
    // Fds that were sent and not received count against the user's limit (ETOOMANYREFS), root excepted.
    let (me, importer) = enter!("what_some_leave_on_the_way_others_get_past");
    let user = |command: &mut std::process::Command| {
        as_user(command, USER);
        with_files(command, 64);
    };
    let mut remote = Remote::start_with(&me, user);
    let (memory, rkey) = share(&mut remote, &format!("uids={}", nix::unistd::geteuid()), 64);
    // They ask and do not take what they are given.
    let ids = ids(&importer, &rkey);
    let hoarders: Vec<Raw> = (0..8)
        .map(|_| {
            let hoarder = Raw::proven(&key(&rkey));
            hoarder.ask_for(&ids);
            assert!(hoarder.has_answer());
            hoarder
        })
        .collect();
    let mut good = Importing::start_with(&me, user);
    assert_eq!(good.verify(&rkey, &memory, "route=broker").unwrap(), "broker");
    // What they were given is a share of the limit, and each share leaves something to the next one.
    let shares: Vec<usize> = hoarders.iter().map(|hoarder| hoarder.outcomes().1.len()).collect();
    println!("shares of a limit of 64: {shares:?}");
    assert!(shares.iter().all(|&share| share >= 1) && shares.iter().sum::<usize>() < 64, "{shares:?}");
    // Now they have taken it, and go on.
    for hoarder in &hoarders {
        hoarder.ask_for(&ids);
        assert!(!hoarder.outcomes().1.is_empty());
    }
}

#[test]
fn forty_thousand_chunks_under_the_usual_limit() {
    // B29: 80 GiB in chunks of 2 MiB, 1024 fds on each side.
    let config = FakeConfig { memory_bytes: Some(96 << 30), ..FakeConfig::default() };
    let (me, _importer) = enter!("forty_thousand_chunks_under_the_usual_limit", &config);
    let count = 40_000;
    let mut remote = Remote::start_with(&me, |command| with_files(command, 1024));
    remote.ask("exporter_with reserve=256");
    let memory = remote.marked_memory_at((count + 8) * 2 * MIB, 0, &chunks(count));
    let start = std::time::Instant::now();
    let (_, rkey) = remote.export(&memory, 0, count * 2 * MIB);
    let exported = start.elapsed();
    assert_eq!(remote.stats().fds, 768);
    // By default: what has an fd is fetched, the rest is asked for.
    let mut process = Importing::start_with(&me, |command| with_files(command, 1024));
    let start = std::time::Instant::now();
    assert_eq!(process.verify(&rkey, &memory, "").unwrap(), "pidfd");
    println!("{count} chunks: export {exported:?}, import and a look at each {:?}", start.elapsed());
    process.finish();
}
