//! `cuda-ipc run`: starts a program with the preload library.
//!
//! This file is the command: it prepares the environment and becomes the program by exec, so signals, exit code and process are the program's own.
//! `run/library.rs` finds the library, `run/program.rs` finds the program and says why the loader would not preload into it, `run/settings.rs` and
//! `run/nvlink.rs` look at what keeps UCX off the lane. All output is on standard error.
//!
//! Exit codes are those of env(1): the program's own, or 125 if this command fails before it has come to the program, 126 if the program is there and
//! cannot be run with the library, 127 if it is not there; and 64 for a wrong use, as everywhere in `cuda-ipc`.

mod library;
mod nvlink;
mod program;
mod settings;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::ValueEnum;

use library::Library;

/// Start a program with the preload library, which gives its UCX or NIXL the cuda_ipc lane for memory of cuMemCreate.
///
/// The program and its children are as without it, unless they load UCX's CUDA module. Prints nothing unless there is something to say on how UCX is set up. Exit
/// code: the program's; 125 without a usable library, 126 if the program cannot be run with it, 127 if there is no such program.
#[derive(clap::Args)]
#[command(override_usage = "cuda-ipc run [OPTIONS] [--] CMD [ARGS]...")]
pub(crate) struct Args {
    /// Let each process that used UCX's CUDA module say at its end what it shared, imported and was refused
    #[arg(long)]
    explain: bool,
    /// How much is said: the library says each cause of a lost lane once, as a warning
    #[arg(long, value_name = "LEVEL")]
    log: Option<Level>,
    /// The preload library [default: CUDA_IPC_PRELOAD, or libcuda_ipc_preload.so beside this program or in ../lib]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Values of `--log` and of CUDA_IPC_LOG.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

impl Level {
    const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }

    fn of_environment() -> Self {
        let value = std::env::var("CUDA_IPC_LOG").unwrap_or_default();
        Self::from_str(&value, true).unwrap_or(Self::Warn)
    }
}

/// Why the program does not run.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    code: u8,
    text: String,
}

impl Refusal {
    const OURS: u8 = 125;
    const NOT_RUNNABLE: u8 = 126;
    const NOT_FOUND: u8 = 127;

    fn new(code: u8, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

/// Becomes the program; returns only if that is not possible.
pub(crate) fn run(args: &Args) -> ExitCode {
    let Err(refusal) = start(args);
    eprintln!("cuda-ipc: {}", refusal.text);
    ExitCode::from(refusal.code)
}

fn start(args: &Args) -> Result<core::convert::Infallible, Refusal> {
    let (name, arguments) = args.command.split_first().ok_or_else(|| Refusal::new(Refusal::OURS, "no program"))?;
    let library = Library::find(args.library.as_deref())?;
    let program = program::find(name)?;
    program::check(&program, &library)?;

    let mut command = Command::new(&program);
    command.arg0(name).args(arguments);
    command.env("LD_PRELOAD", with_library(library.path(), std::env::var_os("LD_PRELOAD").as_deref()));
    if args.explain {
        // Which of all the processes is the program itself: that one says so if it never used UCX.
        command.env("CUDA_IPC_EXPLAIN", std::process::id().to_string());
    }
    let level = args.log.unwrap_or_else(Level::of_environment);
    if args.log.is_some() {
        command.env("CUDA_IPC_LOG", level.name());
    }
    let findings = settings::look(|name| std::env::var(name).ok(), &nvlink::look);
    if findings.enable_reads {
        command.env(settings::ENABLE_READS, "y");
    }
    if level >= Level::Warn {
        for note in &findings.notes {
            eprintln!("cuda-ipc: {note}");
        }
    }
    let error = command.exec();
    Err(Refusal::new(Refusal::NOT_RUNNABLE, format!("{}: {error}", program.display())))
}

/// `LD_PRELOAD` with our library in front of what is there, and once.
fn with_library(library: &Path, existing: Option<&OsStr>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let separates = |byte: &u8| matches!(byte, b':' | b' ');
    for other in existing.unwrap_or_default().as_bytes().split(separates).filter(|other| !other.is_empty()) {
        if other != library.as_os_str().as_bytes() {
            value.push(":");
            value.push(OsStr::from_bytes(other));
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::with_library;
    use std::ffi::OsStr;
    use std::path::Path;

    #[test]
    fn what_was_preloaded_stays_behind_ours() {
        let value =
            |existing: Option<&str>| with_library(Path::new("/l/ours.so"), existing.map(OsStr::new)).into_string().unwrap_or_default();
        assert_eq!(value(None), "/l/ours.so");
        assert_eq!(value(Some("")), "/l/ours.so");
        assert_eq!(value(Some("/a.so /b.so:libc.so")), "/l/ours.so:/a.so:/b.so:libc.so");
        // A command inside of a command.
        assert_eq!(value(Some("/a.so:/l/ours.so")), "/l/ours.so:/a.so");
    }
}
