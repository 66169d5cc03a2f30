//! The program's end of the shim between it and libc (`tests/shim`).
//!
//! A process that was started with [`preload`] finds it with [`Shim::require`], which also proves that it is in effect: a call counted, and one that fails as
//! told. A process without it fails there; no test passes because nothing was intercepted.

use core::ffi::{CStr, c_char, c_int, c_long};
use std::ffi::{CString, OsString};
use std::path::PathBuf;
use std::process::Command;

use cuda_driver_sys::Nullable;

/// Says where the shim is, if not in the target directory that this program was built into.
pub const SHIM: &str = "CUDA_IPC_SYSCALL_SHIM";

/// Makes `command` run with the shim. Panics where it has not been built.
pub fn preload(command: &mut Command) {
    let path = std::env::var_os(SHIM).map(PathBuf::from).or_else(|| {
        let exe = std::env::current_exe().ok()?;
        exe.ancestors().skip(1).take(2).map(|dir| dir.join("libsyscall_shim.so")).find(|path| path.exists())
    });
    let mut value = OsString::from(path.expect("the shim is not built: cargo build -p syscall-shim"));
    if let Some(other) = std::env::var_os("LD_PRELOAD") {
        value.push(":");
        value.push(other);
    }
    command.env("LD_PRELOAD", value);
}

/// One call, as the shim's `gate.rs` describes it.
#[repr(C)]
#[derive(Debug)]
pub struct HookedCall {
    name: *const c_char,
    /// Its arguments; what the function does not take is garbage.
    pub arguments: [c_long; 7],
    /// 0 before the call, 1 after it.
    pub phase: c_int,
    /// After the call: what it returned.
    pub result: c_long,
}

impl HookedCall {
    /// The function's name, without a 64 at its end; of `syscall` and `fcntl` that of the call or command, as far as this project makes it.
    pub fn name(&self) -> &'static str {
        // SAFETY: the shim passes names that are constants of its own, and it is never unloaded.
        let name = unsafe { CStr::from_ptr(self.name) }.to_str().unwrap_or("?");
        match name {
            // A lock or a parked thread of the standard library's: depends on what other threads do.
            "syscall" if self.arguments[0] == libc::SYS_futex && self.arguments[2] & c_long::from(libc::FUTEX_PRIVATE_FLAG) != 0 => {
                PRIVATE_FUTEX
            }
            "syscall" => syscall_name(self.arguments[0]),
            "fcntl" | "fcntl64" => fcntl_name(self.arguments[1]),
            name => name.strip_suffix("64").unwrap_or(name),
        }
    }
}

/// Name of a futex call within one process.
pub const PRIVATE_FUTEX: &str = "futex(private)";

fn syscall_name(number: c_long) -> &'static str {
    match number {
        pidfd_sys::numbers::PIDFD_OPEN => "pidfd_open",
        pidfd_sys::numbers::PIDFD_GETFD => "pidfd_getfd",
        libc::SYS_futex => "futex",
        libc::SYS_memfd_create => "memfd_create",
        libc::SYS_statx => "statx",
        libc::SYS_getrandom => "getrandom",
        _ => "syscall",
    }
}

fn fcntl_name(command: c_long) -> &'static str {
    match c_int::try_from(command) {
        Ok(libc::F_GETFD) => "fcntl(F_GETFD)",
        Ok(libc::F_SETFD) => "fcntl(F_SETFD)",
        Ok(libc::F_ADD_SEALS) => "fcntl(F_ADD_SEALS)",
        Ok(libc::F_GET_SEALS) => "fcntl(F_GET_SEALS)",
        _ => "fcntl",
    }
}

/// Answers 0 to let a call through, an errno to fail it without making it, the errno's negative to make it and then report failure.
pub type Hook = extern "C" fn(*const HookedCall) -> c_int;

/// The shim's control functions.
#[derive(Clone, Copy)]
pub struct Shim {
    set_object: unsafe extern "C" fn(*const c_char),
    set_hook: extern "C" fn(Option<Hook>) -> c_int,
    calls: unsafe extern "C" fn(*const c_char) -> u64,
}

