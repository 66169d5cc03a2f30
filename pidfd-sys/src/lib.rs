//! One safe function per system call for reaching another process through a pidfd, with our own syscall numbers.
//!
//! | function | call | needs | since Linux |
//! |---|---|---|---|
//! | [`pidfd_open`] | pidfd_open(2) | `std` | 5.3 |
//! | [`pidfd_getfd`] | pidfd_getfd(2) | `std` | 5.6 |
//! | [`has_exited`] | poll(2) on a pidfd | `std` | 5.3 |
//! | [`set_ptracer`] | prctl(2), `PR_SET_PTRACER` | | 3.4 |
//! | [`process_stat`], [`pid_namespace`], [`user_namespace`], [`boot_id`] | files below `/proc` | `std` | 3.8 |
//!
//! The numbers are constants of this crate ([`numbers`]): neither the C library's headers nor its version decides whether the calls exist, only
//! the running kernel does, and it answers `ENOSYS` where they do not. [`raw`] has the same calls on plain file descriptor numbers; they neither
//! allocate nor lock, so a child of fork may use them, and they are what is left without the `std` feature.
//!
//! Every failure is an [`Error`]: the [`Step`] that failed and the kernel's [`Errno`], unchanged. What an errno means for a caller is decided
//! above. Deliberately absent: retries (but for `EINTR` of poll), logging, policy, allocation without `std`.

#![no_std]
#![deny(unsafe_code)]
// The table above links to functions that are not there without `std`.
#![cfg_attr(not(feature = "std"), allow(rustdoc::broken_intra_doc_links, rustdoc::private_intra_doc_links))]

#[cfg(not(target_os = "linux"))]
compile_error!("pidfd-sys is for Linux only");

#[cfg(feature = "std")]
extern crate std;

#[cfg(feature = "std")]
mod boot_id;
#[allow(unsafe_code)]
mod errno;
mod error;
#[allow(unsafe_code)]
mod has_exited;
#[cfg(feature = "std")]
mod namespace;
pub mod numbers;
#[allow(unsafe_code)]
mod pidfd_getfd;
#[allow(unsafe_code)]
mod pidfd_open;
#[cfg(feature = "std")]
mod process_stat;
#[cfg(feature = "std")]
mod procfs;
#[allow(unsafe_code)]
mod ptracer;

pub mod raw {
    //! The calls on plain file descriptor numbers, without `std`.
    //!
    //! No function here closes a number it was given, and every number is safe to pass: one that is not an open pidfd is `EBADF`. A returned
    //! number belongs to the caller, who must close it. No allocation and no lock: callable between fork and exec.

    pub use crate::has_exited::raw::has_exited;
    pub use crate::pidfd_getfd::raw::pidfd_getfd;
    pub use crate::pidfd_open::raw::pidfd_open;
}

#[cfg(feature = "std")]
pub use boot_id::boot_id;
pub use errno::Errno;
pub use error::{Error, Step};
#[cfg(feature = "std")]
pub use has_exited::has_exited;
#[cfg(feature = "std")]
pub use namespace::{pid_namespace, user_namespace};
#[cfg(feature = "std")]
pub use pidfd_getfd::pidfd_getfd;
#[cfg(feature = "std")]
pub use pidfd_open::pidfd_open;
#[cfg(feature = "std")]
pub use process_stat::{ProcessStat, process_stat};
pub use ptracer::{Ptracer, PtracerOutcome, set_ptracer};

// The examples of the README are run as tests.
#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct Readme;
