//! Every combination of facts, also those that no world has: no panic, and no verdict against a fact or without the facts that it needs.

use std::collections::BTreeMap;

use cuda_ipc_core::diagnosis::{BrokerFailure, Call, Cause, Facts, Failure, Life, PeerFacts, Trial, Yama, find};
use cuda_ipc_core::reason;

use crate::world::{HALF, NEW, OLD};
use crate::{EACCES, EBADF, EMFILE, ENFILE, ENOSYS, EPERM, ESRCH};

const ANSWERS: [Option<bool>; 3] = [None, Some(false), Some(true)];

fn failures() -> Vec<Failure> {
    let errnos = [EPERM, EACCES, ENOSYS, ESRCH, EBADF, EMFILE, ENFILE];
    let calls = [Call::PidfdOpen, Call::PidfdGetfd].into_iter().flat_map(|call| errnos.map(|errno| Failure::Call(call, errno)));
    let brokers = [
        BrokerFailure::NoListener { socket_dir: false },
        BrokerFailure::NoListener { socket_dir: true },
        BrokerFailure::OtherUser,
        BrokerFailure::UnmappedUser,
        BrokerFailure::OutOfFiles(EMFILE),
        BrokerFailure::Other,
    ];
    let others = [
        Failure::OtherPidNamespace,
        Failure::Ended,
        Failure::NotTheExporter,
        Failure::OwnCall(EMFILE),
        Failure::OwnCall(EPERM),
        Failure::Driver(999),
        Failure::Export(reason::Cause::NoHandleType),
        Failure::Export(reason::Cause::FabricOnly),
        Failure::Export(reason::Cause::PoolWithoutHandle),
        Failure::Export(reason::Cause::TooManyFiles { limit: 64 }),
        Failure::Export(reason::Cause::Hole),
        Failure::Other,
    ];
    calls.chain(brokers.map(Failure::Broker)).chain(others).collect()
}

/// What the kernel's rules make of a process: everything but the failure, Yama and the trials.
fn peers() -> Vec<PeerFacts> {
    let mut peers = Vec::new();
    for life in [Life::Unknown, Life::Lives, Life::LivesWithoutFirstThread, Life::Exited] {
        for number in 0..3_usize.pow(6) {
            let answer = |at: u32| ANSWERS[number / 3_usize.pow(at) % 3];
            peers.push(PeerFacts {
                life,
                same_ids: answer(0),
                dumpable: answer(1),
                capabilities_covered: answer(2),
                readable: answer(3),
                same_pid_namespace: answer(4),
                same_user_namespace: answer(5),
            });
        }
    }
    peers
}

