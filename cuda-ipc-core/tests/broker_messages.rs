//! Messages of the broker: golden bytes, totality of the decoders, one encoding for each message; names and proofs.
#![cfg(not(loom))]

mod support;

use cuda_ipc_core::broker::message::{MAGIC, MESSAGE_MAX, VERSION};
use cuda_ipc_core::broker::{Answer, BATCH_MAX, Buffer, Challenge, MessageError, Outcome, Proof, Proofs, Refusal, Request, SocketName};
use cuda_ipc_core::key::{HostId, Nonce};
use cuda_ipc_core::table::ChunkId;
use proptest::prelude::*;
use support::hex;

const NONCE: Nonce = Nonce(0x1122_3344_5566_7788);
const HOST: HostId = HostId(0x99aa_bbcc_ddee_ff01);
const EMPTY: Buffer = [0xee; MESSAGE_MAX];

/// Challenges that count up from a byte.
fn challenge(first: u8) -> Challenge {
    Challenge(core::array::from_fn(|at| first + u8::try_from(at).expect("16")))
}

fn proofs() -> Proofs {
    Proofs::new(NONCE, challenge(0x10), challenge(0xa0))
}

const IDS: [ChunkId; 2] = [ChunkId { slot: 1, generation: 1 }, ChunkId { slot: u32::MAX, generation: 0x0123_4567_89ab_cdef }];
const OUTCOMES: [Outcome; 4] = [Outcome::Given, Outcome::Dead, Outcome::Later(24), Outcome::Driver(999)];

#[test]
fn golden_requests() {
    for (request, golden) in [
        (Request::Hello(challenge(0x10)), include_str!("golden/broker_hello.hex")),
        (Request::Prove(proofs().of_importer()), include_str!("golden/broker_prove.hex")),
        (Request::Table, include_str!("golden/broker_table_request.hex")),
    ] {
        let (bytes, mut buffer) = (hex(golden), EMPTY);
        assert_eq!(request.encode(&mut buffer), bytes);
        assert_eq!(Request::decode(&bytes), Ok(request));
        assert_eq!(Answer::decode(&bytes), Err(MessageError::Kind(bytes[5])));
    }
    let (bytes, mut buffer) = (hex(include_str!("golden/broker_chunks_request.hex")), EMPTY);
    assert_eq!(Request::encode_chunks(IDS, &mut buffer), bytes);
    let Ok(decoded @ Request::Chunks(ids)) = Request::decode(&bytes) else { panic!("a request for chunks") };
    assert_eq!(ids.iter().collect::<Vec<_>>(), IDS);
    assert_eq!(decoded.encode(&mut buffer), bytes);
}

#[test]
fn golden_answers() {
    for (answer, golden) in [
        (Answer::Challenge(challenge(0xa0), proofs().of_exporter()), include_str!("golden/broker_challenge.hex")),
        (Answer::Table, include_str!("golden/broker_table_answer.hex")),
        (Answer::Refused(Refusal::Uid(1000)), include_str!("golden/broker_refused.hex")),
    ] {
        let (bytes, mut buffer) = (hex(golden), EMPTY);
        assert_eq!(answer.encode(&mut buffer), bytes);
        assert_eq!(Answer::decode(&bytes), Ok(answer));
        assert_eq!(Request::decode(&bytes), Err(MessageError::Kind(bytes[5])));
    }
    let (bytes, mut buffer) = (hex(include_str!("golden/broker_chunks_answer.hex")), EMPTY);
    assert_eq!(Answer::encode_chunks(OUTCOMES, &mut buffer), bytes);
    let Ok(decoded @ Answer::Chunks(outcomes)) = Answer::decode(&bytes) else { panic!("an answer about chunks") };
    assert_eq!(outcomes.iter().collect::<Vec<_>>(), OUTCOMES);
    assert_eq!(decoded.encode(&mut buffer), bytes);
}

