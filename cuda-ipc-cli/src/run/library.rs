//! The preload library: where it is, and whether the loader can be told of it.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::Refusal;
use super::program::elf::Elf;

/// Its file name.
const FILE: &str = "libcuda_ipc_preload.so";
/// Names it by path.
const VARIABLE: &str = "CUDA_IPC_PRELOAD";

/// A library that can be preloaded.
#[derive(Debug)]
pub(super) struct Library {
    path: PathBuf,
    elf: Elf,
}

impl Library {
    /// The one that is asked for, by argument or variable; else the one beside this program, or in `../lib`.
    pub(super) fn find(asked: Option<&Path>) -> Result<Self, Refusal> {
        let variable = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(path) = asked.map(Path::to_owned).or(variable) {
            return Self::open(&path).map_err(|why| refuse(&path, &why));
        }
        let program = std::env::current_exe().and_then(std::fs::canonicalize);
        let program = program.map_err(|error| Refusal::new(Refusal::OURS, format!("where this program is: {error}")))?;
        let places: Vec<PathBuf> =
            program.parent().into_iter().flat_map(|folder| [folder.join(FILE), folder.join("../lib").join(FILE)]).collect();
        match places.iter().find(|place| place.exists()) {
            Some(place) => Self::open(place).map_err(|why| refuse(place, &why)),
            None => {
                let places: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
                Err(Refusal::new(
                    Refusal::OURS,
                    format!("no preload library: neither {}; --library PATH or {VARIABLE}=PATH says where it is", places.join(" nor ")),
                ))
            }
        }
    }

    fn open(path: &Path) -> Result<Self, String> {
        let path = path.canonicalize().map_err(|error| error.to_string())?;
        // The loader splits LD_PRELOAD there and replaces there; it knows no quotes.
        if let Some(byte) = path.as_os_str().as_bytes().iter().find(|byte| matches!(byte, b':' | b' ' | b'$')) {
            return Err(format!("LD_PRELOAD cannot name a path with `{}`", char::from(*byte)));
        }
        let elf = Elf::read(&path).map_err(|error| error.to_string())?.ok_or("it is no ELF file")?;
        Ok(Self { path, elf })
    }

    /// Absolute path, without links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn elf(&self) -> &Elf {
        &self.elf
    }
}

fn refuse(path: &Path, why: &str) -> Refusal {
    Refusal::new(Refusal::OURS, format!("the preload library {}: {why}", path.display()))
}
