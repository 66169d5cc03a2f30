//! Messages to bytes and back.

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Answer, BATCH_MAX, Buffer, Challenge, MAGIC, MessageError, Outcome, Proof, Refusal, Request, VERSION};
use crate::table::ChunkId;

/// What every message begins with.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    /// Number of chunks; 0 in messages about none.
    count: U16,
}

/// A chunk in a request.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Id {
    slot: U32,
    generation: U64,
}

/// An outcome, or a refusal.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Code {
    code: U32,
    detail: U32,
}

/// A challenge and the proof that comes with it.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Proven {
    challenge: [u8; 16],
    proof: [u8; 32],
}

pub(super) const HEAD_LEN: usize = size_of::<Head>();
pub(super) const ID_LEN: usize = size_of::<Id>();

const _: () = assert!(HEAD_LEN == 8 && ID_LEN == 12 && size_of::<Code>() == 8 && size_of::<Proven>() == 48);

/// Kinds of message. An answer has the number of its request, and the highest bit.
mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const PROVE: u8 = 2;
    pub(super) const TABLE: u8 = 3;
    pub(super) const CHUNKS: u8 = 4;
    pub(super) const CHALLENGE: u8 = 0x80 | HELLO;
    pub(super) const TABLE_GIVEN: u8 = 0x80 | TABLE;
    pub(super) const CHUNKS_GIVEN: u8 = 0x80 | CHUNKS;
    pub(super) const REFUSED: u8 = 0xff;
}

/// The chunks of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ids<'a>(&'a [Id]);

impl<'a> Ids<'a> {
    /// How many: at least one.
    #[allow(clippy::len_without_is_empty, reason = "never empty in a decoded message")]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Each of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ChunkId> + use<'a> {
        self.0.iter().map(|id| ChunkId { slot: id.slot.get(), generation: id.generation.get() })
    }
}

impl fmt::Debug for Ids<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The outcomes in an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Outcomes<'a>(&'a [Code]);

impl<'a> Outcomes<'a> {
    /// How many: at least one.
    #[allow(clippy::len_without_is_empty, reason = "never empty in a decoded message")]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Each of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Outcome> + use<'a> {
        // Each was read once when the message was decoded.
        self.0.iter().map(|code| Outcome::read(code).unwrap_or(Outcome::Dead))
    }
}

impl fmt::Debug for Outcomes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a> Request<'a> {
    /// Reads a request from exactly its bytes.
    ///
    /// Errors: the first thing wrong, in the order length of the head, magic, version, kind, count, length, contents.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let (head, body) = Head::read(bytes)?;
        match head.kind {
            kind::HELLO => Ok(Self::Hello(Challenge(head.single(body)?))),
            kind::PROVE => Ok(Self::Prove(Proof(head.single(body)?))),
            kind::TABLE => head.single::<[u8; 0]>(body).map(|_| Self::Table),
            kind::CHUNKS => {
                let ids: &[Id] = head.list(body)?;
                match ids.iter().position(|id| id.generation.get() == 0) {
                    Some(at) => Err(MessageError::Generation { at }),
                    None => Ok(Self::Chunks(Ids(ids))),
                }
            }
            other => Err(MessageError::Kind(other)),
        }
    }

    /// The bytes of the request.
    pub fn encode<'b>(&self, buffer: &'b mut Buffer) -> &'b [u8] {
        match self {
            Self::Hello(challenge) => single(kind::HELLO, &challenge.0, buffer),
            Self::Prove(proof) => single(kind::PROVE, &proof.0, buffer),
            Self::Table => single(kind::TABLE, &[0; 0], buffer),
            Self::Chunks(ids) => list(kind::CHUNKS, ids.0.iter().copied(), buffer),
        }
    }

    /// The bytes of a request for chunks: of the first [`BATCH_MAX`] of them, if there are more.
    pub fn encode_chunks(ids: impl IntoIterator<Item = ChunkId>, buffer: &mut Buffer) -> &[u8] {
        let ids = ids.into_iter().map(|id| Id { slot: id.slot.into(), generation: id.generation.into() });
        list(kind::CHUNKS, ids, buffer)
    }
}

impl<'a> Answer<'a> {
    /// Reads an answer from exactly its bytes.
    ///
    /// Errors: as [`Request::decode`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let (head, body) = Head::read(bytes)?;
        match head.kind {
            kind::CHALLENGE => {
                let Proven { challenge, proof } = head.single(body)?;
                Ok(Self::Challenge(Challenge(challenge), Proof(proof)))
            }
            kind::TABLE_GIVEN => head.single::<[u8; 0]>(body).map(|_| Self::Table),
            kind::CHUNKS_GIVEN => {
                let outcomes: &[Code] = head.list(body)?;
                outcomes.iter().try_for_each(|code| Outcome::read(code).map(|_| ()))?;
                Ok(Self::Chunks(Outcomes(outcomes)))
            }
            kind::REFUSED => Refusal::read(head.single(body)?).map(Self::Refused),
            other => Err(MessageError::Kind(other)),
        }
    }

    /// The bytes of the answer.
    pub fn encode<'b>(&self, buffer: &'b mut Buffer) -> &'b [u8] {
        match *self {
            Self::Challenge(challenge, proof) => single(kind::CHALLENGE, &Proven { challenge: challenge.0, proof: proof.0 }, buffer),
            Self::Table => single(kind::TABLE_GIVEN, &[0; 0], buffer),
            Self::Chunks(outcomes) => list(kind::CHUNKS_GIVEN, outcomes.0.iter().copied(), buffer),
            Self::Refused(refusal) => single(kind::REFUSED, &refusal.code(), buffer),
        }
    }

    /// The bytes of an answer about chunks: of the first [`BATCH_MAX`] of them, if there are more.
    pub fn encode_chunks(outcomes: impl IntoIterator<Item = Outcome>, buffer: &mut Buffer) -> &[u8] {
        list(kind::CHUNKS_GIVEN, outcomes.into_iter().map(|outcome| outcome.code()), buffer)
    }
}

