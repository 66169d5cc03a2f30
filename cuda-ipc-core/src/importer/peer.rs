//! A peer: another process with a verified identity, and its export table.

use core::sync::atomic::AtomicU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::broker::{Line, NotGiven};
use super::broker_error::{BrokerError, PidfdRefusal};
use super::error::{Deadline, ImportError, ImportErrorKind, ImportStep};
use super::route::{ConnectOptions, Route};
use crate::import::Found;
use crate::key::{HostId, Key, Nonce};
use crate::sys::fork;
use crate::sys::process_fd::ProcessFd;
use crate::sys::table_file::PeerTable;
use crate::table::{Layout, Reader};

/// An exporter that this process has reached: a pidfd, which pins its pid, or a connection to its broker; and its table, whose nonce was checked.
///
/// Kept for as long as anything of the exporter is wanted; a first contact costs some tens of microseconds, every later import only what its chunks cost.
/// Usable from any thread. Holds one fd and one read-only mapping; one fd more where a pidfd's exporter was asked for chunks of which it holds no fd.
#[derive(Debug)]
pub struct Peer {
    nonce: Nonce,
    pid: u32,
    /// `None` where the broker was the way.
    pidfd: Option<ProcessFd>,
    line: Line,
    table: PeerTable,
    /// Number of the table's fd in the peer.
    table_fd: u32,
    token: u64,
}

impl Peer {
    /// Reaches the exporter of `key`, by pidfd if that is allowed, else by its broker's abstract name.
    ///
    /// See [`Peer::connect_with`].
    pub fn connect(key: &Key, deadline: Deadline) -> Result<Self, ImportError> {
        Self::connect_with(key, &ConnectOptions::default(), deadline)
    }

    /// Reaches the exporter of `key` by the ways that `options` allow.
    ///
    /// A pid or fd number that was reused, an exec and a restart are all found by the table's nonce, before anything else of the process is used. Errors:
    /// [`ImportError`] with the step; where both ways were tried in vain, [`ImportErrorKind::NoRoute`] names both causes. Nothing is left open. Source:
    /// pidfd_open(2), pidfd_getfd(2), unix(7).
    pub fn connect_with(key: &Key, options: &ConnectOptions, deadline: Deadline) -> Result<Self, ImportError> {
        let fail = |step, kind| ImportError { step, kind, pid: key.pid, address: key.base, stuck_bytes: 0 };
        let token = fork::token().map_err(|error| fail(ImportStep::Key, ImportErrorKind::Syscall(error)))?;
        judge(key, options.own_keys).map_err(|kind| fail(ImportStep::Key, kind))?;
        if deadline.is_over() {
            return Err(fail(ImportStep::OpenPeer, ImportErrorKind::DeadlineOver));
        }
        let line = Line::new(key, options.clone());
        let refused = match options.route {
            Route::Broker => None,
            Route::Auto | Route::Pidfd => match fetch_table(key, token) {
                Ok((pidfd, fetched)) => return Self::new(key, token, Some(pidfd), line, &fetched),
                Err(error) if options.route == Route::Pidfd => return Err(error),
                Err(error) => Some(PidfdRefusal::of(&error).ok_or(error)?),
            },
        };
        match line.table(deadline) {
            Ok(fetched) => Self::new(key, token, None, line, &fetched),
            Err(broker) => Err(fail(
                ImportStep::AskBroker,
                match (refused, broker) {
                    // Its pid is free in its own PID namespace, so no thread of it lives.
                    (Some(refused), BrokerError::NoListener { .. }) if refused.is_no_such_process() => ImportErrorKind::ExporterGone,
                    (Some(pidfd), broker) => ImportErrorKind::NoRoute { pidfd, broker },
                    (None, broker) => ImportErrorKind::Broker(broker),
                },
            )),
        }
    }

    /// The peer whose table was fetched, if it is one and the key's.
    fn new(key: &Key, token: u64, pidfd: Option<ProcessFd>, line: Line, fetched: &ProcessFd) -> Result<Self, ImportError> {
        let fail = |kind| ImportError { step: ImportStep::OpenTable, kind, pid: key.pid, address: key.base, stuck_bytes: 0 };
        let file = PeerTable::check(fetched.as_fd()).map_err(|error| fail(ImportErrorKind::NotATable(error)))?;
        let table = PeerTable::map(fetched.as_fd(), file).map_err(|error| fail(ImportErrorKind::Syscall(error)))?;
        Reader::open(table.words(), Layout::STANDARD, key.nonce).map_err(|error| fail(ImportErrorKind::Table(error)))?;
        Ok(Self { nonce: key.nonce, pid: key.pid, pidfd, line, table, table_fd: key.table_fd, token })
    }

    /// Identity of the peer's table; keys with another nonce are another peer's.
    pub const fn nonce(&self) -> Nonce {
        self.nonce
    }

    /// Its pid, as its own PID namespace numbers it.
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// The way by which it was reached.
    pub const fn route(&self) -> Route {
        if self.pidfd.is_some() { Route::Pidfd } else { Route::Broker }
    }

