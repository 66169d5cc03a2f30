//! The driver of a test: where the fake one is, a private machine for it, test bodies that run in processes of their own.
//!
//! `libcuda.so.1` is found by the loader, and the loader reads `LD_LIBRARY_PATH` when a process starts. So a test that needs the fake driver runs its
//! body in a fresh process of the same test binary ([`Inside`]), which can start further ones, by role. Nothing here builds anything: `cargo build -p
//! fake-cuda -p fake-nvml` makes the libraries, `cargo xtask test` does that first.

use core::sync::atomic::{AtomicU32, Ordering};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Error, ErrorKind, Result, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

mod calls;
mod control;

pub use calls::{Answer, Cuda};
pub use control::{Fake, FakeCounters, FakeDevice, FakeHook};

/// Says where the fake driver's libraries are: a directory with `libcuda.so.1`, or with cargo's `libcuda.so`.
pub const FAKE_DRIVER_DIR: &str = "CUDA_IPC_FAKE_DRIVER_DIR";
const INSIDE: &str = "CUDA_IPC_TEST_INSIDE";
const ROLE: &str = "CUDA_IPC_TEST_ROLE";

/// The directory for `LD_LIBRARY_PATH`: `libcuda.so.1` and `libnvidia-ml.so.1` of the fake driver.
///
/// Taken from [`FAKE_DRIVER_DIR`]; otherwise made, as `fake-driver/` with links, in the target directory this executable was built into.
/// Errors: `NotFound` where the fake driver has not been built.
pub fn fake_driver_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(FAKE_DRIVER_DIR).map(PathBuf::from) {
        return if dir.join("libcuda.so.1").exists() { Ok(dir) } else { link_libraries(&dir) };
    }
    let exe = std::env::current_exe()?;
    // target/<profile>/deps/test-hash, or target/<profile>/program
    exe.ancestors()
        .skip(1)
        .take(2)
        .find(|dir| dir.join("libcuda.so").exists() && dir.file_name().is_none_or(|name| name != "deps"))
        .map(link_libraries)
        .unwrap_or_else(|| Err(Error::new(ErrorKind::NotFound, "the fake driver is not built: cargo build -p fake-cuda -p fake-nvml")))
}

fn link_libraries(built: &Path) -> Result<PathBuf> {
    if !built.join("libcuda.so").exists() {
        return Err(Error::new(ErrorKind::NotFound, format!("no libcuda.so in {}", built.display())));
    }
    let dir = built.join("fake-driver");
    std::fs::create_dir_all(&dir)?;
    for (file, link) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
        match std::os::unix::fs::symlink(Path::new("..").join(file), dir.join(link)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(dir)
}

/// A directory for one fake machine, removed with all in it when dropped.
#[derive(Debug)]
pub struct TestDir(PathBuf);

impl TestDir {
    /// Makes a directory of its own, in memory where that is possible.
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let shm = Path::new("/dev/shm");
        let parent = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("cuda-ipc-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir)?;
        Ok(Self(dir))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} stays: {error}", self.0.display());
        }
    }
}

/// Settings of the fake driver for the processes of one test. What is `None` keeps the driver's default.
#[derive(Clone, Debug, Default)]
pub struct FakeConfig {
    /// `FAKE_CUDA_DIR`: processes with the same directory share a machine.
    pub dir: Option<PathBuf>,
    /// `FAKE_CUDA_DEVICES`.
    pub devices: Option<u32>,
    /// `FAKE_CUDA_MEMORY`: bytes per device.
    pub memory_bytes: Option<u64>,
    /// `FAKE_CUDA_VA`: bytes of addresses that may be reserved at a time.
    pub va_bytes: Option<u64>,
    /// `FAKE_CUDA_FAULT`, such as `cuMemMap#3=2;cuMemMap#*~5ms`.
    pub faults: Option<String>,
    /// `FAKE_CUDA_ASYNC`: `hold`, or milliseconds.
    pub asynchronous: Option<String>,
    /// `FAKE_CUDA_FABRIC`: fabric handles work.
    pub fabric: bool,
    /// `FAKE_CUDA_PEERS=0`: no device reaches another's memory.
    pub no_peers: bool,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
}

/// Makes `command` run with the fake driver in front of any other, set up as `config` says.
///
/// Errors: those of [`fake_driver_dir`].
pub fn with_fake_driver<'a>(command: &'a mut Command, config: &FakeConfig) -> Result<&'a mut Command> {
    let mut path: OsString = fake_driver_dir()?.into();
    if let Some(old) = std::env::var_os("LD_LIBRARY_PATH").filter(|old| !old.is_empty()) {
        path.push(":");
        path.push(old);
    }
    command.env("LD_LIBRARY_PATH", path);
    let mut set = |name: &str, value: Option<OsString>| {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    };
    set("FAKE_CUDA_DIR", config.dir.clone().map(Into::into));
    set("FAKE_CUDA_DEVICES", config.devices.map(|n| n.to_string().into()));
    set("FAKE_CUDA_MEMORY", config.memory_bytes.map(|n| n.to_string().into()));
    set("FAKE_CUDA_VA", config.va_bytes.map(|n| n.to_string().into()));
    set("FAKE_CUDA_FAULT", config.faults.clone().map(Into::into));
    set("FAKE_CUDA_ASYNC", config.asynchronous.clone().map(Into::into));
    set("FAKE_CUDA_FABRIC", config.fabric.then(|| "1".into()));
    set("FAKE_CUDA_PEERS", config.no_peers.then(|| "0".into()));
    set("CUDA_VISIBLE_DEVICES", config.visible_devices.clone().map(Into::into));
    Ok(command)
}

