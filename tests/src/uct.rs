//! UCX's CUDA module as far as the preload library sees it: driver calls that come from a module of that name, in cuda_ipc's order.
//!
//! A process that was started with [`preload`] finds the preload library and the module (`tests/uct-cuda`) with [`Uct::load`]. The sequences follow UCX 1.22:
//! `uct_cuda_ipc_mem_add_reg` and `uct_cuda_ipc_mkey_pack` for exports, `uct_cuda_ipc_open_memhandle` and `uct_cuda_ipc_close_memhandle` for imports. Like UCX, they
//! undo what they have done where a later call fails.
//!
//! # Safety
//! The unsafe here is dlopen and dlsym, and the call of the module's only function with a driver function's name, arguments and live locals as its outputs.

mod sequences;

use core::cell::Cell;
use core::ffi::{CStr, c_void};
use std::ffi::{CString, OsString};
use std::path::PathBuf;
use std::process::Command;

use cuda_driver_sys::{CUresult, Nullable};

pub use sequences::{Exported, Imported, ImportedPool, KEY_LEN, NO_FABRIC, Stopped};

/// File name of the preload library.
pub const PRELOAD: &CStr = c"libcuda_ipc_preload.so";

/// Makes `command` run with the preload library behind what it preloads already, and shows its warnings each time. Panics where it has not been built.
pub fn preload(command: &mut Command) {
    const VARIABLE: &str = "LD_PRELOAD";
    let set = command.get_envs().find(|(name, _)| *name == VARIABLE).and_then(|(_, value)| value).map(OsString::from);
    let mut value = set.or_else(|| std::env::var_os(VARIABLE)).unwrap_or_default();
    if !value.is_empty() {
        value.push(":");
    }
    value.push(built("libcuda_ipc_preload.so", "cuda-ipc-preload"));
    command.env(VARIABLE, value).env("CUDA_IPC_LOG", "debug");
}

fn built(file: &str, package: &str) -> PathBuf {
    let exe = std::env::current_exe().expect("the path of this test binary");
    let path = exe.ancestors().skip(1).take(2).map(|dir| dir.join(file)).find(|path| path.exists());
    path.unwrap_or_else(|| panic!("{file} is not built: cargo build -p {package}"))
}

thread_local! {
    static CALLING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a call that comes from the module.
pub(crate) fn is_calling() -> bool {
    CALLING.get()
}

/// The module. See the file's documentation.
#[derive(Clone, Copy)]
pub struct Uct {
    call: unsafe extern "C" fn(*const c_void, *const u64) -> u32,
}

impl Uct {
    /// Loads the module. Panics in a process without the preload library.
    pub fn load() -> Self {
        let path = built("libuct_cuda_stand_in.so", "uct-cuda-stand-in");
        let path = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path without NUL");
        // SAFETY: a C string; the module has no constructors and is never closed.
        let module = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!module.is_null(), "{path:?} cannot be loaded");
        // SAFETY: an open module and a C string.
        let call = unsafe { libc::dlsym(module, c"uct_cuda_stand_in_call".as_ptr()) };
        // SAFETY: null, or the module's function of this name, whose signature the field repeats.
        let call = unsafe { Option::<unsafe extern "C" fn(*const c_void, *const u64) -> u32>::from_address(call) };
        let this = Self { call: call.expect("a module that is whole") };
        assert_eq!(file_of(this.find(c"cuMemMap")), PRELOAD.to_str().expect("a name"), "the preload library is in front of the driver");
        this
    }

    /// The function that a module gets for this name.
    fn find(self, name: &CStr) -> *const c_void {
        // SAFETY: a C string; the default scope is what the loader binds a module's calls in first.
        let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        assert!(!function.is_null(), "nobody has {name:?}");
        function
    }

    /// Makes a driver call from the module. Its pointers are to live values of the types that the function wants.
    pub(crate) fn call(self, name: &CStr, arguments: &[u64]) -> CUresult {
        let mut all = [0; 9];
        all[..arguments.len()].copy_from_slice(arguments);
        let function = self.find(name);
        CALLING.set(true);
        // SAFETY: see the file's chapter.
        let code = unsafe { (self.call)(function, all.as_ptr()) };
        CALLING.set(false);
        CUresult(code)
    }
}

impl core::fmt::Debug for Uct {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Uct")
    }
}

/// The name of the file that a function was loaded from.
fn file_of(function: *const c_void) -> String {
    let mut info = core::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: looks an address up and writes to a live local.
    let found = unsafe { libc::dladdr(function, info.as_mut_ptr()) };
    assert_ne!(found, 0, "a function of no file");
    // SAFETY: plain C data, zeroed and then written by the call.
    let info = unsafe { info.assume_init() };
    // SAFETY: the loader's own C string.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy();
    path.rsplit('/').next().unwrap_or(&path).to_owned()
}
