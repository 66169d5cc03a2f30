//! The step of `gen-headers` that calls cbindgen, in a file of its own because only this needs the `codegen` feature.

use std::process::ExitCode;

use cbindgen::{Builder, Config};

use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "OUTPUT";
const CRATE: &str = "cuda-ipc-ffi";

/// Writes what cbindgen makes of the C ABI's crate.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let [output] = args else { return Err(Failure::Usage("a file is needed".to_owned())) };
    let folder = workspace.root.join(CRATE);
    let config = Config::from_file(folder.join("cbindgen.toml")).map_err(Failure::task)?;
    let bindings =
        Builder::new().with_crate(&folder).with_config(config).generate().map_err(|error| Failure::task(format!("cbindgen: {error}")))?;
    bindings.write_to_file(output);
    Ok(ExitCode::SUCCESS)
}
