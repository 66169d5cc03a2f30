//! Both ends of the broker's route, with every call failing once: the importer's as in `fault_sweep.rs`, and the calls of the exporter's broker thread while it
//! serves. Other importers, the exporter and the next attempt never suffer.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::time::Duration;
use std::collections::BTreeMap;

use cuda_ipc_core::importer::{ConnectOptions, Deadline, Peer, Route};
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, key};
use cuda_ipc_tests::points::{Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::{Snapshot, wait_until};
use cuda_ipc_tests::sweep::{Outcome, failures, names};
use cuda_ipc_tests::{hooked, shim};

const MIB: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(10);

fn by_broker() -> ConnectOptions {
    ConnectOptions::default().with_route(Route::Broker)
}

fn text(error: impl core::fmt::Display) -> String {
    error.to_string()
}

/// What an import by the broker may survive, and how its errors name what failed.
fn judge(point: &Point, verdict: Verdict, outcome: &Outcome) -> bool {
    let (Verdict::Fail(code) | Verdict::FailAfter(code)) = verdict else { return false };
    match (outcome, point.name) {
        // As in an import by pidfd.
        (Ok(()), "cuThreadExchangeStreamCaptureMode" | "cuMemRelease" | "cuMemUnmap" | "cuMemAddressFree") => true,
        (Ok(()), "close" | "munmap" | "fcntl(F_SETFD)" | "fstat") => true,
        // The number of the overflow uid, which is almost always the same one.
        (Ok(()), "open" | "read" | "statx") => true,
        // How many fds can be taken now: one at least is tried. And whether the other end is gone: the next call finds out.
        (Ok(()), "openat" | "poll") => true,
        // Not now: waited for and repeated.
        (Ok(()), "sendmsg" | "recvmsg" | "connect" | "getrandom") => matches!(code, libc::EINTR | libc::EAGAIN),
        (Ok(()), _) => false,
        (Err(text), "connect") => text.contains("abstract socket name") && text.contains(&format!("({code})")),
        (Err(text), _) => names(text, point, verdict),
    }
}

#[test]
fn an_import_by_the_broker_survives_or_names_every_failure() {
    let test = "an_import_by_the_broker_survives_or_names_every_failure";
    let Some(me) = Inside::enter(test, &FakeConfig::default()) else { return };
    match me.role() {
        exporter::ROLE => return exporter::serve(&me),
        "main" => return me.spawn_with("watched", shim::preload).unwrap().finish(),
        _ => {}
    }
    let mut importer = Importer::start();
    importer.core = driver::Cuda::with(hooked::driver()).unwrap();
    let mut remote = Remote::start(&me);
    remote.ask(&format!("exporter_with reserve={}", 1_u64 << 40));
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, MIB, 6 * MIB);
    let operation = || {
        let peer = importer.connect_with(&rkey, &by_broker()).map_err(text)?;
        let import = importer.import_from(&peer, &rkey).map_err(text)?;
        memory.spot_check(&importer.cuda, import.address(), MIB, 6 * MIB).unwrap();
        import.close().map_err(text)
    };
    let watch = Watch::new();
    operation().unwrap();
    let before = Snapshot::take(&importer.fake);
    let (outcome, points) = watch.list(operation);
    outcome.unwrap();
    let (mut runs, mut survived, mut passed) = (0, 0, 0);
    for (at, point) in points.iter().enumerate() {
        // When an answer comes is the exporter's business, so that the same call need not have the same number each time: it is counted by name.
        let number = points[..at].iter().filter(|earlier| earlier.name == point.name).count();
        for verdict in failures(point) {
            let (mut seen, mut reached) = (0, false);
            let hook = |now: &Point| {
                if now.name != point.name || !now.before {
                    return Verdict::Go;
                }
                seen += 1;
                if seen - 1 != number {
                    return Verdict::Go;
                }
                reached = true;
                verdict
            };
            let outcome = watch.run(hook, operation);
            let what = format!("call {number} of {} with {verdict:?}: {outcome:?}", point.name);
            if reached {
                assert!(judge(point, verdict, &outcome), "wrong outcome of {what}");
                survived += u64::from(outcome.is_ok());
                runs += 1;
            } else {
                // It had not to wait this time.
                assert!(outcome.is_ok(), "{what}");
                passed += 1;
            }
            before.assert_settles(&importer.fake, &what);
            operation().unwrap_or_else(|error| panic!("it does not work any more after {what}: {error}"));
        }
    }
    println!(
        "import by the broker: {} points, {runs} runs, {survived} of them succeeded, {passed} did not come to their call",
        points.len()
    );
    assert!(points.len() >= 55 && runs >= 500, "{} points, {runs} runs", points.len());
}

