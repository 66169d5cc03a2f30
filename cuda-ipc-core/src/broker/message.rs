//! The broker's messages: a head of eight bytes, then what the kind has, exactly.
//!
//! Numbers are little endian, every byte is defined, nothing is aligned. The kernel delivers packets whole and unharmed, so there is no checksum; what a
//! decoder accepts is what the encoder writes, byte for byte. The bytes themselves are in `wire.rs`.

mod wire;

use core::fmt;

use super::proof::{Challenge, Proof};

pub use wire::{Ids, Outcomes};

/// The first four bytes of every message.
pub const MAGIC: [u8; 4] = *b"CIPB";
/// The version this code writes and reads.
pub const VERSION: u8 = 1;
/// Chunks in one request at most: as many fds as the kernel lets one message carry (`SCM_MAX_FD`).
pub const BATCH_MAX: usize = 253;
/// Length of the longest message in bytes.
pub const MESSAGE_MAX: usize = wire::HEAD_LEN + BATCH_MAX * wire::ID_LEN;

/// Room for any message.
pub type Buffer = [u8; MESSAGE_MAX];

/// What an importer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The first message.
    Hello(Challenge),
    /// The second one. Has no answer unless it is wrong.
    Prove(Proof),
    /// Asks for the fd of the export table.
    Table,
    /// Asks for fds of these chunks.
    Chunks(Ids<'a>),
}

/// What an exporter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// To [`Request::Hello`].
    Challenge(Challenge, Proof),
    /// To [`Request::Table`]: the table's fd comes along.
    Table,
    /// To [`Request::Chunks`]: what became of each, in their order. The fds of those given come along, in the same order.
    Chunks(Outcomes<'a>),
    /// To anything: no, and the connection ends.
    Refused(Refusal),
}

/// What became of one chunk of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its fd comes along.
    Given,
    /// It is not published (any more) under this identity.
    Dead,
    /// Not this time: ask again. The errno says what was lacking, 0 that the answer was full.
    Later(u32),
    /// The driver did not export it, for this `CUresult`.
    Driver(u32),
}

/// Why an exporter does not talk with an importer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// It belongs to another user, whom the exporter does not serve.
    Uid(u32),
    /// Its user does not exist in the exporter's user namespace, where it looks like this one.
    UnmappedUid(u32),
    /// It does not know the nonce.
    Proof,
    /// What it sent is not a message of this version, or not at this point.
    Message,
    /// The exporter has as many importers as it takes.
    TooMany(u32),
    /// The exporter has no file descriptor left, or the kernel's errno says what else it lacks.
    Resources(u32),
}

/// Why some bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageError {
    /// Another length than the kind's.
    Length(usize),
    /// It does not begin with [`MAGIC`].
    Magic([u8; 4]),
    /// Written by another version of this library.
    Version(u8),
    /// A kind that this version does not know, or that the other side says.
    Kind(u8),
    /// No chunk, or more than [`BATCH_MAX`], or a number where there is nothing to count.
    Count(u16),
    /// A chunk that no table has: its generation is 0.
    Generation {
        /// Its place in the message.
        at: usize,
    },
    /// An outcome that this version does not know, or a detail where there is none.
    Outcome {
        /// The code.
        code: u32,
        /// Its detail.
        detail: u32,
    },
    /// A refusal that this version does not know, or a detail where there is none.
    Refusal {
        /// The code.
        code: u32,
        /// Its detail.
        detail: u32,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Uid(uid) => write!(f, "it does not serve user {uid}"),
            Self::UnmappedUid(uid) => write!(f, "this process's user does not exist in its user namespace (it sees user {uid})"),
            Self::Proof => f.write_str("it was not convinced that this process has its key"),
            Self::Message => f.write_str("it did not understand this process"),
            Self::TooMany(most) => write!(f, "it serves {most} importers already"),
            Self::Resources(errno) => write!(f, "it lacks resources (errno {errno})"),
        }
    }
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length(len) => write!(f, "broker message of {len} bytes"),
            Self::Magic(found) => write!(f, "not a broker message: it begins with {found:02x?}"),
            Self::Version(found) => write!(f, "broker protocol version {found} is not {VERSION}"),
            Self::Kind(found) => write!(f, "unexpected kind {found:#04x} of broker message"),
            Self::Count(found) => write!(f, "broker message about {found} chunks"),
            Self::Generation { at } => write!(f, "broker message about a chunk that cannot be (number {at})"),
            Self::Outcome { code, detail } => write!(f, "unknown outcome {code} ({detail}) in a broker message"),
            Self::Refusal { code, detail } => write!(f, "unknown refusal {code} ({detail}) of a broker"),
        }
    }
}

impl core::error::Error for MessageError {}
