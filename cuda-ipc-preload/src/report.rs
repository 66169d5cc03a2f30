//! What is said, and when: one line for each cause of a lost lane, a report at exit if asked for, otherwise nothing.
//!
//! A preload library has no logger: its one channel is standard error, and it uses it for a lost lane only.

use core::fmt::{Arguments, Write as _};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::io::Write;

use cuda_ipc_core::diagnosis::{self, Diagnosis};

/// What can be lost, each said once and then counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub(crate) enum Cause {
    /// No driver, or none that initialises.
    NoDriver,
    /// No export table.
    NoTable,
    /// Memory that could not be exported.
    NotExported,
    /// A key that could not be imported.
    NotImported,
    /// A copy from or to memory that its owner has freed.
    DeadRange,
}

/// How many there are.
const CAUSES: usize = 5;

static COUNTS: [AtomicU64; CAUSES] = [const { AtomicU64::new(0) }; CAUSES];

/// Counts `cause`, and says `text` the first time.
pub(crate) fn warn(cause: Cause, text: &Arguments<'_>) {
    let first = COUNTS.get(cause as usize).is_some_and(|count| count.fetch_add(1, Relaxed) == 0);
    if first && !silent() {
        // One write, so that lines of several threads do not mix. A closed standard error is nobody's problem.
        let line = format!("cuda-ipc: WARN {text}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

static FOUND: [AtomicU64; diagnosis::Cause::COUNT] = [const { AtomicU64::new(0) }; diagnosis::Cause::COUNT];

/// As [`warn`], with the cause that was found and its remedy: once for each of these.
pub(crate) fn warn_found(cause: Cause, text: &Arguments<'_>, found: Option<&Diagnosis>) {
    let Some(found) = found else { return warn(cause, text) };
    let first = FOUND.get(found.cause.index()).is_some_and(|count| count.fetch_add(1, Relaxed) == 0);
    if first && !silent() {
        let mut lines = format!("cuda-ipc: WARN {text}\ncuda-ipc: cause: {found}\ncuda-ipc: remedy: {}\n", found.remedy());
        if let Some(way) = found.other_way() {
            let _ = writeln!(lines, "cuda-ipc: {way}");
        }
        // One write, as above.
        let _ = std::io::stderr().write_all(lines.as_bytes());
    }
}

fn silent() -> bool {
    std::env::var_os("CUDA_IPC_LOG").is_some_and(|level| level == "off" || level == "error")
}
