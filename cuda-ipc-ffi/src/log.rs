//! What is said to whom: lines of a context go to the caller's function, or to standard error where the user has asked for them by CUDA_IPC_LOG alone.
//!
//! A lane that is lost is said once for each cause, as a warning; the same again is said at level debug. No lock is held while the caller's function runs, so it
//! may call this library.
//!
//! # Safety
//! The unsafe here is the call of the caller's function. That it may be called from any thread until the context is gone is what the header asks for.

#![allow(unsafe_code)]

use core::ffi::{c_char, c_void};
use core::fmt;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use crate::status::cuda_ipc_status_t;
use crate::text::Text;

/// Says nothing.
pub const CUDA_IPC_LOG_OFF: i32 = 1;
/// The library cannot do what it is for.
pub const CUDA_IPC_LOG_ERROR: i32 = 2;
/// A lane is lost, with the cause: once for each cause.
pub const CUDA_IPC_LOG_WARN: i32 = 3;
/// Contexts come and go.
pub const CUDA_IPC_LOG_INFO: i32 = 4;
/// Exports, imports, and repeated causes.
pub const CUDA_IPC_LOG_DEBUG: i32 = 5;

/// Receives a line of the log: its level, and text that ends with 0 and is good during the call. Called from any thread that calls the library, never from one
/// of the library's own, and without locks: it may call the library, but not destroy the context that it is of. `user` is what stands in the configuration.
#[allow(non_camel_case_types, reason = "its name in C")]
pub type cuda_ipc_log_fn_t = Option<unsafe extern "C" fn(level: i32, line: *const c_char, user: *mut c_void)>;

/// Bytes of a line, with the 0 at its end. A longer one is cut off.
const LINE: usize = 512;

/// The log of a context.
#[derive(Debug)]
pub(crate) struct Log {
    level: i32,
    sink: Sink,
    /// Causes that were said.
    said: Mutex<Vec<cuda_ipc_status_t>>,
}

#[derive(Clone, Copy, Debug)]
enum Sink {
    Nobody,
    Caller(unsafe extern "C" fn(i32, *const c_char, *mut c_void), User),
    StandardError,
}

/// The caller's own pointer.
#[derive(Clone, Copy, Debug)]
struct User(*mut c_void);

// SAFETY: never followed here, only handed to the caller's function, which the header says is called from any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl Log {
    /// Lines up to `level` go to `function`; without one, to standard error if `asked` says that the user wants them.
    pub(crate) fn new(level: i32, function: cuda_ipc_log_fn_t, user: *mut c_void, asked: bool) -> Self {
        let sink = match function {
            Some(function) => Sink::Caller(function, User(user)),
            None if asked => Sink::StandardError,
            None => Sink::Nobody,
        };
        Self { level, sink, said: Mutex::default() }
    }

    /// Says a line.
    pub(crate) fn say(&self, level: i32, line: fmt::Arguments<'_>) {
        if level > self.level || matches!(self.sink, Sink::Nobody) {
            return;
        }
        let text = Text::<LINE>::of(line);
        match self.sink {
            Sink::Nobody => {}
            Sink::Caller(function, User(user)) => {
                // SAFETY: the caller's function with its own pointer; a `Text` ends with 0.
                unsafe { function(level, text.with_end().as_ptr().cast(), user) };
            }
            Sink::StandardError => {
                let line = [b"cuda-ipc: ", text.written(), b"\n"].concat();
                // One write, so that lines of several threads do not mix; whoever has closed standard error wants no lines.
                let _ = std::io::stderr().write_all(&line);
            }
        }
    }

    /// Says that a lane is lost: as a warning the first time for this cause.
    pub(crate) fn lost(&self, cause: cuda_ipc_status_t, line: fmt::Arguments<'_>) {
        let first = {
            let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
            let first = !said.contains(&cause);
            if first {
                said.push(cause);
            }
            first
        };
        self.say(if first { CUDA_IPC_LOG_WARN } else { CUDA_IPC_LOG_DEBUG }, line);
    }
}
