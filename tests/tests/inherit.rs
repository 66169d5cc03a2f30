//! What forked children and executed programs inherit of an importer or an exporter: nothing.

#![allow(clippy::unwrap_used, reason = "tests")]

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::importer::{ImportErrorKind, ImportStep};
use cuda_ipc_core::sys::driver;
use cuda_ipc_core::table::HeaderError;
use cuda_ipc_tests::child::{fork, raw_clone, wait};
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, key};
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::{self, Snapshot};
use cuda_ipc_tests::{hooked, shim};

const MIB: u64 = 1 << 20;

#[test]
fn an_importing_parent_keeps_what_its_child_drops() {
    let Some(me) = Inside::enter("an_importing_parent_keeps_what_its_child_drops", &FakeConfig::default()) else { return };
    if me.role() == exporter::ROLE {
        return exporter::serve(&me);
    }
    let importer = Importer::start();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 6 * MIB);
    let before = snapshot::open_fds();
    let peer = importer.connect(&rkey).unwrap();
    let import = importer.import_from(&peer, &rkey).unwrap();
    let mut held = Some((peer, import));
    for by_fork in [true, false] {
        let snapshot = Snapshot::take(&importer.fake);
        let body = || {
            let (peer, import) = held.take().unwrap();
            let forked = matches!(peer.lookup(rkey.base, 1), Err(error) if error.kind == ImportErrorKind::Forked)
                && matches!(importer.import_from(&peer, &rkey), Err(error) if error.kind == ImportErrorKind::Forked)
                && !import.is_current();
            let closed = !by_fork || snapshot::open_fds() == before;
            drop((peer, import));
            forked && closed
        };
        wait(if by_fork { fork(body) } else { raw_clone(body) }, "an importing parent");
        snapshot.assert_unchanged(&importer.fake, "a child that dropped an import");
    }
    let (peer, import) = held.unwrap();
    importer.verify_import(&import, &rkey, &memory);
    importer.verify_import(&importer.import_from(&peer, &rkey).unwrap(), &rkey, &memory);
    assert_eq!(importer.fake.device(0).calls_after_fork, 0);
}

#[test]
fn nothing_leaks_into_an_executed_program() {
    let Some(me) = Inside::enter("nothing_leaks_into_an_executed_program", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "fresh" => {
            let links: Vec<String> = snapshot::open_fds().values().map(|link| link.display().to_string()).collect();
            return me.tell(&links.into_iter().filter(|link| !link.starts_with("pipe:")).collect::<Vec<_>>().join(","));
        }
        _ => {}
    }
    let fresh = || {
        let mut fresh = me.spawn("fresh").unwrap();
        let links = fresh.listen();
        fresh.finish();
        links
    };
    let before = fresh();
    let importer = Importer::start();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * MIB);
    let import = importer.verify(&rkey, &memory);
    let exporter = Exporter::new(importer.core, ExporterOptions::default()).unwrap();
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    let export = exporter.export(address, 2 * MIB).unwrap();
    assert_eq!(fresh(), before, "an executed program has none of our fds");
    drop((import, export));

    // In place, too: the old key leads to the same pid, and no further.
    remote.exec();
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 2)]);
    let (_, new) = remote.export(&memory, 0, 2 * MIB);
    assert_eq!((key(&new).pid, key(&new).table_fd), (key(&rkey).pid, key(&rkey).table_fd));
    let error = importer.connect(&rkey).map(drop).unwrap_err();
    let kind = ImportErrorKind::Table(HeaderError::Nonce { expected: key(&rkey).nonce, found: key(&new).nonce });
    assert_eq!((error.step, error.kind), (ImportStep::OpenTable, kind));
    importer.verify(&new, &memory);
}

/// Forks before each call of an operation; each child must have the fds that were there before the operation, and no other. A file below `/proc` that is
/// just being read pins nothing. With `in_flight` fds, one that is about to be closed has been let go of already.
fn fork_everywhere(watch: &Watch, in_flight: bool, mut operation: impl FnMut()) -> usize {
    let open = || {
        let mut fds = snapshot::open_fds();
        fds.retain(|_, link| !link.starts_with("/proc"));
        fds
    };
    operation();
    let fds = open();
    let mut forks = 0;
    let hook = |point: &Point| {
        // After a call that makes an fd, its number is in no Rust hand yet: nobody can know of it.
        if point.before {
            forks += 1;
            let more = usize::from(in_flight && point.name == "close");
            let good = || {
                let now = open();
                fds.iter().all(|(number, link)| now.get(number) == Some(link)) && now.len() <= fds.len() + more
            };
            wait(fork(good), &format!("a fork before {point:?}"));
        }
        Verdict::Go
    };
    watch.run(hook, operation);
    assert_eq!(open(), fds);
    forks
}

#[test]
fn a_fork_at_any_step_inherits_nothing() {
    // A14 and section 5 of the design: fds in flight too.
    let Some(me) = Inside::enter("a_fork_at_any_step_inherits_nothing", &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "main" => return me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {}
    }
    let mut importer = Importer::start();
    importer.core = driver::Cuda::with(hooked::driver()).unwrap();
    let watch = Watch::new();
    let mut remote = Remote::start(&me);
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (2 * MIB, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 4 * MIB);
    let imports = fork_everywhere(&watch, true, || {
        let import = importer.import(&rkey).unwrap();
        memory.spot_check(&importer.cuda, import.address(), 0, 4 * MIB).unwrap();
    });
    let (_, address) = importer.cuda.mem_chunk(2 << 20, 0, 1).unwrap();
    // Without a broker, whose thread opens and closes fds in its own time.
    let exports = fork_everywhere(&watch, false, || {
        let exporter = Exporter::new(importer.core, exporter::without_broker()).unwrap();
        drop(exporter.export(address, 2 * MIB).unwrap());
    });
    println!("{imports} forks in an import, {exports} in an export");
    assert!(imports >= 35 && exports >= 30);
    assert_eq!(importer.fake.device(0).calls_after_fork, 0);
}
