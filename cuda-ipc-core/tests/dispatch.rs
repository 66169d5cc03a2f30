//! The dispatch table: every combination of what can be known of memory, against the rules, each stated by itself.

use cuda_ipc_core::dispatch::{FABRIC, FdFrom, Lane, Means, Memory, POSIX_FD, Place, PoolKind, Trial, Verdict, dispatch};
use cuda_ipc_core::reason::Cause;

const PLACES: [Place; 4] = [Place::Unknown, Place::Room, Place::Host, Place::Device];
const POOLS: [PoolKind; 3] = [PoolKind::None, PoolKind::Default, PoolKind::Made];
const TRIALS: [Trial; 3] = [Trial::Untried, Trial::Works, Trial::Refused(800)];
/// All masks of the handle types that the driver has had: POSIX_FD, two of another system, FABRIC.
const TYPES: [u64; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Every combination, once.
fn combinations() -> Vec<(Memory, Means)> {
    let mut all = Vec::new();
    for place in PLACES {
        for managed in [false, true] {
            for legacy in [false, true] {
                for pool in POOLS {
                    for handle_types in TYPES {
                        for posix in TRIALS {
                            for fabric in TRIALS {
                                for fds_left in [false, true] {
                                    let memory = Memory { place, managed, legacy, pool, handle_types };
                                    all.push((memory, Means { posix, fabric, fds_left }));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    all
}

/// The first rule that applies, in words of its own: not the code under test turned round, but a list of conditions and answers.
fn expected(memory: &Memory, means: &Means) -> Verdict {
    let Memory { place, managed, legacy, pool, handle_types } = *memory;
    let posix = handle_types & POSIX_FD != 0;
    let fabric = handle_types & FABRIC != 0;
    let posix_refused = matches!(means.posix, Trial::Refused(_));
    let from = if means.fds_left { FdFrom::Held } else { FdFrom::OnDemand };
    let device = place == Place::Device && !managed;
    let made = pool != PoolKind::None;
    let rules: [(bool, Verdict); 15] = [
        (managed, Verdict::NoIpc(Cause::Managed)),
        (place == Place::Unknown, Verdict::NoIpc(Cause::NotDeviceMemory)),
        (place == Place::Room, Verdict::NoIpc(Cause::Hole)),
        (place == Place::Host, Verdict::NoIpc(Cause::HostMemory)),
        (device && legacy && !made, Verdict::Goes(Lane::Legacy)),
        (device && posix && !posix_refused && !made, Verdict::Goes(Lane::Chunks(from))),
        (device && posix && !posix_refused && made, Verdict::Goes(Lane::Pool(from))),
        (device && posix && !fabric, Verdict::NoIpc(Cause::PosixRefused { code: 800 })),
        (device && fabric && means.fabric == Trial::Untried, Verdict::TryFabric),
        (device && fabric && means.fabric == Trial::Works, Verdict::NoIpc(Cause::FabricOnly)),
        (device && fabric, Verdict::NoIpc(Cause::FabricRefused { code: 800 })),
        (pool == PoolKind::Default, Verdict::NoIpc(Cause::DefaultPool)),
        (pool == PoolKind::Made, Verdict::NoIpc(Cause::PoolWithoutHandle)),
        (pool == PoolKind::None, Verdict::NoIpc(Cause::NoHandleType)),
        (true, Verdict::NoIpc(Cause::EmptyRange)),
    ];
    rules.into_iter().find(|(applies, _)| *applies).map_or(Verdict::NoIpc(Cause::EmptyRange), |(_, verdict)| verdict)
}

#[test]
fn every_combination_has_its_lane_or_its_reason() {
    let all = combinations();
    assert_eq!(all.len(), 4 * 2 * 2 * 3 * 16 * 3 * 3 * 2);
    let mut counts = std::collections::BTreeMap::<String, usize>::new();
    for (memory, means) in &all {
        let verdict = dispatch(memory, means);
        assert_eq!(verdict, expected(memory, means), "{memory:?} {means:?}");
        *counts.entry(format!("{verdict:?}")).or_default() += 1;
    }
    // Every answer there is has been given.
    let names: Vec<&str> = counts.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "Goes(Chunks(Held))",
            "Goes(Chunks(OnDemand))",
            "Goes(Legacy)",
            "Goes(Pool(Held))",
            "Goes(Pool(OnDemand))",
            "NoIpc(DefaultPool)",
            "NoIpc(FabricOnly)",
            "NoIpc(FabricRefused { code: 800 })",
            "NoIpc(Hole)",
            "NoIpc(HostMemory)",
            "NoIpc(Managed)",
            "NoIpc(NoHandleType)",
            "NoIpc(NotDeviceMemory)",
            "NoIpc(PoolWithoutHandle)",
            "NoIpc(PosixRefused { code: 800 })",
            "TryFabric",
        ],
        "{counts:?}"
    );
}

#[test]
fn what_users_rely_on_holds_in_every_combination() {
    for (memory, means) in combinations() {
        let verdict = dispatch(&memory, &means);
        // A handle type that was not asked for is never used (B37).
        if let Verdict::Goes(Lane::Chunks(_) | Lane::Pool(_)) = verdict {
            assert!(memory.handle_types & POSIX_FD != 0, "{memory:?}");
        }
        if verdict == Verdict::TryFabric {
            assert!(memory.handle_types & FABRIC != 0, "{memory:?}");
            // A trial is asked for once: with its answer there is a verdict.
            for fabric in [Trial::Works, Trial::Refused(801)] {
                assert_ne!(dispatch(&memory, &Means { fabric, ..means }), Verdict::TryFabric);
            }
        }
        // Memory that offers both goes by the fd, whatever is known of fabric handles (B40).
        if memory.handle_types & (POSIX_FD | FABRIC) == POSIX_FD | FABRIC {
            let verdicts = TRIALS.map(|fabric| dispatch(&memory, &Means { fabric, posix: Trial::Works, ..means }));
            assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0] && *verdict != Verdict::TryFabric), "{memory:?}");
        }
        // The budget of fds changes where an fd comes from, never whether there is a lane.
        let other = dispatch(&memory, &Means { fds_left: !means.fds_left, ..means });
        assert_eq!(matches!(verdict, Verdict::Goes(_)), matches!(other, Verdict::Goes(_)), "{memory:?}");
    }
}

#[test]
fn every_cause_has_a_name_and_a_text_of_its_own() {
    let causes = [
        Cause::EmptyRange,
        Cause::NotDeviceMemory,
        Cause::Freed,
        Cause::HostMemory,
        Cause::Managed,
        Cause::Legacy,
        Cause::NoHandleType,
        Cause::FabricOnly,
        Cause::FabricRefused { code: 800 },
        Cause::PosixRefused { code: 801 },
        Cause::DefaultPool,
        Cause::PoolWithoutHandle,
        Cause::PosixPool,
        Cause::Hole,
        Cause::LeavesReservation { base: 1, len: 2 },
        Cause::LeavesAllocation { base: 1, len: 2 },
        Cause::SeveralDevices,
        Cause::Unaligned { len: 3 },
        Cause::KeptChanging,
        Cause::TableFull,
        Cause::TooManyFiles { limit: 4 },
        Cause::Table { call: "mmap", errno: 12 },
        Cause::Driver { call: "cuMemRelease", code: 1 },
        Cause::Forked,
    ];
    let names: std::collections::BTreeSet<&str> = causes.iter().map(Cause::name).collect();
    let texts: std::collections::BTreeSet<String> = causes.iter().map(ToString::to_string).collect();
    assert_eq!((names.len(), texts.len()), (causes.len(), causes.len()));
    assert!(names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')), "{names:?}");
}
