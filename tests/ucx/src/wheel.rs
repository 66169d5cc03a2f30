//! UCX releases: downloaded from PyPI by pip, which checks their hashes, unpacked as they are, and our program compiled for each.
//!
//! Everything is kept in `target/ucx`, so a second run downloads nothing. A UCX that somebody has built from its sources is used where it was installed
//! ([`installed`]).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;

/// The releases and their hashes.
const LIST: &str = include_str!("../wheels.txt");
/// The program's sources, in the folder `player` of this package.
const SOURCES: [&str; 4] = ["main.c", "memory.c", "transfer.c", "transport.c"];

/// A release that is listed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Release {
    /// `libucx-cu12`, `libucx-cu13`.
    package: &'static str,
    /// `1.22.0`.
    pub(crate) version: &'static str,
    hash: &'static str,
    /// Whether it is tested unless something else is asked for.
    pub(crate) is_default: bool,
}

impl Release {
    /// All that are listed.
    pub(crate) fn all() -> Vec<Self> {
        LIST.lines().filter_map(Self::parse).collect()
    }

    fn parse(line: &'static str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (package, version) = words.next()?.split_once("==")?;
        let hash = words.next()?;
        hash.starts_with("--hash=").then(|| Self { package, version, hash, is_default: words.next() == Some("default") })
    }

    /// What people call it: `1.22.0`, or `1.22.0-cu13` where CUDA 12 is not meant.
    pub(crate) fn name(&self) -> String {
        match self.package.strip_prefix("libucx-") {
            Some("cu12") | None => self.version.to_owned(),
            Some(cuda) => format!("{}-{cuda}", self.version),
        }
    }

    /// The release, unpacked under `target`, with our program.
    pub(crate) fn fetch(&self, target: &Path) -> Outcome<Wheel> {
        let folder = target.join("ucx").join(self.name());
        let pin = format!("{}=={} {}\n", self.package, self.version, self.hash);
        let stamp = folder.join("requirements.txt");
        if std::fs::read_to_string(&stamp).ok().as_ref() != Some(&pin) {
            self.download(&folder, &pin)?;
            // Last, so that an interrupted download is made again.
            std::fs::rename(folder.join("wanted.txt"), &stamp).map_err(|error| format!("{}: {error}", stamp.display()))?;
        }
        let libraries = format!("{}.libs", self.package.replace('-', "_"));
        let unpacked = folder.join("unpacked");
        let libraries = vec![unpacked.join(libraries)];
        let ucx = unpacked.join("libucx");
        let wheel = Wheel { name: self.name(), version: self.version.to_owned(), ucx, libraries, folder, has_lane: false };
        wheel.compile()?;
        Ok(wheel)
    }

    fn download(&self, folder: &Path, pin: &str) -> Outcome {
        println!("downloading {} {}", self.package, self.version);
        let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
        let _ = std::fs::remove_dir_all(folder);
        let (wheels, unpacked, wanted) = (folder.join("wheels"), folder.join("unpacked"), folder.join("wanted.txt"));
        std::fs::create_dir_all(&wheels).map_err(failed)?;
        std::fs::write(&wanted, pin).map_err(failed)?;
        let mut pip = Command::new("python3");
        pip.args("-m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes".split(' '));
        run(pip.arg("--dest").arg(&wheels).arg("--requirement").arg(&wanted))?;
        for wheel in std::fs::read_dir(&wheels).map_err(failed)? {
            // Not changed in any way afterwards: a stripped library of a wheel does not work.
            run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel.map_err(failed)?.path()).arg(&unpacked))?;
        }
        std::fs::remove_dir_all(&wheels).map_err(failed)
    }
}

/// A UCX that was installed from its sources: `NAME=FOLDER[:MORE]...`, where FOLDER is the prefix it was installed in, and MORE are folders for the loader. NAME
/// begins with the release's number.
pub(crate) fn installed(description: &str, target: &Path) -> Outcome<Wheel> {
    let (name, folders) = description.split_once('=').ok_or("--tree wants NAME=FOLDER")?;
    let mut folders = folders.split(':').map(PathBuf::from);
    let ucx = folders.next().unwrap_or_default();
    let version = name.split('-').next().unwrap_or_default().to_owned();
    let folder = target.join("ucx").join(format!("tree-{name}"));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut wheel = Wheel { name: name.to_owned(), version, ucx, libraries: folders.collect(), folder, has_lane: false };
    let module = std::fs::read(wheel.cuda_module()).map_err(|error| format!("{}: {error}", wheel.cuda_module().display()))?;
    let needed = b"libcuda_ipc.so";
    wheel.has_lane = module.windows(needed.len()).any(|window| window == needed);
    wheel.compile()?;
    Ok(wheel)
}

/// An unpacked release.
#[derive(Clone, Debug)]
pub(crate) struct Wheel {
    pub(crate) name: String,
    version: String,
    /// Ours, for the program.
    folder: PathBuf,
    /// With UCX's `include` and `lib`.
    ucx: PathBuf,
    /// What the packager has put beside UCX's own libraries.
    libraries: Vec<PathBuf>,
    /// Whether its CUDA module was linked with the C library (`cargo xtask ucx-apply`).
    pub(crate) has_lane: bool,
}

impl Wheel {
    /// Whether this is that release or a later one.
    pub(crate) fn is_at_least(&self, version: &str) -> bool {
        let numbers = |text: &str| -> Vec<u32> { text.split('.').filter_map(|part| part.parse().ok()).collect() };
        numbers(&self.version) >= numbers(version)
    }

    /// Our program, linked with this release.
    pub(crate) fn program(&self) -> PathBuf {
        self.folder.join("player")
    }

    /// Folders for the loader to search.
    pub(crate) fn search_path(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.ucx.join("lib")];
        folders.extend(self.libraries.iter().cloned());
        folders
    }

    /// UCX's CUDA transport.
    pub(crate) fn cuda_module(&self) -> PathBuf {
        self.ucx.join("lib/ucx/libuct_cuda.so.0")
    }

    fn compile(&self) -> Outcome {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("player");
        self.compile_to(&SOURCES.map(|file| sources.join(file)), &self.program(), "-lucp")
    }

    /// The program that measures hits, linked with this release.
    pub(crate) fn hit(&self) -> Outcome<PathBuf> {
        let program = self.folder.join("hit");
        self.compile_to(&[Path::new(env!("CARGO_MANIFEST_DIR")).join("hit/main.c")], &program, "-luct")?;
        Ok(program)
    }

    fn compile_to(&self, sources: &[PathBuf], program: &Path, library: &str) -> Outcome {
        let mut cc = Command::new("cc");
        cc.args("-std=c11 -O2 -Wall -Wextra -Werror".split(' ')).arg("-isystem").arg(self.ucx.join("include"));
        cc.args(sources).arg("-o").arg(program);
        // UCX's own libraries depend on each other by names that only the search path of a run resolves.
        cc.arg("-L").arg(self.ucx.join("lib")).args([library, "-luct", "-lucs", "-ldl", "-Wl,--allow-shlib-undefined"]);
        run(&mut cc)
    }
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Outcome {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name}: {status}: {command:?}")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::Release;

    #[test]
    fn every_line_of_the_list_is_a_release() {
        let lines = super::LIST.lines().filter(|line| !line.starts_with('#')).count();
        let all = Release::all();
        assert_eq!(all.len(), lines);
        assert!(all.iter().any(|release| release.is_default && release.name() == "1.22.0"));
        assert!(all.iter().any(|release| !release.is_default && release.name() == "1.22.0-cu13"));
    }
}
