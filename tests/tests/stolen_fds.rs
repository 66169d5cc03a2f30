//! Applications that close fds which are not theirs: closefrom, a double close, a dup2 over a number. Ours are then somebody else's, and are neither
//! used nor closed any more.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_ipc_core::importer::{ImportErrorKind, Peer};
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::exporter::{Remote, RemoteMemory, Stats};
use cuda_ipc_tests::importer::{Importer, enter, key};

const MIB: u64 = 1 << 20;

/// Three exported chunks of one size, and the fd numbers that they have in the exporter.
fn three_chunks(remote: &mut Remote, importer: &Importer) -> (RemoteMemory, Rkey, Vec<u64>) {
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    let numbers = numbers(&importer.connect(&rkey).unwrap(), &rkey);
    (memory, rkey, numbers)
}

fn numbers(peer: &Peer, rkey: &Rkey) -> Vec<u64> {
    peer.lookup(rkey.base, rkey.len).unwrap().iter().map(|(_, chunk)| u64::from(chunk.fd.unwrap())).collect()
}

#[test]
fn fds_that_the_application_closed_are_revoked_and_not_closed_again() {
    let Some((me, importer)) = enter("fds_that_the_application_closed_are_revoked_and_not_closed_again") else { return };
    let mut remote = Remote::start(&me);
    let (memory, rkey, numbers) = three_chunks(&mut remote, &importer);
    let table = u64::from(key(&rkey).table_fd);
    let peer = importer.connect(&rkey).unwrap();
    remote.ask("close_from 3");
    // Unrelated files take all the numbers.
    let highest = numbers.iter().copied().max().unwrap().max(table);
    while remote.number("open /etc/passwd") < highest {}
    let open = remote.number("fds");

    let refused = importer.import_from(&peer, &rkey).unwrap_err();
    assert!(matches!(refused.kind, ImportErrorKind::Driver(_) | ImportErrorKind::ExporterGone), "before the sweep: {refused}");
    assert_eq!(remote.number("sweep"), 3);
    assert_eq!(remote.stats(), Stats { published: 3, retired: 3, swept: 3, ..Stats::default() });
    importer.import_from(&peer, &rkey).expect_err("revoked");
    importer.connect(&rkey).expect_err("the table's fd is gone too");
    assert_eq!(remote.number("fds"), open, "nothing was closed");
    remote.ask("no_exporter");
    assert_eq!(remote.number("fds"), open, "nor is it at the exporter's end");
    for number in numbers.into_iter().chain([table]) {
        assert_eq!(remote.ask(&format!("link {number}")), "/etc/passwd");
    }
    // A new exporter is as good as ever.
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    importer.verify(&rkey, &memory);
}

#[test]
fn an_fd_closed_twice_by_the_application_revokes_its_chunk_only() {
    let Some((me, importer)) = enter("an_fd_closed_twice_by_the_application_revokes_its_chunk_only") else { return };
    let mut remote = Remote::start(&me);
    let (memory, rkey, numbers) = three_chunks(&mut remote, &importer);
    let peer = importer.connect(&rkey).unwrap();
    remote.ask(&format!("close {}", numbers[1]));
    importer.import_from(&peer, &rkey).expect_err("the fd is not there");
    assert_eq!(remote.number("sweep"), 1);
    assert_eq!(remote.stats(), Stats { chunks: 2, fds: 2, published: 3, retired: 1, swept: 1 });
    let first = importer.import_range(&peer, &rkey, memory.base, 2 * MIB).unwrap();
    memory.verify(&importer.cuda, first.address(), 0, 2 * MIB).unwrap();
    // The next registration makes it whole again.
    remote.export(&memory, 0, 6 * MIB);
    importer.verify_import(&importer.import_from(&peer, &rkey).unwrap(), &rkey, &memory);
}

