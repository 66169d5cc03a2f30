//! `tidy`: checks what neither the compiler nor clippy can: which crate may do what, licences, documents.
//!
//! Every finding is a line `path:line: reason` and fails the task; the length report does not. Each check is a file and works on texts, so that it
//! can be tested; this file gathers the texts.

mod catalogue;
mod documents;
mod layers;
mod manifests;
mod rust_version;
mod soundness;
mod sources;
mod supply;

use std::process::ExitCode;

use serde_json::Value;
use xshell::cmd;

use crate::fuzz;
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "";

/// One violation.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    line: usize,
    reason: String,
}

impl Finding {
    fn new(path: &str, line: usize, reason: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, reason: reason.into() }
    }
}

/// A file of the checkout that is text.
struct File {
    /// From the root.
    path: String,
    text: String,
}

impl File {
    fn has_extension(&self, extension: &str) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, found)| found == extension)
    }
}

/// Runs every check and prints what it finds.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    if let [arg, ..] = args {
        return Err(Failure::unknown_argument(arg));
    }
    let files = files(workspace)?;
    let deny = workspace.read("deny.toml")?;
    let mut findings = Vec::new();
    findings.extend(sources::check(&files));
    findings.extend(documents::check(&files));
    findings.extend(catalogue::check(&files));
    findings.extend(soundness::check(&files));
    for (manifest, is_root) in [("Cargo.toml", true), ("tests/no-std-proof/Cargo.toml", false), ("fuzz/Cargo.toml", false)] {
        let lock = manifest.replace(".toml", ".lock");
        match metadata(workspace, manifest)? {
            Some(metadata) => {
                findings.extend(supply::check(&lock, &metadata, &deny));
                if is_root {
                    findings.extend(layers::check(&files, &metadata));
                    findings.extend(manifests::check(&files, &metadata));
                    findings.extend(rust_version::check(&files, &metadata));
                }
            }
            None => findings.push(Finding::new(
                &lock,
                1,
                format!("is out of date; run `cargo metadata --manifest-path {manifest}` and commit it"),
            )),
        }
    }
    for (path, lines) in sources::long_files(&files) {
        println!("note: {path} has {lines} lines; about {} is the aim", sources::LONG);
    }
    for Finding { path, line, reason } in &findings {
        println!("{path}:{line}: {reason}");
    }
    if findings.is_empty() {
        println!("tidy: {} files, no findings", files.len());
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::task(format!("{} findings", findings.len())))
}

/// All text files that git tracks or would add.
fn files(workspace: &Workspace) -> Result<Vec<File>, Failure> {
    let list = cmd!(workspace.shell, "git ls-files --cached --others --exclude-standard").quiet().read()?;
    // Git quotes such a name; cargo refuses to pack a crate that has one. Nobody chooses it: some program has opened a file by a wrong pointer.
    if let Some(name) = list.lines().find(|path| path.starts_with('"')) {
        return Err(Failure::task(format!("{name} is no name for a file")));
    }
    let mut files: Vec<File> = list
        .lines()
        // A file that is deleted and not yet committed, or that is no text, cannot break a rule.
        .filter_map(|path| Some(File { path: path.to_owned(), text: std::fs::read_to_string(workspace.root.join(path)).ok()? }))
        .collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// What cargo knows about a workspace and its dependencies on this platform; `None` if its lock file does not fit its manifests.
fn metadata(workspace: &Workspace, manifest: &str) -> Result<Option<Value>, Failure> {
    let sh = &workspace.shell;
    let host = fuzz::host(workspace)?;
    let output = cmd!(sh, "cargo metadata --format-version 1 --all-features --locked --filter-platform {host} --manifest-path {manifest}")
        .quiet()
        .ignore_status()
        .output()?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        return if errors.contains("--locked") { Ok(None) } else { Err(Failure::task(format!("cargo metadata for {manifest}: {errors}"))) };
    }
    serde_json::from_slice(&output.stdout).map(Some).map_err(|error| Failure::task(format!("cargo metadata for {manifest}: {error}")))
}

/// The 1-based number of the first line that `wanted` accepts; 1 if there is none.
fn line_of(text: &str, wanted: impl Fn(&str) -> bool) -> usize {
    text.lines().position(wanted).map_or(1, |at| at + 1)
}

#[cfg(test)]
fn file(path: &str, text: &str) -> File {
    File { path: path.to_owned(), text: text.to_owned() }
}