#[test]
fn a_broker_survives_every_failure_while_it_serves() {
    let Some(me) = Inside::enter("a_broker_survives_every_failure_while_it_serves", &FakeConfig::default()) else { return };
    if me.role() == exporter::ROLE {
        return exporter::serve(&me);
    }
    let importer = Importer::start();
    cuda_ipc_core::sys::ProcessLife::current().unwrap();
    let mut remote = Remote::start_with(&me, shim::preload);
    remote.ask(&format!("exporter_with reserve={}", 1_u64 << 40));
    let memory = remote.memory(64 * MIB, &[(2 * MIB, 1), (4 * MIB, 2), (2 * MIB, 3)]);
    let (_, rkey) = remote.export(&memory, MIB, 6 * MIB);
    let import = |limit: Duration| -> Outcome {
        let peer = Peer::connect_with(&key(&rkey), &by_broker(), Deadline::after(limit)).map_err(text)?;
        let import = importer.import_from(&std::sync::Arc::new(peer), &rkey).map_err(text)?;
        memory.spot_check(&importer.cuda, import.address(), MIB, 6 * MIB).unwrap();
        import.close().map_err(text)
    };
    import(SOON).unwrap();
    let mut refused = 0;
    let ours = Snapshot::take(&importer.fake);
    // The broker closes the first connection when it sees its end, some time after the importer has closed it.
    let mut counts = Vec::new();
    let settled = wait_until(SOON, || {
        counts.push(remote.number("fds"));
        counts.len() >= 50 && counts.iter().rev().take(50).all(|count| Some(count) == counts.last())
    });
    assert!(settled, "{counts:?}");
    let fds = remote.number("fds");
    // Its calls in one service, as many as there are until it waits for the next importer.
    let disarm = |remote: &mut Remote| -> (u64, String) {
        let answer = remote.ask("disarm");
        let (count, name) = answer.split_once(' ').unwrap();
        (count.parse().unwrap(), name.to_owned())
    };
    remote.ask("arm 0 0 0");
    import(SOON).unwrap();
    assert!(wait_until(SOON, || remote.number("fds") == fds));
    let (calls, _) = disarm(&mut remote);
    let errnos = [libc::EMFILE, libc::ENOMEM, libc::EPERM, libc::EINTR, libc::EAGAIN, libc::EINVAL];
    let one = (0..calls).flat_map(|at| errnos.map(|errno| (at, at + 1, errno)));
    // And everything, until that is over. What has proven nothing by then goes after the broker's limit for that, some seconds later.
    let all = [(0, u64::MAX, libc::EMFILE)];
    let (mut runs, mut failed) = ([0, 0], BTreeMap::<String, u64>::new());
    for (at, before, errno) in one.chain(all) {
        let lasts = before == u64::MAX;
        remote.ask(&format!("arm {at} {before} {errno}"));
        let outcome = import(if lasts { Duration::from_millis(300) } else { SOON });
        let (_, name) = disarm(&mut remote);
        let what = format!("call {at} to {before}, {name} with errno {errno}: {outcome:?}");
        *failed.entry(name).or_default() += 1;
        runs[usize::from(lasts)] += 1;
        if lasts {
            refused += u64::from(outcome.is_err_and(|error| error.contains("by the exporter's broker")));
        } else {
            // The importer connects again, and the broker is none the worse for it.
            outcome.unwrap_or_else(|_| panic!("{what}"));
        }
        // A broker that could not go on begins anew with the next export. After that all is as it was.
        let again = wait_until(SOON, || {
            remote.export(&memory, MIB, 6 * MIB);
            import(SOON).is_ok()
        });
        assert!(again, "{what}, and the next one: {:?}", import(SOON));
        assert!(wait_until(SOON, || remote.number("fds") == fds), "{} fds, {fds} before {what}", remote.number("fds"));
        ours.assert_settles(&importer.fake, &what);
    }
    println!(
        "a broker: {calls} calls in one service; {} runs with one failure, {} with lasting ones, {refused} refused: {failed:?}",
        runs[0], runs[1]
    );
    for name in ["accept4", "recvmsg", "sendmsg", "getsockopt", "fcntl", "ioctl"] {
        assert!(failed.contains_key(name), "{name}: {failed:?}");
    }
    assert!(calls >= 50 && runs[0] >= 300 && refused == 1, "{calls} calls, {runs:?} runs, {refused} refused");
    remote.finish();
}
