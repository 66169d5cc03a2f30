//! Which CUDA driver a command gets: the real one where a GPU answers, else the fake driver, built here.
//!
//! # Safety
//! The unsafe here opens the real driver and calls two of its functions, as `cuda-driver-sys` would. It is not used, so that xtask can be built
//! while that crate's bindings are broken or being made.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsString, c_int, c_uint};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::workspace::{Failure, Workspace};

/// The fake driver's packages.
pub(crate) const FAKE_PACKAGES: &str = "--package fake-cuda --package fake-nvml";
/// What the harness in `tests/` looks at first.
const FOLDER_VARIABLE: &str = "CUDA_IPC_FAKE_DRIVER_DIR";

/// Cargo's two build profiles, by the folder their output is in.
#[derive(Clone, Copy)]
pub(crate) enum Profile {
    Debug,
    Release,
}

impl Profile {
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
        }
    }
}

/// A folder in which the fake driver's libraries have the names that programs open.
pub(crate) struct FakeDriver {
    folder: PathBuf,
}

impl FakeDriver {
    /// Links the libraries that cargo has built for `profile`.
    pub(crate) fn link(workspace: &Workspace, profile: Profile) -> Result<Self, Failure> {
        let folder = workspace.shell.create_dir(workspace.target.join("fake-driver").join(profile.folder()))?;
        // The name without a number is what cudarc asks for first, and what a linker does.
        for (built, opened) in [("libcuda.so", "libcuda.so.1"), ("libcuda.so", "libcuda.so"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
            let library = workspace.target.join(profile.folder()).join(built);
            if !library.is_file() {
                return Err(Failure::task(format!("{} was not built", library.display())));
            }
            replace_link(&library, &folder.join(opened))?;
        }
        Ok(Self { folder })
    }

    /// The variables that make a program open the fake driver.
    pub(crate) fn environment(&self) -> [(&'static str, OsString); 2] {
        let mut search = self.folder.clone().into_os_string();
        if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            search.push(":");
            search.push(rest);
        }
        [(FOLDER_VARIABLE, self.folder.clone().into_os_string()), ("LD_LIBRARY_PATH", search)]
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }
}

fn replace_link(target: &Path, link: &Path) -> Result<(), Failure> {
    if std::fs::read_link(link).is_ok_and(|current| current == target) {
        return Ok(());
    }
    let _ = std::fs::remove_file(link);
    symlink(target, link).map_err(|error| Failure::task(format!("{}: {error}", link.display())))
}

/// How many devices the system's own driver has, or why there is none.
pub(crate) fn real_devices() -> Result<u32, String> {
    // SAFETY: the name is a C string; the driver's constructors run in this process, which asks it two questions and then starts a child.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err("libcuda.so.1 cannot be opened".to_owned());
    }
    let symbol = |name: &CStr| {
        // SAFETY: `handle` is an open library that is never closed, and the name is a C string.
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        if address.is_null() { Err(format!("libcuda.so.1 has no {}", name.to_string_lossy())) } else { Ok(address) }
    };
    let init = symbol(c"cuInit")?;
    // SAFETY: cuInit is `CUresult cuInit(unsigned int)` in every driver; CUresult is an int in C.
    let init: unsafe extern "C" fn(c_uint) -> c_int = unsafe { core::mem::transmute(init) };
    let count = symbol(c"cuDeviceGetCount")?;
    // SAFETY: cuDeviceGetCount is `CUresult cuDeviceGetCount(int *)` in every driver.
    let count: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { core::mem::transmute(count) };
    // SAFETY: 0 is the only flag value there is.
    let result = unsafe { init(0) };
    if result != 0 {
        return Err(format!("cuInit failed with {result}"));
    }
    let mut devices = 0;
    // SAFETY: `devices` is a live local.
    let result = unsafe { count(&raw mut devices) };
    match u32::try_from(devices) {
        Ok(devices) if result == 0 && devices > 0 => Ok(devices),
        _ => Err("the driver has no device".to_owned()),
    }
}