    /// Whether it has exited. (A process whose first thread has exited while others live has not.)
    ///
    /// Of a peer that was reached by its broker: whether it has closed the connection, which it also does a moment after it has taken back all that it shared.
    pub fn has_exited(&self) -> bool {
        match &self.pidfd {
            Some(pidfd) => pidfd_sys::has_exited(pidfd.as_fd()).unwrap_or(false),
            None => self.is_current() && self.line.is_closed(),
        }
    }

    /// Whether it lives no more as the peer that was reached: it has exited, or has replaced itself by exec, which a pidfd does not tell.
    pub fn is_gone(&self) -> bool {
        self.has_exited() || self.has_other_table().unwrap_or(false)
    }

    /// Whether the table that is mapped here is the process's no more.
    ///
    /// After an exec nobody writes that table, and the numbers in it may be those of other fds. What tells is that the table's own fd (CLOEXEC) is not there
    /// any more: one fetch, one fstat. A connection is closed by an exec, so an open one tells as much. Errors: a refusal to answer, which says nothing.
    pub(super) fn has_other_table(&self) -> Result<bool, ImportErrorKind> {
        let Some(pidfd) = &self.pidfd else { return Ok(!self.line.is_open()) };
        match pidfd_sys::pidfd_getfd(pidfd.as_fd(), self.table_fd.cast_signed()) {
            Ok(fd) => self.table.is_file(self.brief(fd).as_fd()).map(|same| !same).map_err(ImportErrorKind::Syscall),
            Err(error) if error.errno == pidfd_sys::Errno::EBADF => Ok(true),
            Err(_) if self.line.is_open() => Ok(false),
            Err(error) => Err(ImportErrorKind::Pidfd(error)),
        }
    }

    /// The pidfd, to poll for readability: it becomes readable when the peer exits. `None` where the peer was reached by its broker.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Whether chunks that cannot be fetched may be asked for.
    pub(super) fn may_ask(&self) -> bool {
        self.pidfd.is_none() || self.line.options().route == Route::Auto
    }

    /// Asks the broker for fds of the first of `chunks`: at least one.
    pub(super) fn ask_for(&self, chunks: &[Found], deadline: Deadline) -> Result<Vec<ProcessFd>, ImportErrorKind> {
        self.line.chunks(chunks, deadline).map_err(|why| match why {
            NotGiven::Dead => ImportErrorKind::Retired,
            NotGiven::Broker(BrokerError::DeadlineOver) => ImportErrorKind::DeadlineOver,
            NotGiven::Broker(BrokerError::NoListener { .. }) if self.pidfd.is_none() => ImportErrorKind::ExporterGone,
            NotGiven::Broker(_) if self.pidfd.is_some() && self.is_gone() => ImportErrorKind::ExporterGone,
            NotGiven::Broker(error) => ImportErrorKind::Broker(error),
        })
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

/// Fetches the table of the key's exporter by pidfd_open and pidfd_getfd; the pidfd and the table's fd.
fn fetch_table(key: &Key, token: u64) -> Result<(ProcessFd, ProcessFd), ImportError> {
    let fail = |step, kind| ImportError { step, kind, pid: key.pid, address: key.base, stuck_bytes: 0 };
    let ours = pidfd_sys::pid_namespace(None).map_err(|error| fail(ImportStep::Key, ImportErrorKind::Pidfd(error)))?;
    if ours != u64::from(key.pid_namespace) {
        let ours = u32::try_from(ours).unwrap_or(0);
        return Err(fail(ImportStep::Key, ImportErrorKind::OtherPidNamespace { theirs: key.pid_namespace, ours }));
    }
    let pidfd = pidfd_sys::pidfd_open(key.pid).map_err(|error| fail(ImportStep::OpenPeer, ImportErrorKind::Pidfd(error)))?;
    let pidfd = ProcessFd::new(pidfd).map_err(|error| fail(ImportStep::OpenPeer, ImportErrorKind::Syscall(error)))?;
    match pidfd_sys::pidfd_getfd(pidfd.as_fd(), key.table_fd.cast_signed()) {
        Ok(fetched) => Ok((pidfd, ProcessFd::brief(fetched, token))),
        // Only a readable pidfd says that the process is gone; errnos of getfd differ between kernels.
        Err(_) if pidfd_sys::has_exited(pidfd.as_fd()).unwrap_or(false) => Err(fail(ImportStep::FetchTable, ImportErrorKind::ExporterGone)),
        Err(error) => Err(fail(ImportStep::FetchTable, ImportErrorKind::Pidfd(error))),
    }
}

/// What the key alone says about reaching its exporter.
fn judge(key: &Key, own_keys: bool) -> Result<(), ImportErrorKind> {
    if !own_keys && own_nonces_contain(key.nonce) {
        return Err(ImportErrorKind::OwnProcess);
    }
    if HostId::from_boot_id(pidfd_sys::boot_id().map_err(ImportErrorKind::Pidfd)?) != key.host {
        return Err(ImportErrorKind::OtherHost);
    }
    Ok(())
}

/// Whether an exporter of this process has this nonce, so that a key with it names memory of this process.
pub fn own_nonces_contain(nonce: Nonce) -> bool {
    fork::own_nonces().any(|own| own == nonce.0)
}
