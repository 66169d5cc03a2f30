//! The judgement: never against a fact, never without one, and right in every world of a model of the kernel's rules.

#![allow(clippy::unwrap_used, reason = "tests")]

mod every_combination;
mod texts;
mod world;
mod worlds;

pub(crate) const EPERM: i32 = 1;
pub(crate) const ESRCH: i32 = 3;
pub(crate) const EBADF: i32 = 9;
pub(crate) const EACCES: i32 = 13;
pub(crate) const ENFILE: i32 = 23;
pub(crate) const EMFILE: i32 = 24;
pub(crate) const ENOSYS: i32 = 38;
