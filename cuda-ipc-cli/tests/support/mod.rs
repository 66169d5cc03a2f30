//! How tests start the program, and a fake machine for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_cuda-ipc");

/// The program, with no driver at all.
pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(args).stdin(Stdio::null());
    command
}

pub(crate) fn run(mut command: Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("no signal"), text(stdout), text(stderr))
}

/// A fake machine of its own, removed afterwards.
pub(crate) struct Fake {
    pub(crate) driver: PathBuf,
    pub(crate) machine: PathBuf,
}

impl Fake {
    pub(crate) fn new(test: &str) -> Option<Self> {
        let Some(driver) = std::env::var_os("CUDA_IPC_FAKE_DRIVER_DIR") else {
            println!("skipped {test}: CUDA_IPC_FAKE_DRIVER_DIR is not set; run `cargo xtask test`");
            return None;
        };
        let shm = Path::new("/dev/shm");
        let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let machine = parent.join(format!("cuda-ipc-cli-{test}-{}", std::process::id()));
        std::fs::create_dir(&machine).expect("a folder for the fake machine");
        Some(Self { driver: driver.into(), machine })
    }

    pub(crate) fn program(&self, args: &[&str]) -> Command {
        let mut command = program(args);
        command.env("LD_LIBRARY_PATH", &self.driver).env("FAKE_CUDA_DIR", &self.machine).env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> (i32, String, String) {
        run(self.program(args))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.machine);
    }
}
