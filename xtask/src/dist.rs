//! `dist`: what is handed out, under `target/packages`: a tar.gz and a Python wheel for any x86-64 Linux with glibc 2.28 or later; with `--gpu-kit`, a folder for
//! a machine with a GPU and without a toolchain.
//!
//! The binaries are linked by zig against the old glibc; its pinned version comes from PyPI into `target/dist-tools`. What they ask of glibc is read from
//! them afterwards, since a wrong linker would go unnoticed on a new machine. `dist/trials.rs` uses packages and checkout as new users would.

mod kit;
mod trials;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use xshell::{Cmd, cmd};

use crate::c_library;
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[--gpu-kit | --check]";

/// The oldest glibc that the packages run on: that of manylinux_2_28.
const GLIBC: (u32, u32) = (2, 28);
const TARGET: &str = "x86_64-unknown-linux-gnu";
const PACKAGES: &str = "--package cuda-ipc-cli --package cuda-ipc-preload --package cuda-ipc-ffi";
const REQUIREMENTS: &str = "xtask/dist/requirements.txt";
/// Files that go into the tar.gz as they are: from the root of the checkout, into a folder.
const FILES: &[(&str, &str)] = &[
    ("README.md", ""),
    ("LICENSE-MIT", ""),
    ("LICENSE-APACHE", ""),
    ("docs/permissions.md", "docs"),
    ("docs/c-abi.md", "docs"),
    ("examples/c/common.h", "examples"),
    ("examples/c/driver.h", "examples"),
    ("examples/c/exporter.c", "examples"),
    ("examples/c/importer.c", "examples"),
];

/// Makes the packages; with `--check` also uses them.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let flag = match args {
        [] => None,
        [flag] if flag == "--gpu-kit" || flag == "--check" => Some(flag.as_str()),
        [other, ..] => return Err(Failure::unknown_argument(other)),
    };
    let tools = Tools::fetch(workspace)?;
    let out = workspace.shell.create_dir(workspace.target.join("packages"))?;
    if flag == Some("--gpu-kit") {
        println!("{}", kit::make(workspace, &tools, &out)?.display());
        return Ok(ExitCode::SUCCESS);
    }
    let built = tools.build(workspace, PACKAGES)?;
    let archive = archive(workspace, &built, &out)?;
    let wheel = wheel(workspace, &tools, &built, &out)?;
    if flag == Some("--check") {
        trials::run(workspace, &archive, &wheel)?;
    }
    println!("{}\n{}", archive.display(), wheel.display());
    Ok(ExitCode::SUCCESS)
}

/// The programs that `requirements.txt` pins, in a virtual environment.
pub(crate) struct Tools {
    bin: PathBuf,
}

impl Tools {
    /// Installs them, unless they were installed from the very same pins.
    fn fetch(workspace: &Workspace) -> Result<Self, Failure> {
        let sh = &workspace.shell;
        let folder = workspace.target.join("dist-tools");
        let (pins, stamp) = (workspace.read(REQUIREMENTS)?, folder.join("requirements.txt"));
        let tools = Self { bin: folder.join("bin") };
        if sh.read_file(&stamp).ok().as_deref() != Some(pins.as_str()) {
            sh.remove_path(&folder)?;
            cmd!(sh, "python3 -m venv {folder}").run()?;
            let (python, requirements) = (tools.python(), workspace.root.join(REQUIREMENTS));
            cmd!(sh, "{python} -m pip install --quiet --no-deps --only-binary :all: --require-hashes --requirement {requirements}")
                .run()?;
            // Last, so that an interrupted installation is made again.
            sh.write_file(&stamp, pins)?;
        }
        Ok(tools)
    }

    fn python(&self) -> PathBuf {
        self.bin.join("python")
    }

