//! The witness: collects what the diagnosis judges by, from the kernel, after something has failed.
//!
//! It asks only: no fd is fetched, nothing is changed, and no process is started. What it reads of processes is in `witness/process.rs`; how errors of this
//! module's importer become a diagnosis' failures is in `witness/failure.rs`. What a fact proves is `crate::diagnosis`' business.

mod failure;
mod process;

use std::os::fd::AsFd;
use std::path::PathBuf;

use pidfd_sys::Errno;

use super::ImportError;
use crate::diagnosis::{Call, Diagnosis, Facts, Failure, KernelVersion, Life, PeerFacts, Trial, Yama};
use crate::key::Key;
use crate::reason::NoIpc;
use process::Status;

/// Explains failures. Usable from any thread; each explanation costs some tens of system calls, so it is not for a path that fails all the time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witness {
    ptrace_scope: PathBuf,
    release: PathBuf,
    gpu_visible: Option<bool>,
}

impl Default for Witness {
    /// Reads the running kernel's files.
    fn default() -> Self {
        Self { ptrace_scope: "/proc/sys/kernel/yama/ptrace_scope".into(), release: "/proc/sys/kernel/osrelease".into(), gpu_visible: None }
    }
}

/// No fd of any process: the kernel looks for it only after it has looked whether the caller may ask.
const NO_FD: i32 = i32::MAX;

impl Witness {
    /// Reads Yama's setting from another file: for tests, and where the machine's files are mounted elsewhere.
    ///
    /// Where the file is missing there is no Yama if its folder's parent exists.
    #[must_use]
    pub fn with_ptrace_scope(self, file: impl Into<PathBuf>) -> Self {
        Self { ptrace_scope: file.into(), ..self }
    }

    /// Reads the kernel's release from another file.
    #[must_use]
    pub fn with_release(self, file: impl Into<PathBuf>) -> Self {
        Self { release: file.into(), ..self }
    }

    /// Adds whether the exporter's GPU is one of this process's, which the caller knows from the rkey or from a chunk.
    #[must_use]
    pub fn with_gpu_visible(self, visible: bool) -> Self {
        Self { gpu_visible: Some(visible), ..self }
    }

    /// Finds the cause of a failed import of `key`. `None` where the error itself says all: no setting of machine, container or exporter is behind it.
    pub fn explain(&self, error: &ImportError, key: &Key) -> Option<Diagnosis> {
        let (failure, broker) = failure::of(&error.kind)?;
        let same = pidfd_sys::pid_namespace(None).ok().map(|ours| ours == u64::from(key.pid_namespace));
        // In another namespace the number is nobody's, or a stranger's.
        let mut peer = if same == Some(true) { peer_facts(key.pid) } else { PeerFacts::UNKNOWN };
        peer.same_pid_namespace = same;
        Some(Diagnosis::of(self.facts(failure, broker, peer)))
    }

    /// Finds the cause of a refused export. `None` as for [`Witness::explain`].
    pub fn explain_export(&self, no_ipc: &NoIpc) -> Option<Diagnosis> {
        let diagnosis = Diagnosis::of(Facts::of(Failure::Export(no_ipc.cause)));
        (diagnosis.cause != crate::diagnosis::Cause::Unknown).then_some(diagnosis)
    }

    /// Tries whether fds of process `pid` could be fetched from this one, and finds the cause if not. Nothing is fetched.
    ///
    /// `pid` counts in this process's PID namespace. `Ok`: they could, by the keys that the process makes. For a verdict on a node `pid` is a process that is neither this one nor a descendant
    /// of it; those are looked into where others are not.
    pub fn try_process(&self, pid: u32) -> Result<(), Diagnosis> {
        let ((call, trial), mut peer) = (try_calls(pid), peer_facts(pid));
        let failure = match trial {
            // Keys have numbers of the exporter's namespace, by which it is not found from here.
            _ if peer.same_pid_namespace == Some(false) => Failure::OtherPidNamespace,
            Trial::Works => return Ok(()),
            Trial::Fails(errno) => Failure::Call(call, errno),
            Trial::NotDone => Failure::Other,
        };
        if failure != Failure::OtherPidNamespace {
            // Where the number counts that was given.
            peer.same_pid_namespace = Some(true);
        }
        Err(Diagnosis::of(self.facts(failure, None, peer)))
    }

