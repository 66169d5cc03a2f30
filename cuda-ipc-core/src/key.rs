//! Key v1: the 64 bytes that travel from an exporter to its importers.
//!
//! A key names a *reservation* of one process (or one pool allocation), not the chunks that are in it today; those stand in the process's export
//! table, to which the key leads by {pid, table fd}. Every byte is defined and every export of the same reservation gives the same 64 bytes, because
//! users of the field compare keys byte for byte. 64 bytes is the size of `CUmemFabricHandle` and `CUipcMemHandle`, so a key fits wherever those do.
//!
//! Decoding is total: any bytes give a [`Key`] or a named [`KeyError`]. A key proves nothing by itself; identity is its [`Nonce`], which the table must
//! repeat. What a carrier adds around a key (address, length, device) is `rkey.rs`.

use core::fmt;

use crc::{CRC_32_ISCSI, Crc};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of an encoded key in bytes.
pub const KEY_LEN: usize = 64;
/// The first four bytes of every key.
pub const KEY_MAGIC: [u8; 4] = *b"CIPC";
/// The version this code writes and reads.
pub const KEY_VERSION: u8 = 1;

/// CRC-32C, as iSCSI and ext4 use it.
pub(crate) const CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// 64 random bits that identify one export table, and with it one process life: new after fork, exec and restart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nonce(pub u64);

/// Its last 16 bits, as in the text of errors: enough to tell two apart. Who knows all of it may ask the exporter's broker, and logs have readers.
impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nonce({self})")
    }
}

impl fmt::Display for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "..{:04x}", self.0 & 0xffff)
    }
}

/// A hash of the machine's boot id: equal on one running kernel, different on another machine or after a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostId(pub u64);

impl HostId {
    /// The id of the machine whose `/proc/sys/kernel/random/boot_id` is `boot_id`.
    ///
    /// FNV-1a: it only has to tell machines apart, not to resist anybody.
    pub const fn from_boot_id(boot_id: [u8; 16]) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut at = 0;
        while at < boot_id.len() {
            #[allow(clippy::indexing_slicing, reason = "at < len by the loop's condition; iterators are not const")]
            let byte = boot_id[at];
            hash = (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3);
            at += 1;
        }
        Self(hash)
    }
}

/// What a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyKind {
    /// A virtual memory management reservation in which chunks come and go (`cuMemAddressReserve`).
    Reservation,
    /// One allocation of a memory pool (`cuMemAllocFromPoolAsync`), found in the table by its slot.
    PoolAllocation {
        /// Slot of the allocation's entry in the export table.
        slot: u32,
    },
    /// A memory pool itself, for carriers that name pool and allocation apart: it leads to the exporter and names no memory. Its base is the exporter's number
    /// of the pool, the same for all allocations of it, and its length is 1.
    Pool,
}

impl KeyKind {
    const RESERVATION: u8 = 1;
    const POOL_ALLOCATION: u8 = 2;
    const POOL: u8 = 3;
}

/// A decoded key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// What is named.
    pub kind: KeyKind,
    /// The exporter's process id, as its own PID namespace numbers it; never 0.
    pub pid: u32,
    /// Number of the table's file descriptor in the exporter.
    pub table_fd: u32,
    /// Identity of the exporter's table; never 0.
    pub nonce: Nonce,
    /// Inode of the exporter's PID namespace (these are 32 bits wide).
    pub pid_namespace: u32,
    /// The exporter's machine.
    pub host: HostId,
    /// First address of the reservation or allocation, in the exporter.
    pub base: u64,
    /// Its length in bytes; never 0, and `base + len` does not overflow.
    pub len: u64,
}

/// Why some bytes are not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// Not 64 bytes.
    Length(usize),
    /// Does not begin with [`KEY_MAGIC`]: another library's handle.
    Magic([u8; 4]),
    /// Written by another version of this library.
    Version(u8),
    /// Damaged on the way: the checksum does not fit.
    Checksum {
        /// What bytes 60..64 say.
        stored: u32,
        /// What bytes 0..60 give.
        computed: u32,
    },
    /// A kind this version does not know.
    Kind(u8),
    /// Flag bits this version does not know.
    Flags(u16),
    /// The pid is 0 or beyond what Linux gives out.
    Pid(u32),
    /// The table's fd number is beyond what Linux gives out.
    TableFd(u32),
    /// The nonce is 0.
    Nonce,
    /// The range is empty or wraps around.
    Range {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Bytes 52..60 hold what this kind has no use for.
    Detail(u64),
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length(len) => write!(f, "a key has {KEY_LEN} bytes, these are {len}"),
            Self::Magic(found) => write!(f, "not a cuda-ipc key: it begins with {found:02x?}"),
            Self::Version(found) => write!(f, "key version {found} is not {KEY_VERSION}"),
            Self::Checksum { stored, computed } => write!(f, "key damaged: checksum {stored:08x} stored, {computed:08x} computed"),
            Self::Kind(found) => write!(f, "unknown key kind {found}"),
            Self::Flags(found) => write!(f, "unknown key flags {found:#06x}"),
            Self::Pid(found) => write!(f, "key with impossible pid {found}"),
            Self::TableFd(found) => write!(f, "key with impossible table fd {found}"),
            Self::Nonce => f.write_str("key with nonce 0"),
            Self::Range { base, len } => write!(f, "key with impossible range {base:#x}+{len:#x}"),
            Self::Detail(found) => write!(f, "key with unexpected detail {found:#x}"),
        }
    }
}

