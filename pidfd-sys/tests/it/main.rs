//! The calls against the running kernel: real processes, real filters, real refusals.
//!
//! One module per source file. `child` forks helpers, `seccomp` installs filters, `again` runs everything once more without privileges. What the
//! running kernel or user cannot show is skipped with a line that starts with `skipped:`.

mod again;
mod boot_id;
mod child;
mod errno;
mod has_exited;
mod namespace;
mod pidfd_getfd;
mod pidfd_open;
mod process_stat;
mod ptracer;
mod seccomp;
mod sys;
