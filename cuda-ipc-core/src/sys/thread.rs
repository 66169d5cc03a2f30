//! Threads of ours, which take no signals: a signal that the application expects on one of its own threads must not end up on ours.
//!
//! # Safety
//! The unsafe here is sigfillset and pthread_sigmask on local signal sets.

#![allow(unsafe_code)]

use std::thread::JoinHandle;

/// Starts a thread with every signal blocked from its first instruction.
///
/// Errors: the spawn's own. Source: pthread_sigmask(3); a thread inherits its creator's mask.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    let mut all = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initialises the local set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` is initialised above, `before` is writable; the call changes this thread's mask only.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: `before` was written by the call above, which cannot fail with these arguments.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut()) };
    spawned
}
