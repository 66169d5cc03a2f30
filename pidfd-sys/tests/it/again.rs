//! All tests once more as a user without rights, when they run as root.

use crate::sys::{is_root, skip};
use std::os::unix::process::CommandExt;
use std::process::Command;

const USER: u32 = 54_321;

#[test]
fn everything_again_without_root() {
    if !is_root() {
        skip("already without root");
        return;
    }
    let program = std::env::current_exe().expect("the test program");
    let output = match Command::new(program).args(["--skip", "again::"]).uid(USER).gid(USER).current_dir("/").output() {
        Ok(output) => output,
        Err(error) => return skip(&format!("uid {USER} cannot run the test program: {error}")),
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    for line in err.lines().filter_map(|line| line.strip_prefix("skipped: ")) {
        skip(&format!("without root: {line}"));
    }
    assert!(output.status.success(), "without root: {}\n{out}\n{err}", output.status);
}