#[test]
fn a_number_taken_by_another_chunk_never_stands_for_the_old_one() {
    // Exported fds of one GPU share an inode, so fstat cannot tell chunk from chunk; only the exporter knows that it got the number a second time.
    let Some((me, importer)) = enter("a_number_taken_by_another_chunk_never_stands_for_the_old_one") else { return };
    let mut remote = Remote::start(&me);
    let (memory, rkey, numbers) = three_chunks(&mut remote, &importer);
    let other = remote.memory(64 * MIB, &[(2 * MIB, 44)]);
    let peer = importer.connect(&rkey).unwrap();
    remote.ask(&format!("close {}", numbers[1]));
    let (_, other_key) = remote.export(&other, 0, 2 * MIB);
    assert_eq!(self::numbers(&peer, &other_key), numbers[1..2], "the lowest free number");

    match importer.import_range(&peer, &rkey, memory.base + 2 * MIB, 2 * MIB) {
        Ok(import) => memory.verify(&importer.cuda, import.address(), 2 * MIB, 2 * MIB).expect("the right chunk or none"),
        Err(error) => println!("refused: {error}"),
    }
    importer.verify(&other_key, &other);
    // The old chunk's end is not the new one's.
    remote.ask("sweep");
    remote.ask(&format!("retire {} 0 {}", memory.index, 6 * MIB));
    importer.verify(&other_key, &other);
    remote.export(&memory, 0, 6 * MIB);
    importer.verify(&rkey, &memory);
    importer.verify(&other_key, &other);
}

#[test]
fn a_file_put_over_a_number_is_no_chunk() {
    let Some((me, importer)) = enter("a_file_put_over_a_number_is_no_chunk") else { return };
    let mut remote = Remote::start(&me);
    let (memory, rkey, numbers) = three_chunks(&mut remote, &importer);
    let peer = importer.connect(&rkey).unwrap();
    remote.ask(&format!("put {} /dev/null", numbers[0]));
    let error = importer.import_from(&peer, &rkey).unwrap_err();
    assert!(matches!(error.kind, ImportErrorKind::Driver(_)), "{error}");
    assert_eq!(remote.number("sweep"), 1);
    assert_eq!(remote.ask(&format!("link {}", numbers[0])), "/dev/null", "untouched");
    remote.export(&memory, 0, 6 * MIB);
    importer.verify_import(&importer.import_from(&peer, &rkey).unwrap(), &rkey, &memory);
    // A table's number too: new importers get an error, those that have the table are not misled.
    remote.ask(&format!("put {} /dev/null", key(&rkey).table_fd));
    let error = importer.connect(&rkey).unwrap_err();
    assert!(matches!(error.kind, ImportErrorKind::NotATable(_)), "{error}");
    let error = importer.import_from(&peer, &rkey).unwrap_err();
    assert_eq!(error.kind, ImportErrorKind::ExporterGone, "as after an exec: nothing tells the two apart");
    remote.ask("no_exporter");
    assert_eq!(remote.ask(&format!("link {}", key(&rkey).table_fd)), "/dev/null", "untouched");
}

#[test]
fn an_importer_loses_its_fds_too() {
    let Some((me, importer)) = enter("an_importer_loses_its_fds_too") else { return };
    let mut remote = Remote::start(&me);
    let (memory, rkey, _) = three_chunks(&mut remote, &importer);
    let peer = importer.connect(&rkey).unwrap();
    let import = importer.import_from(&peer, &rkey).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&peer.pidfd().unwrap());
    let null = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: takes the peer's number away from it, as an application's stray dup2 would.
    assert_eq!(unsafe { libc::dup3(std::os::fd::AsRawFd::as_raw_fd(&null), number, libc::O_CLOEXEC) }, number);
    let error = importer.import_from(&peer, &rkey).unwrap_err();
    println!("{error}");
    importer.verify_import(&import, &rkey, &memory);
    drop((import, peer));
    let link = std::fs::read_link(format!("/proc/self/fd/{number}")).expect("still open");
    assert_eq!(link.to_str(), Some("/dev/null"), "the application's file is not closed with the peer");
    importer.verify(&rkey, &memory);
}
