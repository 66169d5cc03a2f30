//! The packages in the hands of new users, on the fake driver: one who has only pip, and one who has only a C compiler and the tar.gz. Each does what the
//! documents say, and has to end with a share whose bytes were verified. (Who has only Rust types `cargo xtask demo`, which is a stage of `test`.)

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use xshell::{Shell, cmd};

use crate::driver::{FAKE_PACKAGES, FakeDriver, Profile};
use crate::workspace::{Failure, Workspace};

/// What a demo says last when every byte was compared.
const VERIFIED: &str = " verified=true ";
/// How long an exporter may take to be ready.
const PATIENCE: Duration = Duration::from_secs(20);

/// Both of them.
pub(super) fn run(workspace: &Workspace, archive: &Path, wheel: &Path) -> Result<(), Failure> {
    workspace.cargo(&format!("build {FAKE_PACKAGES}")).run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    let folder = workspace.target.join("dist-trials");
    workspace.shell.remove_path(&folder)?;
    workspace.shell.create_dir(&folder)?;
    with_pip(&workspace.shell, &fake, &folder, wheel)?;
    with_a_compiler(&workspace.shell, &fake, &folder, archive)
}

/// pip install, and then what README says.
fn with_pip(sh: &Shell, fake: &FakeDriver, folder: &Path, wheel: &Path) -> Result<(), Failure> {
    let venv = folder.join("venv");
    cmd!(sh, "python3 -m venv {venv}").run()?;
    let (python, program) = (venv.join("bin/python"), venv.join("bin/cuda-ipc"));
    cmd!(sh, "{python} -m pip install --quiet --no-index {wheel}").run()?;
    let _variables = fake.environment().map(|(name, value)| sh.push_env(name, value));
    expect(&cmd!(sh, "{program} demo").read()?, VERIFIED, "cuda-ipc demo")?;
    expect(&cmd!(sh, "{python} -m cuda_ipc demo --chunks 3").read()?, VERIFIED, "python -m cuda_ipc demo")?;
    // The fake driver is a GPU like any other to it; what it says of this machine's limits is not this trial's business.
    expect(&cmd!(sh, "{python} -m cuda_ipc doctor").ignore_status().read()?, "driver", "python -m cuda_ipc doctor")?;
    let ask = "import cuda_ipc, os; print(cuda_ipc.is_active(), os.path.isfile(cuda_ipc.preload_path()))";
    expect(&cmd!(sh, "{python} -c {ask}").read()?, "False True", "is_active() by itself")?;
    expect(&cmd!(sh, "{program} run -- {python} -c {ask}").read()?, "True True", "is_active() under cuda-ipc run")?;
    println!("trial: pip install, then demo, doctor and run: verified");
    Ok(())
}

/// tar, cc by pkg-config, and the two example programs.
fn with_a_compiler(sh: &Shell, fake: &FakeDriver, folder: &Path, archive: &Path) -> Result<(), Failure> {
    cmd!(sh, "tar -C {folder} -xzf {archive}").run()?;
    let package = sh.read_dir(folder)?.into_iter().find(|path| path.join("bin").is_dir() && path.join("include").is_dir());
    let package = package.ok_or_else(|| Failure::task("the archive has no folder with bin and include"))?;
    let _pc = sh.push_env("PKG_CONFIG_PATH", package.join("lib/pkgconfig"));
    // Where a user unpacks it is not where it was made: pkg-config finds the prefix by the file's own place.
    let flags = cmd!(sh, "pkg-config --define-prefix --cflags --libs cuda_ipc").read()?;
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let driver = fake.folder();
    for example in ["exporter", "importer"] {
        let given = &flags;
        let (source, to) = (package.join("examples").join(example).with_extension("c"), package.join(example));
        cmd!(sh, "cc {source} -o {to} {given...} -L {driver} -l:libcuda.so.1").run()?;
    }
    let mut search = OsString::from(package.join("lib"));
    for (name, value) in fake.environment() {
        if name == "LD_LIBRARY_PATH" {
            search.push(":");
            search.push(value);
        }
    }
    let (socket, log) = (folder.join("socket"), folder.join("exporter.log"));
    let output = std::fs::File::create(&log).map_err(|error| Failure::task(format!("{}: {error}", log.display())))?;
    let mut exporter = std::process::Command::new(package.join("exporter"))
        .arg(&socket)
        .envs(fake.environment())
        .env("LD_LIBRARY_PATH", &search)
        .stdout(output)
        .spawn()
        .map_err(|error| Failure::task(format!("starting the example exporter: {error}")))?;
    let began = Instant::now();
    while !socket.exists() && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _variables = fake.environment().map(|(name, value)| sh.push_env(name, value));
    let importer = package.join("importer");
    let said = cmd!(sh, "{importer} {socket}").env("LD_LIBRARY_PATH", &search).ignore_status().read()?;
    // It ends when the importer has; killed, where there was none.
    if said.is_empty() {
        let _ = exporter.kill();
    }
    let ended = exporter.wait().map_err(|error| Failure::task(format!("waiting for the example exporter: {error}")))?;
    expect(&said, "verified ", "the example importer")?;
    if !ended.success() {
        return Err(Failure::task(format!("the example exporter ended with {ended}")));
    }
    println!("trial: tar.gz and cc, then the examples: {}", said.trim());
    Ok(())
}

fn expect(said: &str, part: &str, what: &str) -> Result<(), Failure> {
    if said.contains(part) { Ok(()) } else { Err(Failure::task(format!("{what} did not say `{}` but:\n{said}", part.trim()))) }
}
