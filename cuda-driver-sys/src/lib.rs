//! Raw CUDA driver API types and a table of entry points resolved at run time.
//!
//! [`bindings`] is generated from `cudaTypedefs.h` (see its first line) and holds types only: no function is declared and nothing is linked, so
//! the crate builds without a CUDA toolkit and a program that uses it starts without a driver. C enums are open newtypes: a value that a newer
//! driver returns stays a number instead of becoming undefined behaviour. [`Driver::load`] resolves the functions.
//!
//! No policy, no std, no alloc. This is the only crate of the workspace that names libcuda.

#![no_std]
#![deny(unsafe_code)]

#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, unsafe_code, unreachable_pub, clippy::all, clippy::pedantic)]
#[rustfmt::skip]
pub mod bindings;
mod compat;
mod load;
#[allow(unsafe_code)]
mod table;

pub use bindings::*;
pub use compat::*;
pub use load::{LIBRARY, Library, LoadError, LoaderText};
pub use table::{Driver, ENTRY_POINTS, EntryPoint, Nullable};

// The examples of the README are run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
