//! The broker: hands the table's fd and chunks' fds to importers that may not fetch them, over a Unix socket.
//!
//! It begins with the first export and ends when nothing has been exported for a moment; one thread serves all importers and waits for none. This file is its
//! life: when the thread starts, what it waits for, when it ends.
//!
//! - `sockets.rs`: the names under which it can be reached, and the file in a socket directory.
//! - `visitor.rs`: one importer's connection, from the greeting to its end.
//! - `serve.rs`: what is answered to a request, and with which fds.
//!
//! No lock of the exporter's is held across a system or driver call of all this. The lock of this file orders a beginning after the end before it, and is
//! held while the sockets are opened; nobody takes it while the broker runs.

mod serve;
mod sockets;
mod visitor;

use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::Shared;
use crate::broker::message::MESSAGE_MAX;
use crate::broker::{Buffer, Challenge, Refusal};
use crate::sys::socket::{Socket, timespec};
use crate::sys::{SyscallError, random, thread};
use crate::users::Users;

use sockets::{Listeners, SocketFile};
use visitor::Visitor;

/// How long the broker stays after the last chunk was retired: an exporter that takes back one range often shares the next one soon.
const LINGER: Duration = Duration::from_millis(250);
/// How often the thread looks whether its fds are still its own and its exporter is still there, if nothing else happens.
const LOOK: Duration = Duration::from_secs(10);
/// How soon a beginning that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Connections accepted in one turn: between two turns everybody else is served.
const ACCEPTS: usize = 16;
/// Importers served at a time, where the limit of open files allows as many.
const MOST_VISITORS: usize = 256;
/// Connections at a time that have not proven anything yet. The oldest makes room.
const MOST_UNPROVEN: usize = 64;

/// The broker as its exporter sees it.
#[derive(Debug, Default)]
pub(super) struct Broker {
    /// Whether a thread serves. False while one is about to end.
    running: AtomicBool,
    service: Mutex<Service>,
}

#[derive(Debug, Default)]
struct Service {
    /// The exporter's end of a pair of which the thread has the other: it wakes the thread, and its end ends the thread.
    bell: Option<Arc<Socket>>,
    /// Removed at the end. Not by the thread: an exporter that is dropped at the end of its process leaves no time for that.
    file: Option<SocketFile>,
    failures: BrokerFailures,
    retry: Option<Instant>,
}

/// Why an exporter cannot be reached by some name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BrokerFailures {
    /// The abstract name, which importers in the same network namespace use.
    pub abstract_name: Option<SyscallError>,
    /// The file in the socket directory.
    pub socket_dir: Option<SyscallError>,
    /// Neither: there is no thread, or no pair of sockets to wake it.
    pub service: Option<SyscallError>,
}

impl Broker {
    pub(super) fn failures(&self) -> BrokerFailures {
        self.lock().failures
    }

    fn lock(&self) -> MutexGuard<'_, Service> {
        self.service.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Starts the broker if the options ask for one and it does not run. Called after something was published.
    ///
    /// An export succeeds without a broker too; what failed is kept for [`super::Exporter::broker_failures`].
    pub(super) fn ensure_broker(self: &Arc<Self>) {
        if !self.options.broker || self.broker.running.load(SeqCst) {
            return;
        }
        let mut service = self.broker.lock();
        // Somebody was faster, or the thread has seen what was published and stays.
        if service.bell.is_some() || service.retry.is_some_and(|then| Instant::now() < then) {
            return;
        }
        match self.start_broker(&mut service) {
            Ok(bell) => {
                service.bell = Some(bell.clone());
                self.broker.running.store(true, SeqCst);
                let mut state = self.lock();
                state.broker = Some(bell);
                state.broker_is_idle = false;
            }
            Err(error) => {
                service.failures.service = Some(error);
                service.file = None;
                service.retry = Some(Instant::now() + RETRY);
            }
        }
    }