#[test]
fn a_name_is_a_hash_of_the_nonce() {
    let name = SocketName::new(NONCE, HOST);
    // SHA-256, computed by another implementation in another language.
    assert_eq!(name.abstract_name(), "cuda-ipc-10bb5692f9345a31b5ba4887fc57aa2e");
    assert_eq!(name.file_name(), "cuda-ipc-10bb5692f9345a31b5ba4887fc57aa2e-99aabbccddeeff01");
    assert!(SocketName::is_file_of(name.file_name(), HOST));
    assert!(!SocketName::is_file_of(name.file_name(), HostId(1)));
    for other in
        [name.abstract_name(), "", "cuda-ipc-", &name.file_name().replace("cuda-ipc", "cuda_ipc"), &name.file_name().to_uppercase()]
    {
        assert!(!SocketName::is_file_of(other, HOST), "{other}");
    }
}

#[test]
fn a_proof_is_one_sides_for_one_connection() {
    let ours = proofs();
    assert!(ours.is_of_exporter(&ours.of_exporter()) && ours.is_of_importer(&ours.of_importer()));
    assert!(!ours.is_of_exporter(&ours.of_importer()) && !ours.is_of_importer(&ours.of_exporter()));
    for others in [
        Proofs::new(Nonce(NONCE.0 ^ 1), challenge(0x10), challenge(0xa0)),
        Proofs::new(NONCE, challenge(0x11), challenge(0xa0)),
        Proofs::new(NONCE, challenge(0x10), challenge(0xa1)),
        Proofs::new(NONCE, challenge(0xa0), challenge(0x10)),
    ] {
        assert!(!others.is_of_exporter(&ours.of_exporter()) && !others.is_of_importer(&ours.of_importer()));
    }
    for bit in 0..256 {
        let mut proof = ours.of_importer();
        proof.0[bit / 8] ^= 1 << (bit % 8);
        assert!(!ours.is_of_importer(&proof));
    }
}

#[test]
fn each_wrong_field_has_its_name() {
    let chunks = hex(include_str!("golden/broker_chunks_request.hex"));
    let hello = hex(include_str!("golden/broker_hello.hex"));
    let change = |bytes: &[u8], offset: usize, field: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[offset..offset + field.len()].copy_from_slice(field);
        bytes
    };
    for (bytes, error) in [
        (vec![], MessageError::Length(0)),
        (chunks[..7].to_vec(), MessageError::Length(7)),
        (change(&chunks, 0, b"CIPC"), MessageError::Magic(*b"CIPC")),
        (change(&chunks, 4, &[VERSION + 1]), MessageError::Version(VERSION + 1)),
        (change(&chunks, 5, &[9]), MessageError::Kind(9)),
        (change(&chunks, 5, &[0xff]), MessageError::Kind(0xff)),
        (change(&chunks, 6, &[0]), MessageError::Count(0)),
        (change(&chunks, 6, &[1]), MessageError::Length(32)),
        (change(&chunks, 6, &[254]), MessageError::Count(254)),
        (change(&chunks, 6, &[2, 1]), MessageError::Count(258)),
        (chunks[..31].to_vec(), MessageError::Length(31)),
        ([&chunks[..], &[0]].concat(), MessageError::Length(33)),
        (change(&chunks, 24, &[0; 8]), MessageError::Generation { at: 1 }),
        (change(&hello, 6, &[1]), MessageError::Count(1)),
        (hello[..23].to_vec(), MessageError::Length(23)),
        ([&hello[..], &[0]].concat(), MessageError::Length(25)),
        ([&MAGIC[..], &[VERSION, 3, 0, 0, 0]].concat(), MessageError::Length(9)),
    ] {
        assert_eq!(Request::decode(&bytes), Err(error), "{bytes:02x?}");
    }
    let outcomes = hex(include_str!("golden/broker_chunks_answer.hex"));
    let refused = hex(include_str!("golden/broker_refused.hex"));
    for (bytes, error) in [
        (change(&outcomes, 12, &[1]), MessageError::Outcome { code: 0, detail: 1 }),
        (change(&outcomes, 20, &[1]), MessageError::Outcome { code: 1, detail: 1 }),
        (change(&outcomes, 8, &[4]), MessageError::Outcome { code: 4, detail: 0 }),
        (change(&outcomes, 6, &[3]), MessageError::Length(40)),
        (change(&refused, 8, &[0]), MessageError::Refusal { code: 0, detail: 1000 }),
        (change(&refused, 8, &[3]), MessageError::Refusal { code: 3, detail: 1000 }),
        (change(&refused, 8, &[7]), MessageError::Refusal { code: 7, detail: 1000 }),
        (refused[..12].to_vec(), MessageError::Length(12)),
    ] {
        assert_eq!(Answer::decode(&bytes), Err(error), "{bytes:02x?}");
    }
}

