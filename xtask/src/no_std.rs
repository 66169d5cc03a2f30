//! `no-std`: builds `tests/no-std-proof`, links it with the C library alone and runs it.
//!
//! A bare-metal target would prove the same and may not be installable. Two things can break: the build (std's panic handler next to the proof's
//! own, or alloc without an allocator) and the symbols of the result, which are checked as well.

use std::process::ExitCode;

use xshell::cmd;

use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "";
const FOLDER: &str = "tests/no-std-proof";

/// Symbols, demangled, that only code with std or an allocator has.
const FORBIDDEN: [&str; 8] =
    ["__rust_alloc", "__rust_dealloc", "__rust_realloc", "__rust_no_alloc_shim", "__rdl_alloc", "__rg_alloc", "std::", "alloc::"];

/// Builds, links, inspects, runs.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    if let [arg, ..] = args {
        return Err(Failure::unknown_argument(arg));
    }
    let sh = &workspace.shell;
    let output = workspace.target.join("no-std-proof");
    // Release only: the precompiled core refers to unwinding's personality function, which this leaves out and a debug build would need.
    workspace.cargo_in(FOLDER, "build --release").arg("--target-dir").arg(&output).run()?;
    let (library, program) = (output.join("release/libno_std_proof.a"), output.join("release/no-std-proof"));
    // No default libraries: what is missing is neither Rust's nor the compiler's to give. The start files are C's own.
    cmd!(sh, "cc -nodefaultlibs -Wl,--gc-sections -Wl,--no-undefined -o {program} {library} -lc").run()?;
    for file in [&library, &program] {
        let symbols = cmd!(sh, "nm --demangle {file}").quiet().ignore_stderr().read()?;
        if let Some(symbol) = first_forbidden(&symbols) {
            return Err(Failure::task(format!("{} has the symbol {symbol}", file.display())));
        }
    }
    cmd!(sh, "{program}").run().map_err(|error| Failure::task(format!("{error} (the status is the number of failed checks)")))?;
    println!("cuda-ipc-core, cuda-driver-sys and pidfd-sys link and run without std and allocator");
    Ok(ExitCode::SUCCESS)
}

/// The first symbol of `nm`'s output that only code with std or an allocator has.
fn first_forbidden(symbols: &str) -> Option<&str> {
    // `0000000000000000 T name`, or `                 U name`.
    let names = symbols.lines().filter_map(|line| line.get(19..));
    names.into_iter().find(|name| FORBIDDEN.iter().any(|forbidden| name.trim_start_matches('<').starts_with(forbidden)))
}

#[cfg(test)]
mod tests {
    use super::first_forbidden;

    #[test]
    fn allocator_and_std_symbols_are_found() {
        assert_eq!(first_forbidden("0000000000000000 T main\n                 U dlopen\n"), None);
        assert_eq!(first_forbidden("                 U __rust_alloc\n"), Some("__rust_alloc"));
        assert_eq!(first_forbidden("0000000000000010 t std::rt::lang_start\n"), Some("std::rt::lang_start"));
        let trait_method = "<alloc::string::String as core::fmt::Write>::write_str";
        assert_eq!(first_forbidden(&format!("0000000000000010 t {trait_method}\n")), Some(trait_method));
        // A mention further inside is a type argument of core's own code.
        assert_eq!(first_forbidden("0000000000000010 t core::ptr::drop_in_place<my_std::Thing>\n"), None);
    }
}
