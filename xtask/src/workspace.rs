//! Where things are, how commands are run, and how a task fails. Shared by all tasks.

use std::path::{Path, PathBuf};

use xshell::{Cmd, Shell};

/// Why a task stopped; expected failures only, so no backtrace.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments make no sense: exit 64 and the task's usage.
    Usage(String),
    /// Something that was run or read failed: exit 1. The text names the command or the file.
    Task(String),
}

impl Failure {
    pub(crate) fn task(what: impl Into<String>) -> Self {
        Self::Task(what.into())
    }

    pub(crate) fn unknown_argument(arg: &str) -> Self {
        Self::Usage(format!("unknown argument `{arg}`"))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(what) | Self::Task(what) => f.write_str(what),
        }
    }
}

impl From<xshell::Error> for Failure {
    /// xshell's errors name the command or the path.
    fn from(error: xshell::Error) -> Self {
        Self::Task(error.to_string())
    }
}

/// The checkout and the tools that every task uses.
pub(crate) struct Workspace {
    /// The folder of the workspace's Cargo.toml.
    pub(crate) root: PathBuf,
    /// Cargo's target folder, which also holds what tasks download and generate.
    pub(crate) target: PathBuf,
    /// Runs commands in `root`.
    pub(crate) shell: Shell,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self, Failure> {
        // `cargo run` sets these; a copied binary falls back to where it was built.
        let manifest_folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
        let root = Path::new(&manifest_folder).parent().map(Path::to_owned).ok_or_else(|| Failure::task("xtask is in no workspace"))?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(folder) => std::path::absolute(folder).map_err(|error| Failure::task(format!("CARGO_TARGET_DIR: {error}")))?,
            None => root.join("target"),
        };
        let shell = Shell::new()?;
        shell.change_dir(&root);
        Ok(Self { root, target, shell })
    }

    /// A cargo command line, split at spaces.
    ///
    /// Plain `cargo`: rustup's variables, inherited from the cargo that runs us, make it the same toolchain.
    pub(crate) fn cargo(&self, line: &str) -> Cmd<'_> {
        self.shell.cmd("cargo").args(line.split_whitespace())
    }

    /// A cargo command for one of the small workspaces of their own (`tests/no-std-proof`, `fuzz`).
    ///
    /// Their lock files are committed; in CI an outdated one is an error, elsewhere cargo updates it and git shows that.
    pub(crate) fn cargo_in(&self, folder: &str, line: &str) -> Cmd<'_> {
        let manifest = self.root.join(folder).join("Cargo.toml");
        let locked = in_ci().then_some("--locked");
        self.cargo(line).arg("--manifest-path").arg(manifest).args(locked)
    }

    /// The text of a file, by its path from the root.
    pub(crate) fn read(&self, path: &str) -> Result<String, Failure> {
        Ok(self.shell.read_file(self.root.join(path))?)
    }

    /// Whether a program of this name is in PATH.
    pub(crate) fn has_program(&self, name: &str) -> bool {
        std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
    }
}

/// Whether this is a CI run: `CI` is set and not empty.
pub(crate) fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty())
}
