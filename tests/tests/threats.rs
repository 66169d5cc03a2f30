//! What `docs/threat-model.md` says that no other test tries: what a nonce is made of, where it is shown, what can be done with a fetched table, and which fds an
//! executed program would get.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::importer::{ConnectOptions, Deadline, Route};
use cuda_ipc_core::key::{Key, Nonce};
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_tests::child::{fork, wait};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{LONG, enter, key};
use cuda_ipc_tests::snapshot::open_fds;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mprotect, munmap};

const MIB: u64 = 1 << 20;

#[test]
fn nonces_are_64_random_bits_and_new_after_a_fork() {
    let Some((_, importer)) = enter("nonces_are_64_random_bits_and_new_after_a_fork") else { return };
    const COUNT: usize = 512;
    let nonce = || Exporter::new(importer.core, exporter::without_broker()).unwrap().nonce().0;
    let nonces: Vec<u64> = (0..COUNT).map(|_| nonce()).collect();
    let distinct: BTreeSet<u64> = nonces.iter().copied().collect();
    assert_eq!(distinct.len(), COUNT);
    assert!(!distinct.contains(&0));
    for bit in 0..64 {
        // Nine standard deviations: what is random fails this once in more than 10^16 runs.
        let ones = nonces.iter().filter(|&&nonce| nonce >> bit & 1 == 1).count();
        assert!((COUNT / 2 - 102..=COUNT / 2 + 102).contains(&ones), "bit {bit} is set in {ones} of {COUNT}");
        let changes = nonces.windows(2).filter(|pair| (pair[0] ^ pair[1]) >> bit & 1 == 1).count();
        assert!((COUNT / 2 - 102..=COUNT / 2 + 102).contains(&changes), "bit {bit} changes {changes} times of {COUNT}");
    }
    // No state that a child has a copy of: parent and child go on alike and get different ones.
    let (read, write) = std::io::pipe().unwrap();
    let child = fork(|| {
        use std::io::Write;
        // An exporter makes no driver call before it exports, and a child may make none.
        let nonce = Exporter::new(importer.core, exporter::without_broker()).unwrap().nonce().0;
        (&write).write_all(&nonce.to_le_bytes()).is_ok()
    });
    drop(write);
    let ours = nonce();
    let mut theirs = [0; 8];
    std::io::Read::read_exact(&mut &read, &mut theirs).unwrap();
    wait(child, "a forked exporter");
    let theirs = u64::from_le_bytes(theirs);
    assert!(theirs != ours && !distinct.contains(&theirs) && !distinct.contains(&ours));
}

