//! The memory file of an export table, mapped: writable by its exporter, read-only and distrusted by importers.
//!
//! The exporter maps first and seals then, so that its own mapping stays the only writable one there can ever be (`F_SEAL_FUTURE_WRITE`), and so that the
//! length can never change under a reader (`SHRINK`, `GROW`: no SIGBUS). Its mapping is `MADV_DONTFORK`: a child has no table, see `fork.rs`.
//!
//! # Safety
//! The unsafe here is mmap, munmap, and viewing a mapping as atomic words. A mapping is page aligned, as long as the layout says, and lives as long as its
//! owner; other processes change the words at any time, which atomics allow. Words are only viewed in the process life that mapped them: every owner checks
//! [`super::fork::is_current`] first, because the mapping is absent in a child.

#![allow(unsafe_code)]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, AtomicU64};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;

use super::process_fd::ProcessFd;
use super::{SyscallError, failed};
use crate::table::Layout;
use crate::table::layout::EPOCH_FUTEX_BYTE_OFFSET;

/// What every table file carries. The kernel may add more (`F_SEAL_EXEC`), so a check asks for these at least.
const SEALS: SealFlags = SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// `f_type` of a memfd. Files on hugetlbfs take seals too, but reading one can end in SIGBUS when no huge page is left.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A mapping of a whole table.
#[derive(Debug)]
struct Words {
    start: NonNull<AtomicU64>,
    layout: Layout,
}

// SAFETY: the words are atomics in a shared mapping that any thread may use; unmapping happens in drop, when nobody borrows them.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn map(fd: impl AsFd, layout: Layout, access: ProtFlags) -> Result<Self, SyscallError> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), layout.bytes(), access, MapFlags::SHARED, fd, 0) }.map_err(failed("mmap"))?;
        let start = NonNull::new(start.cast()).ok_or(SyscallError { call: "mmap", errno: libc::ENOMEM })?;
        Ok(Self { start, layout })
    }

    #[inline]
    fn as_slice(&self) -> &[AtomicU64] {
        // SAFETY: see the module's chapter; the slice borrows `self`, so the mapping outlives it.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.layout.words()) }
    }

    /// The futex word: the low half of the epoch.
    fn epoch_futex(&self) -> &AtomicU32 {
        // SAFETY: the offset is inside the header of the mapping and 8-byte aligned.
        let word = unsafe { self.start.as_ptr().byte_add(EPOCH_FUTEX_BYTE_OFFSET) };
        // SAFETY: valid and aligned as above; overlapping atomics of two sizes are only loaded, by the kernel and here.
        unsafe { &*word.cast() }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody borrows it. In a forked child an exporter's mapping is absent, and another may have taken its place, so
        // owners forget it there (`OwnTable`).
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.layout.bytes()) };
    }
}

/// The exporter's table: the file, and the only writable mapping of it.
#[derive(Debug)]
pub(crate) struct OwnTable {
    fd: ProcessFd,
    words: core::mem::ManuallyDrop<Words>,
    token: u64,
}

impl OwnTable {
    /// Makes an empty, sealed file of zeros, mapped writable here.
    pub(crate) fn create() -> Result<Self, SyscallError> {
        let token = super::fork::token()?;
        let layout = Layout::STANDARD;
        let fd = ProcessFd::new(memfd()?)?;
        rustix::fs::ftruncate(&fd, layout.bytes() as u64).map_err(failed("ftruncate"))?;
        let words = Words::map(&fd, layout, ProtFlags::READ | ProtFlags::WRITE)?;
        // SAFETY: the range is the mapping just made.
        unsafe { rustix::mm::madvise(words.start.as_ptr().cast(), layout.bytes(), Advice::LinuxDontFork) }
            .map_err(failed("madvise(MADV_DONTFORK)"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok(Self { fd, words: core::mem::ManuallyDrop::new(words), token })
    }

    /// The fd's number, for keys.
    pub(crate) fn fd_number(&self) -> u32 {
        self.fd.number()
    }

    /// The fd; `None` once the application has closed it under us.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.fd.mark().is_lost()).then(|| self.fd.as_fd())
    }

    /// The words. Only in the process life that made the table.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        self.words.as_slice()
    }

