//! What a key says, beside what this machine knows of it.

use core::fmt;

use cuda_ipc_core::key::{HostId, KEY_LEN, KEY_VERSION, Key, KeyKind};
use pidfd_sys::Errno;
use serde::Serialize;

use super::reach::Reach;
use super::{Lines, address};
use crate::size;

/// A key and what is known of its exporter. `None` in a question's place: it could not be found out.
#[derive(Serialize)]
pub(super) struct KeyReport {
    version: u8,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<u32>,
    pid: u32,
    table_fd: u32,
    nonce: String,
    pid_namespace: u32,
    host: String,
    base: String,
    end: String,
    len: u64,
    made_on_this_host: Option<bool>,
    made_in_this_pid_namespace: Option<bool>,
    process: Process,
    reach: Reach,
}

/// The process that has the key's pid here, which need not be the exporter.
#[derive(Serialize)]
struct Process {
    exists: Option<bool>,
    /// Its command name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// State of its first thread, as in proc_pid_stat(5).
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<char>,
    /// Inode of its PID namespace.
    pid_namespace: Option<u64>,
    /// Why the namespace is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid_namespace_error: Option<String>,
}

impl KeyReport {
    pub(super) fn of(key: &Key) -> Self {
        let (kind, slot) = match key.kind {
            KeyKind::Reservation => ("reservation", None),
            KeyKind::PoolAllocation { slot } => ("pool allocation", Some(slot)),
            KeyKind::Pool => ("pool", None),
            _ => ("unknown to this program", None),
        };
        Self {
            version: KEY_VERSION,
            kind,
            slot,
            pid: key.pid,
            table_fd: key.table_fd,
            nonce: format!("{:016x}", key.nonce.0),
            pid_namespace: key.pid_namespace,
            host: format!("{:016x}", key.host.0),
            base: address(key.base),
            end: address(key.base + key.len),
            len: key.len,
            made_on_this_host: pidfd_sys::boot_id().ok().map(|boot_id| HostId::from_boot_id(boot_id) == key.host),
            made_in_this_pid_namespace: pidfd_sys::pid_namespace(None).ok().map(|ours| ours == u64::from(key.pid_namespace)),
            process: Process::with(key.pid),
            reach: Reach::of(key),
        }
    }
}

impl Process {
    fn with(pid: u32) -> Self {
        let stat = pidfd_sys::process_stat(pid);
        let exists = match stat {
            Ok(_) => Some(true),
            Err(error) if matches!(error.errno, Errno::ENOENT | Errno::ESRCH) => Some(false),
            Err(_) => None,
        };
        if exists == Some(false) {
            return Self { exists, name: None, state: None, pid_namespace: None, pid_namespace_error: None };
        }
        let namespace = pidfd_sys::pid_namespace(Some(pid));
        Self {
            exists,
            name: std::fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned()),
            state: stat.ok().map(|stat| stat.state.into()),
            pid_namespace: namespace.ok(),
            pid_namespace_error: namespace.err().map(|error| error.to_string()),
        }
    }
}

impl fmt::Display for KeyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "key, {KEY_LEN} bytes, version {}", self.version)?;
        let mut lines = Lines(f);
        match (self.kind, self.slot) {
            ("reservation", _) => {
                lines.line("kind", "reservation: a range of addresses (cuMemAddressReserve) in which chunks come and go")?
            }
            (kind, Some(slot)) => lines.line("kind", format_args!("{kind}, in slot {slot} of the export table"))?,
            (kind, None) => lines.line("kind", kind)?,
        }
        lines.line("range", format_args!("{} to {}, {}", self.base, self.end, size::exact(self.len)))?;
        lines.line("pid", format_args!("{}, {}", self.pid, self.process))?;
        lines.line(
            "PID namespace",
            format_args!("{}, {}", self.pid_namespace, this_or_other(self.made_in_this_pid_namespace, "namespace")),
        )?;
        lines.line("table fd", format_args!("{} in that process", self.table_fd))?;
        lines.line("nonce", format_args!("{}, the identity of the exporter's table", self.nonce))?;
        lines.line("host", format_args!("{}, {}", self.host, this_or_other(self.made_on_this_host, "machine since its last boot")))?;
        self.reach.write(&mut lines)
    }
}

fn this_or_other(this: Option<bool>, what: &str) -> String {
    match this {
        Some(true) => format!("this {what}"),
        Some(false) => format!("not this {what}"),
        None => format!("unknown whether this {what}"),
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exists {
            Some(false) => return f.write_str("no such process here"),
            None => return f.write_str("unknown whether such a process is here"),
            Some(true) => {}
        }
        write!(f, "here `{}`", self.name.as_deref().unwrap_or("?"))?;
        if let Some(state) = self.state {
            write!(f, ", state {state}")?;
        }
        match (self.pid_namespace, &self.pid_namespace_error) {
            (Some(namespace), _) => write!(f, ", in PID namespace {namespace}"),
            (None, Some(error)) => write!(f, ", in an unknown PID namespace ({error})"),
            (None, None) => Ok(()),
        }
    }
}
