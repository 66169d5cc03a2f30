//! An importer's line to the broker of its exporter: one connection, made when it is first needed and kept.
//!
//! One thread uses the line at a time; the others wait, until their deadlines. A connection that is closed is made anew: an exporter that shares nothing
//! ends its broker, and begins again with the next export. If nobody listens then, the exporter is gone. How a connection is made is in `broker/connect.rs`.

mod connect;

use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;

use super::broker_error::BrokerError;
use super::error::Deadline;
use super::route::ConnectOptions;
use super::spare_fds::spare_fds;
use crate::broker::message::MESSAGE_MAX;
use crate::broker::{Answer, BATCH_MAX, Buffer, Outcome, Refusal, Request};
use crate::import::Found;
use crate::key::Key;
use crate::sys::failed;
use crate::sys::process_fd::ProcessFd;
use crate::sys::socket::{Packet, Socket};

use connect::Address;

/// How often a question is asked anew whose connection was closed.
const TRIES: u32 = 3;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Line {
    address: Address,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Kept after it has failed, too: its end is the exporter's.
    socket: Option<Arc<Socket>>,
    /// Whether a question may be asked on it. Not after an answer was missed.
    in_step: bool,
    /// Whether a thread uses it.
    busy: bool,
}

/// Why a chunk's fd was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotGiven {
    /// The exporter has retired it.
    Dead,
    /// Something else.
    Broker(BrokerError),
}

impl From<BrokerError> for NotGiven {
    fn from(error: BrokerError) -> Self {
        Self::Broker(error)
    }
}

impl Line {
    /// A line to the exporter of `key`. Nothing is connected yet.
    pub(super) fn new(key: &Key, options: ConnectOptions) -> Self {
        Self { address: Address::new(key, options), state: Mutex::default(), freed: Condvar::new() }
    }

    pub(super) fn options(&self) -> &ConnectOptions {
        self.address.options()
    }

    /// Whether the other end has closed the connection; `false` where none was made. Does not wait.
    pub(super) fn is_closed(&self) -> bool {
        let socket = self.lock().socket.clone();
        socket.is_some_and(|socket| socket.is_lost() || socket.is_closed())
    }

    /// Whether there is a connection and the other end has not closed it. Does not wait.
    pub(super) fn is_open(&self) -> bool {
        let socket = self.lock().socket.clone();
        socket.is_some_and(|socket| !socket.is_lost() && !socket.is_closed())
    }

    /// The fd of the exporter's table.
    pub(super) fn table(&self, deadline: Deadline) -> Result<ProcessFd, BrokerError> {
        let turn = self.turn(deadline)?;
        let (mut question, mut buffer, mut fds) = ([0; MESSAGE_MAX], [0; MESSAGE_MAX], Vec::new());
        let (answer, fds_lost) = turn.ask(Request::Table.encode(&mut question), &mut buffer, &mut fds, deadline)?;
        match (answer, fds.pop()) {
            (Answer::Table, Some(fd)) => Ok(fd),
            (Answer::Table, None) if fds_lost => Err(out_of_files()),
            _ => Err(turn.out_of_step(BrokerError::Unexpected)),
        }
    }

    /// Fds of the first of `chunks`: as many as both processes can spare now, one at least.
    ///
    /// Errors: of the first chunk. What the exporter lacks at the moment is waited for until the deadline.
    pub(super) fn chunks(&self, chunks: &[Found], deadline: Deadline) -> Result<Vec<ProcessFd>, NotGiven> {
        let turn = self.turn(deadline)?;
        let (mut question, mut buffer) = ([0; MESSAGE_MAX], [0; MESSAGE_MAX]);
        let (mut most, mut pause, mut lacking) = (spare_fds().min(BATCH_MAX).min(chunks.len()), Pause::new(), None);
        loop {
            let mut fds = Vec::with_capacity(most);
            let question = Request::encode_chunks(chunks.iter().take(most).map(|(id, _)| *id), &mut question);
            let (answer, fds_lost) = match turn.ask(question, &mut buffer, &mut fds, deadline) {
                // What was waited for says more than that it took too long.
                Err(BrokerError::DeadlineOver) => return Err(lacking.unwrap_or(BrokerError::DeadlineOver).into()),
                other => other?,
            };
            let Answer::Chunks(outcomes) = answer else { return Err(turn.out_of_step(BrokerError::Unexpected).into()) };
            let given = outcomes.iter().filter(|outcome| *outcome == Outcome::Given).count();
            if outcomes.len() != most || fds.len() > given || (fds.len() < given && !fds_lost) {
                return Err(turn.out_of_step(BrokerError::Unexpected).into());
            }
            // What could not be taken is missing at the end.
            let in_front = outcomes.iter().take_while(|outcome| *outcome == Outcome::Given).count();
            fds.truncate(in_front);
            if !fds.is_empty() {
                return Ok(fds);
            }
            match outcomes.iter().next() {
                Some(Outcome::Dead) => return Err(NotGiven::Dead),
                Some(Outcome::Driver(code)) => return Err(BrokerError::Export { code }.into()),
                Some(Outcome::Later(errno)) => {
                    lacking = Some(BrokerError::Busy { errno });
                    if !pause.rest(deadline) {
                        return Err(BrokerError::Busy { errno }.into());
                    }
                }
                // Given, and no number was free here for even one.
                Some(Outcome::Given) if most > 1 => most /= 2,
                Some(Outcome::Given) | None => return Err(out_of_files().into()),
            }
        }
    }

