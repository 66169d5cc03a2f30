//! A UCX source tree: which release it is, which of its files have hooks, and what each of them is without and with them.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use similar::TextDiff;

use super::edit::{self, Misfit};
use super::hooks::{self, Hook};
use crate::workspace::Failure;

/// Releases that the table is for: as it calls them, and as people do.
const RELEASES: [(&str, &str); 3] = [("1.21", "1.21"), ("1.22", "1.22"), ("1.23", "1.23 (master)")];
/// Where our files go.
const FOLDER: &str = "src/uct/cuda/cuda_ipc";
const OURS: [&str; 7] = [
    "cuda_ipc_lane.h",
    "cuda_ipc_lane.inl",
    "cuda_ipc_lane_int.h",
    "cuda_ipc_lane.c",
    "cuda_ipc_lane_export.c",
    "cuda_ipc_lane_import.c",
    "cuda_ipc_lane_lease.c",
];
/// Behind a file's name while it is written.
const HALF_WRITTEN: &str = ".ucx-apply";

/// Whether the lane is in a tree or a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Clean,
    Applied,
}

/// One file of the tree; `None` where there is none.
struct File {
    path: String,
    state: State,
    without: Option<String>,
    with: Option<String>,
}

/// See the module's documentation.
pub(super) struct Tree {
    folder: PathBuf,
    release: &'static str,
    state: State,
    files: Vec<File>,
}

impl Tree {
    /// Reads a tree; `ucx` is the folder of our files. An error if the tree is none, or of a release that the table does not know, or has changed in any place.
    pub(super) fn open(folder: &Path, ucx: &Path) -> Result<Self, Failure> {
        let (release, release_name) = release_of(folder)?;
        let table = read(&ucx.join("hooks.txt"))?.ok_or_else(|| Failure::task("ucx/hooks.txt is missing"))?;
        let hooks: Vec<Hook> = hooks::parse(&table)?.into_iter().filter(|hook| hook.is_for(release)).collect();
        let mut files = Vec::new();
        for path in in_order(&hooks) {
            let of_file: Vec<Hook> = hooks.iter().filter(|hook| hook.file == path).cloned().collect();
            let text =
                read(&folder.join(&path))?.ok_or_else(|| Failure::task(format!("{path}: there is no such file (UCX {release_name})")))?;
            let (state, without, with) =
                changed(&text, &of_file).map_err(|misfit| Failure::task(format!("{path}: {misfit} (UCX {release_name})")))?;
            files.push(File { path, state, without: Some(without), with: Some(with) });
        }
        for name in OURS {
            let path = format!("{FOLDER}/{name}");
            let ours = read(&ucx.join(name))?.ok_or_else(|| Failure::task(format!("ucx/{name} is missing")))?;
            let state = match read(&folder.join(&path))? {
                None => State::Clean,
                Some(found) if found == ours => State::Applied,
                Some(_) => return Err(Failure::task(format!("{path}: is another than ucx/{name} (UCX {release_name})"))),
            };
            files.push(File { path, state, without: None, with: Some(ours) });
        }
        let state = one_state(&files, release_name)?;
        Ok(Self { folder: folder.to_owned(), release: release_name, state, files })
    }

