//! `fuzz`: builds the targets in `fuzz/fuzz_targets` with libFuzzer's instrumentation and runs them for a given time.
//!
//! The stable compiler can do it: coverage comes from LLVM's own pass, so neither nightly nor cargo-fuzz is needed. The layout is cargo-fuzz's, and
//! `cargo fuzz run --sanitizer none TARGET` works as well where that is installed, for targets that need no driver: the others want the fake one, which this sets up.
//! No sanitizer: what is fuzzed forbids unsafe code, or has it at its borders only.

use std::process::ExitCode;

use xshell::cmd;

use crate::driver::{FakeDriver, Profile};
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[TARGET] [--seconds N]";
const FOLDER: &str = "fuzz";
const DEFAULT_SECONDS: u32 = 300;

/// What cargo-fuzz passes, sanitizers aside: edge coverage with counters, tables and compared values, for the target's own code.
const INSTRUMENTATION: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1 -Cdebug-assertions \
    -Coverflow-checks";

/// Fuzzes one target or, one after the other, all of them.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let (mut chosen, mut seconds) = (None, DEFAULT_SECONDS);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--seconds" {
            let value = args.next().ok_or_else(|| Failure::Usage("--seconds needs a number".to_owned()))?;
            seconds = value.parse().map_err(|_| Failure::Usage(format!("--seconds {value}: not a number")))?;
        } else if arg.starts_with('-') || chosen.is_some() {
            return Err(Failure::unknown_argument(arg));
        } else {
            chosen = Some(arg.as_str());
        }
    }
    let mut targets = targets(workspace)?;
    if let Some(chosen) = chosen {
        targets.retain(|target| target == chosen);
        if targets.is_empty() {
            return Err(Failure::Usage(format!("there is no fuzz target `{chosen}` in {FOLDER}/fuzz_targets")));
        }
    }
    fuzz(workspace, &targets, seconds)?;
    Ok(ExitCode::SUCCESS)
}

/// The names of the targets: the files of `fuzz/fuzz_targets`.
pub(crate) fn targets(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let folder = workspace.root.join(FOLDER).join("fuzz_targets");
    let mut names: Vec<String> = workspace
        .shell
        .read_dir(&folder)?
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// Builds the targets and runs each for `seconds`.
pub(crate) fn fuzz(workspace: &Workspace, targets: &[String], seconds: u32) -> Result<(), Failure> {
    if !workspace.has_program("c++") {
        return Err(Failure::task("libFuzzer is C++ and there is no `c++` in PATH"));
    }
    // Naming the target keeps the instrumentation away from build scripts and procedural macros, which link without libFuzzer.
    let host = host(workspace)?;
    let output = workspace.target.join("fuzz");
    let mut build = workspace.cargo_in(FOLDER, &format!("build --release --target {host}")).arg("--target-dir").arg(&output);
    for target in targets {
        build = build.args(["--bin", target]);
    }
    build.env("RUSTFLAGS", INSTRUMENTATION).run()?;
    // What imports for real does so on the fake driver, on a machine of its own.
    workspace.cargo(&format!("build --quiet {}", crate::driver::FAKE_PACKAGES)).run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    for target in targets {
        run_target(workspace, &output.join(&host).join("release").join(target), target, seconds, &fake)?;
    }
    Ok(())
}

fn run_target(workspace: &Workspace, binary: &std::path::Path, target: &str, seconds: u32, fake: &FakeDriver) -> Result<(), Failure> {
    let sh = &workspace.shell;
    let folder = workspace.root.join(FOLDER);
    // Inputs found here, and the committed ones to start from; libFuzzer writes to the first folder only.
    let corpus = sh.create_dir(folder.join("corpus").join(target))?;
    let seeds = Some(folder.join("seeds").join(target)).filter(|seeds| seeds.is_dir());
    let artifacts = sh.create_dir(folder.join("artifacts").join(target))?;
    let artifact_prefix = format!("{}/", artifacts.display());
    let seconds = seconds.to_string();
    let machine = sh.create_temp_dir()?;
    cmd!(sh, "{binary} -max_total_time={seconds} -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix={artifact_prefix} {corpus} {seeds...}")
        .envs(fake.environment())
        .env("FAKE_CUDA_DIR", machine.path())
        .run()
        .map_err(|error| Failure::task(format!("fuzz target {target}: {error}; the input is in {FOLDER}/artifacts/{target}")))
}

/// The compiler's own target triple.
pub(crate) fn host(workspace: &Workspace) -> Result<String, Failure> {
    let version = cmd!(workspace.shell, "rustc --version --verbose").quiet().read()?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| Failure::task("rustc --version --verbose names no host"))
}
