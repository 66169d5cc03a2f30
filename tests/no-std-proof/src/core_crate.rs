//! cuda-ipc-core without `std`: keys, rkeys, the export table, the export and import machines, reasons.

use core::hint::black_box;
use core::sync::atomic::AtomicU64;

use cuda_ipc_core::broker::message::MESSAGE_MAX;
use cuda_ipc_core::broker::{Challenge, Proofs, Request, SocketName};
use cuda_ipc_core::diagnosis::{Call, Cause, Diagnosis, Facts, Failure, Trial};
use cuda_ipc_core::dispatch::{FABRIC, FdFrom, Lane, Means, Memory, POSIX_FD, Place, PoolKind, Verdict, dispatch};
use cuda_ipc_core::export::{self, ChunkFacts, Event, Walk};
use cuda_ipc_core::import::{self, Transfer};
use cuda_ipc_core::key::{HostId, Key, KeyKind, Nonce};
use cuda_ipc_core::reason::{self, NoIpc};
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE, Layout, Reader, Writer};

use crate::text::Text;

const NONCE: Nonce = Nonce(0x0123_4567_89ab_cdef);
const SMALL: Layout = Layout { entries: 8, root: 4, leaves: 2, leaf_len: 16 };

fn sample() -> Key {
    let host = HostId::from_boot_id([7; 16]);
    Key { kind: KeyKind::Reservation, pid: 42, table_fd: 5, nonce: NONCE, pid_namespace: 1, host, base: GRANULE, len: 4 * GRANULE }
}

pub(crate) fn key() -> bool {
    let key = black_box(sample());
    let mut bytes = key.encode();
    let decodes = Key::decode(&bytes) == Ok(key);
    bytes[9] ^= 1;
    decodes && Key::decode(&bytes).is_err() && key.covers(2 * GRANULE, GRANULE)
}

pub(crate) fn lanes() -> bool {
    let both =
        black_box(Memory { place: Place::Device, managed: false, legacy: false, pool: PoolKind::Made, handle_types: POSIX_FD | FABRIC });
    let none = Memory { handle_types: 0, ..both };
    dispatch(&both, &Means::default()) == Verdict::Goes(Lane::Pool(FdFrom::Held))
        && dispatch(&none, &Means::default()) == Verdict::NoIpc(reason::Cause::PoolWithoutHandle)
}

pub(crate) fn rkey() -> bool {
    let rkey = black_box(Rkey { payload: Payload::Posix(sample()), base: GRANULE, len: 64, device: [9; 16] });
    let bytes = rkey.encode();
    Rkey::decode(&bytes) == Ok(rkey) && Rkey::decode(&bytes[1..]).is_err()
}

pub(crate) fn broker() -> bool {
    let ids = [ChunkId { slot: 3, generation: 1 }, ChunkId { slot: 4, generation: 9 }];
    let mut buffer = [0; MESSAGE_MAX];
    let travels = match Request::decode(Request::encode_chunks(black_box(ids), &mut buffer)) {
        Ok(Request::Chunks(read)) => read.iter().eq(ids),
        _ => false,
    };
    let proofs = Proofs::new(NONCE, Challenge([1; 16]), black_box(Challenge([2; 16])));
    let proven = proofs.is_of_exporter(&proofs.of_exporter()) && !proofs.is_of_exporter(&proofs.of_importer());
    travels && proven && SocketName::new(NONCE, sample().host).abstract_name().starts_with("cuda-ipc-")
}

pub(crate) fn diagnosis() -> bool {
    let mut facts = Facts::of(black_box(Failure::Call(Call::PidfdGetfd, 1)));
    facts.on_self = Trial::Fails(1);
    let found = Diagnosis::of(facts);
    let said = Text::of(found).contains("seccomp") && Text::of(found.remedy()).contains("--cap-add SYS_PTRACE");
    said && found.cause == Cause::Seccomp { call: Call::PidfdGetfd, errno: 1 }
}

pub(crate) fn table() -> bool {
    static WORDS: [AtomicU64; SMALL.words()] = [const { AtomicU64::new(0) }; SMALL.words()];
    let Some(mut writer) = Writer::create(&WORDS, SMALL, NONCE) else { return false };
    let chunk = Chunk { kind: ChunkKind::Vmm, fd: Some(3), address: 2 * GRANULE, len: GRANULE, buffer_id: 11, device: [9; 16] };
    let Ok(id) = writer.publish(0, &chunk) else { return false };
    let Ok(reader) = Reader::open(&WORDS, SMALL, NONCE) else { return false };
    let found = reader.chunk_at(2 * GRANULE + 17) == Ok((id, chunk));
    let retired = writer.retire(id);
    found && retired && !reader.is_live(id) && reader.chunks(2 * GRANULE, GRANULE).all(|chunk| chunk.is_err())
}

/// An export of one chunk that the table lacks, refused where a handle is made.
pub(crate) fn export_machine() -> bool {
    let mut walk = Walk::new(black_box(2 * GRANULE), GRANULE);
    for _ in 0..100 {
        let event = match walk.next() {
            export::Action::QueryReservation(_) => Event::Reservation(GRANULE, 8 * GRANULE),
            export::Action::Find(_) => Event::Known(None),
            export::Action::QueryChunk(base) => Event::Chunk(Some(facts(base))),
            export::Action::ExportHandle(_) => Event::Refused(reason::Cause::NoHandleType),
            export::Action::Finished => return walk.into_result().is_err_and(|(cause, _)| cause == reason::Cause::NoHandleType),
            _ => Event::Done,
        };
        walk.report(event);
    }
    false
}

fn facts(base: u64) -> ChunkFacts {
    ChunkFacts { base, len: GRANULE, buffer_id: 11 }
}

/// An import of two chunks whose second map fails.
pub(crate) fn import_machine() -> bool {
    let chunk = Chunk { kind: ChunkKind::Vmm, fd: Some(3), address: GRANULE, len: GRANULE, buffer_id: 11, device: [9; 16] };
    let found =
        [(ChunkId { slot: 0, generation: 1 }, chunk), (ChunkId { slot: 1, generation: 1 }, Chunk { address: 2 * GRANULE, ..chunk })];
    let mut transfer = Transfer::new(black_box(&found), 2);
    for _ in 0..100 {
        match transfer.next() {
            import::Action::Map(1) => transfer.report(Err(2_u32)),
            import::Action::Finished => return transfer.into_result().is_err_and(|failure| failure.stuck == 0),
            _ => transfer.report(Ok(())),
        }
    }
    false
}

pub(crate) fn texts() -> bool {
    let refusal = black_box(NoIpc { cause: reason::Cause::NoHandleType, address: 0x1000 });
    let Err(error) = Key::decode(&[]) else { return false };
    !Text::of(refusal).is_empty() && !Text::of(error).is_empty()
}
