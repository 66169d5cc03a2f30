//! Build chores: `cargo xtask TASK`. One file a task; each builds and calls, none decides anything that the crates should.

// A program has std; the lint is for the libraries.
#![allow(clippy::std_instead_of_core)]

use std::process::ExitCode;

#[cfg(feature = "codegen")]
mod bindgen;
mod c_library;
mod catalogue;
#[cfg(feature = "codegen")]
mod cbindgen;
mod commands;
mod demo;
mod dist;
mod driver;
mod fuzz;
mod gen_bindings;
mod gen_headers;
mod no_std;
mod public_api;
mod test;
mod tidy;
mod ucx;
mod ucx_apply;
mod workspace;

use workspace::{Failure, Workspace};

/// sysexits.h: the command was used wrongly.
const EX_USAGE: u8 = 64;

/// One entry of the task list.
struct Task {
    name: &'static str,
    usage: &'static str,
    help: &'static str,
    run: fn(&Workspace, &[String]) -> Result<ExitCode, Failure>,
}

const TASKS: &[Task] = &[
    Task { name: "test", usage: test::USAGE, help: "everything CI runs, with a table of stages at the end", run: test::run },
    Task {
        name: "demo",
        usage: demo::USAGE,
        help: "two processes share memory: on the GPU if there is one, else on the fake driver",
        run: demo::run,
    },
    Task { name: "c-library", usage: c_library::USAGE, help: "lay the C library out as a package has it", run: c_library::run },
    Task {
        name: "dist",
        usage: dist::USAGE,
        help: "what is handed out: tar.gz, Python wheel, and a kit for a GPU machine",
        run: dist::run,
    },
    Task { name: "tidy", usage: tidy::USAGE, help: "what lints cannot check: layers, names, licences, documents", run: tidy::run },
    Task { name: "ucx", usage: ucx::USAGE, help: "UCX releases with the preload library, on the fake driver", run: ucx::run },
    Task {
        name: "ucx-apply",
        usage: ucx_apply::USAGE,
        help: "put the lane into a UCX source tree, or check, show or take it out",
        run: ucx_apply::run,
    },
    Task { name: "fuzz", usage: fuzz::USAGE, help: "fuzz one target or all of them, for longer than `test` does", run: fuzz::run },
    Task {
        name: "no-std",
        usage: no_std::USAGE,
        help: "link and run a program of the no_std crates without std and allocator",
        run: no_std::run,
    },
    Task {
        name: "gen-bindings",
        usage: gen_bindings::USAGE,
        help: "make cuda-driver-sys/src/bindings.rs from the pinned CUDA headers, or check it",
        run: gen_bindings::run,
    },
    Task {
        name: "gen-headers",
        usage: gen_headers::USAGE,
        help: "make cuda-ipc-ffi/include/cuda_ipc.h and the list of its symbols, or check them",
        run: gen_headers::run,
    },
    Task {
        name: "public-api",
        usage: public_api::USAGE,
        help: "list what each library crate offers, or check the committed lists",
        run: public_api::run,
    },
    #[cfg(feature = "codegen")]
    Task { name: "cbindgen", usage: cbindgen::USAGE, help: "(a step of gen-headers)", run: cbindgen::run },
    #[cfg(feature = "codegen")]
    Task { name: "bindgen", usage: bindgen::USAGE, help: "(a step of gen-bindings)", run: bindgen::run },
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(name) = args.next() else {
        print!("{}", usage());
        return ExitCode::SUCCESS;
    };
    let args: Vec<String> = args.collect();
    if matches!(name.as_str(), "help" | "-h" | "--help") {
        print!("{}", usage());
        return ExitCode::SUCCESS;
    }
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        eprint!("error: there is no task `{name}`\n\n{}", usage());
        return ExitCode::from(EX_USAGE);
    };
    match Workspace::find().and_then(|workspace| (task.run)(&workspace, &args)) {
        Ok(code) => code,
        Err(Failure::Usage(what)) => {
            eprintln!("error: {what}\nusage: cargo xtask {} {}", task.name, task.usage);
            ExitCode::from(EX_USAGE)
        }
        Err(Failure::Task(what)) => {
            eprintln!("error: cargo xtask {}: {what}", task.name);
            ExitCode::FAILURE
        }
    }
}

/// Whether there is a task of this name.
fn has_task(name: &str) -> bool {
    TASKS.iter().any(|task| task.name == name)
}

fn usage() -> String {
    let mut text = String::from("usage: cargo xtask TASK [ARGS]\n\n");
    for task in TASKS {
        text += &format!("    {:14}{}\n", task.name, task.help);
        if !task.usage.is_empty() {
            text += &format!("    {:14}  {}\n", "", task.usage);
        }
    }
    text
}