    fn start_broker(self: &Arc<Self>, service: &mut Service) -> Result<Arc<Socket>, SyscallError> {
        let users = Users::new(&self.options.allowed_uids);
        let mut listeners = Listeners::open(&self.identity, &self.options, &users);
        service.failures = listeners.failures;
        service.file = listeners.file.take();
        if let (true, Some(error)) = (listeners.sockets.is_empty(), listeners.failures.abstract_name.or(listeners.failures.socket_dir)) {
            return Err(error);
        }
        let (bell, wake) = Socket::pair()?;
        let spare = Socket::new()?;
        let weak = Arc::downgrade(self);
        let server = Server { listeners: listeners.sockets, wake, spare: Some(spare), visitors: Vec::new(), users, idle: None };
        thread::spawn("cuda-ipc-broker", move || server.run(&weak))
            .map_err(|error| SyscallError { call: "pthread_create", errno: error.raw_os_error().unwrap_or(libc::EAGAIN) })?;
        Ok(Arc::new(bell))
    }
}

/// The thread's things.
struct Server {
    listeners: Vec<Socket>,
    wake: Socket,
    /// Given up for a moment to tell an importer that there are no more fds.
    spare: Option<Socket>,
    visitors: Vec<Visitor>,
    users: Users,
    idle: Option<Idle>,
}

/// Nothing is published.
#[derive(Clone, Copy, Debug)]
struct Idle {
    since: Instant,
    /// Chunks that had ever been published then.
    published: u64,
}

impl Server {
    fn run(mut self, exporter: &Weak<Shared>) {
        let mut buffer = [0; MESSAGE_MAX];
        // What was published may be gone again: the first look is at that, before anybody rings.
        let mut ready = Vec::new();
        loop {
            let Some(shared) = exporter.upgrade() else { return };
            if !self.turn(&shared, &ready, &mut buffer) {
                return;
            }
            // Nothing of the exporter is held while this waits.
            drop(shared);
            ready = self.wait();
        }
    }

    /// Waits until something is to be done. Says what is ready: the bell, listeners, visitors.
    fn wait(&self) -> Vec<bool> {
        let sockets = core::iter::once(&self.wake).chain(&self.listeners).chain(self.visitors.iter().map(Visitor::socket));
        let mut fds: Vec<PollFd<'_>> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        let timeout = self.next_time().map_or(LOOK, |then| then.saturating_duration_since(Instant::now()).min(LOOK));
        match poll(&mut fds, Some(&timespec(timeout))) {
            Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
            // Interrupted, or out of memory for a moment: as if the time was over.
            Err(_) => vec![false; fds.len()],
        }
    }

    /// When something is due without anybody's doing.
    fn next_time(&self) -> Option<Instant> {
        let unproven = self.visitors.iter().filter_map(Visitor::limit);
        unproven.chain(self.idle.map(|idle| idle.since + LINGER)).min()
    }

    /// Does what is to be done. `false` is the end.
    fn turn(&mut self, shared: &Arc<Shared>, ready: &[bool], buffer: &mut Buffer) -> bool {
        if self.wake.is_lost() || self.listeners.iter().any(Socket::is_lost) {
            // The application has closed our fds. The next export begins anew.
            return !self.end(shared, true);
        }
        if self.spare.is_none() {
            // Lost while there was no room for another; perhaps there is now.
            self.spare = Socket::new().ok();
        }
        let ready = |at: usize| ready.get(at).copied().unwrap_or(false);
        if ready(0) {
            // What is rung for is looked at below in any case.
            while self.wake.receive(buffer).is_ok_and(|packet| !matches!(packet, crate::sys::socket::Packet::End)) {}
        }
        let (listeners, known) = (self.listeners.len(), self.visitors.len());
        for at in (0..known).filter(|at| ready(1 + listeners + at)) {
            let room = self.room();
            if let Some(visitor) = self.visitors.get_mut(at) {
                visitor.receive(shared, room, buffer);
            }
        }
        for at in (0..listeners).filter(|at| ready(1 + at)) {
            self.accept(at, shared, buffer);
        }
        let now = Instant::now();
        self.visitors.retain(|visitor| visitor.stays(now));
        !(self.is_idle(shared, now) && self.end(shared, false))
    }

