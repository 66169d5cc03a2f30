//! A connection to a broker by hand: says what it likes, when it likes.

use core::time::Duration;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use cuda_ipc_core::broker::message::MESSAGE_MAX;
use cuda_ipc_core::broker::{Answer, Challenge, Outcome, Proofs, Refusal, Request, SocketName};
use cuda_ipc_core::key::{HostId, Key, Nonce};
use cuda_ipc_core::table::ChunkId;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect, listen, recvmsg,
    sendmsg, socket,
};

/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(10);

pub(crate) struct Raw(OwnedFd);

/// What was received: bytes and fds; `None` is the end.
pub(crate) type Received = Option<(Vec<u8>, Vec<OwnedFd>)>;

fn new_socket() -> OwnedFd {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap()
}

/// Names of the exporter with this nonce, on this machine.
pub(crate) fn name(nonce: Nonce) -> SocketName {
    SocketName::new(nonce, HostId::from_boot_id(pidfd_sys::boot_id().unwrap()))
}

pub(crate) fn address(nonce: Nonce) -> UnixAddr {
    UnixAddr::new_abstract(name(nonce).abstract_name().as_bytes()).unwrap()
}

/// Listens where another process's broker would.
pub(crate) fn listen_at(address: &UnixAddr) -> nix::Result<OwnedFd> {
    let listener = new_socket();
    bind(listener.as_raw_fd(), address)?;
    listen(&listener, Backlog::new(16).unwrap())?;
    Ok(listener)
}

pub(crate) fn accept(listener: &OwnedFd) -> Raw {
    Raw(nix::sys::socket::accept(listener).unwrap())
}

impl Raw {
    /// Connects and says nothing.
    pub(crate) fn connect(key: &Key) -> nix::Result<Self> {
        let socket = new_socket();
        connect(socket.as_raw_fd(), &address(key.nonce))?;
        Ok(Self(socket))
    }

    /// Connects and is given a challenge.
    pub(crate) fn challenged(key: &Key) -> (Self, Proofs) {
        let raw = Self::connect(key).unwrap();
        let ours = Challenge([7; 16]);
        raw.say(&Request::Hello(ours));
        let (bytes, _) = raw.receive().expect("a challenge");
        let Ok(Answer::Challenge(theirs, proof)) = Answer::decode(&bytes) else { panic!("{bytes:02x?}") };
        let proofs = Proofs::new(key.nonce, ours, theirs);
        assert!(proofs.is_of_exporter(&proof));
        (raw, proofs)
    }

    /// As [`Raw::proven`], in a crowd in which any step may fail.
    pub(crate) fn try_proven(key: &Key) -> Option<Self> {
        let raw = Self::connect(key).ok()?;
        let ours = Challenge([7; 16]);
        raw.send(Request::Hello(ours).encode(&mut [0; MESSAGE_MAX])).ok()?;
        let (bytes, _) = raw.receive()?;
        let Ok(Answer::Challenge(theirs, _)) = Answer::decode(&bytes) else { return None };
        let proof = Proofs::new(key.nonce, ours, theirs).of_importer();
        raw.send(Request::Prove(proof).encode(&mut [0; MESSAGE_MAX])).ok()?;
        Some(raw)
    }

    /// Connects and proves that it has the key.
    pub(crate) fn proven(key: &Key) -> Self {
        let (raw, proofs) = Self::challenged(key);
        raw.say(&Request::Prove(proofs.of_importer()));
        raw
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> nix::Result<()> {
        self.send_with(bytes, &[])
    }

    pub(crate) fn send_with(&self, bytes: &[u8], fds: &[&OwnedFd]) -> nix::Result<()> {
        let numbers: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT, None)
            .map(|_| ())
    }

    pub(crate) fn say(&self, request: &Request<'_>) {
        self.send(request.encode(&mut [0; MESSAGE_MAX])).unwrap();
    }

    pub(crate) fn ask_for(&self, ids: &[ChunkId]) {
        self.send(Request::encode_chunks(ids.iter().copied(), &mut [0; MESSAGE_MAX])).unwrap();
    }

    /// Whether something arrives in good time, if only the end.
    pub(crate) fn has_answer(&self) -> bool {
        let timeout = PollTimeout::try_from(LONG).unwrap();
        poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout).unwrap() == 1
    }

    pub(crate) fn receive(&self) -> Received {
        assert!(self.has_answer(), "nothing came");
        let mut buffer = [0; MESSAGE_MAX];
        let mut space = cmsg_space!([i32; 253]);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let received = match recvmsg::<UnixAddr>(self.0.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::ECONNRESET) => return self.receive(),
            Err(errno) => panic!("{errno}"),
        };
        let mut fds = Vec::new();
        for message in received.cmsgs().unwrap() {
            if let ControlMessageOwned::ScmRights(numbers) = message {
                // SAFETY: received just now, and nobody else's.
                fds.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
            }
        }
        let len = received.bytes;
        (len != 0).then(|| (buffer[..len].to_vec(), fds))
    }

    /// The answer about chunks that is waiting: outcomes and fds.
    pub(crate) fn outcomes(&self) -> (Vec<Outcome>, Vec<OwnedFd>) {
        let (bytes, fds) = self.receive().expect("an answer");
        match Answer::decode(&bytes) {
            Ok(Answer::Chunks(outcomes)) => (outcomes.iter().collect(), fds),
            other => panic!("{other:?}"),
        }
    }

    /// The refusal that is waiting, and then the end.
    #[track_caller]
    pub(crate) fn refusal(&self) -> Refusal {
        let (bytes, fds) = self.receive().expect("a refusal");
        assert!(fds.is_empty());
        let Ok(Answer::Refused(refusal)) = Answer::decode(&bytes) else { panic!("{bytes:02x?}") };
        assert!(self.ends());
        refusal
    }

    /// Whether the connection ends without another word.
    pub(crate) fn ends(&self) -> bool {
        self.receive().is_none()
    }

    /// Whether it has been closed by now.
    pub(crate) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }
}
