//! `ucx`: UCX releases as they are, with the preload library, on the fake driver. Builds what is needed and runs `ucx-tests`, which knows the rest.

use std::process::ExitCode;

use crate::driver::FAKE_PACKAGES;
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[--all-ucx] [--ucx VERSION]... [--tree NAME=FOLDER[:FOLDER]...]... [--scenario PART_OF_NAME]... [--list]";

/// Runs the scenarios that the arguments ask for.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    workspace.cargo(&format!("build --package ucx-tests --package cuda-ipc-preload --package cuda-ipc-cli {FAKE_PACKAGES}")).run()?;
    let program = workspace.target.join("debug/ucx-tests");
    workspace.shell.cmd(program).args(args).run()?;
    Ok(ExitCode::SUCCESS)
}