    /// Wakes whoever sleeps on the epoch, in any process.
    pub(crate) fn wake_epoch(&self) {
        // Cannot fail on a mapped word; a sleeper that were missed has a timeout.
        let _ = futex::wake(self.words.epoch_futex(), futex::Flags::empty(), i32::MAX.cast_unsigned());
    }
}

impl Drop for OwnTable {
    fn drop(&mut self) {
        if super::fork::is_current(self.token) {
            // SAFETY: dropped once, here.
            unsafe { core::mem::ManuallyDrop::drop(&mut self.words) };
        }
    }
}

fn memfd() -> Result<OwnedFd, SyscallError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels that know MFD_NOEXEC_SEAL may insist on it (vm.memfd_noexec); older ones refuse it.
    match rustix::fs::memfd_create("cuda-ipc-table", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create("cuda-ipc-table", flags),
        other => other,
    }
    .map_err(failed("memfd_create"))
}

/// Why a fetched fd is not a table file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotATableFile {
    /// A system call on it failed; among others, files that take no seals answer EINVAL.
    Syscall(SyscallError),
    /// Not an ordinary memory file.
    FileSystem {
        /// Its `f_type`.
        magic: i64,
    },
    /// A seal is missing, so its contents or length are not safe to read.
    Unsealed {
        /// The seals it has.
        seals: u32,
    },
    /// Another length than a table has.
    Length(u64),
}

impl core::fmt::Display for NotATableFile {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Syscall(error) => write!(f, "the fetched fd is no export table ({error})"),
            Self::FileSystem { magic } => write!(f, "the fetched fd is no memory file (file system {magic:#x})"),
            Self::Unsealed { seals } => write!(f, "the fetched fd is no export table: seals {seals:#x} do not suffice"),
            Self::Length(len) => write!(f, "the fetched fd is no export table: {len} bytes long"),
        }
    }
}

/// A peer's table, mapped read-only. The fd is closed once mapped.
#[derive(Debug)]
pub(crate) struct PeerTable {
    words: Words,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl PeerTable {
    /// Device and inode of `fd` if it is a sealed memory file of a table's length. What is in it is [`crate::table::Reader::open`]'s to judge.
    pub(crate) fn check(fd: BorrowedFd<'_>) -> Result<(u64, u64), NotATableFile> {
        let syscall = |call| move |errno| NotATableFile::Syscall(failed(call)(errno));
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(syscall("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SEALS) {
            return Err(NotATableFile::Unsealed { seals: seals.bits() });
        }
        #[allow(clippy::useless_conversion, reason = "f_type has another type on other architectures")]
        let magic = i64::from(rustix::fs::fstatfs(fd).map_err(syscall("fstatfs"))?.f_type);
        if magic != TMPFS_MAGIC {
            return Err(NotATableFile::FileSystem { magic });
        }
        let stat = rustix::fs::fstat(fd).map_err(syscall("fstat"))?;
        let len = stat.st_size.cast_unsigned();
        if len != Layout::STANDARD.bytes() as u64 {
            return Err(NotATableFile::Length(len));
        }
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Maps a file that [`PeerTable::check`] has found good.
    pub(crate) fn map(fd: BorrowedFd<'_>, file: (u64, u64)) -> Result<Self, SyscallError> {
        Ok(Self { words: Words::map(fd, Layout::STANDARD, ProtFlags::READ)?, file })
    }

    /// Whether `fd` is the file that is mapped here. The mapping keeps the inode, so its number is not given to another file.
    pub(crate) fn is_file(&self, fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
        let stat = rustix::fs::fstat(fd).map_err(failed("fstat"))?;
        Ok((stat.st_dev, stat.st_ino) == self.file)
    }

    /// The words.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        self.words.as_slice()
    }

    /// The futex word of the epoch, and the value it has while the epoch is `seen`.
    pub(crate) fn epoch_word(&self, seen: u64) -> (&AtomicU32, u32) {
        #[allow(clippy::cast_possible_truncation, reason = "the futex word is the low half")]
        let seen = seen as u32;
        (self.words.epoch_futex(), seen)
    }
}
