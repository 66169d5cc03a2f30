//! Importers that are none: what they send costs others nothing, and they get nothing.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use std::os::fd::OwnedFd;
use std::time::Instant;

use cuda_ipc_core::broker::message::{MAGIC, MESSAGE_MAX, VERSION};
use cuda_ipc_core::broker::{Answer, Challenge, Outcome, Proof, Refusal, Request};
use cuda_ipc_core::importer::{ImportErrorKind, Route};
use cuda_ipc_core::key::{Key, Nonce};
use cuda_ipc_core::table::ChunkId;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::importer::key;
use cuda_ipc_tests::snapshot::wait_until;

use crate::importing::Importing;
use crate::raw::{Raw, accept, address, listen_at};
use crate::support::{MIB, SOON, by, ids, import, share};

#[test]
fn who_does_not_know_the_nonce_gets_nothing() {
    let (me, importer) = enter!("who_does_not_know_the_nonce_gets_nothing");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 2);
    let (key, ids) = (key(&rkey), ids(&importer, &rkey));
    // A wrong proof; the exporter's own proof; a proof of another connection.
    let (raw, _) = Raw::challenged(&key);
    raw.say(&Request::Prove(Proof([0; 32])));
    assert_eq!(raw.refusal(), Refusal::Proof);
    let (raw, proofs) = Raw::challenged(&key);
    raw.say(&Request::Prove(proofs.of_exporter()));
    assert_eq!(raw.refusal(), Refusal::Proof);
    let (_other, proofs) = Raw::challenged(&key);
    let (raw, _) = Raw::challenged(&key);
    raw.say(&Request::Prove(proofs.of_importer()));
    assert_eq!(raw.refusal(), Refusal::Proof);
    // Nothing is answered before that.
    for greeting in [0, 1] {
        for request in [Request::Table, Request::Prove(proofs.of_importer())] {
            if greeting == 1 && matches!(request, Request::Prove(_)) {
                continue;
            }
            let raw = if greeting == 0 { Raw::connect(&key).unwrap() } else { Raw::challenged(&key).0 };
            raw.say(&request);
            assert_eq!(raw.refusal(), Refusal::Message);
        }
        let raw = if greeting == 0 { Raw::connect(&key).unwrap() } else { Raw::challenged(&key).0 };
        raw.ask_for(&ids);
        assert_eq!(raw.refusal(), Refusal::Message);
    }
    // Nor a second greeting.
    let raw = Raw::proven(&key);
    raw.say(&Request::Hello(Challenge([1; 16])));
    assert_eq!(raw.refusal(), Refusal::Message);
    // The name of a nonce that nobody has leads nowhere.
    let wrong = Key { nonce: Nonce(key.nonce.0 ^ 1), ..key };
    assert_eq!(Raw::connect(&wrong).err(), Some(nix::errno::Errno::ECONNREFUSED));
    let (_, imported) = import(&importer, &rkey, &by(Route::Broker)).unwrap();
    importer.verify_import(&imported, &rkey, &memory);
}

#[test]
fn only_live_chunks_are_given() {
    let (me, importer) = enter!("only_live_chunks_are_given");
    let mut remote = Remote::start(&me);
    for reserve in [256, 1_u64 << 40] {
        let (mut memory, rkey) = share(&mut remote, &format!("reserve={reserve}"), 4);
        let ids = ids(&importer, &rkey);
        let raw = Raw::proven(&key(&rkey));
        let (slot, generation) = (ids[1].slot, ids[1].generation);
        let asked = [
            ids[0],
            ChunkId { slot, generation: generation + 1 },
            ChunkId { slot, generation: generation | 1 << 63 },
            ChunkId { slot: slot + 100, generation: 1 },
            ChunkId { slot: u32::MAX, generation: 1 },
            ids[3],
            ids[0],
        ];
        raw.ask_for(&asked);
        let (outcomes, fds) = raw.outcomes();
        use Outcome::{Dead, Given};
        assert_eq!(outcomes, [Given, Dead, Dead, Dead, Dead, Given, Given]);
        assert_eq!(fds.len(), 3);
        // Retired; and retired, and its slot used again.
        remote.ask(&format!("retire {} 0 1", memory.index));
        memory.replace(&mut remote, 4 * MIB, 77);
        remote.export(&memory, 4 * MIB, 4 * MIB);
        raw.ask_for(&ids);
        assert_eq!(raw.outcomes().0, [Dead, Given, Dead, Given]);
        // Freed without a word: the driver says so.
        remote.ask(&format!("unmap {} {}", memory.index, 2 * MIB));
        raw.ask_for(&ids);
        assert_eq!(raw.outcomes().0, [Dead, Dead, Dead, Given]);
        assert_eq!(remote.stats().chunks, 2, "and it is retired, too");
        // Freed and made anew at the same address, still without a word.
        remote.ask(&format!("unmap {} {}", memory.index, 6 * MIB));
        remote.ask(&format!("map {} {} {} 5", memory.index, 6 * MIB, 2 * MIB));
        raw.ask_for(&ids);
        assert_eq!(raw.outcomes().0, [Dead, Dead, Dead, Dead]);
        drop((raw, fds));
    }
}

