//! `demo`: builds the `cuda-ipc` program and runs its demo, on the GPU if there is one, else on the fake driver.
//!
//! Standard output is the program's alone; which driver was taken and what cargo prints goes to standard error.

use std::process::{Command, ExitCode, Stdio};

use crate::driver::{self, FAKE_PACKAGES, FakeDriver, Profile};
use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[ARGS]   (see --help)";

/// Runs the demo with these arguments; its exit code is the task's.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let status = command(workspace, args)?.status().map_err(|error| Failure::task(format!("cuda-ipc demo: {error}")))?;
    // A signal has no code; the shell's way to say so would be another number, 1 is enough for a demo.
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Runs the demo with `--json` and checks that it verified the bytes it shared.
pub(crate) fn check(workspace: &Workspace, args: &[&str]) -> Result<(), Failure> {
    let args: Vec<String> = args.iter().copied().chain(["--json"]).map(str::to_owned).collect();
    let output = command(workspace, &args)?
        .stderr(Stdio::inherit())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Failure::task(format!("cuda-ipc demo: {error}")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    if !output.status.success() {
        return Err(Failure::task(format!("cuda-ipc demo {}: {}", args.join(" "), output.status)));
    }
    if is_verified(&text) {
        Ok(())
    } else {
        Err(Failure::task(format!("cuda-ipc demo {}: no JSON object with \"verified\": true", args.join(" "))))
    }
}

/// Whether the text is, or has a line that is, a JSON object with `"verified": true`.
fn is_verified(text: &str) -> bool {
    std::iter::once(text).chain(text.lines()).any(|json| {
        let object: Option<serde_json::Value> = serde_json::from_str(json).ok();
        object.and_then(|object| object.get("verified")?.as_bool()) == Some(true)
    })
}

fn command(workspace: &Workspace, args: &[String]) -> Result<Command, Failure> {
    let real = driver::real_devices();
    let packages = if real.is_ok() { "" } else { FAKE_PACKAGES };
    workspace.cargo(&format!("build --release --package cuda-ipc-cli {packages}")).run()?;
    let mut command = Command::new(workspace.target.join("release/cuda-ipc"));
    command.arg("demo").args(args);
    match real {
        Ok(devices) => eprintln!("demo: using the CUDA driver of this machine ({devices} device{})", if devices == 1 { "" } else { "s" }),
        Err(reason) => {
            let fake = FakeDriver::link(workspace, Profile::Release)?;
            eprintln!("demo: no GPU ({reason}); using the fake driver in {}", fake.folder().display());
            command.envs(fake.environment());
        }
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::is_verified;

    #[test]
    fn only_a_true_boolean_is_verified() {
        assert!(is_verified("{\"driver\":\"fake\",\"verified\":true}\n"));
        assert!(is_verified("{\n  \"verified\": true\n}\n"));
        assert!(is_verified("note\n{\"verified\":true}\n"));
        for text in ["", "verified=true", "{\"verified\":false}", "{\"verified\":\"true\"}", "{\"driver\":\"fake\"}", "[true]"] {
            assert!(!is_verified(text), "{text}");
        }
    }
}
