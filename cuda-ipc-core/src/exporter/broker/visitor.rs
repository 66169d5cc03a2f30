//! One importer's connection: it proves that it has the key, then asks, and is answered at once. What is wrong ends it.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use super::serve;
use crate::broker::{Answer, Buffer, Challenge, MessageError, Outcome, Proofs, Refusal, Request};
use crate::exporter::Shared;
use crate::sys::socket::{Packet, Socket};
use crate::users::Stranger;

/// How long a connection may take to prove that it has the key.
const GREETING: Duration = Duration::from_secs(5);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Visitor {
    socket: Socket,
    stage: Stage,
    /// Fds in the last answer, if they may not have been received yet.
    in_flight: usize,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Has said nothing yet.
    New { challenge: Challenge, until: Instant },
    /// Has been given a challenge.
    Challenged { proofs: Proofs, until: Instant },
    /// Has the key.
    Proven,
    /// Is gone, or has to go.
    Over,
}

impl Visitor {
    pub(super) fn new(socket: Socket, challenge: Challenge) -> Self {
        Self { socket, stage: Stage::New { challenge, until: Instant::now() + GREETING }, in_flight: 0 }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn is_proven(&self) -> bool {
        matches!(self.stage, Stage::Proven)
    }

    /// Until when something is expected of it.
    pub(super) fn limit(&self) -> Option<Instant> {
        match self.stage {
            Stage::New { until, .. } | Stage::Challenged { until, .. } => Some(until),
            Stage::Proven | Stage::Over => None,
        }
    }

    pub(super) fn stays(&self, now: Instant) -> bool {
        !matches!(self.stage, Stage::Over) && self.limit().is_none_or(|until| now < until)
    }

    /// Fds on their way to it.
    pub(super) fn in_flight(&mut self) -> usize {
        if self.in_flight != 0 && !self.has_untaken() {
            self.in_flight = 0;
        }
        self.in_flight
    }

    fn has_untaken(&self) -> bool {
        self.socket.has_untaken().unwrap_or(false)
    }

    /// Receives a request, if there is one, and answers it. `room`: fds that may go with the answer.
    pub(super) fn receive(&mut self, shared: &Arc<Shared>, room: usize, buffer: &mut Buffer) {
        if self.socket.is_lost() {
            self.stage = Stage::Over;
            return;
        }
        let next = match self.socket.receive(buffer) {
            Ok(Packet::Message { len, .. }) => self.answer(shared, room, len, buffer),
            Ok(Packet::End) => Err(None),
            Err(Errno::AGAIN) => return,
            Err(Errno::MSGSIZE) => Err(Some(Refusal::Message)),
            Err(_) => Err(None),
        };
        self.stage = next.unwrap_or_else(|refusal| {
            if let Some(refusal) = refusal {
                refuse(&self.socket, refusal, buffer);
            }
            Stage::Over
        });
    }

    /// The next stage, or with what to end: with a refusal, or silently.
    fn answer(&mut self, shared: &Arc<Shared>, room: usize, len: usize, buffer: &mut Buffer) -> Result<Stage, Option<Refusal>> {
        // Nobody asks before having received the answer to what was asked before; who does would fill the kernel's memory with fds.
        if self.has_untaken() {
            return Err(None);
        }
        self.in_flight = 0;
        let message = |_: MessageError| Some(Refusal::Message);
        let request = Request::decode(buffer.get(..len).unwrap_or_default()).map_err(message)?;
        match (self.stage, request) {
            (Stage::New { challenge, until }, Request::Hello(theirs)) => {
                let proofs = Proofs::new(shared.identity.nonce, theirs, challenge);
                let answer = Answer::Challenge(challenge, proofs.of_exporter());
                self.send(answer.encode(buffer))?;
                Ok(Stage::Challenged { proofs, until })
            }
            (Stage::Challenged { proofs, .. }, Request::Prove(proof)) => {
                if proofs.is_of_importer(&proof) {
                    Ok(Stage::Proven)
                } else {
                    Err(Some(Refusal::Proof))
                }
            }
            (Stage::Proven, Request::Table) => {
                let Some(fd) = shared.table.fd() else { return Err(Some(Refusal::Resources(Errno::BADF.raw_os_error().cast_unsigned()))) };
                match self.socket.send(Answer::Table.encode(buffer), &[fd]) {
                    Ok(()) => self.in_flight = 1,
                    // The user's limit of fds in flight. The importer comes again.
                    Err(Errno::TOOMANYREFS) => return Err(Some(Refusal::Resources(Errno::TOOMANYREFS.raw_os_error().cast_unsigned()))),
                    Err(_) => return Err(None),
                }
                Ok(Stage::Proven)
            }
            (Stage::Proven, Request::Chunks(ids)) => {
                let served = serve::chunks(shared, ids.iter(), room);
                match self.socket.send(Answer::encode_chunks(served.outcomes.iter().copied(), buffer), &served.borrowed()) {
                    Ok(()) => self.in_flight = served.fds.len(),
                    Err(Errno::PIPE | Errno::CONNRESET | Errno::AGAIN) => return Err(None),
                    // The fds did not pass: too many are in flight, or one was closed under us. Without them the answer does.
                    Err(errno) => {
                        let errno = errno.raw_os_error().cast_unsigned();
                        let later = |&outcome: &Outcome| if outcome == Outcome::Given { Outcome::Later(errno) } else { outcome };
                        self.send(Answer::encode_chunks(served.outcomes.iter().map(later), buffer))?;
                    }
                }
                Ok(Stage::Proven)
            }
            _ => Err(Some(Refusal::Message)),
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Option<Refusal>> {
        self.socket.send(bytes, &[]).map_err(|_| None)
    }
}

/// Says no. The caller closes the connection; what was said can still be read then.
pub(super) fn refuse(socket: &Socket, refusal: Refusal, buffer: &mut Buffer) {
    let _ = socket.send(Answer::Refused(refusal).encode(buffer), &[]);
}

impl From<Stranger> for Refusal {
    fn from(stranger: Stranger) -> Self {
        match stranger {
            Stranger::Uid(uid) => Self::Uid(uid),
            Stranger::Unmapped(uid) => Self::UnmappedUid(uid),
        }
    }
}