impl core::error::Error for KeyError {}

/// The bytes, field by field. `Unaligned`, because carriers place keys at any offset.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Wire {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    flags: U16,
    pid: U32,
    table_fd: U32,
    nonce: U64,
    pid_namespace: U32,
    host: U64,
    base: U64,
    len: U64,
    detail: U64,
    checksum: U32,
}

const _: () = assert!(size_of::<Wire>() == KEY_LEN);

impl Wire {
    fn checksum(&self) -> u32 {
        let (covered, _) = self.as_bytes().split_at(KEY_LEN - 4);
        CRC32C.checksum(covered)
    }
}

impl Key {
    /// The key's 64 bytes.
    pub fn encode(&self) -> [u8; KEY_LEN] {
        let (kind, detail) = match self.kind {
            KeyKind::Reservation => (KeyKind::RESERVATION, 0),
            KeyKind::PoolAllocation { slot } => (KeyKind::POOL_ALLOCATION, u64::from(slot)),
            KeyKind::Pool => (KeyKind::POOL, 0),
        };
        let mut wire = Wire {
            magic: KEY_MAGIC,
            version: KEY_VERSION,
            kind,
            flags: U16::ZERO,
            pid: self.pid.into(),
            table_fd: self.table_fd.into(),
            nonce: self.nonce.0.into(),
            pid_namespace: self.pid_namespace.into(),
            host: self.host.0.into(),
            base: self.base.into(),
            len: self.len.into(),
            detail: detail.into(),
            checksum: U32::ZERO,
        };
        wire.checksum = wire.checksum().into();
        zerocopy::transmute!(wire)
    }

    /// Whether `[base, base + len)` lies inside what the key names.
    pub const fn covers(&self, base: u64, len: u64) -> bool {
        // `self.base + self.len` cannot overflow in a decoded key; a made-up one is answered without panic all the same.
        match (base.checked_sub(self.base), base.checked_add(len)) {
            (Some(offset), Some(_)) => offset <= self.len && len <= self.len - offset,
            _ => false,
        }
    }

    /// Reads a key from exactly 64 bytes at any alignment.
    ///
    /// Errors: the first thing wrong, in the order length, magic, version, checksum, then the fields.
    pub fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let wire = Wire::ref_from_bytes(bytes).map_err(|_| KeyError::Length(bytes.len()))?;
        if wire.magic != KEY_MAGIC {
            return Err(KeyError::Magic(wire.magic));
        }
        if wire.version != KEY_VERSION {
            return Err(KeyError::Version(wire.version));
        }
        let (stored, computed) = (wire.checksum.get(), wire.checksum());
        if stored != computed {
            return Err(KeyError::Checksum { stored, computed });
        }
        if wire.flags.get() != 0 {
            return Err(KeyError::Flags(wire.flags.get()));
        }
        let detail = wire.detail.get();
        let kind = match wire.kind {
            KeyKind::RESERVATION if detail == 0 => KeyKind::Reservation,
            KeyKind::POOL_ALLOCATION => KeyKind::PoolAllocation { slot: u32::try_from(detail).map_err(|_| KeyError::Detail(detail))? },
            KeyKind::POOL if detail == 0 => KeyKind::Pool,
            KeyKind::RESERVATION | KeyKind::POOL => return Err(KeyError::Detail(detail)),
            other => return Err(KeyError::Kind(other)),
        };
        let (pid, table_fd) = (wire.pid.get(), wire.table_fd.get());
        // Both are non-negative C ints in the kernel's interfaces.
        if pid == 0 || i32::try_from(pid).is_err() {
            return Err(KeyError::Pid(pid));
        }
        if i32::try_from(table_fd).is_err() {
            return Err(KeyError::TableFd(table_fd));
        }
        if wire.nonce.get() == 0 {
            return Err(KeyError::Nonce);
        }
        let (base, len) = (wire.base.get(), wire.len.get());
        if len == 0 || base.checked_add(len).is_none() || (kind == KeyKind::Pool && len != 1) {
            return Err(KeyError::Range { base, len });
        }
        Ok(Self {
            kind,
            pid,
            table_fd,
            nonce: Nonce(wire.nonce.get()),
            pid_namespace: wire.pid_namespace.get(),
            host: HostId(wire.host.get()),
            base,
            len,
        })
    }
}
