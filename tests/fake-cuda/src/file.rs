//! Files and memory by raw system calls: opening, mapping, and open-file-description locks.
//!
//! Device addresses are mapped by the raw `mmap` and `munmap` system calls, so that a program that hooks the C library's (UCX does) is not told of
//! them. Locks here belong to an open file description, not to a process: the kernel drops one when the last fd or mapping of that description is
//! gone, whoever has it by then and however it dies.

use core::ffi::{CStr, c_int, c_long, c_short, c_void};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::path::Path;

/// Opens or creates a file for every user of the directory, close-on-exec.
pub(crate) fn open_shared(path: &Path) -> Result<File> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let file = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o666).open(path)?;
    // The umask may have narrowed the mode; another user's file keeps its mode.
    let _ = file.set_permissions(std::fs::Permissions::from_mode(0o666));
    Ok(file)
}

/// Opens an existing file by a path made earlier; no allocation, so it fails for no other reason than the kernel's.
pub(crate) fn open_again(path: &CStr) -> Result<File> {
    // SAFETY: `path` is a C string.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the fd was opened just now and nobody else knows it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Maps `len` bytes of the file, shared, readable and writable.
pub(crate) fn map_shared(file: &File, len: u64) -> Result<*mut u8> {
    let address = raw_map(0, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd())?;
    Ok(core::ptr::with_exposed_provenance_mut(address))
}

/// Reserves addresses without access. `at` is a wish unless `exact`.
pub(crate) fn map_none(at: usize, len: u64, exact: bool) -> Result<usize> {
    let place = if exact { libc::MAP_FIXED_NOREPLACE } else { 0 };
    let address = raw_map(at, len, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | place, -1)?;
    if exact && address != at {
        // Kernels before 4.17 take the flag for a wish.
        unmap(address, len);
        return Err(Error::from_raw_os_error(libc::EEXIST));
    }
    Ok(address)
}

/// Ordinary private memory.
pub(crate) fn map_private(len: u64) -> Result<usize> {
    raw_map(0, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
}

fn raw_map(at: usize, len: u64, protection: c_int, flags: c_int, fd: RawFd) -> Result<usize> {
    // SAFETY: no MAP_FIXED, so no existing mapping is replaced, whatever the arguments.
    let address =
        unsafe { libc::syscall(libc::SYS_mmap, at, len, c_long::from(protection), c_long::from(flags), c_long::from(fd), c_long::from(0)) };
    if address == -1 { Err(Error::last_os_error()) } else { Ok(usize::try_from(address).unwrap_or(0)) }
}

/// Gives addresses back that [`map_none`] or [`map_private`] gave, or a part of them.
pub(crate) fn unmap(address: usize, len: u64) {
    // SAFETY: the caller owns the range (its bookkeeping says so) and nothing of ours points into it any more.
    unsafe { libc::syscall(libc::SYS_munmap, address, len) };
}

/// `madvise` on memory that is ours.
pub(crate) fn advise(address: *mut u8, len: u64, advice: c_int) -> Result<()> {
    let Ok(len) = usize::try_from(len) else { return Err(Error::from_raw_os_error(libc::EINVAL)) };
    // SAFETY: the range is part of a mapping this library made and owns; no advice used here invalidates live Rust references.
    let rc = unsafe { libc::madvise(address.cast::<c_void>(), len, advice) };
    if rc == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Empties a range of the file: it reads as zeros and takes no room.
pub(crate) fn punch(file: &File, from: u64, len: u64) -> Result<()> {
    let (Ok(from), Ok(len)) = (i64::try_from(from), i64::try_from(len)) else { return Err(Error::from_raw_os_error(libc::EINVAL)) };
    // SAFETY: a system call on an fd we own.
    let rc = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, from, len) };
    if rc == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Kinds of lock.
#[derive(Clone, Copy)]
pub(crate) enum Lock {
    Shared,
    Exclusive,
}

/// Takes a lock on `len` bytes (0: to the end of all offsets), at once or not at all.
pub(crate) fn try_lock(file: &File, kind: Lock, from: u64, len: u64) -> Result<()> {
    lock_call(file, libc::F_OFD_SETLK, kind, from, len).map(|_| ())
}

/// Takes a lock and waits for it.
pub(crate) fn wait_lock(file: &File, kind: Lock, from: u64, len: u64) -> Result<()> {
    loop {
        match lock_call(file, libc::F_OFD_SETLKW, kind, from, len) {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            other => return other.map(|_| ()),
        }
    }
}

/// Whether another open file description has any lock in the range.
pub(crate) fn is_locked(file: &File, from: u64, len: u64) -> bool {
    lock_call(file, libc::F_OFD_GETLK, Lock::Exclusive, from, len).is_ok_and(|kind| kind != libc::F_UNLCK)
}

fn lock_call(file: &File, command: c_int, kind: Lock, from: u64, len: u64) -> Result<c_int> {
    let kind = match kind {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
    };
    // SAFETY: `flock` is plain C data; zero is a valid value for each of its fields.
    let mut lock: libc::flock = unsafe { core::mem::zeroed() };
    lock.l_type = c_short::try_from(kind).unwrap_or(0);
    lock.l_whence = c_short::try_from(libc::SEEK_SET).unwrap_or(0);
    lock.l_start = i64::try_from(from).unwrap_or(i64::MAX);
    lock.l_len = i64::try_from(len).unwrap_or(0);
    // SAFETY: an fd we own and a live `flock`, which is what these commands take.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if rc == 0 { Ok(c_int::from(lock.l_type)) } else { Err(Error::last_os_error()) }
}
