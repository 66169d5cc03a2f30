//! All that a program asks of the kernel, its children's part included: followed with ptrace(2) from its start to its end.
//!
//! # Safety
//! The unsafe here is: code between fork and exec that makes one system call; ptrace and waitpid on processes of this thread's, with numbers and one structure of
//! the size that is passed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, Read, Result};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// What was seen of a program.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// System calls, by number and how many.
    pub calls: BTreeMap<i64, usize>,
    /// Files that were opened, or tried.
    pub opened: BTreeSet<String>,
    /// Exit status as waitpid(2) has it.
    pub status: i32,
    /// What it wrote, all of its processes.
    pub output: String,
    /// And to standard error.
    pub errors: String,
}

/// Runs `command` to its end and that of all its children. The look begins with the `from`th exec of the first process, counted from 1.
///
/// Output beyond what a pipe holds would stop it. Errors: what ptrace or waitpid says.
pub fn follow(mut command: Command, from: usize) -> Result<Followed> {
    let trace_me = || {
        // SAFETY: see the module's chapter.
        check(unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) }).map(drop)
    };
    // SAFETY: as above.
    unsafe { command.pre_exec(trace_me) };
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let first = i32::try_from(child.id()).map_err(Error::other)?;
    let (mut seen, mut execs, mut has_options) = (Followed::default(), 0, false);
    while let Some((pid, status)) = next()? {
        if !libc::WIFSTOPPED(status) {
            if pid == first {
                seen.status = status;
            }
            continue;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        if pid == first && !has_options {
            has_options = true;
            execs += 1;
            set_options(pid)?;
        } else if event == libc::PTRACE_EVENT_EXEC && pid == first {
            execs += 1;
        } else if signal == libc::SIGTRAP | 0x80
            && execs >= from
            && let Some((number, arguments)) = entered(pid)?
        {
            *seen.calls.entry(number).or_default() += 1;
            if number == libc::SYS_openat {
                seen.opened.insert(text(pid, arguments[1])?);
            }
        }
        // Stops of ours are no signals of its own; SIGSTOP is how a new process begins.
        let ours = [libc::SIGTRAP, libc::SIGTRAP | 0x80, libc::SIGSTOP].contains(&signal) || event != 0;
        // SAFETY: see the module's chapter.
        let rc = unsafe { libc::ptrace(libc::PTRACE_SYSCALL, pid, 0, if ours { 0 } else { signal }) };
        match check(rc) {
            // It was killed meanwhile; its end is still to be told.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => drop(other?),
        }
    }
    read_to_end(child.stdout.take(), &mut seen.output)?;
    read_to_end(child.stderr.take(), &mut seen.errors)?;
    Ok(seen)
}

fn read_to_end(pipe: Option<impl Read>, text: &mut String) -> Result<usize> {
    pipe.ok_or(Error::other("no pipe"))?.read_to_string(text)
}

/// The next event of any process of this thread's; `None` if there is none any more.
fn next() -> Result<Option<(i32, i32)>> {
    let mut status = 0;
    // SAFETY: see the module's chapter.
    match check(unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) }.into()) {
        Ok(pid) => Ok(Some((i32::try_from(pid).map_err(Error::other)?, status))),
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(None),
        Err(error) => Err(error),
    }
}

fn set_options(pid: i32) -> Result<()> {
    let options = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACEEXEC
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_EXITKILL;
    // SAFETY: see the module's chapter.
    check(unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, pid, 0, options) }).map(drop)
}

/// Number and arguments, if the process has stopped at the entry of a call.
fn entered(pid: i32) -> Result<Option<(i64, [u64; 6])>> {
    let mut info = core::mem::MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
    let size = size_of::<libc::ptrace_syscall_info>();
    // SAFETY: see the module's chapter.
    check(unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, pid, size, info.as_mut_ptr()) })?;
    // SAFETY: plain C data, zeroed and then written by the kernel.
    let info = unsafe { info.assume_init() };
    const ENTRY: u8 = 1;
    if info.op != ENTRY {
        return Ok(None);
    }
    // SAFETY: at an entry this is the valid member.
    let entry = unsafe { info.u.entry };
    Ok(Some((entry.nr.cast_signed(), entry.args)))
}

/// A C string of a stopped process.
fn text(pid: i32, address: u64) -> Result<String> {
    let memory = std::fs::File::open(format!("/proc/{pid}/mem"))?;
    let mut bytes = Vec::new();
    let mut byte = [0];
    while bytes.len() < 4096 && memory.read_at(&mut byte, address + bytes.len() as u64)? == 1 && byte != [0] {
        bytes.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn check(rc: libc::c_long) -> Result<libc::c_long> {
    if rc == -1 { Err(Error::last_os_error()) } else { Ok(rc) }
}
