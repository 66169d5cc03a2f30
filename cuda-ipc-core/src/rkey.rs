//! The rkey of the API: a payload of any handle type and what a carrier such as UCX keeps beside it.
//!
//! UCX carries handle type, base, length and device in its own rkey and needs only the 64-byte payload. A user of the crates or the C ABI has no such
//! carrier, so this is the one message an exporter sends for any device pointer. The type decides how the payload is read; the importer never guesses it
//! from its own state. 108 bytes, well under the 255 that UCP allows one transport's rkey.

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::key::{CRC32C, KEY_LEN, Key, KeyError};

/// Length of an encoded rkey in bytes.
pub const RKEY_LEN: usize = 108;
/// The first four bytes of every rkey.
pub const RKEY_MAGIC: [u8; 4] = *b"CIRK";
/// The version this code writes and reads.
pub const RKEY_VERSION: u8 = 1;

/// The payload of an rkey: what the importer needs to reach the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Payload {
    /// The memory cannot be shared; the peer takes another lane.
    NoIpc,
    /// A `CUipcMemHandle`, for memory of `cuMemAlloc`.
    Legacy([u8; 64]),
    /// A [`Key`]: POSIX fds by way of the exporter's table.
    Posix(Key),
}

/// What an exporter sends for the range `[base, base + len)` of one GPU's memory.
///
/// With a legacy handle the range is the whole allocation: the handle gives all of it, and an importer has to know where it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rkey {
    /// Handle type and handle.
    pub payload: Payload,
    /// First address of the exported range, in the exporter.
    pub base: u64,
    /// Its length in bytes; never 0.
    pub len: u64,
    /// UUID of the GPU that holds the memory (`cuDeviceGetUuid`).
    pub device: [u8; 16],
}

/// Why some bytes are not an rkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RkeyError {
    /// Not 108 bytes.
    Length(usize),
    /// Does not begin with [`RKEY_MAGIC`].
    Magic([u8; 4]),
    /// Written by another version of this library.
    Version(u8),
    /// Damaged on the way: the checksum does not fit.
    Checksum {
        /// What bytes 104..108 say.
        stored: u32,
        /// What bytes 0..104 give.
        computed: u32,
    },
    /// A handle type this version does not know.
    HandleType(u8),
    /// The payload's size does not fit its type.
    PayloadSize {
        /// The handle type.
        handle_type: u8,
        /// The size found, in bytes.
        size: u16,
    },
    /// The payload bytes are not 0 although no handle is there.
    Padding,
    /// The range is empty or wraps around.
    Range {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The payload is of type POSIX, but no valid key.
    Key(KeyError),
    /// The range is not inside the reservation that its key names.
    OutsideReservation {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
}

impl fmt::Display for RkeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length(len) => write!(f, "an rkey has {RKEY_LEN} bytes, these are {len}"),
            Self::Magic(found) => write!(f, "not a cuda-ipc rkey: it begins with {found:02x?}"),
            Self::Version(found) => write!(f, "rkey version {found} is not {RKEY_VERSION}"),
            Self::Checksum { stored, computed } => write!(f, "rkey damaged: checksum {stored:08x} stored, {computed:08x} computed"),
            Self::HandleType(found) => write!(f, "unknown handle type {found}"),
            Self::PayloadSize { handle_type, size } => write!(f, "handle type {handle_type} with a payload of {size} bytes"),
            Self::Padding => f.write_str("rkey without a handle, but with payload bytes"),
            Self::Range { base, len } => write!(f, "rkey with impossible range {base:#x}+{len:#x}"),
            Self::Key(error) => write!(f, "rkey payload: {error}"),
            Self::OutsideReservation { base, len } => write!(f, "rkey range {base:#x}+{len:#x} is outside its key's reservation"),
        }
    }
}

impl core::error::Error for RkeyError {}

const NO_IPC: u8 = 0;
const LEGACY: u8 = 1;
const POSIX: u8 = 2;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Wire {
    magic: [u8; 4],
    version: u8,
    handle_type: u8,
    payload_size: U16,
    base: U64,
    len: U64,
    device: [u8; 16],
    payload: [u8; KEY_LEN],
    checksum: U32,
}

const _: () = assert!(size_of::<Wire>() == RKEY_LEN);

impl Wire {
    fn checksum(&self) -> u32 {
        let (covered, _) = self.as_bytes().split_at(RKEY_LEN - 4);
        CRC32C.checksum(covered)
    }
}

impl Rkey {
    /// The rkey's 108 bytes.
    pub fn encode(&self) -> [u8; RKEY_LEN] {
        let (handle_type, payload_size, payload) = match self.payload {
            Payload::NoIpc => (NO_IPC, 0_u16, [0; KEY_LEN]),
            Payload::Legacy(handle) => (LEGACY, 64, handle),
            Payload::Posix(key) => (POSIX, 64, key.encode()),
        };
        let mut wire = Wire {
            magic: RKEY_MAGIC,
            version: RKEY_VERSION,
            handle_type,
            payload_size: payload_size.into(),
            base: self.base.into(),
            len: self.len.into(),
            device: self.device,
            payload,
            checksum: U32::ZERO,
        };
        wire.checksum = wire.checksum().into();
        zerocopy::transmute!(wire)
    }

    /// Reads an rkey from exactly 108 bytes at any alignment.
    ///
    /// Errors: the first thing wrong, in the order length, magic, version, checksum, then the fields.
    pub fn decode(bytes: &[u8]) -> Result<Self, RkeyError> {
        let wire = Wire::ref_from_bytes(bytes).map_err(|_| RkeyError::Length(bytes.len()))?;
        if wire.magic != RKEY_MAGIC {
            return Err(RkeyError::Magic(wire.magic));
        }
        if wire.version != RKEY_VERSION {
            return Err(RkeyError::Version(wire.version));
        }
        let (stored, computed) = (wire.checksum.get(), wire.checksum());
        if stored != computed {
            return Err(RkeyError::Checksum { stored, computed });
        }
        let size = wire.payload_size.get();
        let payload = match (wire.handle_type, size) {
            (NO_IPC, 0) if wire.payload == [0; KEY_LEN] => Payload::NoIpc,
            (NO_IPC, 0) => return Err(RkeyError::Padding),
            (LEGACY, 64) => Payload::Legacy(wire.payload),
            (POSIX, 64) => Payload::Posix(Key::decode(&wire.payload).map_err(RkeyError::Key)?),
            (NO_IPC | LEGACY | POSIX, _) => return Err(RkeyError::PayloadSize { handle_type: wire.handle_type, size }),
            (other, _) => return Err(RkeyError::HandleType(other)),
        };
        let (base, len) = (wire.base.get(), wire.len.get());
        if len == 0 || base.checked_add(len).is_none() {
            return Err(RkeyError::Range { base, len });
        }
        if let Payload::Posix(key) = payload
            && !key.covers(base, len)
        {
            return Err(RkeyError::OutsideReservation { base, len });
        }
        Ok(Self { payload, base, len, device: wire.device })
    }
}
