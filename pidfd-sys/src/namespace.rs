//! `/proc/PID/ns`: which PID and user namespace a process lives in.
//!
//! A namespace is named by the inode of its file; equal inodes of two processes on one host mean one namespace while both are alive.

use crate::procfs::errno_of;
use crate::{Error, Step};
use std::os::unix::fs::MetadataExt;

/// Returns the inode of the PID namespace of process `pid`, or of the caller.
///
/// `pid` counts in the PID namespace of the mounted `/proc`.
/// Errors: `ENOENT` if there is no such process, or no `/proc`; `EACCES` if the caller may not read-trace the process.
/// Source: namespaces(7), pid_namespaces(7).
pub fn pid_namespace(pid: Option<u32>) -> Result<u64, Error> {
    inode(pid, "pid")
}

/// Returns the inode of the user namespace of process `pid`, or of the caller.
///
/// `pid` counts in the PID namespace of the mounted `/proc`.
/// Errors: `ENOENT` if there is no such process, or no `/proc`; `EACCES` if the caller may not read-trace the process.
/// Source: namespaces(7), user_namespaces(7).
pub fn user_namespace(pid: Option<u32>) -> Result<u64, Error> {
    inode(pid, "user")
}

fn inode(pid: Option<u32>, kind: &str) -> Result<u64, Error> {
    let path = match pid {
        Some(pid) => std::format!("/proc/{pid}/ns/{kind}"),
        None => std::format!("/proc/self/ns/{kind}"),
    };
    let file = std::fs::metadata(path).map_err(|error| Step::ReadNamespace.failed(errno_of(&error)))?;
    Ok(file.ino())
}
