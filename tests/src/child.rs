//! Children made without exec, at a test's command.
//!
//! # Safety
//! The unsafe here is fork and clone. A child runs the test's closure on a copy of everything, allocates (which the C library's fork allows), and ends
//! without running anything of the parent's.

/// Forks; the child runs `body` and ends with its answer, or is killed after a while.
pub fn fork(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child allocates, which the C library's fork allows, and ends without running anything of the parent's.
    match unsafe { libc::fork() } {
        0 => end_of_child(body),
        child => {
            assert!(child > 0, "{}", std::io::Error::last_os_error());
            child
        }
    }
}

/// As [`fork`], by a bare system call: no handler runs.
pub fn raw_clone(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: as fork, with a copy of this stack.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => end_of_child(body),
        child => i32::try_from(child).expect("a pid"),
    }
}

fn end_of_child(body: impl FnOnce() -> bool) -> ! {
    // SAFETY: a number.
    unsafe { libc::alarm(30) };
    let good = std::panic::catch_unwind(core::panic::AssertUnwindSafe(body)).unwrap_or(false);
    // SAFETY: ends the child.
    unsafe { libc::_exit(i32::from(!good)) }
}

/// Waits for the end of a child, and panics if it was no good one.
#[track_caller]
pub fn wait(child: i32, what: &str) {
    let mut status = -1;
    // SAFETY: a child of ours, and a live local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child of {what}");
}
