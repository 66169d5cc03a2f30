//! A library for `LD_PRELOAD` that stands between a test program and libc.
//!
//! It has the C library's functions that reach the kernel (`functions.rs`). Each call goes through: to a hook of the test's, which may stop it, fail it
//! with an errno or just watch, and then to the real function. A call is hooked if it comes from the program itself (from its own code or what is linked into
//! it, not from libc, the fake driver or any other library), on the thread that has set the hook, and not from inside the hook. All other calls
//! pass untouched. What to do about a call is the hook's business: see `tests/src/shim.rs`, the only user.
//!
//! - `functions.rs`: which functions, and how each says that it failed.
//! - `entry.rs`: from the symbol to `gate.rs`, with the caller's address.
//! - `gate.rs`: who is hooked, and the control functions.

mod entry;
mod functions;
mod gate;