    /// Whether nothing has been published for a while.
    fn is_idle(&mut self, shared: &Shared, now: Instant) -> bool {
        let mut state = shared.lock();
        let stats = state.stats();
        // While this thread waits for the time to pass, nobody has to ring.
        state.broker_is_idle = stats.chunks == 0;
        self.idle = match self.idle {
            _ if stats.chunks != 0 => None,
            Some(idle) if idle.published == stats.published => Some(idle),
            _ => Some(Idle { since: now, published: stats.published }),
        };
        self.idle.is_some_and(|idle| now >= idle.since + LINGER)
    }

    /// Ends the service, unless something has been published meanwhile and it `must` not. Says whether it ended.
    fn end(&mut self, shared: &Shared, must: bool) -> bool {
        // In this order: who publishes now finds either a thread that stays or, after the lock, none.
        shared.broker.running.store(false, SeqCst);
        let mut service = shared.broker.lock();
        {
            let mut state = shared.lock();
            if !must && state.stats().chunks != 0 {
                shared.broker.running.store(true, SeqCst);
                return false;
            }
            state.broker = None;
        }
        service.bell = None;
        service.file = None;
        // Under the lock, so that the names are free for who comes next.
        self.listeners.clear();
        true
    }

    /// Fds that may be sent in one answer, so that importers that do not take theirs leave something of the limit of fds in flight to others.
    fn room(&mut self) -> usize {
        let waiting: usize = self.visitors.iter_mut().map(Visitor::in_flight).sum();
        let limit = usize::try_from(super::walk::file_limit()).unwrap_or(usize::MAX);
        limit.saturating_sub(waiting) / 4
    }

    fn accept(&mut self, listener: usize, shared: &Arc<Shared>, buffer: &mut Buffer) {
        for _ in 0..ACCEPTS {
            let Some(socket) = self.listeners.get(listener) else { return };
            match socket.accept() {
                Ok(fd) => {
                    let Ok(socket) = Socket::accepted(fd) else { return };
                    if socket.took_over() {
                        shared.retire_taken();
                    }
                    self.welcome(socket, buffer);
                }
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(errno @ (Errno::MFILE | Errno::NFILE)) => return self.turn_away(listener, errno, buffer),
                Err(_) => return,
            }
        }
    }

    /// Keeps a new connection if its user may have one and there is room.
    fn welcome(&mut self, socket: Socket, buffer: &mut Buffer) {
        let refusal = match self.users.judge(&socket) {
            Ok(Ok(())) => None,
            Ok(Err(stranger)) => Some(stranger.into()),
            Err(error) => Some(Refusal::Resources(error.errno.cast_unsigned())),
        };
        let most = (usize::try_from(super::walk::file_limit()).unwrap_or(usize::MAX) / 4).clamp(8, MOST_VISITORS);
        let proven = self.visitors.iter().filter(|visitor| visitor.is_proven()).count();
        let refusal = refusal.or_else(|| (proven >= most).then(|| Refusal::TooMany(u32::try_from(most).unwrap_or(u32::MAX))));
        if let Some(refusal) = refusal {
            visitor::refuse(&socket, refusal, buffer);
            return;
        }
        if self.visitors.len() - proven >= MOST_UNPROVEN
            && let Some(oldest) = self.visitors.iter().position(|visitor| !visitor.is_proven())
        {
            // Visitors stand in the order in which they came.
            self.visitors.remove(oldest);
        }
        match random().map(Challenge) {
            Ok(challenge) => self.visitors.push(Visitor::new(socket, challenge)),
            Err(error) => visitor::refuse(&socket, Refusal::Resources(error.errno.cast_unsigned()), buffer),
        }
    }

    /// Out of fds: tells the next importer so, with the one that was kept for this.
    fn turn_away(&mut self, listener: usize, errno: Errno, buffer: &mut Buffer) {
        self.spare = None;
        if let Some(Ok(fd)) = self.listeners.get(listener).map(Socket::accept)
            && let Ok(socket) = Socket::accepted(fd)
        {
            visitor::refuse(&socket, Refusal::Resources(errno.raw_os_error().cast_unsigned()), buffer);
        }
        self.spare = Socket::new().ok();
        if self.spare.is_none() {
            // Another thread was faster. Without this the listener stays ready and the thread never sleeps.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
