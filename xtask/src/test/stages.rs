//! The stages of `test`: one function each, in the order in which they run.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use crate::driver::{FakeDriver, Profile};
use crate::workspace::{Failure, Workspace};
use crate::{c_library, commands, demo, dist, fuzz, gen_bindings, gen_headers, no_std, public_api, tidy, ucx};

/// One stage.
pub(super) struct Stage {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    /// Left out with `--fast`.
    pub(super) slow: bool,
    pub(super) run: fn(&Workspace) -> Result<Done, Failure>,
}

/// How a stage ended that did not fail.
pub(super) enum Done {
    Passed,
    /// Nothing ran, for this reason.
    Skipped(String),
}

type Outcome = Result<Done, Failure>;

pub(super) const STAGES: &[Stage] = &[
    Stage { name: "fmt", help: "rustfmt, in all three workspaces", slow: false, run: fmt },
    Stage { name: "tidy", help: "what lints cannot check", slow: false, run: tidy },
    Stage { name: "build", help: "every crate and the fake driver", slow: false, run: build },
    Stage { name: "clippy", help: "all targets, warnings are errors", slow: false, run: clippy },
    Stage { name: "features", help: "every feature set that users can choose", slow: false, run: features },
    Stage { name: "docs", help: "rustdoc, warnings are errors; what the libraries offer is what is committed", slow: false, run: docs },
    Stage { name: "crates", help: "each crate can be packed for crates.io", slow: false, run: crates },
    Stage { name: "tests", help: "all tests, on the fake driver", slow: false, run: tests },
    Stage { name: "doctests", help: "the examples in the documentation", slow: false, run: doctests },
    Stage { name: "no-std", help: "the no_std crates link and run without std and allocator", slow: false, run: no_std },
    Stage { name: "bindings", help: "the CUDA types are what the pinned headers give", slow: true, run: bindings },
    Stage { name: "headers", help: "the C header and its list of symbols are what the sources give", slow: true, run: headers },
    Stage { name: "c-library", help: "the C library as a package: C programs link with what pkg-config says", slow: false, run: c_library },
    Stage { name: "asan", help: "the C ABI's programs with a library that AddressSanitizer is built into", slow: true, run: asan },
    Stage { name: "valgrind", help: "both ends of shares by the C ABI under valgrind's memcheck", slow: true, run: valgrind },
    Stage { name: "loom", help: "every interleaving of the small concurrency models", slow: true, run: loom },
    Stage { name: "fuzz", help: "each fuzz target for some seconds", slow: true, run: fuzz },
    Stage { name: "ucx", help: "UCX releases with the preload library (all of them: cargo xtask ucx --all-ucx)", slow: true, run: ucx },
    Stage { name: "dist", help: "the packages are made, and new users get a verified share with them", slow: true, run: dist },
    Stage { name: "demo", help: "the demo shares and verifies memory", slow: true, run: demo },
    Stage { name: "commands", help: "the commands in the documents, as they stand there", slow: true, run: commands },
];

/// How long each fuzz target runs.
const FUZZ_SECONDS: u32 = 5;
/// The workspaces besides the root's.
const OTHER_WORKSPACES: [&str; 2] = ["tests/no-std-proof", "fuzz"];
/// The feature sets, as arguments of clippy. Defaults of each library on its own, because in a workspace build features add up.
const FEATURE_SETS: &[&str] = &[
    "--package cuda-driver-sys",
    "--package pidfd-sys --no-default-features",
    "--package pidfd-sys",
    "--package cuda-ipc-core --no-default-features",
    "--package cuda-ipc-core",
    "--package cuda-ipc-cache",
    "--package cuda-ipc-ffi",
    "--package cuda-ipc-preload",
    "--package cuda-ipc-cli",
];
/// Runs of the demo; each must verify what it shared.
const DEMOS: &[&[&str]] = &[
    &[],
    &["--chunks", "300", "--size", "700M"],
    &["--route", "broker"],
    &["--kind", "pool"],
    &["--kind", "pool", "--route", "broker"],
    &["--kind", "malloc"],
];
/// Packages whose models need fewer dependencies than the package.
const LOOM_FEATURES: &[(&str, &str)] = &[("cuda-ipc-core", "--no-default-features")];

