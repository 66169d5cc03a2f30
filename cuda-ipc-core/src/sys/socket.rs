//! Unix sockets of type SEQPACKET: whole packets with fds beside them, never waiting unless asked to, and who is at the other end.
//!
//! The kernel keeps packets apart, so a reader never sees half a message, and a writer either sends all of one or nothing. What the packets say is
//! `broker.rs`'s.
//!
//! # Safety
//! The unsafe here is getsockopt and ioctl, each with one local of the type and length that the call writes. (A safe wrapper of SO_PEERCRED exists in rustix;
//! it takes the pid for a non-zero number, and the kernel gives 0 where the other process is not visible in this PID namespace.)

#![allow(unsafe_code)]

use core::mem::MaybeUninit;
use core::time::Duration;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

use super::process_fd::ProcessFd;
use super::{SyscallError, failed};
use crate::broker::BATCH_MAX;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A socket of this process life. Its calls never wait, but for [`Socket::wait`].
#[derive(Debug)]
pub(crate) struct Socket {
    fd: ProcessFd,
    token: u64,
}

/// Who connected to a socket, or who listens on it: as of that moment, in this process's namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Credentials {
    /// `None` where the process is not visible in this PID namespace.
    pub(crate) pid: Option<u32>,
    pub(crate) uid: u32,
}

/// What was received.
#[derive(Debug)]
pub(crate) enum Packet {
    /// A packet of this length. `fds_lost`: fds came along for which there was no room, in the caller's hands or in the process.
    Message { len: usize, fds_lost: bool },
    /// The other end is closed.
    End,
}

