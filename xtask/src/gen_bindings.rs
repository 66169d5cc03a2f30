//! `gen-bindings`: makes the CUDA driver types from NVIDIA's `cudaTypedefs.h`; with `--check`, compares them with the tree and with newer headers.
//!
//! The headers come from PyPI packages pinned by version and hash and are not committed. bindgen itself runs in a second xtask process, built
//! with the `codegen` feature. Nothing here runs unless it is named: no build script, no other task but `test`.

mod drift;
mod symbols;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use xshell::cmd;

use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[--check]";
pub(crate) const BINDGEN_FOLDER: &str = "cuda-driver-sys/bindgen";
const BINDINGS: &str = "cuda-driver-sys/src/bindings.rs";
const COMPAT: &str = "cuda-driver-sys/src/compat.rs";
const FIRST_LINE: &str = "// cargo xtask gen-bindings\n";
const BASE: &str = "12.9";
const NEWER: &str = "13.x";

/// Generates, or checks with `--check`.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let check = match args {
        [] => false,
        [flag] if flag == "--check" => true,
        [other, ..] => return Err(Failure::unknown_argument(other)),
    };
    let headers = Headers::fetch(workspace)?;
    let text = format!("{FIRST_LINE}{}", headers.bindgen(workspace, &headers.base, "12.9")?);
    if !check {
        workspace.shell.write_file(workspace.root.join(BINDINGS), text)?;
        eprintln!("wrote {BINDINGS}");
        return Ok(ExitCode::SUCCESS);
    }
    let mut findings = Vec::new();
    if let Some(line) = first_difference(&workspace.read(BINDINGS)?, &text) {
        findings.push(format!("{BINDINGS}:{line}: differs from what the {BASE} headers give; run: cargo xtask gen-bindings"));
    }
    let newer = headers.bindgen(workspace, &headers.newer, "13.x")?;
    let accepted = workspace.read(&format!("{BINDGEN_FOLDER}/accepted-drift.txt"))?;
    findings.extend(drift::compare(&text, &newer, &workspace.read(COMPAT)?, &accepted));
    findings.extend(drift::missing_names(&typedef_names(workspace)?, &text, &newer));
    let table = workspace.read("cuda-driver-sys/src/table.rs")?;
    for (label, folder) in [(BASE, &headers.base), (NEWER, &headers.newer)] {
        let (typedefs, cuda) =
            (workspace.shell.read_file(folder.join("cudaTypedefs.h"))?, workspace.shell.read_file(folder.join("cuda.h"))?);
        findings.extend(symbols::compare(&table, &typedefs, &cuda, label));
    }
    for finding in &findings {
        println!("{finding}");
    }
    if findings.is_empty() {
        println!("{BINDINGS} is what the {BASE} headers give; the {NEWER} headers agree with it");
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::task(format!("{} differences", findings.len())))
}

/// The names in `typedefs.txt`, one a line.
pub(crate) fn typedef_names(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let text = workspace.read(&format!("{BINDGEN_FOLDER}/typedefs.txt"))?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect())
}

/// The number of the first line in which two texts differ.
fn first_difference(tree: &str, generated: &str) -> Option<usize> {
    if tree == generated {
        return None;
    }
    let same = tree.lines().zip(generated.lines()).take_while(|(a, b)| a == b).count();
    Some(same + 1)
}

/// The unpacked headers and libclang, under `target/cuda-headers`.
struct Headers {
    folder: PathBuf,
    base: PathBuf,
    newer: PathBuf,
    libclang: PathBuf,
}

impl Headers {
    /// Downloads and unpacks what `requirements.txt` pins, unless the folder was made from the very same pins.
    fn fetch(workspace: &Workspace) -> Result<Self, Failure> {
        let folder = workspace.target.join("cuda-headers");
        let pins = workspace.read(&format!("{BINDGEN_FOLDER}/requirements.txt"))?;
        let stamp = folder.join("requirements.txt");
        if workspace.shell.read_file(&stamp).ok().as_deref() != Some(pins.as_str()) {
            Self::download(workspace, &folder)?;
            // Last, so that an interrupted download is made again.
            workspace.shell.write_file(&stamp, pins)?;
        }
        Ok(Self {
            base: folder.join("unpacked/nvidia/cuda_runtime/include"),
            newer: folder.join("unpacked/nvidia/cu13/include"),
            libclang: folder.join("unpacked/libclang-18.1.1.data/platlib/clang/native"),
            folder,
        })
    }

    /// pip checks the hashes: `--require-hashes` refuses a file that is not pinned.
    fn download(workspace: &Workspace, folder: &Path) -> Result<(), Failure> {
        let sh = &workspace.shell;
        sh.remove_path(folder)?;
        let (wheels, unpacked) = (sh.create_dir(folder.join("wheels"))?, sh.create_dir(folder.join("unpacked"))?);
        let pins = workspace.root.join(BINDGEN_FOLDER).join("requirements.txt");
        cmd!(sh, "python3 -m pip download --quiet --no-deps --only-binary :all: --require-hashes --dest {wheels} --requirement {pins}")
            .run()?;
        for wheel in sh.read_dir(&wheels)? {
            cmd!(sh, "python3 -m zipfile -e {wheel} {unpacked}").run()?;
        }
        Ok(())
    }

    /// What bindgen makes of one header folder.
    fn bindgen(&self, workspace: &Workspace, headers: &Path, name: &str) -> Result<String, Failure> {
        let sh = &workspace.shell;
        // libclang's wheel has no headers of the compiler's own, such as stddef.h.
        let compiler_headers = cmd!(sh, "cc -print-file-name=include").read()?;
        let output = self.folder.join(format!("bindings-{name}.rs"));
        workspace
            .cargo("run --quiet --package xtask --features codegen -- bindgen")
            .args([headers.as_os_str(), compiler_headers.as_ref(), output.as_os_str()])
            .env("LIBCLANG_PATH", &self.libclang)
            .run()?;
        Ok(sh.read_file(output)?)
    }
}

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn the_first_different_line_is_found() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(2));
        assert_eq!(first_difference("a\nb\n", "a\nb\nc\n"), Some(3));
        assert_eq!(first_difference("", "a\n"), Some(1));
    }
}
