//! What is said, and when: one line for each cause of a lost lane, more if CUDA_IPC_LOG asks for it, otherwise nothing.
//!
//! A preload library has no logger: its one channel is standard error. The report at exit is `explain.rs`'.

use core::fmt::{Arguments, Write as _};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::io::Write;
use std::sync::OnceLock;

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
    /// UCX's calls do not come here.
    Bypassed,
    /// A setting that is not understood.
    Setting,
}

/// How many there are.
const CAUSES: usize = 7;

static COUNTS: [AtomicU64; CAUSES] = [const { AtomicU64::new(0) }; CAUSES];
/// What was said first of each.
static FIRST: [OnceLock<String>; CAUSES] = [const { OnceLock::new() }; CAUSES];

/// How much is said: the values of CUDA_IPC_LOG.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Level {
    Silent,
    Warn,
    Info,
    Debug,
}

/// Counts `cause`, and says `text` the first time; each time at level `debug`.
pub(crate) fn warn(cause: Cause, text: &Arguments<'_>) {
    let first = note(cause, text);
    if is_said(first) {
        say(&format_args!("WARN {text}"));
    }
}

static FOUND: [AtomicU64; diagnosis::Cause::COUNT] = [const { AtomicU64::new(0) }; diagnosis::Cause::COUNT];

/// As [`warn`], with the cause that was found and its remedy: once for each of these.
pub(crate) fn warn_found(cause: Cause, text: &Arguments<'_>, found: Option<&Diagnosis>) {
    let Some(found) = found else { return warn(cause, text) };
    note(cause, text);
    let first = FOUND.get(found.cause.index()).is_some_and(|count| count.fetch_add(1, Relaxed) == 0);
    if is_said(first) {
        let mut lines = format!("WARN {text}\ncause: {found}\nremedy: {}\n", found.remedy());
        if let Some(way) = found.other_way() {
            let _ = writeln!(lines, "{way}");
        }
        say(&format_args!("{lines}"));
    }
}

/// Counts `cause`, and remembers the first text for the report at exit. Whether this is the first.
fn note(cause: Cause, text: &Arguments<'_>) -> bool {
    let first = COUNTS.get(cause as usize).is_some_and(|count| count.fetch_add(1, Relaxed) == 0);
    if first && let Some(slot) = FIRST.get(cause as usize) {
        let _ = slot.set(text.to_string());
    }
    first
}

/// Whether a warning is said that is the first of its kind, or is not.
fn is_said(first: bool) -> bool {
    level() >= if first { Level::Warn } else { Level::Debug }
}

/// Says what may be worth knowing about this process, at level `info`.
pub(crate) fn info(text: &Arguments<'_>) {
    if level() >= Level::Info {
        say(&format_args!("INFO {text}"));
    }
}

/// Says what happens, at level `debug`.
pub(crate) fn debug(text: &Arguments<'_>) {
    if level() >= Level::Debug {
        say(&format_args!("DEBUG {text}"));
    }
}

/// Writes lines, each with the name of this project in front.
pub(crate) fn say(text: &Arguments<'_>) {
    // One write, so that lines of several threads do not mix. A closed standard error is nobody's problem.
    let lines: String = text.to_string().lines().map(|line| format!("cuda-ipc: {line}\n")).collect();
    let _ = std::io::stderr().write_all(lines.as_bytes());
}

/// What was lost: how often, and what was said the first time.
pub(crate) fn lost() -> impl Iterator<Item = (u64, &'static str)> {
    let count = |count: &AtomicU64| count.load(Relaxed);
    COUNTS.iter().map(count).zip(&FIRST).filter_map(|(count, text)| Some((count, text.get()?.as_str())))
}

fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| match std::env::var("CUDA_IPC_LOG").as_deref() {
        Ok("off" | "error") => Level::Silent,
        Ok("info") => Level::Info,
        Ok("debug") => Level::Debug,
        _ => Level::Warn,
    })
}
