//! The driver of a test: where the fake one is, a private machine for it, test bodies that run in processes of their own, and its control functions.
//!
//! `libcuda.so.1` is found by the loader, and the loader reads `LD_LIBRARY_PATH` when a process starts. So a test that needs the fake driver runs its
//! body in a fresh process of the same test binary ([`Inside`]), which can start further ones, by role. Nothing here builds anything: `cargo build -p
//! fake-cuda -p fake-nvml` makes the libraries, `cargo xtask test` does that first.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicU32, Ordering};
use std::ffi::{CString, OsString};
use std::io::{BufRead, BufReader, Error, ErrorKind, Result, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use cuda_driver_sys::Nullable;

mod calls;

pub use calls::{Answer, Cuda};

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

/// Counters of one process, as the fake driver's `control.rs` describes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakeCounters {
    /// VMM handle references not released.
    pub handles: u64,
    /// Mappings of device memory.
    pub mappings: u64,
    /// Their bytes.
    pub mapped_bytes: u64,
    /// Reservations by `cuMemAddressReserve`.
    pub reservations: u64,
    /// Their bytes.
    pub reserved_bytes: u64,
    /// Exported fds made.
    pub exports_made: u64,
    /// Shareable handles imported.
    pub imports_made: u64,
    /// Driver calls.
    pub driver_calls: u64,
    /// Driver calls of forked children of this process.
    pub calls_after_fork: u64,
    /// Copies and fills begun.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Copies whose memory was unmapped or freed while they ran.
    pub copies_into_dead_mappings: u64,
    /// Bugs of the fake.
    pub internal_errors: u64,
}

/// What all processes have of one physical device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakeDevice {
    /// Physical memory in bytes.
    pub memory_bytes: u64,
    /// In use.
    pub used_bytes: u64,
    /// VMM handle references.
    pub handles: u64,
    /// Mappings.
    pub mappings: u64,
    /// Their bytes.
    pub mapped_bytes: u64,
    /// Processes attached.
    pub processes: u64,
    /// Driver calls of forked children, of anyone.
    pub calls_after_fork: u64,
    /// Chunks that only an exported fd keeps.
    pub orphans: u64,
}

/// The control functions of the fake driver that this process has loaded.
#[derive(Clone, Copy)]
pub struct Fake {
    add_fault: unsafe extern "C" fn(*const c_char) -> c_int,
    clear_faults: extern "C" fn(),
    calls: unsafe extern "C" fn(*const c_char) -> u64,
    counters: unsafe extern "C" fn(*mut FakeCounters, usize) -> c_int,
    device: unsafe extern "C" fn(u32, *mut FakeDevice, usize) -> c_int,
    set_async: extern "C" fn(i64) -> c_int,
    release_queue: extern "C" fn() -> c_int,
}

impl Fake {
    /// The fake driver's control functions; `None` where the driver is a real one, or there is none.
    pub fn find() -> Option<Self> {
        // SAFETY: a C string; loading the driver is what every test here does anyway. Never closed.
        let library = unsafe { libc::dlopen(cuda_driver_sys::LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return None;
        }
        Some(Self {
            add_fault: symbol(library, c"fake_cuda_add_fault")?,
            clear_faults: symbol(library, c"fake_cuda_clear_faults")?,
            calls: symbol(library, c"fake_cuda_calls")?,
            counters: symbol(library, c"fake_cuda_counters")?,
            device: symbol(library, c"fake_cuda_device")?,
            set_async: symbol(library, c"fake_cuda_set_async")?,
            release_queue: symbol(library, c"fake_cuda_release_queue")?,
        })
    }

    /// As [`Fake::find`]; prints why `what` is skipped where there is no fake driver.
    pub fn require(what: &str) -> Option<Self> {
        let found = Self::find();
        if found.is_none() {
            println!("skipped: {what} needs the fake driver's control functions, and this driver has none");
        }
        found
    }

    /// Adds fault rules, such as `cuMemMap#3=2;cuMemMap#*~5ms`. Panics if the driver does not understand them.
    pub fn add_fault(&self, rules: &str) {
        let text = CString::new(rules).expect("rules without NUL");
        // SAFETY: a C string that lives for the call.
        let rc = unsafe { (self.add_fault)(text.as_ptr()) };
        assert_eq!(rc, 0, "the fake driver does not understand {rules}");
    }

    /// Removes all fault rules; calls are numbered anew.
    pub fn clear_faults(&self) {
        (self.clear_faults)();
    }

    /// Calls of one driver function so far, by symbol or base name.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).expect("a name without NUL");
        // SAFETY: a C string that lives for the call.
        unsafe { (self.calls)(name.as_ptr()) }
    }

    /// Calls of all driver functions so far.
    pub fn total_calls(&self) -> u64 {
        // SAFETY: null means all functions.
        unsafe { (self.calls)(core::ptr::null()) }
    }

    /// This process's counters; all zero before `cuInit`.
    pub fn counters(&self) -> FakeCounters {
        let mut counters = FakeCounters::default();
        // SAFETY: the structure and its size.
        unsafe { (self.counters)(&raw mut counters, size_of::<FakeCounters>()) };
        counters
    }

    /// What everybody has of a physical device; all zero before `cuInit`.
    pub fn device(&self, gpu: u32) -> FakeDevice {
        let mut device = FakeDevice::default();
        // SAFETY: the structure and its size.
        unsafe { (self.device)(gpu, &raw mut device, size_of::<FakeDevice>()) };
        device
    }

    /// Asynchronous work completes after `micros`; at once for 0; on hold, until synchronised with or released, for `None`.
    pub fn set_async(&self, micros: Option<u32>) {
        (self.set_async)(micros.map_or(-1, i64::from));
    }

    /// Lets what is queued now complete.
    pub fn release_queue(&self) {
        (self.release_queue)();
    }
}

impl core::fmt::Debug for Fake {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Fake")
    }
}

fn symbol<F: Copy>(library: *mut core::ffi::c_void, name: &CStr) -> Option<F>
where
    Option<F>: Nullable<Fn = F>,
{
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: null, or the fake driver's function of this name, whose signature the field of `Fake` repeats from its `control.rs`.
    unsafe { Option::<F>::from_address(address) }
}