impl Shim {
    /// Finds the shim in this process and proves that it works. Panics if it is not there or does not.
    pub fn require() -> Self {
        let version: extern "C" fn() -> c_int = symbol(c"syscall_shim_version").expect("LD_PRELOAD has the shim");
        assert_eq!(version(), 1);
        let whole = "a shim that is whole";
        let (set_hook, calls) = (symbol(c"syscall_shim_set_hook").expect(whole), symbol(c"syscall_shim_calls").expect(whole));
        let shim = Self { set_object: symbol(c"syscall_shim_set_object").expect(whole), set_hook, calls };
        shim.prove();
        shim
    }

    /// Whose calls are looked at from the next hook on: the loaded object with this file name, or this program itself.
    pub fn set_object(&self, name: Option<&'static CStr>) {
        // SAFETY: null, or a C string that is never freed.
        unsafe { (self.set_object)(name.map_or(core::ptr::null(), CStr::as_ptr)) }
    }

    /// Sets the hook for calls that this program, or the object that was set, makes on this thread.
    pub fn set_hook(&self, hook: Option<Hook>) {
        assert_eq!((self.set_hook)(hook), 0, "the shim knows where the object is");
    }

    /// Calls of a function so far, whoever made them.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).expect("a name without NUL");
        // SAFETY: a C string that lives for the call.
        unsafe { (self.calls)(name.as_ptr()) }
    }

    fn prove(&self) {
        extern "C" fn refuse_to_open(call: *const HookedCall) -> c_int {
            // SAFETY: the shim passes a call that is valid while the hook runs.
            let call = unsafe { &*call };
            if call.name().starts_with("open") && call.phase == 0 { libc::EDOM } else { 0 }
        }
        let counted = |what: &str| self.calls(what) + self.calls(&format!("{what}64"));
        let (opened, closed) = (counted("open"), counted("close"));
        drop(std::fs::File::open("/dev/null").expect("/dev/null"));
        assert_eq!((counted("open"), counted("close")), (opened + 1, closed + 1), "libc's functions are interposed");
        self.set_hook(Some(refuse_to_open));
        let refused = std::fs::File::open("/dev/null").map(drop);
        let elsewhere = std::thread::spawn(|| std::fs::File::open("/dev/null").map(drop)).join().expect("a thread");
        self.set_hook(None);
        assert_eq!(refused.expect_err("the hook decides").raw_os_error(), Some(libc::EDOM));
        elsewhere.expect("other threads are left alone");
        drop(std::fs::File::open("/dev/null").expect("without a hook all is as before"));
    }
}

impl core::fmt::Debug for Shim {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Shim")
    }
}

/// Counts the calls that this program makes on its broker's thread from now on, and fails those from number `at` on and below `before` with this errno. Panics in a process without the shim.
pub fn arm(at: u64, before: u64, errno: c_int) {
    let arm: extern "C" fn(u64, u64, c_int) -> c_int = symbol(c"syscall_shim_arm").expect("a shim that is whole");
    assert_eq!(arm(at, before, errno), 0, "the shim knows where the program is");
}

/// Ends that: how many calls there were, and which of them failed first.
pub fn disarm() -> (u64, Option<&'static str>) {
    let disarm: unsafe extern "C" fn(*mut *const c_char) -> u64 = symbol(c"syscall_shim_disarm").expect("a shim that is whole");
    let mut failed = core::ptr::null();
    // SAFETY: a live local.
    let count = unsafe { disarm(&raw mut failed) };
    // SAFETY: null, or a constant of the shim's, which is never unloaded.
    let name = (!failed.is_null()).then(|| unsafe { CStr::from_ptr(failed) }.to_str().unwrap_or("?"));
    (count, name)
}

fn symbol<F: Copy>(name: &CStr) -> Option<F>
where
    Option<F>: Nullable<Fn = F>,
{
    // SAFETY: a C string; RTLD_DEFAULT searches what is loaded.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: null, or the shim's function of this name, whose signature the caller repeats from its `gate.rs`.
    unsafe { Option::<F>::from_address(address) }
}
