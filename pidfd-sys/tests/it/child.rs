//! Forked helper processes with a line to the test that started them.
//!
//! # Safety
//! fork copies one thread of a process that has more, so a body keeps to system calls, the crate's raw layer and memory that exists already. A
//! breach can deadlock the child (a lock whose holder was not copied), which the alarm ends; it cannot corrupt memory.

use crate::sys::{check, wait_until};
use core::time::Duration;
use pidfd_sys::{Errno, Error, Step, process_stat};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const STEPS: [Step; 7] =
    [Step::PidfdOpen, Step::PidfdGetfd, Step::PidfdPoll, Step::SetPtracer, Step::ReadStat, Step::ReadNamespace, Step::ReadBootId];

/// A forked process; killed and reaped on drop.
pub(crate) struct Child {
    pid: libc::pid_t,
    link: UnixStream,
    reaped: bool,
}

/// The child's end of the line.
pub(crate) struct Link(UnixStream);

/// Ends the child without unwinding into the test harness, also when a body panics.
struct ExitOnDrop(i32);

impl Drop for ExitOnDrop {
    fn drop(&mut self) {
        // SAFETY: ends the process; nothing of it is used afterwards.
        unsafe { libc::_exit(self.0) }
    }
}

/// Forks; returns zero in the child, which is then the copy of the calling thread only.
pub(crate) fn fork() -> Result<libc::pid_t, Errno> {
    // SAFETY: both sides only go on as the module's safety chapter says.
    check(unsafe { libc::fork() }.into())
}

impl Child {
    /// Runs `body` in a new process, which exits when it returns.
    pub(crate) fn start(body: impl FnOnce(&Link)) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        ours.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout above zero");
        let pid = fork().expect("fork");
        if pid == 0 {
            let mut exit = ExitOnDrop(101);
            // SAFETY: integers only. No child outlives this, whatever happens to the test.
            unsafe { libc::alarm(60) };
            body(&Link(theirs));
            exit.0 = 0;
            drop(exit);
        }
        Self { pid, link: ours, reaped: false }
    }

    /// Starts a process that only waits.
    pub(crate) fn idle() -> Self {
        let child = Self::start(|link| {
            link.send(0);
            link.park()
        });
        assert_eq!(child.receive(), 0);
        child
    }

    /// Starts a process whose first thread has exited while a second one lives.
    pub(crate) fn without_first_thread() -> Self {
        let mut stack = vec![0_u128; 4096];
        let child = Self::start(|link| {
            extern "C" fn sleep_forever(_: *mut libc::c_void) -> libc::c_int {
                loop {
                    // SAFETY: no arguments.
                    unsafe { libc::pause() };
                }
            }
            let flags = libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES;
            let top = stack.as_mut_ptr_range().end;
            // SAFETY: the stack is 64 KiB, aligned to 16, and lives as long as the process, which has no other use for it.
            let thread = unsafe { libc::clone(sleep_forever, top.cast(), flags, core::ptr::null_mut()) };
            link.send(check(thread.into()).map_or_else(|errno| -errno.0, |_| 0));
            let status: libc::c_long = 0;
            // SAFETY: ends this thread only; `stack` is never dropped.
            unsafe { libc::syscall(libc::SYS_exit, status) };
        });
        assert_eq!(child.receive(), 0, "clone");
        wait_until("the first thread exits", || child.state() == b'Z');
        child
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.cast_unsigned()
    }

    pub(crate) fn state(&self) -> u8 {
        process_stat(self.pid()).expect("not reaped yet").state
    }

    /// Receives a number that the child sent.
    pub(crate) fn receive(&self) -> i32 {
        let mut bytes = [0; 4];
        (&self.link).read_exact(&mut bytes).expect("the child answers");
        i32::from_ne_bytes(bytes)
    }

    /// Receives what the child gave to [`Link::send_result`].
    pub(crate) fn result(&self) -> Result<i32, Error> {
        let (step, value) = (self.receive(), self.receive());
        match usize::try_from(step) {
            Ok(index) => Err(Error { step: STEPS[index], errno: Errno(value) }),
            Err(_) => Ok(value),
        }
    }

    /// Lets the child's next [`Link::wait`] return.
    pub(crate) fn go_on(&self) {
        (&self.link).write_all(&[0]).expect("the child is there");
    }

    /// Kills the child and leaves it as a zombie.
    pub(crate) fn kill(&self) {
        // SAFETY: integers only; the number is ours until the child is reaped.
        check(unsafe { libc::kill(self.pid, libc::SIGKILL) }.into()).expect("kill");
        wait_until("the child dies", || process_stat(self.pid()).is_ok_and(|stat| stat.state == b'Z' && stat.threads <= 1));
    }

    /// Reaps the child; its number is free afterwards.
    pub(crate) fn reap(&mut self) {
        let mut status = 0;
        // SAFETY: `status` is a local of the right type.
        check(unsafe { libc::waitpid(self.pid, &raw mut status, 0) }.into()).expect("waitpid");
        self.reaped = true;
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            // SAFETY: integers only; not reaped, so the number is still ours.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            self.reap();
        }
    }
}

impl Link {
    pub(crate) fn send(&self, value: i32) {
        if (&self.0).write_all(&value.to_ne_bytes()).is_err() {
            drop(ExitOnDrop(102));
        }
    }

    pub(crate) fn send_result(&self, result: Result<i32, Error>) {
        let (step, value) = match result {
            Ok(value) => (None, value),
            Err(error) => (STEPS.iter().position(|step| *step == error.step), error.errno.0),
        };
        self.send(step.map_or(-1, |index| i32::try_from(index).unwrap_or(i32::MAX)));
        self.send(value);
    }

    /// Waits for [`Child::go_on`].
    pub(crate) fn wait(&self) {
        if (&self.0).read_exact(&mut [0]).is_err() {
            drop(ExitOnDrop(103));
        }
    }

    /// Waits until killed.
    pub(crate) fn park(&self) {
        loop {
            self.wait();
        }
    }
}
