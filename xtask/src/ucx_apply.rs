//! `ucx-apply`: puts the lane into a UCX source tree: our files of `ucx/`, and the calls that `ucx/hooks.txt` lists. Also takes it out, checks it, or shows it.
//!
//! Everything is worked out before anything is written, so a tree that does not have a place of the table stays as it is. `hooks` reads the table, `edit` changes a
//! text by it, `tree` knows the files. A diff is made from the user's own tree, which is why this repository holds no text of UCX.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::workspace::{Failure, Workspace};

mod edit;
mod hooks;
mod tree;

use tree::{State, Tree};

pub(crate) const USAGE: &str = "--source FOLDER [--check|--diff|--revert]";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Apply,
    Check,
    Diff,
    Revert,
}

/// Does what the arguments ask for. `--check` exits with 1 if the tree does not have the lane as this repository has it.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let (source, mode) = parse(args)?;
    let tree = Tree::open(&source, &workspace.root.join("ucx"))?;
    let name = format!("UCX {} in {}", tree.release(), source.display());
    match (mode, tree.state()) {
        (Mode::Diff, _) => print!("{}", tree.diff()),
        (Mode::Check, State::Applied) => println!("{name} has the lane"),
        (Mode::Check, State::Clean) => {
            println!("{name} does not have the lane; it can take it");
            return Ok(ExitCode::FAILURE);
        }
        (Mode::Apply, State::Applied) => println!("{name} has the lane already"),
        (Mode::Revert, State::Clean) => println!("{name} does not have the lane"),
        (Mode::Apply, State::Clean) => {
            tree.apply()?;
            println!("{name} has the lane now: {} files; run its autogen.sh again", tree.len());
        }
        (Mode::Revert, State::Applied) => {
            tree.revert()?;
            println!("{name} is as it was: {} files", tree.len());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn parse(args: &[String]) -> Result<(PathBuf, Mode), Failure> {
    let mut source = None;
    let mut mode = Mode::Apply;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let asked = match arg.as_str() {
            "--source" => {
                source = Some(args.next().ok_or_else(|| Failure::Usage("--source needs a folder".to_owned()))?);
                continue;
            }
            "--check" => Mode::Check,
            "--diff" => Mode::Diff,
            "--revert" => Mode::Revert,
            other => return Err(Failure::unknown_argument(other)),
        };
        if mode != Mode::Apply {
            return Err(Failure::Usage(format!("`{arg}` goes with no other of its kind")));
        }
        mode = asked;
    }
    let source = source.ok_or_else(|| Failure::Usage("--source is missing".to_owned()))?;
    // From where the user is; the tasks themselves run in the root.
    let source = std::path::absolute(Path::new(source)).map_err(|error| Failure::task(format!("{source}: {error}")))?;
    Ok((source, mode))
}
