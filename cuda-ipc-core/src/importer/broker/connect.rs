//! Making a connection: by which name, with whom, and the proofs of both sides.
//!
//! The abstract name is tried first, then the file in the socket directory. What answers there is believed only if it belongs to this user or a listed one and
//! proves that it knows the nonce; before that it is told nothing, after that it still gives no more than fds, which are checked.

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::{Pause, receive, send};
use crate::broker::message::MESSAGE_MAX;
use crate::broker::{Answer, Challenge, Proofs, Request, SocketName};
use crate::importer::broker_error::BrokerError;
use crate::importer::error::Deadline;
use crate::importer::route::ConnectOptions;
use crate::key::{Key, Nonce};
use crate::sys::process_fd::ProcessFd;
use crate::sys::socket::{Socket, address_in};
use crate::sys::{failed, random};
use crate::users::{Stranger, Users};

/// How often a connection is tried that the other side closes without a word: its broker may just have ended, or have had to make room.
const ATTEMPTS: u32 = 8;

/// Where an exporter's broker is.
#[derive(Debug)]
pub(super) struct Address {
    nonce: Nonce,
    name: SocketName,
    options: ConnectOptions,
}

impl Address {
    pub(super) fn new(key: &Key, options: ConnectOptions) -> Self {
        Self { nonce: key.nonce, name: SocketName::new(key.nonce, key.host), options }
    }

    pub(super) fn options(&self) -> &ConnectOptions {
        &self.options
    }

    /// A connection on which both sides have proven that they know the nonce.
    pub(super) fn connect(&self, deadline: Deadline) -> Result<Socket, BrokerError> {
        let mut pause = Pause::new();
        let mut attempts = 1;
        loop {
            match self.try_names(deadline) {
                Err(BrokerError::Closed) if attempts < ATTEMPTS && pause.rest(deadline) => attempts += 1,
                other => return other,
            }
        }
    }

    fn try_names(&self, deadline: Deadline) -> Result<Socket, BrokerError> {
        // Half of the time for the first name, if there is a second one: who holds it may never answer.
        let first = if self.options.socket_dir.is_some() { deadline.half() } else { deadline };
        let by_name = match self.by_name(first) {
            Ok(socket) => return Ok(socket),
            Err(error) => error,
        };
        let Some(directory) = &self.options.socket_dir else { return Err(by_name.into_error(None)) };
        match self.by_file(directory, deadline) {
            Ok(socket) => Ok(socket),
            // Where one name has nobody, what happened at the other one says more.
            Err(Failure::NoListener(errno)) => Err(by_name.into_error(Some(errno))),
            Err(Failure::Other(error)) => match by_name {
                Failure::NoListener(_) => Err(error),
                Failure::Other(before) => Err(before),
            },
        }
    }

    fn by_name(&self, deadline: Deadline) -> Result<Socket, Failure> {
        let address = SocketAddrUnix::new_abstract_name(self.name.abstract_name().as_bytes()).map_err(syscall("connect"))?;
        self.reach(&address, deadline)
    }

    fn by_file(&self, directory: &Path, deadline: Deadline) -> Result<Socket, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty()).map_err(|errno| Failure::NoListener(errno.raw_os_error()))?;
        let directory = ProcessFd::new(directory).map_err(BrokerError::Syscall)?;
        let address = address_in(&directory, self.name.file_name()).map_err(BrokerError::Syscall)?;
        self.reach(&address, deadline)
    }

    fn reach(&self, address: &SocketAddrUnix, deadline: Deadline) -> Result<Socket, Failure> {
        let socket = Socket::new().map_err(BrokerError::Syscall)?;
        let mut pause = Pause::new();
        loop {
            match socket.connect(address) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                // Too many wait there already.
                Err(Errno::AGAIN) if pause.rest(deadline) => {}
                Err(Errno::AGAIN) => return Err(BrokerError::DeadlineOver.into()),
                Err(errno) => return Err(Failure::NoListener(errno.raw_os_error())),
            }
        }
        match Users::new(&self.options.allowed_uids).judge(&socket).map_err(BrokerError::Syscall)? {
            Ok(()) => {}
            Err(Stranger::Uid(uid)) => return Err(BrokerError::OtherUser { uid }.into()),
            Err(Stranger::Unmapped(uid)) => return Err(BrokerError::UnmappedUser { uid }.into()),
        }
        self.greet(&socket, deadline)?;
        Ok(socket)
    }

    /// Lets the other side prove that it knows the nonce, and proves the same.
    fn greet(&self, socket: &Socket, deadline: Deadline) -> Result<(), BrokerError> {
        let ours = Challenge(random().map_err(BrokerError::Syscall)?);
        let (mut buffer, mut fds) = ([0; MESSAGE_MAX], Vec::new());
        send(socket, Request::Hello(ours).encode(&mut buffer))?;
        let (len, _) = receive(socket, &mut buffer, &mut fds, deadline)?;
        let (theirs, proof) = match Answer::decode(buffer.get(..len).unwrap_or_default()) {
            Ok(Answer::Challenge(theirs, proof)) => (theirs, proof),
            Ok(Answer::Refused(refusal)) => return Err(BrokerError::Refused(refusal)),
            Ok(_) => return Err(BrokerError::Unexpected),
            Err(error) => return Err(BrokerError::Message(error)),
        };
        let proofs = Proofs::new(self.nonce, ours, theirs);
        if !proofs.is_of_exporter(&proof) {
            return Err(BrokerError::Impostor);
        }
        send(socket, Request::Prove(proofs.of_importer()).encode(&mut buffer))
    }
}

/// What came of one name.
enum Failure {
    /// Nobody can be reached by it, for this errno.
    NoListener(i32),
    Other(BrokerError),
}

impl Failure {
    fn into_error(self, socket_dir: Option<i32>) -> BrokerError {
        match self {
            Self::NoListener(abstract_name) => BrokerError::NoListener { abstract_name, socket_dir },
            Self::Other(error) => error,
        }
    }
}

impl From<BrokerError> for Failure {
    fn from(error: BrokerError) -> Self {
        Self::Other(error)
    }
}

fn syscall(call: &'static str) -> impl Fn(Errno) -> BrokerError {
    move |errno| BrokerError::Syscall(failed(call)(errno))
}
