//! What a thread of another process really asks of the kernel: its system calls, seen with ptrace(2).
//!
//! The traced thread says when to look ([`look`]): between [`Mark::On`] and [`Mark::Off`] every call counts, and [`Mark::End`] ends the trace.
//!
//! # Safety
//! The unsafe here is ptrace and waitpid on a thread of a child process, with numbers and one structure of the size that is passed, and a system call
//! that only asks for a constant.

use std::io::{Error, Result};

/// What the traced thread says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Mark {
    /// From here on.
    On = 0x5151_0001,
    /// Not from here on.
    Off = 0x5151_0002,
    /// That is all.
    End = 0x5151_0003,
}

/// A call nobody makes otherwise, with an argument that nobody passes.
const MARK_CALL: i64 = libc::SYS_sched_get_priority_max;

/// Says a mark to whoever traces this thread.
pub fn look(mark: Mark) {
    // SAFETY: takes a number that is no policy, and refuses it.
    unsafe { libc::syscall(MARK_CALL, mark as u64) };
}

/// A traced thread. This thread must be the one that asks, and its process the parent of the other.
#[derive(Debug)]
pub struct Trace {
    tid: i32,
}

impl Trace {
    /// Takes hold of the thread and stops it.
    pub fn seize(tid: i32) -> Result<Self> {
        // SAFETY: see the module's chapter.
        check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACESYSGOOD) })?;
        // SAFETY: as above.
        check(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0) })?;
        let trace = Self { tid };
        trace.wait()?;
        Ok(trace)
    }

    /// Lets the thread run until [`Mark::End`] and returns the numbers of the system calls that it made while it was to be looked at. Lets go of it then.
    pub fn calls(self) -> Result<Vec<i64>> {
        let (mut calls, mut on) = (Vec::new(), false);
        loop {
            // SAFETY: see the module's chapter.
            check(unsafe { libc::ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0) })?;
            if self.wait()? != libc::SIGTRAP | 0x80 {
                continue;
            }
            let Some((number, argument)) = self.entered()? else { continue };
            match argument {
                _ if number != MARK_CALL && on => calls.push(number),
                _ if number != MARK_CALL => {}
                argument if argument == Mark::On as u64 => on = true,
                argument if argument == Mark::End as u64 => {
                    // SAFETY: see the module's chapter.
                    check(unsafe { libc::ptrace(libc::PTRACE_DETACH, self.tid, 0, 0) })?;
                    return Ok(calls);
                }
                _ => on = false,
            }
        }
    }

    /// Number and first argument, if the thread has stopped at the entry of a call.
    fn entered(&self) -> Result<Option<(i64, u64)>> {
        let mut info = core::mem::MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
        let size = size_of::<libc::ptrace_syscall_info>();
        // SAFETY: see the module's chapter.
        check(unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, self.tid, size, info.as_mut_ptr()) })?;
        // SAFETY: plain C data, zeroed and then written by the kernel.
        let info = unsafe { info.assume_init() };
        const ENTRY: u8 = 1;
        if info.op != ENTRY {
            return Ok(None);
        }
        // SAFETY: at an entry this is the valid member.
        let entry = unsafe { info.u.entry };
        Ok(Some((entry.nr.cast_signed(), entry.args[0])))
    }

    /// Waits until the thread stops: by which signal.
    fn wait(&self) -> Result<i32> {
        let mut status = 0;
        // SAFETY: see the module's chapter.
        check(unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) }.into())?;
        if libc::WIFSTOPPED(status) { Ok(libc::WSTOPSIG(status)) } else { Err(Error::other(format!("the thread ended: {status:#x}"))) }
    }
}

fn check(rc: libc::c_long) -> Result<()> {
    if rc == -1 { Err(Error::last_os_error()) } else { Ok(()) }
}