    pub(super) fn release(&self) -> &str {
        self.release
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Files that have anything of the lane.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// A unified diff from the tree without the lane to the tree with it.
    pub(super) fn diff(&self) -> String {
        let mut text = String::new();
        for file in &self.files {
            let (old, new) = (file.without.as_deref().unwrap_or_default(), file.with.as_deref().unwrap_or_default());
            let before = if file.without.is_some() { format!("a/{}", file.path) } else { "/dev/null".to_owned() };
            let diff = TextDiff::from_lines(old, new);
            text += &diff.unified_diff().context_radius(3).header(&before, &format!("b/{}", file.path)).to_string();
        }
        text
    }

    pub(super) fn apply(&self) -> Result<(), Failure> {
        self.write(|file| file.with.as_deref())
    }

    pub(super) fn revert(&self) -> Result<(), Failure> {
        self.write(|file| file.without.as_deref())
    }

    /// Makes every file what `wanted` says: first beside the old ones, and if all that has worked, in their places.
    fn write<'a>(&'a self, wanted: impl Fn(&'a File) -> Option<&'a str>) -> Result<(), Failure> {
        let half_written = |file: &File| self.folder.join(format!("{}{HALF_WRITTEN}", file.path));
        let failed = |path: &Path, error: std::io::Error| Failure::task(format!("{}: {error}", path.display()));
        let written = self.files.iter().try_for_each(|file| {
            let Some(text) = wanted(file) else { return Ok(()) };
            let (old, new) = (self.folder.join(&file.path), half_written(file));
            fs::write(&new, text).map_err(|error| failed(&new, error))?;
            match fs::metadata(&old) {
                Ok(old) => fs::set_permissions(&new, old.permissions()).map_err(|error| failed(&new, error)),
                Err(_) => Ok(()),
            }
        });
        if written.is_err() {
            for file in &self.files {
                let _ = fs::remove_file(half_written(file));
            }
            return written;
        }
        for file in &self.files {
            let path = self.folder.join(&file.path);
            match wanted(file) {
                Some(_) => fs::rename(half_written(file), &path),
                None => fs::remove_file(&path),
            }
            .map_err(|error| failed(&path, error))?;
        }
        Ok(())
    }
}

/// What a file is, and what it is without and with the hooks.
fn changed(text: &str, hooks: &[Hook]) -> Result<(State, String, String), Misfit> {
    let undone = edit::undo(text, hooks);
    if let Ok(without) = &undone
        && edit::apply(without, hooks).is_ok_and(|with| with == text)
    {
        return Ok((State::Applied, without.clone(), text.to_owned()));
    }
    match undone {
        Err(misfit) if edit::has_traces(text, hooks) => Err(misfit),
        _ => Ok((State::Clean, text.to_owned(), edit::apply(text, hooks)?)),
    }
}

/// The state of all files, which is the same unless somebody has changed some of them.
fn one_state(files: &[File], release: &str) -> Result<State, Failure> {
    let with = files.iter().find(|file| file.state == State::Applied);
    let without = files.iter().find(|file| file.state == State::Clean);
    match (with, without) {
        (Some(with), Some(without)) => {
            Err(Failure::task(format!("{} has the lane and {} has not (UCX {release})", with.path, without.path)))
        }
        (Some(_), None) => Ok(State::Applied),
        (None, _) => Ok(State::Clean),
    }
}

/// The files of the hooks, each once.
fn in_order(hooks: &[Hook]) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for hook in hooks {
        if !paths.contains(&hook.file) {
            paths.push(hook.file.clone());
        }
    }
    paths
}

/// The release, as the table and as people call it.
fn release_of(folder: &Path) -> Result<(&'static str, &'static str), Failure> {
    let path = folder.join("configure.ac");
    let text =
        read(&path)?.ok_or_else(|| Failure::task(format!("{}: there is no such file: is that a UCX source tree?", path.display())))?;
    let number = |name: &str| {
        let start = format!("define([{name}],");
        let value = text.lines().find_map(|line| line.strip_prefix(start.as_str()))?;
        value.split(')').next().map(|value| value.trim().to_owned())
    };
    let (Some(major), Some(minor)) = (number("ucx_ver_major"), number("ucx_ver_minor")) else {
        return Err(Failure::task(format!("{}: it names no version of UCX", path.display())));
    };
    let version = format!("{major}.{minor}");
    RELEASES.into_iter().find(|(release, _)| *release == version).ok_or_else(|| {
        let known: Vec<&str> = RELEASES.iter().map(|(_, name)| *name).collect();
        Failure::task(format!("{}: UCX {version} is not in the table, which has {}", path.display(), known.join(", ")))
    })
}

/// The text of a file; none if there is no file.
fn read(path: &Path) -> Result<Option<String>, Failure> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::task(format!("{}: {error}", path.display()))),
    }
}