fn fmt(workspace: &Workspace) -> Outcome {
    workspace.cargo("fmt --all --check").run()?;
    for folder in OTHER_WORKSPACES {
        let manifest = workspace.root.join(folder).join("Cargo.toml");
        workspace.cargo("fmt --check --manifest-path").arg(manifest).run()?;
    }
    Ok(Done::Passed)
}

fn tidy(workspace: &Workspace) -> Outcome {
    tidy::run(workspace, &[])?;
    Ok(Done::Passed)
}

fn build(workspace: &Workspace) -> Outcome {
    workspace.cargo("build --workspace").run()?;
    FakeDriver::link(workspace, Profile::Debug)?;
    Ok(Done::Passed)
}

fn clippy(workspace: &Workspace) -> Outcome {
    workspace.cargo("clippy --workspace --all-targets -- -D warnings").run()?;
    Ok(Done::Passed)
}

fn features(workspace: &Workspace) -> Outcome {
    for set in FEATURE_SETS {
        workspace.cargo(&format!("clippy --quiet {set} -- -D warnings")).run()?;
    }
    Ok(Done::Passed)
}

fn docs(workspace: &Workspace) -> Outcome {
    public_api::run(workspace, &["--check".to_owned()])?;
    Ok(Done::Passed)
}

fn crates(workspace: &Workspace) -> Outcome {
    let published = FEATURE_SETS.iter().filter_map(|set| set.split_whitespace().nth(1)).collect::<std::collections::BTreeSet<_>>();
    let packages = published.iter().flat_map(|name| ["--package", name]);
    // Not built from the packed files: they are those that the other stages build, and none of them includes a file of another folder.
    let packed =
        workspace.cargo("package --no-verify --allow-dirty").args(packages).env("CARGO_TERM_COLOR", "never").ignore_status().output()?;
    let said = String::from_utf8_lossy(&packed.stderr);
    let count = said.lines().filter(|line| line.trim_start().starts_with("Packaged ")).count();
    if count != published.len() {
        return Err(Failure::task(format!("{count} of {} crates were packed:\n{said}", published.len())));
    }
    println!("{count} crates can be packed");
    Ok(Done::Passed)
}

fn tests(workspace: &Workspace) -> Outcome {
    // Fresh after the build stage; alone, this makes the fake driver that the tests open.
    workspace.cargo("build --workspace").run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    println!("fake driver: {}", fake.folder().display());
    if workspace.has_program("cargo-nextest") {
        workspace.cargo("nextest run --workspace --no-fail-fast").envs(fake.environment()).run()?;
    } else {
        // Tests that fork or change the environment want a process of their own; one at a time is the next best.
        println!("cargo-nextest is not installed: running the tests of each file in one process, one at a time");
        workspace.cargo("test --workspace --lib --bins --tests --no-fail-fast -- --test-threads=1").envs(fake.environment()).run()?;
    }
    Ok(Done::Passed)
}

fn doctests(workspace: &Workspace) -> Outcome {
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    workspace.cargo("test --workspace --doc").envs(fake.environment()).run()?;
    Ok(Done::Passed)
}

fn no_std(workspace: &Workspace) -> Outcome {
    no_std::run(workspace, &[])?;
    Ok(Done::Passed)
}

fn bindings(workspace: &Workspace) -> Outcome {
    gen_bindings::run(workspace, &["--check".to_owned()])?;
    // The generator itself is in no default build, so no other stage sees it.
    workspace.cargo("clippy --quiet --package xtask --features codegen -- -D warnings").run()?;
    Ok(Done::Passed)
}

fn headers(workspace: &Workspace) -> Outcome {
    gen_headers::run(workspace, &["--check".to_owned()])?;
    Ok(Done::Passed)
}

fn c_library(workspace: &Workspace) -> Outcome {
    c_library::check(workspace)?;
    Ok(Done::Passed)
}

