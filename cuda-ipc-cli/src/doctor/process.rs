//! The other process: what is known of it, whether its fds can be had from here, and whether the preload library is active in it.

use std::collections::BTreeSet;

use cuda_ipc_core::diagnosis::Life;
use cuda_ipc_core::importer::Witness;
use serde::Serialize;

use super::node::network_namespace;
use crate::finding::Finding;

/// A process. `None`: not known, mostly because this process may not look into it.
#[derive(Serialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) exists: bool,
    pub(super) name: Option<String>,
    pub(super) same_user_and_group: Option<bool>,
    pub(super) dumpable: Option<bool>,
    pub(super) same_pid_namespace: Option<bool>,
    pub(super) same_user_namespace: Option<bool>,
    pub(super) same_network_namespace: Option<bool>,
    /// Whether its fds can be fetched from here.
    pub(super) reachable_by_pidfd: bool,
    /// The abstract socket name of its broker; none where it has exported nothing, or its fds cannot be listed.
    pub(super) broker: Option<String>,
    /// Whether the preload library is in it.
    pub(super) preload_active: Option<bool>,
    /// What keeps its fds from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) finding: Option<Finding>,
}

/// The preload library's file.
const PRELOAD: &str = "libcuda_ipc_preload.so";

impl Process {
    pub(super) fn look(pid: u32) -> Self {
        let witness = Witness::default();
        let facts = witness.process(pid);
        let exists = facts.life != Life::Exited && std::fs::metadata(format!("/proc/{pid}")).is_ok();
        let tried = if exists {
            witness.try_process(pid).map_err(Finding::from)
        } else {
            Err(Finding::new(
                "no-such-process",
                format!("there is no process {pid} here, or it has exited"),
                "Give the number that the process has in this PID namespace",
                &["ps -e | grep <its name>"],
            ))
        };
        Self {
            pid,
            exists,
            name: std::fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned()),
            same_user_and_group: facts.same_ids,
            dumpable: facts.dumpable,
            same_pid_namespace: facts.same_pid_namespace,
            same_user_namespace: facts.same_user_namespace,
            same_network_namespace: network_namespace("self").zip(network_namespace(&pid.to_string())).map(|(ours, its)| ours == its),
            reachable_by_pidfd: tried.is_ok(),
            broker: broker(pid),
            preload_active: mapped_files(pid).map(|files| files.iter().any(|file| file.ends_with(PRELOAD))),
            finding: tried.err(),
        }
    }
}

/// The files that a process has mapped; `None` if this process may not know.
pub(super) fn mapped_files(pid: u32) -> Option<BTreeSet<String>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    // Address, access, offset, device, inode, and the path, which may have blanks.
    let path = |line: &str| line.find('/').and_then(|at| line.get(at..)).map(|path| path.trim_end_matches(" (deleted)").to_owned());
    Some(maps.lines().filter_map(path).collect())
}

/// The name under which one of the process's sockets listens, if it is a broker's.
fn broker(pid: u32) -> Option<String> {
    let sockets: BTreeSet<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .ok()?
        .filter_map(|entry| {
            std::fs::read_link(entry.ok()?.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned)
        })
        .collect();
    // Of its network namespace, which need not be this process's.
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).ok()?;
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let (inode, name) = (fields.nth(6)?, fields.next()?);
        let name = name.strip_prefix('@')?;
        (name.starts_with("cuda-ipc-") && sockets.contains(inode)).then(|| name.to_owned())
    })
}