#[test]
fn texts_do_not_give_a_nonce_away() {
    let Some((me, importer)) = enter("texts_do_not_give_a_nonce_away") else { return };
    let mut remote = Remote::start(&me);
    remote.ask("exporter_with");
    let memory = remote.memory(8 * MIB, &[(2 * MIB, 1)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * MIB);
    let real = key(&rkey);
    let forged = Key { nonce: Nonce(0x1234_5678_9abc_def1), ..real };
    let forged_rkey = Rkey { payload: Payload::Posix(forged), ..rkey };
    let by = |route| ConnectOptions::default().with_route(route);
    let mut texts = Vec::new();
    let mut add = |text: String| texts.push(text);
    // What can be had of things that work,
    let peer = importer.connect(&rkey).unwrap();
    let import = importer.import_from(&peer, &rkey).unwrap();
    let cache = Cache::new(importer.core, CacheOptions::default());
    let window = cache.window(&real, 0, false, Deadline::after(LONG)).unwrap();
    let lease = window.lease(rkey.base, rkey.len, Deadline::after(LONG)).unwrap();
    add(format!("{rkey:?} {real:?} {peer:?} {import:?} {cache:?} {window:?} {lease:?}"));
    // of refusals, one of which meets the real table with a forged key,
    for route in [Route::Pidfd, Route::Broker, Route::Auto] {
        let error = importer.connect_with(&forged_rkey, &by(route)).map(drop).unwrap_err();
        add(format!("{error} {error:?}"));
    }
    let error = cache.window(&forged, 0, false, Deadline::after(LONG)).map(drop).unwrap_err();
    add(format!("{error} {error:?}"));
    // and of the exporter's side.
    let exporter = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    add(format!("{exporter:?} {export:?} {:?} {:?}", exporter.stats(), exporter.broker_failures()));

    assert!(texts.iter().any(|text| text.contains("another process life")), "the real table was met: {texts:#?}");
    for Nonce(nonce) in [real.nonce, forged.nonce, exporter.nonce()] {
        let hex: String = nonce.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        for secret in [nonce.to_string(), format!("{nonce:016x}"), hex, format!("{nonce:x}")] {
            for text in &texts {
                assert!(!text.to_lowercase().contains(&secret), "{secret} is in: {text}");
            }
        }
    }
}

#[test]
fn a_fetched_table_cannot_be_written() {
    let Some((me, importer)) = enter("a_fetched_table_cannot_be_written") else { return };
    let mut remote = Remote::start(&me);
    let memory = remote.memory(8 * MIB, &[(2 * MIB, 1)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * MIB);
    let key = key(&rkey);
    let process = pidfd_sys::pidfd_open(key.pid).unwrap();
    let table = pidfd_sys::pidfd_getfd(process.as_fd(), i32::try_from(key.table_fd).unwrap()).unwrap();
    let len = core::num::NonZeroUsize::new(4096).unwrap();
    let map = |table: BorrowedFd<'_>, protection| {
        // SAFETY: a new mapping at an address of the kernel's choice; nobody views it as anything.
        unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, table, 0) }
    };
    assert_eq!(map(table.as_fd(), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).err(), Some(Errno::EPERM));
    assert_eq!(nix::unistd::write(&table, &[0; 8]), Err(Errno::EPERM));
    assert_eq!(nix::unistd::ftruncate(&table, 0), Err(Errno::EPERM));
    let readable = map(table.as_fd(), ProtFlags::PROT_READ).unwrap();
    // SAFETY: the mapping made above, of this length.
    assert_eq!(unsafe { mprotect(readable, 4096, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) }, Err(Errno::EACCES));
    // Nor by its name.
    let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&table));
    if let Ok(again) = std::fs::OpenOptions::new().read(true).write(true).open(name) {
        assert_eq!(map(again.as_fd(), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).err(), Some(Errno::EPERM));
        assert_eq!(nix::unistd::write(&again, &[0; 8]), Err(Errno::EPERM));
    }
    // SAFETY: the mapping made above, which nobody uses any more.
    unsafe { munmap(readable, 4096) }.unwrap();
    importer.verify(&rkey, &memory);
}

#[test]
fn every_fd_of_ours_closes_on_exec() {
    let Some((me, importer)) = enter("every_fd_of_ours_closes_on_exec") else { return };
    let mut remote = Remote::start(&me);
    let dir = std::path::PathBuf::from(std::env::var_os("FAKE_CUDA_DIR").unwrap()).join("sockets");
    remote.ask(&format!("exporter_with dir={}", dir.display()));
    let memory = remote.memory(8 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    let before: BTreeSet<i32> = open_fds().into_keys().collect();
    let by = |route| ConnectOptions::default().with_route(route);
    // Everything that holds fds: peers by both routes, a cache with its thread, an exporter with chunks, a broker and a file of its socket.
    let peers = [Route::Pidfd, Route::Broker].map(|route| importer.connect_with(&rkey, &by(route)).unwrap());
    let imports = peers.each_ref().map(|peer| importer.import_from(peer, &rkey).unwrap());
    let cache = Cache::new(importer.core, CacheOptions::default());
    let window = cache.window(&key(&rkey), 0, false, Deadline::after(LONG)).unwrap();
    let lease = window.lease(rkey.base, rkey.len, Deadline::after(LONG)).unwrap();
    let mut options = ExporterOptions::default();
    options.socket_dir = Some(dir);
    let exporter = Exporter::new(importer.core, options).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    let ours: Vec<_> = open_fds().into_iter().filter(|(number, _)| !before.contains(number)).collect();
    let kinds: BTreeSet<String> =
        ours.iter().map(|(_, link)| link.display().to_string().split(':').next().unwrap_or_default().to_owned()).collect();
    println!("{ours:?}");
    assert!(ours.len() >= 6 && kinds.len() >= 3, "a table, a chunk, sockets, pidfds: {kinds:?}");
    for (number, link) in &ours {
        // SAFETY: an fd of this process that was listed just now; it is only asked for its flags.
        let fd = unsafe { BorrowedFd::borrow_raw(*number) };
        let flags = FdFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC), "fd {number} ({}) would be inherited", link.display());
    }
    drop((export, lease, imports, peers));
}
