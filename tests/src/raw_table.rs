//! An export table made by hand, honest or not: what a hostile or broken process may put where its table is said to be.
//!
//! # Safety
//! The unsafe here is the memory file and its mapping, which is never unmapped.

use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cuda_ipc_core::key::{HostId, Key, KeyKind, Nonce};
use cuda_ipc_core::table::{GRANULE, Layout, Writer};

const LAYOUT: Layout = Layout::STANDARD;
/// Words of the header.
const HEADER_LEN: usize = 32;
/// Words of an entry.
const ENTRY_LEN: usize = 16;

/// Header words, by name.
pub const HEADER: [(&str, usize); 8] =
    [("magic", 0), ("version", 1), ("nonce", 2), ("entries", 3), ("root", 4), ("leaves", 5), ("leaf_len", 6), ("births", 16)];

/// See the module's documentation.
#[derive(Debug)]
pub struct RawTable {
    file: OwnedFd,
    words: &'static [AtomicU64],
    nonce: Nonce,
    /// What the writer has put into the header.
    header: [u64; HEADER_LEN],
}

/// The words of an entry that are looked at.
#[derive(Clone, Copy, Debug)]
pub struct RawEntry {
    /// Generation times four, plus 1 for live or 2 for dead.
    pub state: u64,
    /// Number of the fd.
    pub fd: u32,
    /// 1 for VMM memory.
    pub kind: u8,
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

impl RawTable {
    /// A table with an honest header and nothing in it.
    pub fn new(nonce: u64) -> std::io::Result<Self> {
        let last_error = std::io::Error::last_os_error;
        let size = LAYOUT.bytes();
        // SAFETY: a C string and flags.
        let fd = unsafe { libc::memfd_create(c"raw-table".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(last_error());
        }
        // SAFETY: made just now.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: an open fd and a length.
        if unsafe { libc::ftruncate(fd, i64::try_from(size).unwrap_or(0)) } < 0 {
            return Err(last_error());
        }
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new shared mapping of the file, at an address of the kernel's choice.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), size, rights, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(last_error());
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
        // SAFETY: an open fd, and numbers.
        if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } < 0 {
            return Err(last_error());
        }
        // SAFETY: page aligned, as long as the layout says, never unmapped; zeros are valid atomics.
        let words = unsafe { core::slice::from_raw_parts(start.cast::<AtomicU64>(), LAYOUT.words()) };
        Writer::create(words, LAYOUT, Nonce(nonce)).expect("long enough");
        let header = core::array::from_fn(|at| words[at].load(Ordering::SeqCst));
        Ok(Self { file, words, nonce: Nonce(nonce), header })
    }

    /// Number of the table's fd.
    pub fn number(&self) -> u32 {
        self.file.as_raw_fd().cast_unsigned()
    }

    /// A key of this process that leads to the table.
    pub fn key(&self, base: u64, len: u64) -> Key {
        let namespace = pidfd_sys::pid_namespace(None).expect("a namespace");
        Key {
            kind: KeyKind::Reservation,
            pid: std::process::id(),
            table_fd: self.number(),
            nonce: self.nonce,
            pid_namespace: u32::try_from(namespace).expect("32 bits"),
            host: HostId::from_boot_id(pidfd_sys::boot_id().expect("a boot id")),
            base,
            len,
        }
    }

    /// Makes the header what it was at first.
    pub fn honest_header(&self) {
        self.header.iter().enumerate().for_each(|(at, &word)| self.put(at, word));
    }

    /// Writes one word.
    pub fn put(&self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::SeqCst);
    }

    /// Reads one word.
    pub fn get(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::SeqCst)
    }

    /// First word of an entry.
    pub const fn entry_start(slot: u32) -> usize {
        HEADER_LEN + slot as usize * ENTRY_LEN
    }

    /// Writes an entry.
    pub fn entry(&self, slot: u32, entry: &RawEntry) {
        let start = Self::entry_start(slot);
        self.put(start + 1, u64::from(entry.fd) | u64::from(entry.kind) << 32);
        self.put(start + 2, entry.address);
        self.put(start + 3, entry.len);
        self.put(start, entry.state);
    }

    /// The root word for `address`, and the word of leaf 0 for it. (By hand everything goes by leaf 0.)
    pub fn index_words(address: u64) -> (usize, usize) {
        let granule = usize::try_from(address / GRANULE).expect("an address");
        let (root, within) = (granule / LAYOUT.leaf_len as usize, granule % LAYOUT.leaf_len as usize);
        let root_start = Self::entry_start(LAYOUT.entries);
        (root_start + root, root_start + LAYOUT.root as usize + within)
    }

    /// Lets the index lead from `address` to an entry.
    pub fn index(&self, address: u64, slot: u32) {
        let (root, leaf) = Self::index_words(address);
        self.put(leaf, u64::from(slot) + 1);
        self.put(root, 1);
    }
}
