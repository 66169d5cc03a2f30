//! `c-library`: lays the C library out as a package has it: `lib/libcuda_ipc.so*`, `lib/libcuda_ipc.a`, `lib/pkgconfig/cuda_ipc.pc`, `include/cuda_ipc.h`.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use xshell::cmd;

use crate::driver::Profile;
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[--prefix FOLDER]   (default: target/c-library)";
const CRATE: &str = "cuda-ipc-ffi";
/// As the library itself says; a test compares them.
const SONAME: &str = "libcuda_ipc.so.0";

/// Builds the release and lays it out.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let prefix = match args {
        [] => workspace.target.join("c-library"),
        [flag, folder] if flag == "--prefix" => std::path::absolute(folder).map_err(|error| Failure::task(format!("{folder}: {error}")))?,
        [other, ..] => return Err(Failure::unknown_argument(other)),
    };
    workspace.cargo(&format!("build --release --package {CRATE}")).run()?;
    lay_out(workspace, &workspace.target.join(Profile::Release.folder()), &prefix)?;
    eprintln!("installed in {}", prefix.display());
    Ok(ExitCode::SUCCESS)
}

/// Lays out what cargo has put into the folder `built`.
pub(crate) fn lay_out(workspace: &Workspace, built: &Path, prefix: &Path) -> Result<(), Failure> {
    let sh = &workspace.shell;
    let version = env!("CARGO_PKG_VERSION");
    let (lib, include) = (sh.create_dir(prefix.join("lib"))?, sh.create_dir(prefix.join("include"))?);
    let file = format!("libcuda_ipc.so.{version}");
    sh.copy_file(built.join("libcuda_ipc.so"), lib.join(&file))?;
    sh.copy_file(built.join("libcuda_ipc.a"), lib.join("libcuda_ipc.a"))?;
    sh.copy_file(workspace.root.join(CRATE).join("include/cuda_ipc.h"), include.join("cuda_ipc.h"))?;
    for (link, to) in [(SONAME, file.as_str()), ("libcuda_ipc.so", SONAME)] {
        sh.remove_path(lib.join(link))?;
        symlink(to, lib.join(link)).map_err(|error| Failure::task(format!("{link}: {error}")))?;
    }
    let template = workspace.read(&format!("{CRATE}/cuda_ipc.pc.in"))?;
    sh.write_file(lib.join("pkgconfig/cuda_ipc.pc"), filled_in(&template, prefix, version))?;
    Ok(())
}

/// The `.pc` file, without the comment that is for the template.
fn filled_in(template: &str, prefix: &Path, version: &str) -> String {
    let lines = template.lines().filter(|line| !line.starts_with('#'));
    let text: String = lines.flat_map(|line| [line, "\n"]).collect();
    text.replace("@prefix@", &prefix.to_string_lossy()).replace("@version@", version)
}

/// Lays a debug build out and links the examples with what pkg-config says of it, both ways.
pub(crate) fn check(workspace: &Workspace) -> Result<(), Failure> {
    workspace.cargo(&format!("build --package {CRATE} {}", crate::driver::FAKE_PACKAGES)).run()?;
    let fake = crate::driver::FakeDriver::link(workspace, Profile::Debug)?;
    let prefix = workspace.target.join("c-library-check");
    workspace.shell.remove_path(&prefix)?;
    lay_out(workspace, &workspace.target.join(Profile::Debug.folder()), &prefix)?;
    let sh = &workspace.shell;
    let _variable = sh.push_env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let flags = |options: &[&str]| -> Result<Vec<String>, Failure> {
        Ok(cmd!(sh, "pkg-config {options...} cuda_ipc").read()?.split_whitespace().map(str::to_owned).collect())
    };
    let version = cmd!(sh, "pkg-config --modversion cuda_ipc").read()?;
    if version != env!("CARGO_PKG_VERSION") {
        return Err(Failure::task(format!("cuda_ipc.pc has version {version}")));
    }
    // A static link takes the archive by name: `-lcuda_ipc` prefers the shared library beside it.
    let archive = prefix.join("lib/libcuda_ipc.a").to_string_lossy().into_owned();
    let as_archive = |flag: String| if flag == "-lcuda_ipc" { archive.clone() } else { flag };
    let ways = [("dynamic", flags(&["--libs"])?), ("static", flags(&["--static", "--libs"])?.into_iter().map(as_archive).collect())];
    let (cflags, driver) = (flags(&["--cflags"])?, fake.folder());
    for (way, libs) in ways {
        for example in ["exporter", "importer"] {
            let source = workspace.root.join(format!("examples/c/{example}.c"));
            let program: PathBuf = prefix.join(format!("{example}-{way}"));
            let (common, linked) = (&cflags, &libs);
            cmd!(sh, "cc {common...} {source} -o {program} {linked...} -L {driver} -l:libcuda.so.1").run()?;
            let search = format!("{}:{}", prefix.join("lib").display(), driver.display());
            // Without an argument it says how it is used: the loader has found everything.
            let said = cmd!(sh, "{program}").env("LD_LIBRARY_PATH", search).ignore_status().read_stderr()?;
            if !said.starts_with("usage: ") {
                return Err(Failure::task(format!("{} does not run: {said}", program.display())));
            }
        }
    }
    println!("c-library: the examples link with what pkg-config says, both ways");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{SONAME, filled_in};
    use std::path::Path;

    #[test]
    fn the_template_is_filled_in() {
        let template = include_str!("../../cuda-ipc-ffi/cuda_ipc.pc.in");
        let text = filled_in(template, Path::new("/usr/local"), "1.2.3");
        assert!(text.starts_with("prefix=/usr/local\n") && text.contains("\nVersion: 1.2.3\n") && !text.contains('@'), "{text}");
    }

    #[test]
    fn the_soname_is_the_librarys() {
        assert!(include_str!("../../cuda-ipc-ffi/build.rs").contains(&format!("\"{SONAME}\"")));
    }
}