    /// Waits until no other thread uses the line.
    fn turn(&self, deadline: Deadline) -> Result<Turn<'_>, BrokerError> {
        let mut state = self.lock();
        while state.busy {
            if deadline.is_over() {
                return Err(BrokerError::DeadlineOver);
            }
            (state, _) = self.freed.wait_timeout(state, deadline.remaining()).unwrap_or_else(PoisonError::into_inner);
        }
        state.busy = true;
        Ok(Turn { line: self })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread's use of the line.
#[derive(Debug)]
struct Turn<'a> {
    line: &'a Line,
}

impl Turn<'_> {
    /// Asks and waits for the answer. Says whether fds were lost on the way.
    ///
    /// Errors: a refusal too; what the exporter lacks at the moment is waited for until the deadline.
    fn ask<'b>(
        &self,
        question: &[u8],
        buffer: &'b mut Buffer,
        fds: &mut Vec<ProcessFd>,
        deadline: Deadline,
    ) -> Result<(Answer<'b>, bool), BrokerError> {
        let (mut pause, mut tries, mut lacking) = (Pause::new(), 0, None);
        let (len, fds_lost) = loop {
            match self.ask_once(question, buffer, fds, deadline) {
                Ok(answer) => break answer,
                // It may have been closed long ago, or just now. Whether the exporter is gone, a new connection tells.
                Err(BrokerError::Closed) if tries < TRIES => tries += 1,
                Err(lacks @ BrokerError::Refused(Refusal::Resources(_))) if pause.rest(deadline) => lacking = Some(lacks),
                // What was waited for says more than that it took too long.
                Err(BrokerError::DeadlineOver) => return Err(lacking.unwrap_or(BrokerError::DeadlineOver)),
                Err(error) => return Err(error),
            }
        };
        match Answer::decode(buffer.get(..len).unwrap_or_default()) {
            Ok(answer) => Ok((answer, fds_lost)),
            Err(error) => Err(self.out_of_step(BrokerError::Message(error))),
        }
    }

    /// Length of the answer, which is no refusal, and whether fds were lost.
    fn ask_once(
        &self,
        question: &[u8],
        buffer: &mut Buffer,
        fds: &mut Vec<ProcessFd>,
        deadline: Deadline,
    ) -> Result<(usize, bool), BrokerError> {
        fds.clear();
        let socket = self.socket(deadline)?;
        let (len, fds_lost) = exchange(&socket, question, buffer, fds, deadline).map_err(|error| self.out_of_step(error))?;
        match Answer::decode(buffer.get(..len).unwrap_or_default()) {
            Ok(Answer::Refused(refusal)) => Err(self.out_of_step(BrokerError::Refused(refusal))),
            _ => Ok((len, fds_lost)),
        }
    }

    /// The connection, made if there is none to be used.
    fn socket(&self, deadline: Deadline) -> Result<Arc<Socket>, BrokerError> {
        let kept = {
            let state = self.line.lock();
            state.socket.clone().filter(|_| state.in_step)
        };
        if let Some(kept) = kept.filter(|kept| !kept.is_lost()) {
            return Ok(kept);
        }
        let socket = Arc::new(self.line.address.connect(deadline)?);
        let mut state = self.line.lock();
        state.in_step = true;
        let before = state.socket.replace(socket.clone());
        drop(state);
        drop(before);
        Ok(socket)
    }

    /// Nothing more is asked on this connection after an error.
    fn out_of_step(&self, error: BrokerError) -> BrokerError {
        self.line.lock().in_step = false;
        error
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.line.lock().busy = false;
        self.line.freed.notify_one();
    }
}

/// Sends a message and receives one: its length, and whether fds were lost.
fn exchange(
    socket: &Socket,
    message: &[u8],
    buffer: &mut Buffer,
    fds: &mut Vec<ProcessFd>,
    deadline: Deadline,
) -> Result<(usize, bool), BrokerError> {
    send(socket, message)?;
    receive(socket, buffer, fds, deadline)
}

fn send(socket: &Socket, message: &[u8]) -> Result<(), BrokerError> {
    match socket.send(message, &[]) {
        // Closed, but something may have been said before.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
        Err(errno) => Err(BrokerError::Syscall(failed("sendmsg")(errno))),
    }
}

fn receive(socket: &Socket, buffer: &mut Buffer, fds: &mut Vec<ProcessFd>, deadline: Deadline) -> Result<(usize, bool), BrokerError> {
    loop {
        match socket.receive_fds(buffer, fds) {
            Ok(Packet::Message { len, fds_lost }) => return Ok((len, fds_lost)),
            Ok(Packet::End) => return Err(BrokerError::Closed),
            // Said once, when the other end was closed before it has read all; what it had said comes after.
            Err(Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => {
                if !socket.wait(deadline.instant()).map_err(BrokerError::Syscall)? {
                    return Err(BrokerError::DeadlineOver);
                }
            }
            Err(errno) => return Err(BrokerError::Syscall(failed("recvmsg")(errno))),
        }
    }
}

fn out_of_files() -> BrokerError {
    BrokerError::Syscall(failed("recvmsg")(Errno::MFILE))
}

/// Growing pauses.
#[derive(Debug)]
struct Pause(Duration);

impl Pause {
    const LONGEST: Duration = Duration::from_millis(20);

    const fn new() -> Self {
        Self(Duration::from_millis(1))
    }

    /// Sleeps; `false` if the deadline leaves no time for that.
    fn rest(&mut self, deadline: Deadline) -> bool {
        if deadline.instant() < Instant::now() + self.0 {
            return false;
        }
        std::thread::sleep(self.0);
        self.0 = (self.0 * 2).min(Self::LONGEST);
        true
    }
}
