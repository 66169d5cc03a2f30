//! The names under which a broker can be reached: an abstract one, and a file in a directory that importers of other network namespaces share.
//!
//! Both names are made of a hash of the nonce. Whoever takes one of them beforehand cannot pass for the exporter, which has to prove that it knows the
//! nonce; the exporter is then reached by the other name, or not at all.
//!
//! In the directory nothing is followed and nothing trusted: a socket is made under another name and moved to its place, entries are judged without following
//! links, and only sockets of this user on this machine, which nobody listens on, are cleared away.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::BrokerFailures;
use crate::broker::SocketName;
use crate::exporter::{ExporterOptions, Identity};
use crate::key::HostId;
use crate::sys::fork;
use crate::sys::process_fd::ProcessFd;
use crate::sys::socket::{Socket, address_in};
use crate::sys::{SyscallError, failed};
use crate::users::Users;

/// Ends the name of a socket that has not been moved to its place.
const UNFINISHED: &str = ".new";
/// Entries of the directory that are looked at, at most.
const ENTRIES: usize = 1024;
/// How long a socket may be unfinished.
const FINISHING: u64 = 60;

/// Sockets that importers can connect to, and what failed.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    pub(super) sockets: Vec<Socket>,
    pub(super) file: Option<SocketFile>,
    pub(super) failures: BrokerFailures,
}

impl Listeners {
    pub(super) fn open(identity: &Identity, options: &ExporterOptions, users: &Users) -> Self {
        let name = SocketName::new(identity.nonce, identity.host);
        let mut listeners = Self::default();
        match listen_abstract(&name) {
            Ok(socket) => listeners.sockets.push(socket),
            Err(error) => listeners.failures.abstract_name = Some(error),
        }
        if let Some(directory) = &options.socket_dir {
            match listen_in(directory, options.socket_dir_mode, &name, identity.host, users) {
                Ok((socket, file)) => {
                    listeners.sockets.push(socket);
                    listeners.file = Some(file);
                }
                Err(error) => listeners.failures.socket_dir = Some(error),
            }
        }
        listeners
    }
}

fn listen_abstract(name: &SocketName) -> Result<Socket, SyscallError> {
    let socket = Socket::new()?;
    let address = SocketAddrUnix::new_abstract_name(name.abstract_name().as_bytes()).map_err(failed("bind"))?;
    socket.bind(&address).map_err(failed("bind"))?;
    socket.listen().map_err(failed("listen"))?;
    Ok(socket)
}

/// A socket's file. Removed at the end, if it is still that one.
#[derive(Debug)]
pub(super) struct SocketFile {
    directory: ProcessFd,
    name: SocketName,
    file: (u64, u64),
    token: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A forked child's copy means its parent's file.
        if !fork::is_current(self.token) || self.directory.mark().is_lost() {
            return;
        }
        let name = self.name.file_name();
        if look(&self.directory, name).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.file) {
            let _ = rustix::fs::unlinkat(&self.directory, name, AtFlags::empty());
        }
    }
}

fn listen_in(path: &Path, mode: u32, name: &SocketName, host: HostId, users: &Users) -> Result<(Socket, SocketFile), SyscallError> {
    let token = fork::token()?;
    let directory = ProcessFd::new(open_directory(path, mode)?)?;
    clear_stale(&directory, host);
    let unfinished = format!("{}{UNFINISHED}", name.file_name());
    let socket = Socket::new()?;
    // A socket's file gets the socket's own mode, less the umask (unix(7)), so there is no moment in which others may connect.
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::fchmod(&socket, mode).map_err(failed("fchmod"))?;
    let _ = rustix::fs::unlinkat(&directory, unfinished.as_str(), AtFlags::empty());
    socket.bind(&address_in(&directory, &unfinished)?).map_err(failed("bind"))?;
    let finish = || {
        let stat = look(&directory, &unfinished).map_err(failed("fstatat"))?;
        if users.has_others() {
            open_to_all(&directory, &unfinished, &stat)?;
        }
        socket.listen().map_err(failed("listen"))?;
        rustix::fs::renameat(&directory, unfinished.as_str(), &directory, name.file_name()).map_err(failed("renameat"))?;
        Ok((stat.st_dev, stat.st_ino))
    };
    match finish() {
        Ok(file) => Ok((socket, SocketFile { directory, name: *name, file, token })),
        Err(error) => {
            let _ = rustix::fs::unlinkat(&directory, unfinished.as_str(), AtFlags::empty());
            Err(error)
        }
    }
}

/// Opens the directory, which is made if it is not there, and checks whose it is and who else may write in it.
///
/// Errors: the system call's; EPERM where it belongs to somebody who is neither this user nor root, or others may do more with it than the options say.
fn open_directory(path: &Path, mode: u32) -> Result<OwnedFd, SyscallError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            match rustix::fs::mkdir(path, Mode::from_raw_mode(mode)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed("mkdir")(errno)),
            }
            rustix::fs::open(path, flags, Mode::empty())
        }
        other => other,
    }
    .map_err(failed("open"))?;
    let stat = rustix::fs::fstat(&directory).map_err(failed("fstat"))?;
    let trusted = stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw();
    if !trusted || stat.st_mode & 0o777 & !mode != 0 {
        return Err(SyscallError { call: "checking the socket directory", errno: libc::EPERM });
    }
    Ok(directory)
}

fn look(directory: &impl AsFd, name: &str) -> Result<Stat, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Lets every user connect; who is served is decided by their credentials.
fn open_to_all(directory: &impl AsFd, name: &str, stat: &Stat) -> Result<(), SyscallError> {
    // By an fd of that very file: a path could be led elsewhere by whoever may write in the directory.
    let file =
        rustix::fs::openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(failed("openat"))?;
    let opened = rustix::fs::fstat(&file).map_err(failed("fstat"))?;
    if (opened.st_dev, opened.st_ino) != (stat.st_dev, stat.st_ino) {
        return Err(SyscallError { call: "openat", errno: libc::ESTALE });
    }
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    rustix::fs::chmod(path.as_str(), Mode::from_raw_mode(0o666)).map_err(failed("chmod"))
}

/// Removes sockets that exporters of this user have left behind on this machine.
fn clear_stale(directory: &ProcessFd, host: HostId) {
    let Ok(entries) = Dir::read_from(directory) else { return };
    let own = rustix::process::geteuid().as_raw();
    let names = entries.take(ENTRIES).filter_map(|entry| entry.ok()?.file_name().to_str().ok().map(str::to_owned));
    for name in names {
        let finished = name.strip_suffix(UNFINISHED);
        if !SocketName::is_file_of(finished.unwrap_or(&name), host) {
            continue;
        }
        let Ok(stat) = look(directory, &name) else { continue };
        if stat.st_uid != own || FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            continue;
        }
        // One that is being made has no listener yet.
        let old =
            SystemTime::UNIX_EPOCH.elapsed().is_ok_and(|now| i64::try_from(now.as_secs()).unwrap_or(0) - stat.st_mtime > FINISHING as i64);
        if (finished.is_none() || old) && is_deserted(directory, &name) {
            let _ = rustix::fs::unlinkat(directory, name.as_str(), AtFlags::empty());
        }
    }
}

/// Whether nobody listens on a socket's file.
fn is_deserted(directory: &ProcessFd, name: &str) -> bool {
    let refused = |address| Some(Socket::new().ok()?.connect(&address) == Err(Errno::CONNREFUSED));
    address_in(directory, name).ok().and_then(refused).unwrap_or(false)
}
