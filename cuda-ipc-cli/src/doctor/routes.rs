//! The ways by which file descriptors travel, each by trial.
//!
//! For pidfd a child of this program looks into this process: this process is not its descendant, so Yama answers the child as it would answer any sibling.
//! (The other way round, or on itself, everything looks open.) For the broker this process connects with itself and hands itself an fd, by an abstract name and
//! by a file in the socket directory.

use core::mem::MaybeUninit;
use core::time::Duration;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;

use cuda_ipc_core::importer::Witness;
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;

use crate::Role;
use crate::failure::Failure;
use crate::finding::Finding;
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;

/// One way.
#[derive(Serialize)]
pub(super) struct Way {
    pub(super) works: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) finding: Option<Finding>,
}

/// All ways.
#[derive(Serialize)]
pub(super) struct Routes {
    pub(super) pidfd: Way,
    pub(super) broker_name: Way,
    /// None where no socket directory is set.
    pub(super) broker_file: Option<Way>,
}

/// How long the child may take.
const SILENCE: Duration = Duration::from_secs(20);

impl Routes {
    pub(super) fn try_all() -> Self {
        let directory = super::node::socket_dir();
        Self {
            pidfd: Way::new(by_neighbour().unwrap_or_else(|failure| Some(not_tried(&failure)))),
            broker_name: Way::new(by_name()),
            broker_file: directory.map(|directory| Way::new(by_file(Path::new(&directory)))),
        }
    }
}

impl Way {
    fn new(finding: Option<Finding>) -> Self {
        Self { works: finding.is_none(), finding }
    }
}

fn by_neighbour() -> Result<Option<Finding>, Failure> {
    let mut child = PeerProcess::start(Role::DoctorNeighbour, &std::process::id(), SILENCE)?;
    let found = child.receive(&mut Progress::new())?;
    child.finish()?;
    Ok(found)
}

fn not_tried(failure: &Failure) -> Finding {
    let fact = format!("it could not be tried whether one process may fetch file descriptors of another: {}", failure.first_line());
    Finding::new("not-tried", fact, "Let this program start another process of itself", &[])
}

/// The child: looks into the process that the command names.
pub(crate) fn neighbour(link: &mut Link) -> Result<(), Failure> {
    let pid: u32 = link.receive()?;
    link.send(&Witness::default().try_process(pid).err().map(Finding::from))?;
    link.wait_for_end();
    Ok(())
}

fn by_name() -> Option<Finding> {
    let name = format!("cuda-ipc-doctor-{}", std::process::id());
    let tried = SocketAddr::from_abstract_name(&name).and_then(|address| {
        let listener = UnixListener::bind_addr(&address)?;
        pass_an_fd(&listener, UnixStream::connect_addr(&address)?)
    });
    tried.err().map(|error| {
        Finding::new(
            "no-abstract-socket",
            format!("processes cannot meet by an abstract socket name here: {error}"),
            "Allow Unix sockets in the sandbox or the filter that this process runs under",
            &[],
        )
    })
}

fn by_file(directory: &Path) -> Option<Finding> {
    try_file(directory).err().map(|error| {
        Finding::new(
            "no-socket-file",
            format!("no socket can be made in the socket directory {}: {error}", directory.display()),
            "Let CUDA_IPC_SOCKET_DIR name a directory that belongs to the user of the processes, who alone may use it",
            &["mkdir -m 700 -p \"$CUDA_IPC_SOCKET_DIR\"", "chmod 700 \"$CUDA_IPC_SOCKET_DIR\""],
        )
    })
}

/// Makes a socket in the directory by the rules of an exporter's broker, and takes it away again.
fn try_file(directory: &Path) -> std::io::Result<()> {
    let opened = rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&opened)?;
    if stat.st_uid != 0 && stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::other(format!("it belongs to user {}", stat.st_uid)));
    }
    if stat.st_mode & 0o077 != 0 {
        return Err(std::io::Error::other(format!("others than its user may use it (mode {:o})", stat.st_mode & 0o777)));
    }
    // By the fd, because a socket's path is short.
    let file = format!("/proc/self/fd/{}/.cuda-ipc-doctor-{}", opened.as_raw_fd(), std::process::id());
    let tried = UnixListener::bind(&file).and_then(|listener| pass_an_fd(&listener, UnixStream::connect(&file)?));
    // There only if bind made it.
    let _ = std::fs::remove_file(&file);
    tried
}

/// Sends an fd through a connection and takes it out at the other end.
fn pass_an_fd(listener: &UnixListener, from: UnixStream) -> std::io::Result<()> {
    let (to, _) = listener.accept()?;
    let fds = [from.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    message.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&from, &[IoSlice::new(&[1])], &mut message, SendFlags::NOSIGNAL)?;
    let (mut byte, mut space) = ([0], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
    let mut message = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&to, &mut [IoSliceMut::new(&mut byte)], &mut message, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)?;
    let received = message.drain().map(|message| if let RecvAncillaryMessage::ScmRights(fds) = message { fds.count() } else { 0 });
    if received.sum::<usize>() == 1 { Ok(()) } else { Err(std::io::Error::other("no file descriptor came out")) }
}