fn check_all(failure: Failure, peers: &[PeerFacts], counts: &mut BTreeMap<&'static str, u64>) {
    let trials = [Trial::NotDone, Trial::Works, Trial::Fails(EPERM), Trial::Fails(ENOSYS)];
    // What only some failures look at is varied for these only.
    let of_call = matches!(failure, Failure::Call(_, EPERM | EACCES | ENOSYS));
    let only = |all: usize| if of_call { all } else { 1 };
    let gpus = if matches!(failure, Failure::Driver(_)) { &ANSWERS[..] } else { &ANSWERS[..1] };
    let yamas = [None, Some(Yama::Absent), Some(Yama::Scope(0)), Some(Yama::Scope(1)), Some(Yama::Scope(2)), Some(Yama::Scope(3))];
    for &kernel in &[Some(NEW), None, Some(OLD), Some(HALF)][..only(4)] {
        for &yama in &yamas[..only(6)] {
            for filtered in ANSWERS {
                for on_self in trials {
                    for &on_neighbour in &trials[..only(3)] {
                        for &may_trace in &ANSWERS[..only(3)] {
                            for &gpu_visible in gpus {
                                let mut facts =
                                    Facts { kernel, filtered, yama, on_self, on_neighbour, may_trace, gpu_visible, ..Facts::of(failure) };
                                for &peer in peers {
                                    facts.peer = peer;
                                    let cause = find(&facts);
                                    if let Err(why) = justified(cause, &facts) {
                                        panic!("{cause:?} although {why}: {facts:?}");
                                    }
                                    *counts.entry(cause.name()).or_default() += 1;
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn no_verdict_is_against_a_fact_or_without_one() {
    let (peers, failures) = (peers(), failures());
    let next = core::sync::atomic::AtomicUsize::new(0);
    let counts: Vec<BTreeMap<&str, u64>> = std::thread::scope(|scope| {
        let work = || {
            let mut counts = BTreeMap::new();
            while let Some(failure) = failures.get(next.fetch_add(1, core::sync::atomic::Ordering::Relaxed)) {
                check_all(*failure, &peers, &mut counts);
            }
            counts
        };
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut sum = BTreeMap::new();
    for (name, count) in counts.into_iter().flatten() {
        *sum.entry(name).or_insert(0) += count;
    }
    println!("{sum:?}");
    assert_eq!(sum.len(), Cause::COUNT, "each cause is some combination's: {sum:?}");
}

/// What a verdict needs, and what no fact may say. The second of a pair is said where the first is not so.
fn justified(cause: Cause, facts: &Facts) -> Result<(), &'static str> {
    let peer = &facts.peer;
    let works = |trial| trial == Trial::Works;
    let needs = |holds: bool, otherwise: &'static str| if holds { Ok(()) } else { Err(otherwise) };
    // What a refusal by ptrace's rules needs.
    let getfd_refused = || {
        needs(facts.failure == Failure::Call(Call::PidfdGetfd, EPERM), "getfd was not refused with EPERM")?;
        needs(works(facts.on_self), "the call was not seen to work at all")?;
        needs(peer.life != Life::Exited, "the exporter has exited")
    };
    let without_capability = || needs(facts.may_trace == Some(false), "the capability may be there");
    match cause {
        Cause::Unknown => Ok(()),
        Cause::Seccomp { call, errno } => {
            needs(facts.failure == Failure::Call(call, errno), "it is another failure")?;
            needs(facts.filtered != Some(false), "there is no filter")?;
            needs(!works(facts.on_self) && !works(facts.on_neighbour), "the call works")?;
            needs(
                facts.filtered == Some(true) || matches!(facts.on_self, Trial::Fails(EPERM | EACCES)),
                "neither a filter nor its effect was seen",
            )?;
            needs(errno != ENOSYS || facts.kernel.is_some_and(|kernel| kernel >= call.since()), "the kernel may lack it")
        }
        Cause::KernelWithoutCall { call } => {
            needs(facts.failure == Failure::Call(call, ENOSYS), "it is another failure")?;
            needs(!works(facts.on_self) && !works(facts.on_neighbour), "the call works")?;
            needs(facts.kernel.is_some_and(|kernel| kernel < call.since()) || facts.filtered == Some(false), "a filter may say so")
        }
        Cause::Yama { scope } => {
            getfd_refused()?;
            needs(facts.yama == Some(Yama::Scope(scope)), "Yama's scope is another")?;
            needs(scope == 1 || !works(facts.on_neighbour), "it works on a neighbour")?;
            if scope < 3 {
                without_capability()?;
                needs(peer.same_user_namespace != Some(false), "namespaces differ")?;
            }
            let looked_at = [peer.same_ids, peer.dumpable, peer.capabilities_covered];
            let fine = looked_at.iter().all(|fact| *fact == Some(true)) && peer.same_user_namespace == Some(true);
            let not_bad = looked_at.iter().all(|fact| *fact != Some(false));
            needs(
                scope != 1 || (fine && peer.readable != Some(false)) || (not_bad && peer.readable == Some(true)),
                "it may be another rule",
            )
        }
        Cause::OtherUid if matches!(facts.failure, Failure::Broker(_)) => needs(peer.same_ids != Some(true), "ids are the same"),
        Cause::OtherUserNamespace if matches!(facts.failure, Failure::Broker(_)) => {
            needs(peer.same_user_namespace != Some(true), "namespaces are the same")
        }
        Cause::OtherUid | Cause::NotDumpable | Cause::MoreCapabilities => {
            getfd_refused()?;
            without_capability()?;
            needs(peer.readable != Some(true), "the process may be read")?;
            needs(peer.same_user_namespace != Some(false), "namespaces differ")?;
            let fact = match cause {
                Cause::OtherUid => peer.same_ids,
                Cause::NotDumpable => peer.dumpable,
                _ => peer.capabilities_covered,
            };
            needs(fact == Some(false), "the fact itself is not known")
        }
        Cause::OtherUserNamespace => {
            getfd_refused()?;
            needs(peer.same_user_namespace == Some(false), "namespaces may be the same")?;
            needs(peer.readable != Some(true), "the process may be read")
        }
        Cause::OtherPidNamespace => match facts.failure {
            Failure::OtherPidNamespace => needs(peer.same_pid_namespace != Some(true), "namespaces are the same"),
            _ => {
                needs(facts.failure == Failure::Call(Call::PidfdOpen, ESRCH), "a process was there")?;
                needs(peer.same_pid_namespace == Some(false), "namespaces may be the same")
            }
        },
        Cause::ExporterGone => match facts.failure {
            Failure::Ended => Ok(()),
            Failure::NotTheExporter => needs(peer.life == Life::Exited || peer.same_pid_namespace != Some(false), "it is a stranger"),
            Failure::Call(Call::PidfdOpen, ESRCH) if peer.life != Life::Exited => {
                needs(peer.life == Life::Unknown, "it lives")?;
                needs(peer.same_pid_namespace == Some(true), "it may be elsewhere")
            }
            Failure::Call(Call::PidfdGetfd, EBADF) if peer.life != Life::Exited => {
                needs(peer.same_pid_namespace == Some(true), "it may be a stranger's")
            }
            _ => needs(peer.life == Life::Exited, "nothing says that it has exited"),
        },
        Cause::FirstThreadExited => {
            needs(facts.failure == Failure::Call(Call::PidfdGetfd, ESRCH), "it is another failure")?;
            needs(peer.life == Life::LivesWithoutFirstThread, "its first thread was not seen to have exited")
        }
        Cause::FdLimit { .. } => needs(
            matches!(
                facts.failure,
                Failure::Call(_, EMFILE | ENFILE)
                    | Failure::OwnCall(EMFILE | ENFILE)
                    | Failure::Broker(BrokerFailure::OutOfFiles(_))
                    | Failure::Export(reason::Cause::TooManyFiles { .. })
            ),
            "no limit was met",
        ),
        Cause::GpuNotVisible => needs(
            matches!(facts.failure, Failure::Driver(_)) && facts.gpu_visible == Some(false) && peer.life != Life::Exited,
            "the GPU may be visible",
        ),
        Cause::NoHandleType => needs(
            matches!(facts.failure, Failure::Export(reason::Cause::NoHandleType | reason::Cause::PoolWithoutHandle)),
            "a handle type was asked for",
        ),
        Cause::FabricOnly => needs(facts.failure == Failure::Export(reason::Cause::FabricOnly), "it is not fabric only"),
        Cause::NoListener { socket_dir } => {
            needs(facts.failure == Failure::Broker(BrokerFailure::NoListener { socket_dir }), "somebody listens")?;
            needs(peer.life != Life::Exited, "the exporter has exited")
        }
        _ => Err("this test does not know it"),
    }
}