fn asan(workspace: &Workspace) -> Outcome {
    let (host, folder) = (fuzz::host(workspace)?, workspace.target.join("asan"));
    // The flag is unstable, but nothing else is; with a named target it does not go to build scripts and macros.
    workspace
        .cargo(&format!("build --package cuda-ipc-ffi --target {host} --target-dir"))
        .arg(&folder)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .run()?;
    workspace.cargo(&format!("build {}", crate::driver::FAKE_PACKAGES)).run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    workspace
        .cargo("test --package cuda-ipc-tests --test c_abi -- --exact address_sanitizer_finds_nothing_where_it_would_find_something")
        .envs(fake.environment())
        .env("C_ABI_LIBRARIES", folder.join(host).join("debug"))
        .run()?;
    Ok(Done::Passed)
}

fn valgrind(workspace: &Workspace) -> Outcome {
    if !workspace.has_program("valgrind") {
        return Err(Failure::task("valgrind is not in PATH: install it (apt-get install valgrind; .ci/run does)"));
    }
    // The libraries as users have them, without anything built into them.
    workspace.cargo(&format!("build --package cuda-ipc-ffi {}", crate::driver::FAKE_PACKAGES)).run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    workspace
        .cargo("test --package cuda-ipc-tests --test c_abi -- --ignored --exact memcheck_finds_nothing_where_it_would_find_something --nocapture")
        .envs(fake.environment())
        .run()?;
    Ok(Done::Passed)
}

fn loom(workspace: &Workspace) -> Outcome {
    let models = loom_models(workspace)?;
    if models.is_empty() {
        return Ok(Done::Skipped("no crate has a test whose name begins with loom".to_owned()));
    }
    for (package, tests) in &models {
        let features = LOOM_FEATURES.iter().find(|(name, _)| name == package).map(|(_, features)| *features);
        // A target folder of its own: the flag goes to every dependency and would rebuild all of them twice.
        workspace
            .cargo(&format!("test --release --no-fail-fast --package {package} --target-dir"))
            .arg(workspace.target.join("loom"))
            .args(features)
            .args(tests.iter().flat_map(|test| ["--test", test]))
            .env("RUSTFLAGS", "--cfg loom")
            // A model that fails says where without it, and building is most of this stage's time.
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .run()?;
    }
    Ok(Done::Passed)
}

/// The tests `PACKAGE/tests/loom*`, files or folders, by package; our folders have their packages' names.
fn loom_models(workspace: &Workspace) -> Result<BTreeMap<String, Vec<String>>, Failure> {
    let mut models: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for folder in workspace.shell.read_dir(&workspace.root)?.iter().filter(|folder| folder.join("tests").is_dir()) {
        for path in workspace.shell.read_dir(folder.join("tests"))? {
            let is_test = path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").is_file();
            if let (true, Some(package), Some(test)) = (is_test, name(folder.file_name()), name(path.file_stem()))
                && test.starts_with("loom")
            {
                models.entry(package).or_default().push(test);
            }
        }
    }
    Ok(models)
}

fn name(part: Option<&OsStr>) -> Option<String> {
    Some(part?.to_str()?.to_owned())
}

fn fuzz(workspace: &Workspace) -> Outcome {
    fuzz::fuzz(workspace, &fuzz::targets(workspace)?, FUZZ_SECONDS)?;
    Ok(Done::Passed)
}

fn demo(workspace: &Workspace) -> Outcome {
    for args in DEMOS {
        demo::check(workspace, args)?;
    }
    Ok(Done::Passed)
}

fn commands(workspace: &Workspace) -> Outcome {
    commands::check(workspace)?;
    Ok(Done::Passed)
}

fn dist(workspace: &Workspace) -> Outcome {
    dist::run(workspace, &["--check".to_owned()])?;
    Ok(Done::Passed)
}

fn ucx(workspace: &Workspace) -> Outcome {
    ucx::run(workspace, &[])?;
    Ok(Done::Passed)
}
