//! Gives the shared library its SONAME, and keeps it loaded once it is: its threads must not outlive its code.

/// The number in the SONAME. It changes when a program that was linked before would not work any more, and only then; `docs/c-abi.md` says what that means.
const SONAME: &str = "libcuda_ipc.so.0";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
