//! Keys that lead nowhere, or to somebody else: damaged bytes, processes that are gone or others, fd numbers that are no table. Each gives an error that names
//! step, pid and errno, and leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_ipc_core::importer::{Deadline, ImportErrorKind, ImportStep, NotATableFile};
use cuda_ipc_core::key::{HostId, Key, KeyError, Nonce};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::table::{HeaderError, Layout};
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::{Importer, LONG, by_pidfd, key};
use cuda_ipc_tests::snapshot::{Snapshot, wait_until};
use pidfd_sys::Errno;

const MIB: u64 = 1 << 20;

struct World {
    me: Inside,
    importer: Importer,
}

fn enter(test: &str) -> Option<World> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    if me.role() == exporter::ROLE {
        exporter::serve(&me);
        return None;
    }
    let importer = Importer::start();
    // What is made once in a process is made now.
    cuda_ipc_core::sys::ProcessLife::current().unwrap();
    Some(World { me, importer })
}

impl World {
    fn exporter(&self) -> (Remote, RemoteMemory, Rkey) {
        let mut remote = Remote::start(&self.me);
        let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
        let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
        (remote, memory, rkey)
    }

    /// The error of a connection that must fail, at this step; nothing is left.
    #[track_caller]
    fn refused(&self, key: &Key, step: ImportStep) -> ImportErrorKind {
        let before = Snapshot::take(&self.importer.fake);
        let error = by_pidfd(key, Deadline::after(LONG)).map(drop).unwrap_err();
        println!("{error}");
        assert_eq!((error.step, error.pid, error.stuck_bytes), (step, key.pid, 0), "{error}");
        before.assert_unchanged(&self.importer.fake, &error.to_string());
        error.kind
    }
}

fn errno(kind: ImportErrorKind) -> Errno {
    match kind {
        ImportErrorKind::Pidfd(error) => error.errno,
        other => panic!("no pidfd call failed: {other:?}"),
    }
}

#[test]
fn damaged_bytes_are_no_key() {
    let Some(world) = enter("damaged_bytes_are_no_key") else { return };
    let (_remote, memory, rkey) = world.exporter();
    let bytes = key(&rkey).encode();
    for len in (0..bytes.len()).chain([bytes.len() + 1, 128]) {
        let cut: Vec<u8> = bytes.iter().copied().cycle().take(len).collect();
        assert_eq!(Key::decode(&cut), Err(KeyError::Length(len)));
    }
    let flipped = |bytes: &[u8], bit: usize| {
        let mut bytes = bytes.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes
    };
    for bit in 0..8 * bytes.len() {
        let error = Key::decode(&flipped(&bytes, bit)).expect_err("every bit is covered");
        let expected = match bit / 8 {
            0..4 => matches!(error, KeyError::Magic(_)),
            4 => matches!(error, KeyError::Version(_)),
            _ => matches!(error, KeyError::Checksum { .. }),
        };
        assert!(expected, "bit {bit}: {error}");
    }
    let whole = rkey.encode();
    for bit in 0..8 * whole.len() {
        Rkey::decode(&flipped(&whole, bit)).expect_err("every bit is covered");
    }
    for len in 0..whole.len() {
        Rkey::decode(&whole[..len]).expect_err("too short");
    }
    // Another kind, well formed: a pool allocation is nothing that this call imports.
    let pool = Key { kind: cuda_ipc_core::key::KeyKind::PoolAllocation { slot: 0 }, ..key(&rkey) };
    assert_eq!(Key::decode(&pool.encode()), Ok(pool));
    let before = Snapshot::take(&world.importer.fake);
    let peer = std::sync::Arc::new(by_pidfd(&pool, Deadline::after(LONG)).expect("the same process and table"));
    let import = |key: &Key| {
        cuda_ipc_core::importer::Import::new(
            &world.importer.core,
            &peer,
            key,
            rkey.base,
            rkey.len,
            cuda_ipc_tests::importer::READ,
            Deadline::after(LONG),
        )
    };
    let error = import(&pool).map(drop).unwrap_err();
    assert_eq!((error.step, error.kind), (ImportStep::Key, ImportErrorKind::KeyKind));
    let import = import(&key(&rkey)).unwrap();
    memory.verify(&world.importer.cuda, import.address(), 0, 4 * MIB).unwrap();
    drop((import, peer));
    before.assert_unchanged(&world.importer.fake, "all of it");
}

