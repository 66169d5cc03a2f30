//! What an application may do to the fds of a process, behind an exporter's back.
//!
//! # Safety
//! The unsafe here is close, dup2 and close_range on numbers that somebody else may own. That is what these requests are for; this process has no owner
//! of an fd that minds, except the exporter under test.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};

use super::{Answer, Server, done, text};
use crate::snapshot;

impl Server {
    pub(super) fn answer_about_fds(&mut self, what: &str, words: &[&str], numbers: &[u64]) -> Answer {
        match (what, numbers) {
            ("fds", []) => Ok(snapshot::open_fds().len().to_string()),
            ("close", &[number]) => done(check(
                // SAFETY: see the module's chapter.
                unsafe { libc::close(fd(number)) },
            )),
            ("close_from", &[first]) => {
                let first = u32::try_from(first).map_err(text)?;
                // SAFETY: see the module's chapter.
                let rc = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
                done(check(i32::try_from(rc).unwrap_or(-1)))
            }
            // Opens a file under the lowest free number.
            ("open", []) => std::fs::File::open(words[0]).map(|file| file.into_raw_fd().to_string()).map_err(text),
            // Opens files until `spare` numbers are left.
            ("fill", &[spare]) => {
                let opened: Vec<_> = core::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
                let keep = opened.len().saturating_sub(usize::try_from(spare).map_err(text)?);
                Ok(opened.into_iter().take(keep).map(IntoRawFd::into_raw_fd).count().to_string())
            }
            // Puts an unrelated file where another fd was, or is.
            ("put", &[number]) => {
                let file = std::fs::File::open(words[1]).map_err(text)?;
                done(self.put(file.into(), number))
            }
            // Puts a memory file there that is no table.
            ("put_memfd", &[number, len]) => done(memory_file(words[2], len).and_then(|file| self.put(file.into(), number))),
            // Puts one end of a pipe there.
            ("put_pipe", &[number]) => {
                let (read, _write) = std::io::pipe().map_err(text)?;
                done(self.put(read.into(), number))
            }
            // Puts the fd of a chunk there that was not exported by the exporter.
            ("put_chunk", &[number, memory, offset]) => {
                let cuda = self.cuda;
                let address = self.memory(memory)?.base() + offset;
                let handle = cuda.mem_retain(address).map_err(text)?;
                let exported = cuda.mem_export_fd(handle).map_err(text)?;
                cuda.mem_release(handle).map_err(text)?;
                // SAFETY: the driver has just made this fd for us.
                done(self.put(unsafe { OwnedFd::from_raw_fd(exported) }, number))
            }
            ("link", &[number]) => {
                std::fs::read_link(format!("/proc/self/fd/{number}")).map(|link| link.display().to_string()).map_err(text)
            }
            _ => Err(format!("not understood: {what} {words:?}")),
        }
    }

    /// Closes what was put somewhere.
    pub(super) fn close_placed(&mut self) -> Result<(), String> {
        for number in self.placed.drain(..) {
            // SAFETY: see the module's chapter.
            check(unsafe { libc::close(number) }).map_err(text)?;
        }
        Ok(())
    }

    /// Puts a file under a number, whatever is there; it stays when everybody else has let go of it.
    fn put(&mut self, file: OwnedFd, number: u64) -> std::io::Result<()> {
        // The lowest free number may be just the one.
        if fd(number) == file.as_raw_fd() {
            let _ = file.into_raw_fd();
        } else {
            // SAFETY: see the module's chapter.
            check(unsafe { libc::dup3(file.as_raw_fd(), fd(number), libc::O_CLOEXEC) })?;
        }
        self.placed.retain(|&placed| placed != fd(number));
        self.placed.push(fd(number));
        Ok(())
    }
}

/// A memory file of `len` bytes: `plain`, `sealed` as a table is, or `huge` and sealed.
fn memory_file(kind: &str, len: u64) -> std::io::Result<std::fs::File> {
    let huge = if kind == "huge" { libc::MFD_HUGETLB } else { 0 };
    // SAFETY: a C string and flags.
    let fd = unsafe { libc::memfd_create(c"not-a-table".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge) };
    check(fd)?;
    // SAFETY: made just now.
    let file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.set_len(len)?;
    if kind != "plain" {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
        // SAFETY: an fd that is open, and numbers.
        check(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) })?;
    }
    Ok(file)
}

fn check(rc: i32) -> Result<(), std::io::Error> {
    if rc < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

fn fd(number: u64) -> i32 {
    i32::try_from(number).expect("an fd number")
}
