//! Kernel, gates, limits and namespaces of this process.

use cuda_ipc_core::diagnosis::Yama;
use cuda_ipc_core::importer::Witness;
use serde::Serialize;
use std::os::unix::fs::MetadataExt;

/// What the kernel says. `None`: it does not say.
#[derive(Serialize)]
pub(super) struct Node {
    pub(super) kernel: Option<String>,
    /// Whether a filter of system calls is in force on this process.
    pub(super) seccomp: Option<bool>,
    /// Yama's ptrace_scope; -1 where the kernel has no Yama.
    pub(super) yama_ptrace_scope: Option<i32>,
    pub(super) uid: u32,
    pub(super) cap_sys_ptrace: Option<bool>,
    /// Limits of open files.
    pub(super) open_files_soft: Option<u64>,
    pub(super) open_files_hard: Option<u64>,
    pub(super) pid_namespace: Option<u64>,
    pub(super) user_namespace: Option<u64>,
    pub(super) network_namespace: Option<u64>,
    pub(super) socket_dir: Option<String>,
}

impl Node {
    pub(super) fn look() -> Self {
        let witness = Witness::default();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Self {
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|text| text.trim().to_owned()),
            seccomp: witness.filtered(),
            yama_ptrace_scope: witness.yama().map(|yama| match yama {
                Yama::Absent => -1,
                Yama::Scope(scope) => scope.into(),
            }),
            uid: rustix::process::geteuid().as_raw(),
            cap_sys_ptrace: witness.may_trace(),
            open_files_soft: limit.current,
            open_files_hard: limit.maximum,
            pid_namespace: pidfd_sys::pid_namespace(None).ok(),
            user_namespace: pidfd_sys::user_namespace(None).ok(),
            network_namespace: network_namespace("self"),
            socket_dir: socket_dir(),
        }
    }
}

/// Inode of a process's network namespace.
pub(super) fn network_namespace(who: &str) -> Option<u64> {
    Some(std::fs::metadata(format!("/proc/{who}/ns/net")).ok()?.ino())
}

/// `CUDA_IPC_SOCKET_DIR`, if it is set.
pub(super) fn socket_dir() -> Option<String> {
    std::env::var_os("CUDA_IPC_SOCKET_DIR").filter(|dir| !dir.is_empty()).map(|dir| dir.to_string_lossy().into_owned())
}