impl Socket {
    /// A socket that is neither bound nor connected.
    pub(crate) fn new() -> Result<Self, SyscallError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed("socket"))?;
        Self::from_fd(fd)
    }

    /// Two sockets that are connected with each other.
    pub(crate) fn pair() -> Result<(Self, Self), SyscallError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed("socketpair"))?;
        Ok((Self::from_fd(one)?, Self::from_fd(other)?))
    }

    fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        Ok(Self { fd: ProcessFd::new(fd)?, token: super::fork::token()? })
    }

    /// Whether the application has closed the fd under us. Then whatever has its number is not to be touched.
    pub(crate) fn is_lost(&self) -> bool {
        self.fd.mark().is_lost()
    }

    /// Whether the number stood for another fd of ours until somebody closed that one under us.
    pub(crate) fn took_over(&self) -> bool {
        self.fd.took_over()
    }

    /// Gives the socket an address. Errors: bind(2)'s.
    pub(crate) fn bind(&self, address: &SocketAddrUnix) -> Result<(), Errno> {
        rustix::net::bind(&self.fd, address)
    }

    /// Lets others connect to the address. Errors: listen(2)'s.
    pub(crate) fn listen(&self) -> Result<(), Errno> {
        rustix::net::listen(&self.fd, BACKLOG)
    }

    /// The next connection. Errors: accept4(2)'s, AGAIN if there is none.
    pub(crate) fn accept(&self) -> Result<OwnedFd, Errno> {
        rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    /// As [`Socket::accept`], as a socket.
    pub(crate) fn accepted(fd: OwnedFd) -> Result<Self, SyscallError> {
        Self::from_fd(fd)
    }

    /// Connects. Errors: connect(2)'s, AGAIN if too many wait there already.
    pub(crate) fn connect(&self, address: &SocketAddrUnix) -> Result<(), Errno> {
        rustix::net::connect(&self.fd, address)
    }

    /// Who is at the other end. Source: SO_PEERCRED, unix(7).
    pub(crate) fn peer(&self) -> Result<Credentials, SyscallError> {
        let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
        // SAFETY: `credentials` and `len` are locals; the kernel writes at most `len` bytes, the size of `credentials`.
        let rc = unsafe {
            libc::getsockopt(self.fd.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut credentials).cast(), &raw mut len)
        };
        if rc != 0 {
            return Err(last_error("getsockopt(SO_PEERCRED)"));
        }
        Ok(Credentials { pid: u32::try_from(credentials.pid).ok().filter(|&pid| pid != 0), uid: credentials.uid })
    }

    /// Whether something that was sent has not been received yet. Source: SIOCOUTQ, unix(7).
    pub(crate) fn has_untaken(&self) -> Result<bool, SyscallError> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the request writes one int, which `bytes` is.
        let rc = unsafe { libc::ioctl(self.fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if rc != 0 { Err(last_error("ioctl(SIOCOUTQ)")) } else { Ok(bytes != 0) }
    }

    /// Sends one packet with these fds, or nothing. Errors: sendmsg(2)'s, AGAIN where the other side does not read.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        again(|| rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut control, flags)).map(|_| ())
    }

    /// Receives one packet, and refuses all fds that come along.
    ///
    /// Errors: recvmsg(2)'s, AGAIN if there is none; MSGSIZE if it was longer than the buffer.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Result<Packet, Errno> {
        // Without room for fds the kernel drops them: they never get a number here.
        self.receive_into(buffer, &mut RecvAncillaryBuffer::default())
    }

    /// Receives one packet and the fds that come along, [`BATCH_MAX`] at most. Errors: as [`Socket::receive`].
    pub(crate) fn receive_fds(&self, buffer: &mut [u8], fds: &mut Vec<ProcessFd>) -> Result<Packet, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let packet = self.receive_into(buffer, &mut control);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received.map(|fd| ProcessFd::brief(fd, self.token)));
            }
        }
        packet
    }

    fn receive_into(&self, buffer: &mut [u8], control: &mut RecvAncillaryBuffer<'_>) -> Result<Packet, Errno> {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = again(|| rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(buffer)], control, flags))?;
        match received {
            _ if received.flags.contains(ReturnFlags::TRUNC) => Err(Errno::MSGSIZE),
            // No message of ours is empty, and of a packet that is nobody can tell that it is not the end.
            _ if received.bytes == 0 => Ok(Packet::End),
            _ => Ok(Packet::Message { len: received.bytes, fds_lost: received.flags.contains(ReturnFlags::CTRUNC) }),
        }
    }

    /// Wakes whoever waits at the other end of a pair.
    pub(crate) fn ring(&self) {
        if !self.is_lost() {
            // Full means that it has rung often enough.
            let _ = self.send(&[0], &[]);
        }
    }

    /// Whether the other end is closed, whatever it may have sent before.
    pub(crate) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let ends = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL;
        let [asked] = &mut fds;
        asked.clear_revents();
        again(|| poll(&mut fds, Some(&Timespec::default()))).is_ok() && fds.iter().any(|fd| fd.revents().intersects(ends))
    }

    /// Waits until there is something to receive, if only the end; `false` if the time was over before.
    pub(crate) fn wait(&self, until: Instant) -> Result<bool, SyscallError> {
        loop {
            let left = timespec(until.saturating_duration_since(Instant::now()));
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&left)) {
                Ok(0) if Instant::now() < until => {}
                Ok(ready) => return Ok(ready != 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("poll")(errno)),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An address in an open directory, whatever the length of its path and whatever has become of that.
pub(crate) fn address_in(directory: &impl AsFd, name: &str) -> Result<SocketAddrUnix, SyscallError> {
    // Of this thread: the first thread's entry is gone where that has exited.
    let path: PathBuf = format!("/proc/thread-self/fd/{}/{name}", directory.as_fd().as_raw_fd()).into();
    SocketAddrUnix::new(&path).map_err(failed("bind"))
}

/// A duration as poll takes it.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: duration.subsec_nanos().into() }
}

/// Makes a call again that a signal has interrupted.
fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

fn last_error(call: &'static str) -> SyscallError {
    SyscallError { call, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
}
