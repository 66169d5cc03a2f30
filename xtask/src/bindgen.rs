//! The step of `gen-bindings` that calls bindgen, in a file of its own because only this needs the `codegen` feature.
//!
//! Which headers, and what to do with the text, is `gen_bindings`' business; it also sets LIBCLANG_PATH.

use std::path::Path;
use std::process::ExitCode;

use bindgen::{Builder, EnumVariation, RustEdition, RustTarget};

use crate::gen_bindings::{self, BINDGEN_FOLDER};
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "INCLUDE_FOLDER COMPILER_INCLUDE_FOLDER OUTPUT";

/// Writes what bindgen makes of `cudaTypedefs.h` in one header folder.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let [headers, compiler_headers, output] = args else { return Err(Failure::Usage("three folders are needed".to_owned())) };
    let names = gen_bindings::typedef_names(workspace)?;
    let rust_target = RustTarget::stable(85, 0).map_err(|error| Failure::task(error.to_string()))?;
    let bindings = Builder::default()
        .header(Path::new(headers).join("cudaTypedefs.h").to_string_lossy())
        .use_core()
        .default_enum_style(EnumVariation::NewType { is_bitfield: false, is_global: false })
        // The headers' prose is NVIDIA's; the types are all we take.
        .generate_comments(false)
        .prepend_enum_name(false)
        .ignore_functions()
        .allowlist_type(format!("({})", names.join("|")))
        .rust_target(rust_target)
        .rust_edition(RustEdition::Edition2024)
        .clang_args(["-I", headers, "-isystem", compiler_headers])
        // The workspace's own rustfmt.toml would fold the lines otherwise than bindgen's users expect.
        .rustfmt_configuration_file(Some(workspace.root.join(BINDGEN_FOLDER).join("rustfmt.toml")))
        .generate()
        .map_err(|error| Failure::task(format!("bindgen: {error}")))?;
    bindings.write_to_file(output).map_err(|error| Failure::task(format!("{output}: {error}")))?;
    Ok(ExitCode::SUCCESS)
}