#[test]
fn garbage_ends_the_connection_it_came_by() {
    let (me, importer) = enter!("garbage_ends_the_connection_it_came_by");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 4);
    let (key, ids) = (key(&rkey), ids(&importer, &rkey));
    let good = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    let fds = remote.number("fds");
    let head = |kind: u8, count: u16| [&MAGIC[..], &[VERSION, kind], &count.to_le_bytes()[..]].concat();
    let messages = [
        vec![0],
        vec![0xff; 8],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; MESSAGE_MAX],
        vec![0; MESSAGE_MAX + 1],
        vec![0; 100_000],
        head(4, 0),
        head(4, 1),
        head(4, 254),
        [head(4, 1), vec![0; 12]].concat(),
        [head(4, 2), vec![1; 12]].concat(),
        head(0x84, 1),
        head(0, 0),
        head(0xff, 0),
        [&MAGIC[..], &[VERSION + 1, 3, 0, 0]].concat(),
    ];
    for message in &messages {
        for raw in [Raw::connect(&key).unwrap(), Raw::challenged(&key).0, Raw::proven(&key)] {
            raw.send(message).unwrap();
            assert_eq!(raw.refusal(), Refusal::Message, "{:02x?}", &message[..message.len().min(20)]);
        }
    }
    // Fds that are sent along are never taken.
    let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let raw = Raw::proven(&key);
    raw.send_with(Request::Table.encode(&mut [0; MESSAGE_MAX]), &[&file; 100]).unwrap();
    assert_eq!(raw.receive().unwrap().1.len(), 1, "the table");
    drop(raw);
    // An empty packet is the end; so is asking on before the answer was taken.
    let raw = Raw::proven(&key);
    raw.send(&[]).unwrap();
    assert!(raw.ends());
    let raw = Raw::proven(&key);
    raw.ask_for(&ids);
    assert!(raw.has_answer());
    raw.ask_for(&ids);
    assert!(wait_until(SOON, || raw.is_closed()));
    assert_eq!(raw.outcomes().1.len(), 4);
    assert!(raw.ends());
    drop(raw);
    assert!(wait_until(SOON, || remote.number("fds") == fds), "{} fds, {fds} before", remote.number("fds"));
    let imported = importer.import_from(&good, &rkey).unwrap();
    importer.verify_import(&imported, &rkey, &memory);
}

#[test]
fn silence_has_a_limit_before_the_proof_and_none_after() {
    let (me, importer) = enter!("silence_has_a_limit_before_the_proof_and_none_after");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "", 2);
    let key = key(&rkey);
    let good = importer.connect_with(&rkey, &by(Route::Broker)).unwrap();
    let (start, silent, half) = (Instant::now(), Raw::connect(&key).unwrap(), Raw::challenged(&key).0);
    let proven = Raw::proven(&key);
    assert!(silent.ends() && half.ends());
    assert!((4..8).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
    assert!(!proven.is_closed() && !good.has_exited());
    importer.verify_import(&importer.import_from(&good, &rkey).unwrap(), &rkey, &memory);
    // More than there is room for: the oldest of those that have proven nothing makes room.
    let crowd: Vec<Raw> = (0..100).map(|_| Raw::connect(&key).unwrap()).collect();
    let late = Raw::proven(&key);
    late.say(&Request::Table);
    assert!(late.receive().is_some());
    assert!(wait_until(SOON, || crowd.iter().filter(|raw| raw.is_closed()).count() == 100 - 64 + 1));
    assert!(!proven.is_closed() && !good.has_exited());
}