#[test]
fn a_batch_is_what_one_message_can_carry() {
    let mut buffer = EMPTY;
    let ids = |count: usize| (0..count).map(|slot| ChunkId { slot: u32::try_from(slot).expect("small"), generation: 1 });
    let bytes = Request::encode_chunks(ids(1000), &mut buffer);
    assert_eq!(bytes.len(), MESSAGE_MAX);
    let Ok(Request::Chunks(decoded)) = Request::decode(bytes) else { panic!("a request for chunks") };
    assert_eq!(decoded.iter().collect::<Vec<_>>(), ids(BATCH_MAX).collect::<Vec<_>>());
    let bytes = Answer::encode_chunks([Outcome::Given; 1000], &mut buffer);
    assert!(matches!(Answer::decode(bytes), Ok(Answer::Chunks(outcomes)) if outcomes.len() == BATCH_MAX));
    assert_eq!(Request::decode(Request::encode_chunks([], &mut buffer)), Err(MessageError::Count(0)));
}

#[test]
fn texts_name_the_fact() {
    for (text, word) in [
        (Refusal::Uid(1000).to_string(), "1000"),
        (Refusal::UnmappedUid(65534).to_string(), "user namespace"),
        (Refusal::TooMany(64).to_string(), "64"),
        (MessageError::Version(2).to_string(), "version 2"),
        (MessageError::Length(3).to_string(), "3 bytes"),
    ] {
        assert!(text.contains(word), "{text}");
    }
    assert!(!format!("{:?}", Request::Prove(Proof([7; 32]))).contains('7'), "proofs are not shown");
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![Just(Outcome::Given), Just(Outcome::Dead), any::<u32>().prop_map(Outcome::Later), any::<u32>().prop_map(Outcome::Driver)]
}

proptest! {
    #[test]
    fn chunks_survive(ids in prop::collection::vec((any::<u32>(), 1_u64..), 1..=BATCH_MAX), outcomes in prop::collection::vec(outcome(), 1..=BATCH_MAX)) {
        let ids: Vec<ChunkId> = ids.into_iter().map(|(slot, generation)| ChunkId { slot, generation }).collect();
        let mut buffer = EMPTY;
        let Ok(Request::Chunks(decoded)) = Request::decode(Request::encode_chunks(ids.iter().copied(), &mut buffer)) else { panic!("a request for chunks") };
        prop_assert_eq!(decoded.iter().collect::<Vec<_>>(), ids);
        let mut buffer = EMPTY;
        let Ok(Answer::Chunks(decoded)) = Answer::decode(Answer::encode_chunks(outcomes.iter().copied(), &mut buffer)) else { panic!("an answer about chunks") };
        prop_assert_eq!(decoded.iter().collect::<Vec<_>>(), outcomes);
    }

    /// Any bytes give a message, which is then written as the same bytes, or an error.
    #[test]
    fn decoders_are_total(bytes in bytes_like_messages()) {
        let mut buffer = EMPTY;
        match Request::decode(&bytes) {
            Ok(request) => prop_assert_eq!(request.encode(&mut buffer), &bytes),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
        let mut buffer = EMPTY;
        match Answer::decode(&bytes) {
            Ok(answer) => prop_assert_eq!(answer.encode(&mut buffer), &bytes),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// Random bytes, half of them behind a head that is almost right.
fn bytes_like_messages() -> impl Strategy<Value = Vec<u8>> {
    let kinds = prop::sample::select(vec![1, 2, 3, 4, 0x81, 0x83, 0x84, 0xff, 0]);
    let body = prop_oneof![Just(0_usize), Just(8), Just(16), Just(32), Just(48), (0_usize..8).prop_map(|n| n * 12), 0_usize..100];
    let headed = (kinds, 0_u8..6, body).prop_flat_map(|(kind, count, len)| {
        prop::collection::vec(prop_oneof![3 => Just(0_u8), 1 => 0_u8..5, 1 => any::<u8>()], len)
            .prop_map(move |body| [&MAGIC[..], &[VERSION, kind, count, 0], &body].concat())
    });
    prop_oneof![headed, prop::collection::vec(any::<u8>(), 0..64)]
}
