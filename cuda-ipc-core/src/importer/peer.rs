//! A peer: another process with a verified identity, and its export table.

use core::sync::atomic::AtomicU64;
use std::os::fd::{AsFd, OwnedFd};

use super::error::{Deadline, ImportError, ImportErrorKind, ImportStep};
use crate::import::Found;
use crate::key::{HostId, Key, Nonce};
use crate::sys::fork;
use crate::sys::process_fd::ProcessFd;
use crate::sys::table_file::PeerTable;
use crate::table::{Layout, Reader};

/// An exporter that this process has reached: a pidfd, which pins its pid, and its table, whose nonce was checked.
///
/// Kept for as long as anything of the exporter is wanted; a first contact costs some tens of microseconds, every later import only what its chunks cost.
/// Usable from any thread. Holds one fd and one read-only mapping.
#[derive(Debug)]
pub struct Peer {
    nonce: Nonce,
    pid: u32,
    pidfd: ProcessFd,
    table: PeerTable,
    /// Number of the table's fd in the peer.
    table_fd: u32,
    token: u64,
}

impl Peer {
    /// Reaches the exporter of `key` by pidfd_open and pidfd_getfd.
    ///
    /// A pid or fd number that was reused, an exec and a restart are all found by the table's nonce, before anything else of the process is used. Errors:
    /// [`ImportError`] with the step; nothing is left open. Source: pidfd_open(2), pidfd_getfd(2).
    pub fn connect(key: &Key, deadline: Deadline) -> Result<Self, ImportError> {
        let fail = |step, kind| ImportError { step, kind, pid: key.pid, address: key.base, stuck_bytes: 0 };
        let pidfd_error = |step| move |error| fail(step, ImportErrorKind::Pidfd(error));
        let syscall_error = |step| move |error| fail(step, ImportErrorKind::Syscall(error));

        let token = fork::token().map_err(syscall_error(ImportStep::Key))?;
        judge(key).map_err(|kind| fail(ImportStep::Key, kind))?;
        if deadline.is_over() {
            return Err(fail(ImportStep::OpenPeer, ImportErrorKind::DeadlineOver));
        }
        let pidfd = pidfd_sys::pidfd_open(key.pid).map_err(pidfd_error(ImportStep::OpenPeer))?;
        let pidfd = ProcessFd::new(pidfd).map_err(syscall_error(ImportStep::OpenPeer))?;
        let fetched = pidfd_sys::pidfd_getfd(pidfd.as_fd(), key.table_fd.cast_signed()).map_err(|error| {
            // Only a readable pidfd says that the process is gone; errnos of getfd differ between kernels.
            if pidfd_sys::has_exited(pidfd.as_fd()).unwrap_or(false) {
                fail(ImportStep::FetchTable, ImportErrorKind::ExporterGone)
            } else {
                pidfd_error(ImportStep::FetchTable)(error)
            }
        })?;
        let fetched = ProcessFd::brief(fetched, token);
        let file = PeerTable::check(fetched.as_fd()).map_err(|error| fail(ImportStep::OpenTable, ImportErrorKind::NotATable(error)))?;
        let table = PeerTable::map(fetched.as_fd(), file).map_err(syscall_error(ImportStep::OpenTable))?;
        drop(fetched);
        Reader::open(table.words(), Layout::STANDARD, key.nonce)
            .map_err(|error| fail(ImportStep::OpenTable, ImportErrorKind::Table(error)))?;
        Ok(Self { nonce: key.nonce, pid: key.pid, pidfd, table, table_fd: key.table_fd, token })
    }

    /// Identity of the peer's table; keys with another nonce are another peer's.
    pub const fn nonce(&self) -> Nonce {
        self.nonce
    }

    /// Its pid, as its own PID namespace numbers it.
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has exited. (A process whose first thread has exited while others live has not.)
    pub fn has_exited(&self) -> bool {
        pidfd_sys::has_exited(self.pidfd.as_fd()).unwrap_or(false)
    }

    /// Whether it lives no more as the peer that was reached: it has exited, or has replaced itself by exec, which a pidfd does not tell.
    pub fn is_gone(&self) -> bool {
        self.has_exited() || self.has_other_table().unwrap_or(false)
    }

    /// Whether the table that is mapped here is the process's no more.
    ///
    /// After an exec nobody writes that table, and the numbers in it may be those of other fds. What tells is that the table's own fd (CLOEXEC) is not there
    /// any more: one fetch, one fstat. Errors: a refusal to answer, which says nothing.
    pub(super) fn has_other_table(&self) -> Result<bool, ImportErrorKind> {
        match pidfd_sys::pidfd_getfd(self.pidfd.as_fd(), self.table_fd.cast_signed()) {
            Ok(fd) => self.table.is_file(self.brief(fd).as_fd()).map(|same| !same).map_err(ImportErrorKind::Syscall),
            Err(error) if error.errno == pidfd_sys::Errno::EBADF => Ok(true),
            Err(error) => Err(ImportErrorKind::Pidfd(error)),
        }
    }

    /// The pidfd, to poll for readability: it becomes readable when the peer exits.
    pub fn pidfd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The peer's table. `None` in a forked child.
    #[inline]
    pub fn table(&self) -> Option<Reader<'_, AtomicU64>> {
        self.is_current().then(|| Reader::resume(self.table.words(), Layout::STANDARD)).flatten()
    }

    pub(super) fn epoch_word(&self, seen: u64) -> (&core::sync::atomic::AtomicU32, u32) {
        self.table.epoch_word(seen)
    }

    /// The live chunks that cover `[address, address + len)`, in order.
    ///
    /// Errors: the first look-up that failed; a hole is [`crate::table::LookupError::NoChunk`].
    pub fn lookup(&self, address: u64, len: u64) -> Result<Vec<Found>, ImportError> {
        let fail = |kind| ImportError { step: ImportStep::Lookup, kind, pid: self.pid, address, stuck_bytes: 0 };
        let table = self.table().ok_or(fail(ImportErrorKind::Forked))?;
        table.chunks(address, len).collect::<Result<_, _>>().map_err(|error| fail(ImportErrorKind::Lookup(error)))
    }

    /// Takes a fetched fd to be used at once; a child forked meanwhile does not keep it.
    pub(super) fn brief(&self, fd: OwnedFd) -> ProcessFd {
        ProcessFd::brief(fd, self.token)
    }

    #[inline]
    pub(super) fn is_current(&self) -> bool {
        fork::is_current(self.token)
    }
}

/// What the key alone says about reaching its exporter by pid.
fn judge(key: &Key) -> Result<(), ImportErrorKind> {
    if own_nonces_contain(key.nonce) {
        return Err(ImportErrorKind::OwnProcess);
    }
    if HostId::from_boot_id(pidfd_sys::boot_id().map_err(ImportErrorKind::Pidfd)?) != key.host {
        return Err(ImportErrorKind::OtherHost);
    }
    let ours = pidfd_sys::pid_namespace(None).map_err(ImportErrorKind::Pidfd)?;
    if ours != u64::from(key.pid_namespace) {
        return Err(ImportErrorKind::OtherPidNamespace { theirs: key.pid_namespace, ours: u32::try_from(ours).unwrap_or(0) });
    }
    Ok(())
}

/// Whether an exporter of this process has this nonce, so that a key with it names memory of this process.
pub fn own_nonces_contain(nonce: Nonce) -> bool {
    fork::own_nonces().any(|own| own == nonce.0)
}
