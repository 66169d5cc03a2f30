//! Runs the import machine: chunks of a peer, mapped to their places.

use std::os::fd::AsFd;

use cuda_driver_sys::CUdevice;

use super::error::{Deadline, ImportError, ImportErrorKind, ImportStep};
use super::peer::Peer;
use crate::import::{Action, Found, Transfer};
use crate::sys::driver::{Cuda, Handle};
use crate::sys::process_fd::ProcessFd;
use crate::table::Reader;

/// Who may do what with the memory here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access<'a> {
    /// Ordinals, in this process, of the devices that get access; at least one.
    pub devices: &'a [CUdevice],
    /// Whether they may write.
    pub writable: bool,
}

/// Where chunks go: the chunk at `remote_base + x` in the exporter is mapped at `local_base + x` here.
///
/// The caller owns the reservation, and nothing is mapped at the places of the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// An address in the exporter.
    pub remote_base: u64,
    /// The address here that corresponds to it.
    pub local_base: u64,
}

impl Placement {
    /// Where the exporter's `address` is here.
    pub const fn local(&self, address: u64) -> u64 {
        self.local_base.wrapping_add(address.wrapping_sub(self.remote_base))
    }
}

/// How many fds are fetched before the first is imported, at most. By pidfd each is a call of its own, so one at a time costs nothing and needs one free
/// number; a broker is asked for as many as this process can spare.
const BATCH: usize = crate::broker::BATCH_MAX;

impl Peer {
    /// Fetches, imports and maps `chunks` (in ascending order, without overlap), and gives access with one call for each run of adjacent chunks.
    ///
    /// A mapping keeps its memory alive, whatever the exporter does, until the caller unmaps it. Each chunk was live under its identity after its fd had
    /// been fetched; whether it still is, is the caller's to check before each use. Errors: [`ImportError`]; nothing is mapped then (but `stuck_bytes`), and no
    /// fd or handle is held. Source: pidfd_getfd(2), cuMemImportFromShareableHandle, cuMemMap, cuMemSetAccess, cuMemRelease.
    pub fn import(
        &self,
        cuda: &Cuda,
        chunks: &[Found],
        placement: Placement,
        access: Access<'_>,
        deadline: Deadline,
    ) -> Result<(), ImportError> {
        let fail = |step, kind, address| ImportError { step, kind, pid: self.pid(), address, stuck_bytes: 0 };
        let Some((_, first)) = chunks.first() else { return Ok(()) };
        let Some(table) = self.table() else { return Err(fail(ImportStep::Lookup, ImportErrorKind::Forked, first.address)) };

        let mut transfer = Transfer::new(chunks, BATCH);
        let mut runner = Runner { peer: self, table, cuda, chunks, placement, access, deadline, first: 0, fds: Vec::new(), handle: None };
        cuda.with_relaxed_capture(|| {
            loop {
                match transfer.next() {
                    Action::Finished => break,
                    Action::Fetch { first, count } => match runner.fetch(first, count) {
                        Ok(fetched) => transfer.report_fetched(fetched),
                        Err(error) => transfer.report(Err(error)),
                    },
                    action => transfer.report(runner.act(action)),
                }
            }
        });
        transfer.into_result().map_err(|failure| {
            let address = chunks.get(failure.chunk).map_or(0, |(_, chunk)| chunk.address);
            let stuck_bytes = chunks.iter().take(failure.stuck).map(|(_, chunk)| chunk.len).sum();
            ImportError { stuck_bytes, ..fail(ImportStep::Chunk(failure.step), failure.error, address) }
        })
    }
}

/// The transfer's hands: what it holds between two actions.
struct Runner<'a> {
    peer: &'a Peer,
    table: Reader<'a, core::sync::atomic::AtomicU64>,
    cuda: &'a Cuda,
    chunks: &'a [Found],
    placement: Placement,
    access: Access<'a>,
    deadline: Deadline,
    /// Fds of the chunks from `first` on that were fetched last.
    first: usize,
    fds: Vec<Option<ProcessFd>>,
    handle: Option<Handle>,
}