#[test]
fn a_crowd_of_the_worst_costs_a_good_one_little() {
    // For a fixed time: garbage, silence, floods, vanishing at every stage. A good importer comes and goes meanwhile.
    let (me, importer) = enter!("a_crowd_of_the_worst_costs_a_good_one_little");
    let mut remote = Remote::start(&me);
    let (memory, rkey) = share(&mut remote, "reserve=240", 26);
    let (exporter_key, ids) = (key(&rkey), ids(&importer, &rkey));
    let before = remote.number("fds");
    let mut good = Importing::start(&me);
    let (over, attacks) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    std::thread::scope(|scope| {
        for seed in 1..=4_u64 {
            let (over, attacks, key, ids) = (&over, &attacks, &exporter_key, &ids);
            scope.spawn(move || {
                let mut random = seed;
                let mut kept = Vec::new();
                while !over.load(Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    // Their own backlog may be full of themselves.
                    let Ok(raw) = Raw::connect(key) else { continue };
                    match random >> 60 {
                        0 => kept.push(raw),
                        1 => (0..200).map(|_| raw.send(&random.to_le_bytes())).for_each(drop_result),
                        2 => drop_result(raw.send(&[0x41; MESSAGE_MAX])),
                        3 => drop_result(raw.send(Request::Hello(Challenge([3; 16])).encode(&mut [0; MESSAGE_MAX]))),
                        4 => (0..50).map(|_| raw.send(Request::Table.encode(&mut [0; MESSAGE_MAX]))).for_each(drop_result),
                        5 | 6 => {
                            // With a valid proof: asks again and again and takes nothing.
                            let Some(raw) = Raw::try_proven(key) else { continue };
                            let mut buffer = [0; MESSAGE_MAX];
                            let message = Request::encode_chunks(ids.iter().copied(), &mut buffer);
                            while raw.send(message).is_ok() {}
                        }
                        7 => {
                            let Some(raw) = Raw::try_proven(key) else { continue };
                            drop_result(raw.send(Request::encode_chunks(ids.iter().copied(), &mut [0; MESSAGE_MAX])));
                        }
                        _ => {}
                    }
                    if kept.len() > 100 {
                        kept.clear();
                    }
                    attacks.fetch_add(1, Relaxed);
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            let round = Instant::now();
            assert_eq!(good.verify(&rkey, &memory, "route=broker").unwrap(), "broker");
            longest = longest.max(round.elapsed());
            rounds += 1;
        }
        over.store(true, Relaxed);
    });
    println!("{rounds} good imports beside {} attacks, the longest took {longest:?}", attacks.load(Relaxed));
    assert!(rounds >= 5 && attacks.load(Relaxed) > 100);
    good.finish();
    assert!(wait_until(SOON, || remote.number("fds") <= before), "{} fds, {before} before", remote.number("fds"));
}

#[test]
fn a_name_held_by_somebody_else_is_found_out() {
    let (me, importer) = enter!("a_name_held_by_somebody_else_is_found_out");
    let mut remote = Remote::start(&me);
    let (_, rkey) = share(&mut remote, "", 2);
    // The exporter is gone, and its name is free.
    remote.ask("no_exporter");
    let address = address(key(&rkey).nonce);
    assert!(wait_until(SOON, || listen_at(&address).is_ok()));
    let listener = listen_at(&address).unwrap();
    let squatter = std::thread::spawn(move || {
        // Says nothing, closes; says something else; plays the exporter without knowing the nonce.
        let mut outcomes = Vec::new();
        for way in 0..3 {
            let raw = accept(&listener);
            match way {
                0 => drop_result(raw.send(b"hello")),
                1 => {
                    let forged = Answer::Challenge(Challenge([9; 16]), Proof([9; 32]));
                    drop_result(raw.send(forged.encode(&mut [0; MESSAGE_MAX])));
                }
                // The importer's own words.
                _ => {
                    let (heard, _) = raw.receive().unwrap();
                    drop_result(raw.send(&heard));
                }
            }
            outcomes.push(raw.receive().map(|(heard, _)| heard.len()));
        }
        outcomes
    });
    for expected in ["Message", "Impostor", "Message"] {
        let error = importer.connect_with(&rkey, &by(Route::Broker)).map(drop).unwrap_err();
        let ImportErrorKind::Broker(broker) = error.kind else { panic!("{error}") };
        assert!(format!("{broker:?}").starts_with(expected), "{error}");
        assert!(!error.retryable());
        println!("{error}");
    }
    // Nobody was told a proof: a hello was all that was said.
    assert_eq!(squatter.join().unwrap(), [Some(24), Some(24), None]);
}

/// What is sent in vain is no matter.
fn drop_result(_: nix::Result<()>) {}
