//! `gen-headers`: makes `cuda_ipc.h` from the C ABI's crate, and the list of the symbols that its library exports; with `--check`, compares both with the tree.
//!
//! cbindgen itself runs in a second xtask process, built with the `codegen` feature. That the built library exports what the list says is a test's business
//! (`tests/tests/c_abi`).

use std::process::ExitCode;

use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[--check]";
const HEADER: &str = "cuda-ipc-ffi/include/cuda_ipc.h";
const SYMBOLS: &str = "cuda-ipc-ffi/include/symbols.txt";

/// Generates, or checks with `--check`.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let check = match args {
        [] => false,
        [flag] if flag == "--check" => true,
        [other, ..] => return Err(Failure::unknown_argument(other)),
    };
    let output = workspace.shell.create_dir(workspace.target.join("headers"))?.join("cuda_ipc.h");
    workspace.cargo("run --quiet --package xtask --features codegen -- cbindgen").arg(&output).run()?;
    let header = tidied(&workspace.shell.read_file(&output)?);
    let symbols = symbols(&header)?;
    let mut differences = 0;
    for (path, text) in [(HEADER, header), (SYMBOLS, symbols)] {
        if !check {
            workspace.shell.write_file(workspace.root.join(path), text)?;
            eprintln!("wrote {path}");
        } else if let Some(line) = first_difference(&workspace.read(path).unwrap_or_default(), &text) {
            differences += 1;
            println!("{path}:{line}: differs from what the sources give; run: cargo xtask gen-headers");
        }
    }
    match (check, differences) {
        (true, 0) => println!("{HEADER} and {SYMBOLS} are what the sources give"),
        (_, 0) => {}
        _ => return Err(Failure::task(format!("{differences} differences"))),
    }
    Ok(ExitCode::SUCCESS)
}

/// Leaves out what is for Rust's callers only: the chapters about safety, which repeat what the header says of pointers at its beginning. Puts negative numbers
/// in parentheses, so that they may stand anywhere.
fn tidied(header: &str) -> String {
    let mut text = String::with_capacity(header.len());
    let mut in_safety = false;
    for line in header.lines() {
        let comment = line.trim_start().strip_prefix('*').map(str::trim);
        match comment {
            Some("# Safety") => in_safety = true,
            Some("/") => in_safety = false,
            _ => {}
        }
        if in_safety {
            continue;
        }
        // The empty line before the chapter.
        if comment == Some("/") && text.ends_with(" *\n") {
            text.truncate(text.len() - " *\n".len());
        }
        match line.strip_prefix("#define ").and_then(|define| define.split_once(' ')) {
            Some((name, value)) if value.starts_with('-') => text.push_str(&format!("#define {name} ({value})")),
            _ => text.push_str(line.trim_end()),
        }
        text.push('\n');
    }
    text
}

/// The functions that the header declares, sorted, one a line.
fn symbols(header: &str) -> Result<String, Failure> {
    let mut names: Vec<&str> = header
        .lines()
        .filter(|line| !line.starts_with(' ') && !line.starts_with("typedef"))
        .filter_map(|line| line.split_once('(').map(|(before, _)| before))
        .filter_map(|before| before.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("cuda_ipc_"))
        .collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return Err(Failure::task("the header declares no function"));
    }
    Ok(names.iter().map(|name| format!("{name}\n")).collect())
}

/// The number of the first line in which two texts differ.
fn first_difference(tree: &str, generated: &str) -> Option<usize> {
    (tree != generated).then(|| tree.lines().zip(generated.lines()).take_while(|(a, b)| a == b).count() + 1)
}

#[cfg(test)]
mod tests {
    use super::{first_difference, symbols, tidied};

    #[test]
    fn functions_are_found() {
        let header = "typedef void (*cuda_ipc_log_fn_t)(int level);\n#define X (1)\ncuda_ipc_status_t cuda_ipc_b(int a,\n    cuda_ipc_fn_t f(x));\n\
            const char *cuda_ipc_a(void);\n";
        assert_eq!(symbols(header).ok().as_deref(), Some("cuda_ipc_a\ncuda_ipc_b\n"));
        assert!(symbols("int x;\n").is_err());
    }

    #[test]
    fn chapters_about_safety_are_left_out() {
        let header = "/*\n * Does.\n *\n * # Safety\n * x is good.\n */\nint a(void);\n/*\n * More.\n */\n";
        assert_eq!(tidied(header), "/*\n * Does.\n */\nint a(void);\n/*\n * More.\n */\n");
    }

    #[test]
    fn negative_numbers_are_put_in_parentheses() {
        assert_eq!(tidied("#define A -1\n#define B 1\n#define C\n"), "#define A (-1)\n#define B 1\n#define C\n");
    }

    #[test]
    fn the_first_different_line_is_found() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\n", "a\nb\n"), Some(2));
    }
}