    /// A build for the old glibc.
    fn cargo<'w>(&self, workspace: &'w Workspace, args: &str) -> Cmd<'w> {
        let target = format!("{TARGET}.{}.{}", GLIBC.0, GLIBC.1);
        let mut path = self.bin.clone().into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let zigbuild = workspace.shell.cmd(self.bin.join("cargo-zigbuild"));
        zigbuild.args(["zigbuild", "--profile", "dist", "--target", &target]).args(args.split_whitespace()).env("PATH", path)
    }

    /// Builds packages for the old glibc and returns the folder they are in.
    fn build(&self, workspace: &Workspace, packages: &str) -> Result<PathBuf, Failure> {
        self.cargo(workspace, packages).run()?;
        let built = workspace.target.join(TARGET).join("dist");
        for file in ["cuda-ipc", "libcuda_ipc_preload.so", "libcuda_ipc.so"] {
            check_glibc(workspace, &built.join(file))?;
        }
        Ok(built)
    }
}

/// An error if a binary asks for a symbol that the old glibc does not have.
fn check_glibc(workspace: &Workspace, file: &Path) -> Result<(), Failure> {
    let sh = &workspace.shell;
    let symbols = cmd!(sh, "objdump --dynamic-syms {file}").quiet().read()?;
    let versions: Vec<(u32, u32)> = symbols.lines().filter_map(glibc_version).collect();
    let Some(newest) = versions.iter().max() else {
        return Err(Failure::task(format!("{}: it asks nothing of glibc, which cannot be", file.display())));
    };
    if *newest > GLIBC {
        return Err(Failure::task(format!("{} needs glibc {}.{}", file.display(), newest.0, newest.1)));
    }
    Ok(())
}

/// The version in a line such as `... (GLIBC_2.28) fcntl64`.
fn glibc_version(line: &str) -> Option<(u32, u32)> {
    let (_, version) = line.split_once("GLIBC_")?;
    let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
    let mut parts = version.get(..end)?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// `cuda-ipc-VERSION-x86_64-linux.tar.gz`: bin, lib, include, docs, examples.
fn archive(workspace: &Workspace, built: &Path, out: &Path) -> Result<PathBuf, Failure> {
    let sh = &workspace.shell;
    let name = format!("cuda-ipc-{}-x86_64-linux", env!("CARGO_PKG_VERSION"));
    let folder = out.join(&name);
    sh.remove_path(&folder)?;
    let (bin, lib) = (sh.create_dir(folder.join("bin"))?, sh.create_dir(folder.join("lib"))?);
    sh.copy_file(built.join("cuda-ipc"), &bin)?;
    sh.copy_file(built.join("libcuda_ipc_preload.so"), &lib)?;
    c_library::lay_out(workspace, built, &folder)?;
    for (file, to) in FILES {
        let to = sh.create_dir(folder.join(to))?;
        sh.copy_file(workspace.root.join(file), to)?;
    }
    let archive = out.join(format!("{name}.tar.gz"));
    // The same files give the same archive.
    cmd!(sh, "tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C {out} -czf {archive} {name}").run()?;
    Ok(archive)
}

/// The wheel, of the folder `python` and the files that cargo has built.
fn wheel(workspace: &Workspace, tools: &Tools, built: &Path, out: &Path) -> Result<PathBuf, Failure> {
    let sh = &workspace.shell;
    let (source, wheels) = (out.join("python"), out.join("wheels"));
    sh.remove_path(&source)?;
    sh.remove_path(&wheels)?;
    let from = workspace.root.join("python");
    cmd!(sh, "cp -r {from} {source}").run()?;
    let package = source.join("src/cuda_ipc");
    for (file, folder) in [("cuda-ipc", "bin"), ("libcuda_ipc_preload.so", "lib")] {
        sh.copy_file(built.join(file), sh.create_dir(package.join(folder))?)?;
    }
    let python = tools.python();
    cmd!(sh, "{python} -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir {wheels} {source}").run()?;
    let wheel = sh.read_dir(&wheels)?.into_iter().next().ok_or_else(|| Failure::task("pip made no wheel"))?;
    if !wheel.to_string_lossy().ends_with("-py3-none-manylinux_2_28_x86_64.whl") {
        return Err(Failure::task(format!("{} is no wheel for manylinux_2_28", wheel.display())));
    }
    Ok(wheel)
}