impl Head {
    const fn new(kind: u8, count: u16) -> Self {
        Self { magic: MAGIC, version: VERSION, kind, count: U16::new(count) }
    }

    fn read(bytes: &[u8]) -> Result<(Self, &[u8]), MessageError> {
        let (head, body) = Self::read_from_prefix(bytes).map_err(|_| MessageError::Length(bytes.len()))?;
        if head.magic != MAGIC {
            return Err(MessageError::Magic(head.magic));
        }
        if head.version != VERSION {
            return Err(MessageError::Version(head.version));
        }
        Ok((head, body))
    }

    /// The body of a message about no chunks.
    fn single<T: FromBytes>(&self, body: &[u8]) -> Result<T, MessageError> {
        if self.count != U16::ZERO {
            return Err(MessageError::Count(self.count.get()));
        }
        T::read_from_bytes(body).map_err(|_| length(body))
    }

    /// The items of a message about `count` chunks.
    fn list<'a, T: FromBytes + Immutable + KnownLayout + Unaligned>(&self, body: &'a [u8]) -> Result<&'a [T], MessageError> {
        let count = usize::from(self.count.get());
        if count == 0 || count > BATCH_MAX {
            return Err(MessageError::Count(self.count.get()));
        }
        <[T]>::ref_from_bytes_with_elems(body, count).map_err(|_| length(body))
    }
}

const fn length(body: &[u8]) -> MessageError {
    MessageError::Length(HEAD_LEN + body.len())
}

fn single<'b>(kind: u8, body: &(impl IntoBytes + Immutable), buffer: &'b mut Buffer) -> &'b [u8] {
    let body = body.as_bytes();
    let (_, room) = buffer.split_at_mut(HEAD_LEN);
    let len = body.len();
    room.split_at_mut(len).0.copy_from_slice(body);
    finish(Head::new(kind, 0), len, buffer)
}

fn list<T: IntoBytes + Immutable>(kind: u8, items: impl Iterator<Item = T>, buffer: &mut Buffer) -> &[u8] {
    let (_, room) = buffer.split_at_mut(HEAD_LEN);
    let mut count = 0;
    for (place, item) in room.chunks_exact_mut(size_of::<T>()).zip(items.take(BATCH_MAX)) {
        place.copy_from_slice(item.as_bytes());
        count += 1;
    }
    finish(Head::new(kind, count), usize::from(count) * size_of::<T>(), buffer)
}

/// Puts the head before a body of `len` bytes.
fn finish(head: Head, len: usize, buffer: &mut Buffer) -> &[u8] {
    let (message, _) = buffer.split_at_mut(HEAD_LEN + len);
    message.split_at_mut(HEAD_LEN).0.copy_from_slice(head.as_bytes());
    message
}

impl Outcome {
    const GIVEN: u32 = 0;
    const DEAD: u32 = 1;
    const LATER: u32 = 2;
    const DRIVER: u32 = 3;

    fn code(self) -> Code {
        let (code, detail) = match self {
            Self::Given => (Self::GIVEN, 0),
            Self::Dead => (Self::DEAD, 0),
            Self::Later(errno) => (Self::LATER, errno),
            Self::Driver(result) => (Self::DRIVER, result),
        };
        Code { code: code.into(), detail: detail.into() }
    }

    fn read(code: &Code) -> Result<Self, MessageError> {
        match (code.code.get(), code.detail.get()) {
            (Self::GIVEN, 0) => Ok(Self::Given),
            (Self::DEAD, 0) => Ok(Self::Dead),
            (Self::LATER, errno) => Ok(Self::Later(errno)),
            (Self::DRIVER, result) => Ok(Self::Driver(result)),
            (code, detail) => Err(MessageError::Outcome { code, detail }),
        }
    }
}

impl Refusal {
    const UID: u32 = 1;
    const UNMAPPED_UID: u32 = 2;
    const PROOF: u32 = 3;
    const MESSAGE: u32 = 4;
    const TOO_MANY: u32 = 5;
    const RESOURCES: u32 = 6;

    fn code(self) -> Code {
        let (code, detail) = match self {
            Self::Uid(uid) => (Self::UID, uid),
            Self::UnmappedUid(uid) => (Self::UNMAPPED_UID, uid),
            Self::Proof => (Self::PROOF, 0),
            Self::Message => (Self::MESSAGE, 0),
            Self::TooMany(most) => (Self::TOO_MANY, most),
            Self::Resources(errno) => (Self::RESOURCES, errno),
        };
        Code { code: code.into(), detail: detail.into() }
    }

    fn read(code: Code) -> Result<Self, MessageError> {
        match (code.code.get(), code.detail.get()) {
            (Self::UID, uid) => Ok(Self::Uid(uid)),
            (Self::UNMAPPED_UID, uid) => Ok(Self::UnmappedUid(uid)),
            (Self::PROOF, 0) => Ok(Self::Proof),
            (Self::MESSAGE, 0) => Ok(Self::Message),
            (Self::TOO_MANY, most) => Ok(Self::TooMany(most)),
            (Self::RESOURCES, errno) => Ok(Self::Resources(errno)),
            (code, detail) => Err(MessageError::Refusal { code, detail }),
        }
    }
}