/// A test body inside a process that was started with the fake driver.
///
/// A test calls [`Inside::enter`] with its own full name. In the test runner's process that runs the test again in a fresh process with the fake driver
/// and answers `None` when that one has succeeded; in the fresh process it answers `Some`. There the body looks at [`Inside::role`]: `main` first, and
/// whatever it has given to [`Inside::spawn`].
#[derive(Debug)]
pub struct Inside {
    test: String,
    role: String,
}

impl Inside {
    /// See the type. Panics where the inner process fails or the fake driver is not built.
    pub fn enter(test: &str, config: &FakeConfig) -> Option<Self> {
        if std::env::var(INSIDE).is_ok_and(|inside| inside == test) {
            return Some(Self { test: test.to_owned(), role: std::env::var(ROLE).unwrap_or_else(|_| "main".to_owned()) });
        }
        let private = TestDir::new().expect("a private directory");
        let mut config = config.clone();
        config.dir.get_or_insert_with(|| private.path().to_path_buf());
        let mut command = again(test, "main");
        let status = with_fake_driver(&mut command, &config).expect("the fake driver").status().expect("a process of this test binary");
        assert!(status.success(), "{test}: {status}");
        None
    }

    /// As [`Inside::enter`], but with the real driver where there is one: for questions that both must answer.
    pub fn enter_with_any_driver(test: &str) -> Option<Self> {
        if std::env::var_os(INSIDE).is_none() && is_real_driver() {
            let status = again(test, "main").status().expect("a process of this test binary");
            assert!(status.success(), "{test}: {status}");
            return None;
        }
        Self::enter(test, &FakeConfig::default())
    }

    /// Which process of the test this is.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Starts another process of this test, with the same environment and machine, and pipes to talk with it.
    pub fn spawn(&self, role: &str) -> Result<Peer> {
        self.spawn_with(role, |_| {})
    }

    /// As [`Inside::spawn`], after `change` has had its way with the command.
    pub fn spawn_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Result<Peer> {
        let mut command = again(&self.test, role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let pipes = || Error::from(ErrorKind::BrokenPipe);
        Ok(Peer { child, input, output: BufReader::new(output.ok_or_else(pipes)?) })
    }

    /// Says a word to the process that started this one.
    pub fn tell(&self, word: &str) {
        let mut out = std::io::stdout().lock();
        // The reader may be gone; then nobody waits for the word.
        let _ = writeln!(out, "\n@{word}").and_then(|()| out.flush());
    }

    /// Waits for the next word of the process that started this one; `None` when it is gone.
    pub fn listen(&self) -> Option<String> {
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line).unwrap_or(0);
        (read > 0).then(|| line.trim_end().to_owned())
    }
}

/// Whether a driver is there that is not the fake one.
fn is_real_driver() -> bool {
    // SAFETY: a C string. No CUDA call is made, so processes started later are none the worse for it.
    let library = unsafe { libc::dlopen(cuda_driver_sys::LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    !library.is_null() && Fake::find().is_none()
}

fn again(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the path of this test binary"));
    command.args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"]).env(INSIDE, test).env(ROLE, role);
    command
}

/// Another process of the same test. Killed when dropped.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its next word; what else it prints goes to our output. Panics when it ends without a word.
    pub fn listen(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).expect("output of a peer");
            assert!(read > 0, "a peer ended without a word: {:?}", self.child.wait());
            match line.strip_prefix('@') {
                Some(word) => return word.trim_end().to_owned(),
                None => print!("{line}"),
            }
        }
    }

    /// Says a word to it.
    pub fn tell(&mut self, word: &str) {
        if let Some(input) = &mut self.input {
            writeln!(input, "{word}").expect("a peer that listens");
        }
    }

    /// Ends its input, waits for its end and checks that it was a good one.
    pub fn finish(mut self) {
        self.input = None;
        let mut rest = String::new();
        while self.output.read_line(&mut rest).is_ok_and(|read| read > 0) {
            print!("{rest}");
            rest.clear();
        }
        let status = self.child.wait().expect("the end of a peer");
        assert!(status.success(), "a peer failed: {status}");
    }

    /// How it ended, if it has.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for its end, whatever that is, without ending its input.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait()
    }

    /// Kills it without notice and waits until it is gone.
    pub fn kill(mut self) -> Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Already waited for, in the good cases.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