#[test]
fn the_process_is_not_there() {
    let Some(world) = enter("the_process_is_not_there") else { return };
    // Never was, or was and is reaped.
    let (remote, _, rkey) = world.exporter();
    let known = world.importer.connect(&rkey).unwrap();
    remote.kill();
    assert!(known.has_exited());
    let error = world.importer.import_from(&known, &rkey).map(drop).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::ExporterGone);
    drop(known);
    assert_eq!(errno(world.refused(&key(&rkey), ImportStep::OpenPeer)), Errno::ESRCH);
    let highest = i32::MAX.cast_unsigned();
    assert_eq!(errno(world.refused(&Key { pid: highest, ..key(&rkey) }, ImportStep::OpenPeer)), Errno::ESRCH);
    assert_eq!(errno(world.refused(&Key { pid: 0, ..key(&rkey) }, ImportStep::OpenPeer)), Errno::EINVAL);
    assert_eq!(errno(world.refused(&Key { pid: highest + 1, ..key(&rkey) }, ImportStep::OpenPeer)), Errno::EINVAL);

    // A zombie: exited, and its parent does not care.
    let (remote, _, rkey) = world.exporter();
    let known = world.importer.connect(&rkey).unwrap();
    let pid = nix::unistd::Pid::from_raw(i32::try_from(remote.pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(wait_until(LONG, || known.has_exited()));
    assert_eq!(pidfd_sys::process_stat(remote.pid).unwrap().state, b'Z');
    drop(known);
    assert_eq!(world.refused(&key(&rkey), ImportStep::FetchTable), ImportErrorKind::ExporterGone);

    // A thread that leads no process.
    let thread = std::thread::spawn(std::thread::park);
    let tids: Vec<u32> =
        std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    let tid = tids.into_iter().max().unwrap();
    let error = by_pidfd(&Key { pid: tid, ..key(&rkey) }, Deadline::after(LONG)).map(drop).unwrap_err();
    assert!(matches!(errno(error.kind), Errno::ENOENT | Errno::EINVAL), "{error}");
    thread.thread().unpark();
    thread.join().unwrap();
}

#[test]
fn only_the_first_thread_has_exited() {
    // The kernel then answers ESRCH to pidfd_getfd, but the process lives: nothing may be given up because of it.
    let Some(world) = enter("only_the_first_thread_has_exited") else { return };
    let (mut remote, memory, rkey) = world.exporter();
    let peer = world.importer.connect(&rkey).unwrap();
    let import = world.importer.import_from(&peer, &rkey).unwrap();
    remote.ask("lose_first_thread");
    assert!(!peer.has_exited() && !peer.is_gone());
    assert!(import.is_current());
    memory.verify(&world.importer.cuda, import.address(), 0, 4 * MIB).unwrap();
    drop(import);
    let error = world.importer.import_from(&peer, &rkey).map(drop).unwrap_err();
    assert_eq!(errno(error.kind), Errno::ESRCH);
    assert!(error.other_route_may_work(), "it can still be asked");
    drop(peer);
    assert_eq!(errno(world.refused(&key(&rkey), ImportStep::FetchTable)), Errno::ESRCH);
    remote.kill();
}

#[test]
fn the_pid_is_somebody_elses_now() {
    // B15, B18: what counts is the nonce that the table repeats.
    let Some(world) = enter("the_pid_is_somebody_elses_now") else { return };
    let (first, _, one) = world.exporter();
    let (mut second, memory, other) = world.exporter();
    let (one, two) = (key(&one), key(&other));
    assert_eq!((one.table_fd, one.len), (two.table_fd, two.len), "alike but for pid and nonce");
    let stale = Key { pid: second.pid, ..one };
    let mixed = HeaderError::Nonce { expected: one.nonce, found: two.nonce };
    assert_eq!(world.refused(&stale, ImportStep::OpenTable), ImportErrorKind::Table(mixed));
    let other_nonce = Key { nonce: Nonce(two.nonce.0 ^ 1), ..two };
    let mixed = HeaderError::Nonce { expected: other_nonce.nonce, found: two.nonce };
    assert_eq!(world.refused(&other_nonce, ImportStep::OpenTable), ImportErrorKind::Table(mixed));

    // This process itself, with the key of another; and a process that exports nothing.
    let own = world.refused(&Key { pid: std::process::id(), table_fd: 900, ..one }, ImportStep::FetchTable);
    assert_eq!(errno(own), Errno::EBADF);
    let idle = Remote::start(&world.me);
    assert_eq!(errno(world.refused(&Key { pid: idle.pid, table_fd: 900, ..one }, ImportStep::FetchTable)), Errno::EBADF);

    // Another machine, another boot, another PID namespace: said before anything is opened.
    let far = Key { host: HostId(one.host.0 ^ 1), ..one };
    assert_eq!(world.refused(&far, ImportStep::Key), ImportErrorKind::OtherHost);
    let apart = Key { pid_namespace: one.pid_namespace + 1, ..one };
    let expected = ImportErrorKind::OtherPidNamespace { theirs: one.pid_namespace + 1, ours: one.pid_namespace };
    assert_eq!(world.refused(&apart, ImportStep::Key), expected);

    // Two exporters of one process have two tables.
    let (_, again) = {
        second.ask("exporter 64");
        second.export(&memory, 0, 4 * MIB)
    };
    assert_eq!(key(&again).pid, two.pid);
    let found = world.refused(&Key { table_fd: key(&again).table_fd, ..two }, ImportStep::OpenTable);
    assert_eq!(found, ImportErrorKind::Table(HeaderError::Nonce { expected: two.nonce, found: key(&again).nonce }));
    world.importer.verify(&again, &memory);
    first.finish();
}

#[test]
fn the_number_is_no_table() {
    let Some(world) = enter("the_number_is_no_table") else { return };
    let (mut remote, memory, rkey) = world.exporter();
    let before = Snapshot::take(&world.importer.fake);
    let good = key(&rkey);
    let table = u64::try_from(Layout::STANDARD.bytes()).unwrap();
    // Numbers that are not open, and the highest there is.
    for number in [1000, i32::MAX.cast_unsigned(), u32::MAX] {
        assert_eq!(errno(world.refused(&Key { table_fd: number, ..good }, ImportStep::FetchTable)), Errno::EBADF);
    }
    let unsealed = |kind| matches!(kind, ImportErrorKind::NotATable(NotATableFile::Unsealed { .. }));
    let no_memory_file = |kind| match kind {
        // Files that take no seals.
        ImportErrorKind::NotATable(NotATableFile::Syscall(error)) => (error.call, error.errno) == ("fcntl(F_GET_SEALS)", libc::EINVAL),
        other => unsealed(other),
    };
    // The chunk's own number, and this process's pipes.
    let chunk = world.importer.connect(&rkey).unwrap().lookup(rkey.base, 1).unwrap()[0].1.fd.unwrap();
    for number in [chunk, 0, 1] {
        assert!(no_memory_file(world.refused(&Key { table_fd: number, ..good }, ImportStep::OpenTable)), "{number}");
    }
    // Files put where the table was (or anywhere: the number is what counts).
    const AT: u32 = 60;
    let at = Key { table_fd: AT, ..good };
    let mut put = |what: &str| remote.ask(what);
    for file in ["/dev/null", "/dev/zero", "/", "/proc/self/maps", "/etc/passwd", "/dev/shm"] {
        put(&format!("put {AT} {file}"));
        assert!(no_memory_file(world.refused(&at, ImportStep::OpenTable)), "{file}");
    }
    put(&format!("put_pipe {AT}"));
    assert!(no_memory_file(world.refused(&at, ImportStep::OpenTable)));
    put(&format!("put_chunk {AT} {} 0", memory.index));
    assert!(no_memory_file(world.refused(&at, ImportStep::OpenTable)));
    for (len, kind) in [(0, "plain"), (table, "plain"), (4096, "plain")] {
        put(&format!("put_memfd {AT} {len} {kind}"));
        assert!(unsealed(world.refused(&at, ImportStep::OpenTable)), "{kind} of {len} bytes");
    }
    for len in [0, 1, 4096, table - 1, table + 1, 2 * table] {
        put(&format!("put_memfd {AT} {len} sealed"));
        assert_eq!(world.refused(&at, ImportStep::OpenTable), ImportErrorKind::NotATable(NotATableFile::Length(len)));
    }
    // Sealed and long enough, but zeros.
    put(&format!("put_memfd {AT} {table} sealed"));
    assert_eq!(world.refused(&at, ImportStep::OpenTable), ImportErrorKind::Table(HeaderError::Magic(0)));
    // On hugetlbfs, where reading can kill.
    match remote.try_ask(&format!("put_memfd {AT} {} huge", table.next_multiple_of(2 * MIB))) {
        Ok(_) => {
            let kind = world.refused(&at, ImportStep::OpenTable);
            assert!(matches!(kind, ImportErrorKind::NotATable(NotATableFile::FileSystem { magic: 0x9584_58f6 })), "{kind:?}");
        }
        Err(error) => println!("skipped: this kernel makes no memory file of huge pages: {error}"),
    }
    // Closed under the key; and the real one is as good as before.
    remote.ask(&format!("close {AT}"));
    assert_eq!(errno(world.refused(&at, ImportStep::FetchTable)), Errno::EBADF);
    drop(world.importer.verify(&rkey, &memory));
    before.assert_unchanged(&world.importer.fake, "all of it");
}
