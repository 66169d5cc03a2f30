//! UCX's CUDA modules, of a process or of the environment, and whether they were built with the POSIX_FD arm.
//!
//! The arm is there where the module calls `syscall` (UCX makes pidfd calls by it) and speaks of pidfd. Released wheels lack both, because the C library they are
//! built with has no name for the call. Nothing is loaded: the files are read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use object::{Object, ObjectSymbol};
use serde::Serialize;

use super::process::mapped_files;

/// What was found.
#[derive(Serialize)]
pub(super) struct Ucx {
    /// Where was looked: `process` or `environment`.
    pub(super) searched: &'static str,
    pub(super) libraries: Vec<Library>,
    /// UCX and NIXL wheels of the current Python.
    pub(super) wheels: Vec<Wheel>,
    /// Why Python was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) python_error: Option<String>,
}

/// One CUDA module of UCX.
#[derive(Serialize)]
pub(super) struct Library {
    pub(super) path: String,
    /// Whether it has the POSIX_FD arm; none if the file cannot be read.
    pub(super) has_arm: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// One installed distribution.
#[derive(Serialize)]
pub(super) struct Wheel {
    pub(super) name: String,
    pub(super) version: String,
}

/// The module's file, whatever follows: `libuct_cuda.so.0`, `libuct_cuda-0a1b2c3d.so.0.0.0`.
const MODULE: &str = "libuct_cuda";
/// Distributions that are of interest, by how their names begin.
const WHEELS: [&str; 2] = ["libucx", "nixl"];

impl Ucx {
    /// Looks into process `pid`, else into the environment.
    pub(super) fn look(pid: Option<u32>) -> Self {
        let mut paths = BTreeSet::new();
        let (mut wheels, mut python_error) = (Vec::new(), None);
        match pid {
            Some(pid) => paths.extend(mapped_files(pid).unwrap_or_default().into_iter().map(PathBuf::from).filter(|path| is_module(path))),
            None => {
                for folder in std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths) {
                    paths.extend(modules_in(&folder));
                    paths.extend(modules_in(&folder.join("ucx")));
                }
                match python_folders() {
                    Ok(folders) => folders.iter().for_each(|folder| look_at_wheels(folder, &mut wheels, &mut paths)),
                    Err(error) => python_error = Some(error),
                }
            }
        }
        // One file of several names is one library.
        let files: BTreeSet<PathBuf> = paths.into_iter().map(|path| std::fs::canonicalize(&path).unwrap_or(path)).collect();
        Self { searched: if pid.is_some() { "process" } else { "environment" }, libraries: read_all(files), wheels, python_error }
    }
}

/// Reads the files. Copies in one folder, which wheels have for want of links, are one library, by its first name.
fn read_all(files: BTreeSet<PathBuf>) -> Vec<Library> {
    let (mut seen, mut libraries) = (Vec::new(), Vec::new());
    for path in files {
        let read = (path.parent().map(Path::to_owned), std::fs::read(&path).map_err(|error| error.to_string()));
        if !seen.contains(&read) {
            libraries.push(Library::of(&path, &read.1));
            seen.push(read);
        }
    }
    libraries
}

impl Library {
    fn of(path: &Path, bytes: &Result<Vec<u8>, String>) -> Self {
        let arm = bytes.as_ref().map_err(Clone::clone).and_then(|bytes| has_arm(bytes).map_err(|error| error.to_string()));
        Self { path: path.display().to_string(), has_arm: arm.as_ref().ok().copied(), error: arm.err() }
    }
}

fn has_arm(bytes: &[u8]) -> Result<bool, object::read::Error> {
    let file = object::read::elf::ElfFile64::<object::Endianness>::parse(bytes)?;
    let calls = file.dynamic_symbols().any(|symbol| symbol.is_undefined() && symbol.name() == Ok("syscall"));
    Ok(calls && bytes.windows(5).any(|part| part == b"pidfd"))
}

fn is_module(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.strip_prefix(MODULE)).is_some_and(|rest| rest.starts_with(['.', '-']) && rest.contains(".so"))
}

fn modules_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_module(path)).collect()
}

/// The folders from which `python3` takes installed packages.
fn python_folders() -> Result<Vec<PathBuf>, String> {
    const SCRIPT: &str = "import sys\nfor p in sys.path:\n    if p.endswith('-packages'): print(p)";
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().map_err(|error| format!("python3: {error}"))?;
    if !output.status.success() {
        return Err(format!("python3: {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect())
}

/// Adds the wheels of a folder, and the modules that they say they have installed.
fn look_at_wheels(folder: &Path, wheels: &mut Vec<Wheel>, paths: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let Some((name, version)) = file_name.to_str().and_then(|name| name.strip_suffix(".dist-info")?.split_once('-')) else { continue };
        if !WHEELS.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        wheels.push(Wheel { name: name.to_owned(), version: version.to_owned() });
        let record = std::fs::read_to_string(entry.path().join("RECORD")).unwrap_or_default();
        // Path, hash and size, separated by commas.
        let installed = record.lines().filter_map(|line| line.split(',').next()).map(|path| folder.join(path));
        paths.extend(installed.filter(|path| is_module(path)));
    }
    wheels.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
}
