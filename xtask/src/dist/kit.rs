//! The GPU kit: a folder for a machine with a GPU and without a toolchain. `run.sh` in it runs what needs a GPU.

use std::path::{Path, PathBuf};

use xshell::cmd;

use super::{GLIBC, TARGET, Tools, check_glibc};
use crate::workspace::{Failure, Workspace};

/// What the whole folder may take, so that it is quickly copied to where it is needed.
const MOST_BYTES: u64 = 40 << 20;
const KIT: &str = "xtask/dist/gpu-kit";

/// Makes `cuda-ipc-gpu-kit` in `out`.
pub(super) fn make(workspace: &Workspace, tools: &Tools, out: &Path) -> Result<PathBuf, Failure> {
    let sh = &workspace.shell;
    let built = tools.build(workspace, super::PACKAGES)?;
    let conformance = conformance(workspace, tools)?;
    let kit = out.join("cuda-ipc-gpu-kit");
    sh.remove_path(&kit)?;
    let (bin, lib) = (sh.create_dir(kit.join("bin"))?, sh.create_dir(kit.join("lib"))?);
    sh.copy_file(built.join("cuda-ipc"), &bin)?;
    sh.copy_file(conformance, bin.join("conformance"))?;
    for library in ["libcuda_ipc_preload.so", "libcuda_ipc.so"] {
        sh.copy_file(built.join(library), &lib)?;
    }
    sh.copy_file(workspace.root.join(KIT).join("run.sh"), &kit)?;
    let bench = sh.create_dir(kit.join("bench"))?;
    for script in sh.read_dir(workspace.root.join("bench"))?.iter().filter(|path| path.extension().is_some_and(|end| end == "py")) {
        sh.copy_file(script, &bench)?;
    }
    let bytes: u64 =
        cmd!(sh, "du --bytes --summarize {kit}").read()?.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(u64::MAX);
    if bytes > MOST_BYTES {
        return Err(Failure::task(format!("the kit has {} MiB; {} are the most", bytes >> 20, MOST_BYTES >> 20)));
    }
    Ok(kit)
}

/// Builds the conformance test for the old glibc; its file.
fn conformance(workspace: &Workspace, tools: &Tools) -> Result<PathBuf, Failure> {
    let messages = tools.cargo(workspace, "--package cuda-ipc-tests --test conformance --message-format json").read()?;
    let executable = |line: &str| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == "conformance").then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    };
    let file = messages
        .lines()
        .find_map(executable)
        .ok_or_else(|| Failure::task(format!("no conformance test was built for {TARGET} and glibc {}.{}", GLIBC.0, GLIBC.1)))?;
    check_glibc(workspace, &file)?;
    Ok(file)
}