impl Runner<'_> {
    fn act(&mut self, action: Action) -> Result<(), ImportErrorKind> {
        match action {
            Action::Recheck(at) => {
                if !self.table.is_live(self.chunk(at)?.0) {
                    return Err(ImportErrorKind::Retired);
                }
                // A table whose exporter has called exec says "live" for ever, of fds that are others by now. Asked once, after the last fetch.
                if at + 1 < self.chunks.len() {
                    return Ok(());
                }
                match self.peer.has_other_table() {
                    Ok(false) => Ok(()),
                    Ok(true) => Err(ImportErrorKind::ExporterGone),
                    Err(ImportErrorKind::Pidfd(error)) => Err(self.unreached(at, error)),
                    Err(other) => Err(other),
                }
            }
            Action::Import(at) => {
                let fd = self.fds.get(at - self.first).and_then(Option::as_ref).ok_or(ImportErrorKind::NoFd)?;
                let device = self.chunk(at)?.1.device;
                self.handle = Some(self.cuda.import_fd(fd.as_fd()).map_err(|error| ImportErrorKind::of_import(error, device))?);
                Ok(())
            }
            Action::CloseFd(at) => {
                drop(self.fds.get_mut(at - self.first).and_then(Option::take));
                Ok(())
            }
            Action::Map(at) => {
                let chunk = self.chunk(at)?.1;
                let handle = self.handle.ok_or(ImportErrorKind::NoFd)?;
                self.cuda.map(self.placement.local(chunk.address), chunk.len, handle).map_err(ImportErrorKind::Driver)
            }
            Action::Release(_) => match self.handle.take() {
                Some(handle) => self.cuda.release(handle).map_err(ImportErrorKind::Driver),
                None => Ok(()),
            },
            Action::SetAccess { first, count } => {
                if self.deadline.is_over() {
                    return Err(ImportErrorKind::DeadlineOver);
                }
                let (address, len) = self.run(first, count);
                self.cuda.set_access(address, len, self.access.devices, self.access.writable).map_err(ImportErrorKind::Driver)
            }
            Action::Unmap { first, count } => {
                let (address, len) = self.run(first, count);
                self.cuda.unmap(address, len).map_err(ImportErrorKind::Driver)
            }
            // Fetches are `fetch`'s.
            Action::Fetch { .. } | Action::Finished => Ok(()),
        }
    }

    /// Gets fds of at most `count` chunks from `first` on; says of how many.
    fn fetch(&mut self, first: usize, count: usize) -> Result<usize, ImportErrorKind> {
        if self.deadline.is_over() {
            return Err(ImportErrorKind::DeadlineOver);
        }
        self.first = first;
        self.fds.clear();
        let wanted = self.chunks.get(first..first + count).unwrap_or_default();
        let by_pidfd = self.peer.pidfd().zip(wanted.first().and_then(|(_, chunk)| chunk.fd));
        if let Some((pidfd, number)) = by_pidfd {
            match pidfd_sys::pidfd_getfd(pidfd, number.cast_signed()) {
                Ok(fd) => {
                    self.fds.push(Some(self.peer.brief(fd)));
                    return Ok(1);
                }
                Err(error) => {
                    let error = self.unreached(first, error);
                    if !self.peer.may_ask() || !error.other_route_may_work() {
                        return Err(error);
                    }
                }
            }
        }
        if !self.peer.may_ask() {
            return Err(ImportErrorKind::NoFd);
        }
        // What can be fetched is not asked for, but where the first one could not be.
        let can_fetch = |(_, chunk): &&Found| by_pidfd.is_none() && self.peer.pidfd().is_some() && chunk.fd.is_some();
        let asked = wanted.iter().take_while(|found| !can_fetch(found)).count();
        let fds = self.peer.ask_for(wanted.get(..asked).unwrap_or_default(), self.deadline)?;
        self.fds.extend(fds.into_iter().map(Some));
        Ok(self.fds.len())
    }

    fn chunk(&self, at: usize) -> Result<&Found, ImportErrorKind> {
        // The machine only gives numbers inside the slice it was made for.
        self.chunks.get(at).ok_or(ImportErrorKind::Retired)
    }

    /// Local address and length of a run of adjacent chunks.
    fn run(&self, first: usize, count: usize) -> (u64, u64) {
        let run = self.chunks.get(first..first + count).unwrap_or(&[]);
        let start = run.first().map_or(0, |(_, chunk)| chunk.address);
        (self.placement.local(start), run.iter().map(|(_, chunk)| chunk.len).sum())
    }

    /// What a failed getfd means: a chunk that was retired meanwhile closes its fd, and an exiting exporter all of them.
    fn unreached(&self, at: usize, error: pidfd_sys::Error) -> ImportErrorKind {
        if self.peer.is_gone() {
            ImportErrorKind::ExporterGone
        } else if self.chunks.get(at).is_some_and(|(id, _)| !self.table.is_live(*id)) {
            ImportErrorKind::Retired
        } else {
            ImportErrorKind::Pidfd(error)
        }
    }
}