    /// The running kernel; `None` if its release cannot be read.
    pub fn kernel(&self) -> Option<KernelVersion> {
        KernelVersion::parse(&std::fs::read_to_string(&self.release).ok()?)
    }

    /// Yama's setting; `None` if it cannot be read.
    pub fn yama(&self) -> Option<Yama> {
        match std::fs::read_to_string(&self.ptrace_scope) {
            Ok(text) => text.trim().parse().ok().map(Yama::Scope),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let kernel = self.ptrace_scope.parent()?.parent()?;
                // Without its parent a missing folder says nothing: /proc may not be mounted.
                kernel.is_dir().then_some(Yama::Absent)
            }
            Err(_) => None,
        }
    }

    /// Whether a filter of system calls is in force on this thread; `None` if /proc does not say.
    pub fn filtered(&self) -> Option<bool> {
        Status::of_this_thread()?.seccomp.map(|mode| mode != 0)
    }

    /// Whether this thread has CAP_SYS_PTRACE in its user namespace; `None` if /proc does not say.
    pub fn may_trace(&self) -> Option<bool> {
        Status::of_this_thread()?.may_trace()
    }

    /// What is known of process `pid`, which counts in this process's PID namespace.
    pub fn process(&self, pid: u32) -> PeerFacts {
        peer_facts(pid)
    }

    fn facts(&self, failure: Failure, broker: Option<crate::diagnosis::BrokerFailure>, peer: PeerFacts) -> Facts {
        let own = Status::of_this_thread();
        let (on_self, on_neighbour) = match failure {
            Failure::Call(call, _) => (try_call(call, std::process::id()), neighbour().map_or(Trial::NotDone, |pid| try_call(call, pid))),
            _ => (Trial::NotDone, Trial::NotDone),
        };
        Facts {
            failure,
            broker,
            kernel: self.kernel(),
            filtered: own.as_ref().and_then(|own| own.seccomp).map(|mode| mode != 0),
            yama: self.yama(),
            on_self,
            on_neighbour,
            may_trace: own.as_ref().and_then(Status::may_trace),
            peer,
            open_files_limit: rustix::process::getrlimit(rustix::process::Resource::Nofile).current,
            gpu_visible: self.gpu_visible,
        }
    }
}

/// The parent, unless it is in another PID namespace.
fn neighbour() -> Option<u32> {
    rustix::process::getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok())
}

/// How `call` goes on a process.
fn try_call(call: Call, pid: u32) -> Trial {
    match (call, try_calls(pid)) {
        (Call::PidfdGetfd, (Call::PidfdOpen, _)) => Trial::NotDone,
        (Call::PidfdOpen, (Call::PidfdGetfd, _)) => Trial::Works,
        (_, (_, trial)) => trial,
    }
}

/// Opens a process and asks for an fd that it does not have: the call that decided, and how it went.
fn try_calls(pid: u32) -> (Call, Trial) {
    let pidfd = match pidfd_sys::pidfd_open(pid) {
        Ok(pidfd) => pidfd,
        Err(error) => return (Call::PidfdOpen, failed(error.errno)),
    };
    let trial = match pidfd_sys::pidfd_getfd(pidfd.as_fd(), NO_FD) {
        // Not there: so the kernel was ready to look.
        Err(error) if error.errno == Errno::EBADF => Trial::Works,
        Err(error) => failed(error.errno),
        Ok(_) => Trial::Works,
    };
    (Call::PidfdGetfd, trial)
}

fn failed(errno: Errno) -> Trial {
    match errno {
        // It says nothing about the process that was tried.
        Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM => Trial::NotDone,
        errno => Trial::Fails(errno.0),
    }
}

fn peer_facts(pid: u32) -> PeerFacts {
    let in_proc = process::proc_counts_as_we_do();
    let facts = if in_proc { process::facts(pid) } else { PeerFacts::UNKNOWN };
    PeerFacts { life: life(pid, in_proc), ..facts }
}

fn life(pid: u32, in_proc: bool) -> Life {
    let Ok(pidfd) = pidfd_sys::pidfd_open(pid) else { return Life::Unknown };
    match pidfd_sys::has_exited(pidfd.as_fd()) {
        Ok(true) => Life::Exited,
        Ok(false) if in_proc => process::life(pid),
        Ok(false) => Life::Lives,
        Err(_) => Life::Unknown,
    }
}
