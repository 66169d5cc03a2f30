//! What README tells new users to type, as three of them type it: one who has only Rust and a checkout, one who has only pip and the wheel, and one who has only a
//! C compiler and the tar.gz. Each has to end with a share whose bytes were verified.
//!
//! The sessions stand in README (`<!-- trial: NAME -->`); this file lays out what such a user has, and takes away what he has not.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use xshell::cmd;

use crate::commands::{self, Session};
use crate::driver::{FAKE_PACKAGES, FakeDriver, Profile};
use crate::workspace::{Failure, Workspace};

const DOCUMENT: &str = "README.md";
/// What a demo says when every byte was compared.
const VERIFIED: &str = " verified=true ";
/// What cargo has set for this process, or a developer for his: a new user's shell has none of it.
const NOT_SET: [&str; 6] =
    ["CARGO_TARGET_DIR", "CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CUDA_IPC_FAKE_DRIVER_DIR", "LD_LIBRARY_PATH", "LIBRARY_PATH"];

/// All three of them.
pub(super) fn run(workspace: &Workspace, archive: &Path, wheel: &Path) -> Result<(), Failure> {
    workspace.cargo(&format!("build {FAKE_PACKAGES}")).run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    with_pip(workspace, &fake, wheel)?;
    with_a_compiler(workspace, &fake, archive)?;
    with_rust(workspace)
}

/// The last commit, cloned: what is in nobody's checkout is not there, and nothing has been built. No driver is named: without a GPU the demo makes its own.
fn with_rust(workspace: &Workspace) -> Result<(), Failure> {
    let (sh, folder) = (&workspace.shell, fresh(workspace, "rust")?);
    let (root, clone) = (&workspace.root, folder.join("clone"));
    cmd!(sh, "git clone --quiet --no-hardlinks {root} {clone}").run()?;
    session(workspace, Session::new(&clone).without(&NOT_SET), "rust", &[VERIFIED])?;
    // It is a whole build.
    Ok(sh.remove_path(&folder)?)
}

/// A folder with the wheel in it, and no compiler of Rust.
fn with_pip(workspace: &Workspace, fake: &FakeDriver, wheel: &Path) -> Result<(), Failure> {
    let folder = fresh(workspace, "pip")?;
    workspace.shell.copy_file(wheel, &folder)?;
    let user = Session::new(&folder).without(&NOT_SET).envs(commands::environment(fake)).envs([("PATH", path_without_cargo())]);
    session(workspace, user, "pip", &[VERIFIED, "preload library active: True"])?;
    // Not in README, but in the package's promise: the module does what the command does.
    let more = "env/bin/python -m cuda_ipc demo --chunks 3; env/bin/python -m cuda_ipc doctor || [ $? -eq 1 ]\n\
        env/bin/python -c 'import cuda_ipc, os; print(\"by itself:\", cuda_ipc.is_active(), os.path.isfile(cuda_ipc.preload_path()))'";
    let said = Session::new(&folder).without(&NOT_SET).envs(commands::environment(fake)).run(more, "the wheel's module")?;
    expect(&said, &[VERIFIED, "driver", "by itself: False True"], "the wheel's module")
}

/// A folder with the tar.gz in it, and the system's own programs only.
fn with_a_compiler(workspace: &Workspace, fake: &FakeDriver, archive: &Path) -> Result<(), Failure> {
    let folder = fresh(workspace, "c")?;
    workspace.shell.copy_file(archive, &folder)?;
    let path = OsString::from("/usr/local/bin:/usr/bin:/bin");
    let user = Session::new(&folder).without(&NOT_SET).envs(commands::environment(fake)).envs([("PATH", path)]);
    session(workspace, user, "c", &["verified ", " bytes of process ", "exported 5 chunks"])
}

/// Runs README's session of this name, and looks for what has to be said in it.
fn session(workspace: &Workspace, user: Session, name: &str, expected: &[&str]) -> Result<(), Failure> {
    let began = Instant::now();
    let said = user.run(&commands::trial(workspace, DOCUMENT, name)?, &format!("{DOCUMENT}, trial `{name}`"))?;
    expect(&said, expected, name)?;
    println!("trial `{name}`: a verified share after {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

/// An empty folder for one of them.
fn fresh(workspace: &Workspace, name: &str) -> Result<PathBuf, Failure> {
    let folder = workspace.target.join("dist-trials").join(name);
    workspace.shell.remove_path(&folder)?;
    Ok(workspace.shell.create_dir(&folder)?)
}

/// The search path, without folders that have cargo; but for the system's own, where a distribution's may be.
fn path_without_cargo() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let kept = std::env::split_paths(&path).filter(|folder| folder.starts_with("/usr/bin") || !folder.join("cargo").exists());
    // The folders come from such a variable, so none of them has a colon.
    std::env::join_paths(kept).unwrap_or_default()
}

fn expect(said: &str, parts: &[&str], what: &str) -> Result<(), Failure> {
    match parts.iter().find(|part| !said.contains(**part)) {
        None => Ok(()),
        Some(part) => Err(Failure::task(format!("{what} did not say `{}` but:\n{said}", part.trim()))),
    }
}
