//! A kill storm: exporters and importers that are killed at any moment and started again, for a given time. Every byte that an importer reads under a lease
//! is one that its exporter has put there, no older than what it knew to be there; and in the end nothing is left of anybody.
//!
//! `CUDA_IPC_STORM_SECONDS` says how long (the test runner's limit is some minutes; `cargo test -p cuda-ipc-tests --test kill_storm` has none), `CUDA_IPC_SEED`
//! chooses the kills. Timing is the machine's, so a seed repeats the choice and not the run.

#![allow(clippy::unwrap_used, reason = "tests")]

mod board;
mod exporter;
mod importer;

use core::time::Duration;
use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

use cuda_ipc_core::broker::SocketName;
use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::key::{HostId, Nonce};
use cuda_ipc_tests::apart;
use cuda_ipc_tests::driver::{FakeConfig, Inside, Peer};
use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::random::Random;
use cuda_ipc_tests::snapshot::{Snapshot, wait_until};

use board::Board;

/// Processes of each kind.
const EACH: usize = 8;
/// How long it is in the default tests.
const SECONDS: u64 = 8;
const SOON: Duration = Duration::from_secs(20);

/// A place in the storm: the process that is there now.
struct Place {
    role: &'static str,
    number: usize,
    process: Peer,
}

impl Place {
    fn start(me: &Inside, role: &'static str, number: usize, life: u64) -> Self {
        let process = me
            .spawn_with(role, |command| {
                command.env(board::NUMBER, number.to_string()).env(board::LIFE, life.to_string());
                // Every second importer is denied pidfd_getfd, and every second exporter holds no fds for chunks: those go by the broker.
                if role == importer::ROLE && number % 2 == 1 {
                    apart::refusing(command, pidfd_sys::numbers::PIDFD_GETFD, libc::EPERM);
                }
            })
            .unwrap();
        Self { role, number, process }
    }
}

#[test]
fn a_kill_storm_leaves_nothing_and_shows_nobody_wrong_bytes() {
    let Some(me) = Inside::enter("a_kill_storm_leaves_nothing_and_shows_nobody_wrong_bytes", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::run(&me),
        importer::ROLE => return importer::run(&me),
        _ => {}
    }
    let mut random = Random::from_environment();
    let seconds = std::env::var("CUDA_IPC_STORM_SECONDS").map_or(SECONDS, |text| text.parse().unwrap());
    let observer = Importer::start();
    cuda_ipc_core::sys::ProcessLife::current().unwrap();
    let board = Board::new();
    std::fs::create_dir(board.sockets()).unwrap();
    let before = Snapshot::take(&observer.fake);

    let mut life = 0;
    let mut next_life = || {
        life += 1;
        life
    };
    let mut places: Vec<Place> = (0..2 * EACH)
        .map(|at| Place::start(&me, if at < EACH { exporter::ROLE } else { importer::ROLE }, at % EACH, next_life()))
        .collect();
    let began = Instant::now();
    let mut kills = [0_u64; 2];
    while began.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_micros(random.below(40_000)));
        let at = usize::try_from(random.below(2 * EACH as u64)).unwrap();
        for place in &mut places {
            let end = place.process.try_wait().unwrap();
            assert!(end.is_none(), "{} {} ended by itself: {end:?}", place.role, place.number);
        }
        let (role, number) = (places[at].role, places[at].number);
        let killed = core::mem::replace(&mut places[at], Place::start(&me, role, number, next_life()));
        assert_eq!(killed.process.kill().unwrap().signal(), Some(libc::SIGKILL));
        kills[usize::from(role == importer::ROLE)] += 1;
    }
    board.stop();
    places.into_iter().for_each(|place| place.process.finish());

    println!("{seconds} s: {} exporters and {} importers killed; {}", kills[0], kills[1], board.summary());
    assert!(kills[0] + kills[1] >= seconds, "{kills:?}");
    for name in ["leases of pidfd", "leases of the broker", "caches closed"] {
        assert!(board.count(name) > 0, "none: {name}");
    }
    nothing_is_left(&observer, &board);
    before.assert_settles(&observer.fake, "the storm");
}

/// Memory, sockets and processes of the whole machine.
fn nothing_is_left(observer: &Importer, board: &Board) {
    // The driver's own book of what any process has: nothing that only an fd keeps, wherever that might be on its way.
    observer.cuda.mem_info().unwrap();
    let device = observer.fake.device(0);
    let left = (device.used_bytes, device.handles, device.mappings, device.orphans, device.processes);
    assert_eq!(left, (0, 0, 0, 0, 1), "{device:?}");
    assert_eq!(device.calls_after_fork, 0);
    // Names in the kernel go with their processes.
    let names = std::fs::read_to_string("/proc/net/unix").unwrap();
    let host = HostId::from_boot_id(pidfd_sys::boot_id().unwrap());
    let nonces = board.nonces();
    assert!(nonces.len() >= EACH);
    for nonce in &nonces {
        let name = SocketName::new(Nonce(*nonce), host);
        let text = String::from_utf8_lossy(name.abstract_name().as_bytes()).into_owned();
        assert!(!names.contains(&text), "{text} is still there");
    }
    // Names in the directory do not; the next exporter clears those of the dead away, and its own at its end.
    let killed = std::fs::read_dir(board.sockets()).unwrap().count();
    let mut options = ExporterOptions::default();
    options.socket_dir = Some(board.sockets());
    let exporter = Exporter::new(observer.core, options).unwrap();
    let (handle, address) = observer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    drop(exporter.export(address, 2 << 20).unwrap());
    drop(exporter);
    observer.cuda.mem_drop_chunk(2 << 20, (handle, address)).unwrap();
    assert!(wait_until(SOON, || std::fs::read_dir(board.sockets()).unwrap().count() == 0), "socket files are left");
    println!("{} exporters had names, {killed} socket files of killed ones were cleared away", nonces.len());
}
