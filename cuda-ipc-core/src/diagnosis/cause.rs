//! The causes of a lost lane: name, sentence and remedy of each, for a reader who has never heard of ptrace.

use core::fmt;

use super::{BrokerFailure, Call, Diagnosis};

/// Why two processes cannot share memory. Its text is a sentence that states the fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// A filter of system calls (seccomp) answers in the kernel's place.
    Seccomp {
        /// The call that it stops.
        call: Call,
        /// What it answers.
        errno: i32,
    },
    /// Yama's ptrace_scope: 1 descendants only, 2 CAP_SYS_PTRACE only, 3 and more nobody.
    Yama {
        /// The setting.
        scope: u8,
    },
    /// The exporter belongs to another user or group.
    OtherUid,
    /// The exporter is not dumpable.
    NotDumpable,
    /// The exporter has capabilities that this process lacks.
    MoreCapabilities,
    /// The exporter's pid counts in another PID namespace.
    OtherPidNamespace,
    /// The exporter is in another user namespace.
    OtherUserNamespace,
    /// The kernel, or the sandbox that plays one, lacks the call.
    KernelWithoutCall {
        /// The call.
        call: Call,
    },
    /// The exporter has exited, has become another program, or has taken back all that it shared.
    ExporterGone,
    /// The exporter's first thread has exited while others live; the kernel then gives nothing of it by pid.
    FirstThreadExited,
    /// No file descriptor is left.
    FdLimit {
        /// The soft limit of the process; `None` where the whole machine's is meant, or it is not known.
        limit: Option<u64>,
    },
    /// The exporter's GPU is none of this process's.
    GpuNotVisible,
    /// The allocator asked for no handle type that can travel as an fd.
    NoHandleType,
    /// The allocator asked for a fabric handle only.
    FabricOnly,
    /// Nobody listens under the exporter's socket names, and nothing else was tried.
    NoListener {
        /// Whether a socket directory was looked into.
        socket_dir: bool,
    },
    /// The facts prove none of these.
    Unknown,
}

/// What to do about a cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// What has to change, and where.
    pub text: &'static str,
    /// The command or setting that does it, where there is one. Alternatives, not steps.
    pub commands: &'static [&'static str],
}

impl Cause {
    /// A short name that never changes: for programs, statistics and searches.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Seccomp { .. } => "seccomp",
            Self::Yama { scope: 1 } => "yama-scope-1",
            Self::Yama { scope: 2 } => "yama-scope-2",
            Self::Yama { .. } => "yama-scope-3",
            Self::OtherUid => "other-uid",
            Self::NotDumpable => "not-dumpable",
            Self::MoreCapabilities => "more-capabilities",
            Self::OtherPidNamespace => "other-pid-namespace",
            Self::OtherUserNamespace => "other-user-namespace",
            Self::KernelWithoutCall { .. } => "kernel-without-call",
            Self::ExporterGone => "exporter-gone",
            Self::FirstThreadExited => "first-thread-exited",
            Self::FdLimit { .. } => "fd-limit",
            Self::GpuNotVisible => "gpu-not-visible",
            Self::NoHandleType => "no-handle-type",
            Self::FabricOnly => "fabric-only",
            Self::NoListener { .. } => "no-listener",
            Self::Unknown => "unknown",
        }
    }

    /// How many different [`Cause::index`] there are.
    pub const COUNT: usize = 18;

    /// A number below [`Cause::COUNT`] for each [`Cause::name`]: for counters.
    pub const fn index(self) -> usize {
        match self {
            Self::Seccomp { .. } => 0,
            Self::Yama { scope: 1 } => 1,
            Self::Yama { scope: 2 } => 2,
            Self::Yama { .. } => 3,
            Self::OtherUid => 4,
            Self::NotDumpable => 5,
            Self::MoreCapabilities => 6,
            Self::OtherPidNamespace => 7,
            Self::OtherUserNamespace => 8,
            Self::KernelWithoutCall { .. } => 9,
            Self::ExporterGone => 10,
            Self::FirstThreadExited => 11,
            Self::FdLimit { .. } => 12,
            Self::GpuNotVisible => 13,
            Self::NoHandleType => 14,
            Self::FabricOnly => 15,
            Self::NoListener { .. } => 16,
            Self::Unknown => 17,
        }
    }

    /// What to do about it.
    pub const fn remedy(self) -> Remedy {
        let (text, commands): (&'static str, &'static [&'static str]) = match self {
            Self::Seccomp { .. } => (
                "A container's default filter stops this call. Start the container of the importing process with the right to use it",
                &["docker run --cap-add SYS_PTRACE ...", "Kubernetes: securityContext: {capabilities: {add: [SYS_PTRACE]}}"],
            ),
            Self::Yama { scope: 1 | 2 } => (
                "Allow processes of one user to look into each other. Run this on the machine itself, not in a container; it lasts until the next boot",
                &["sudo sysctl -w kernel.yama.ptrace_scope=0"],
            ),
            Self::Yama { .. } => (
                "This setting cannot be taken back while the machine runs. Remove it from the machine's sysctl files and boot again",
                &["grep -rs ptrace_scope /etc/sysctl.conf /etc/sysctl.d /usr/lib/sysctl.d"],
            ),
            Self::OtherUid => (
                "Run both processes as the same user and group",
                &[
                    "docker run --user \"$(id -u):$(id -g)\" ...",
                    "Kubernetes: the same securityContext.runAsUser and runAsGroup in both pods",
                ],
            ),
            Self::NotDumpable => (
                "That happens when a process changes its user after its start, or when its program file is set-uid or not readable. Start it as the right user from the beginning; if it is your program, let it call prctl(PR_SET_DUMPABLE, 1) after it has changed its user",
                &[],
            ),
            Self::MoreCapabilities => (
                "Give the importing process the same capabilities as the exporter, or take them from the exporter",
                &["docker run --cap-add SYS_PTRACE ... (the importer)", "docker run --cap-drop ALL ... (the exporter)"],
            ),
            Self::OtherPidNamespace => (
                "The two processes are in different containers. Let them share a directory for sockets, or their process numbers",
                &[
                    "CUDA_IPC_SOCKET_DIR=<a directory that both containers mount>, in both processes",
                    "docker run --pid=container:<the other container> ...",
                    "Kubernetes, one pod: shareProcessNamespace: true",
                ],
            ),
            Self::OtherUserNamespace => (
                "The two processes are in containers whose users are not the same for the kernel (rootless, or with users of their own). \
                 Run both in one container, or without user namespaces of their own",
                &["docker run --userns=host ...", "podman run --userns=host ..."],
            ),
            Self::KernelWithoutCall { .. } => (
                "This needs Linux 5.6 or later, and no sandbox that plays a kernel (gVisor). Use a newer kernel or another container runtime",
                &["uname -r"],
            ),
            Self::ExporterGone => ("Start it again, and let it send a new key. If it should be running, look for why it ended", &[]),
            Self::FirstThreadExited => ("Let the exporter's main thread wait for its other threads instead of ending before them", &[]),
            Self::FdLimit { .. } => (
                "Raise the limit of open files before the process starts",
                &["ulimit -n \"$(ulimit -Hn)\"", "docker run --ulimit nofile=65536:65536 ..."],
            ),
            Self::GpuNotVisible => (
                "Let both processes see the GPU that holds the memory",
                &["unset CUDA_VISIBLE_DEVICES", "docker run --gpus all ...", "nvidia-smi -L"],
            ),
            Self::NoHandleType => (
                "Make the memory with an allocator that allows sharing. vLLM's sleep mode, torch_memory_saver, CuPy's asynchronous pool and RMM's default \
                 asynchronous pool do not. If it is your allocator: set requestedHandleTypes to CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR in cuMemCreate",
                &["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
            ),
            Self::FabricOnly => (
                "Such memory travels by the GPUs' fabric only; UCX does that itself where IMEX runs. For this machine alone let the allocator ask for \
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, too",
                &["nvidia-imex-ctl -N"],
            ),
            Self::NoListener { socket_dir: false } => (
                "The exporter's broker is switched off, or the two processes are in different network namespaces (pods, containers). \
                 Let them share a directory for sockets",
                &["CUDA_IPC_SOCKET_DIR=<a directory that both mount>, in both processes"],
            ),
            Self::NoListener { socket_dir: true } => (
                "See that the exporter runs, that its broker is not switched off, and that both processes have the same socket directory mounted",
                &["ls -la \"$CUDA_IPC_SOCKET_DIR\""],
            ),
            Self::Unknown => (
                "Nothing that is known explains it. Send this line and the report of this command, made as the same user, to the maintainers",
                &["cuda-ipc doctor --pid <pid of the exporter>"],
            ),
        };
        Remedy { text, commands }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            Self::Seccomp { call, errno } => {
                return write!(f, "a filter of system calls (seccomp) on this process stops {} with errno {errno}", call.name());
            }
            Self::Yama { scope: 1 } => {
                "this machine's security module Yama lets a process look into its own descendants only (kernel.yama.ptrace_scope = 1)"
            }
            Self::Yama { scope: 2 } => {
                "this machine's security module Yama lets only administrators look into other processes (kernel.yama.ptrace_scope = 2)"
            }
            Self::Yama { scope } => {
                return write!(
                    f,
                    "this machine's security module Yama lets nobody look into other processes (kernel.yama.ptrace_scope = {scope})"
                );
            }
            Self::OtherUid => "the exporter belongs to another user or group",
            Self::NotDumpable => "the exporter has closed itself to other processes (it is not dumpable)",
            Self::MoreCapabilities => "the exporter has privileges (capabilities) that this process lacks",
            Self::OtherPidNamespace => "the exporter is in another PID namespace, so its process number means nothing here",
            Self::OtherUserNamespace => "the exporter is in another user namespace, over which this process has no rights",
            Self::KernelWithoutCall { call } => {
                return write!(f, "the running kernel has no {}, which came with Linux {}", call.name(), call.since());
            }
            Self::ExporterGone => {
                "what made the key is gone: its process has exited, has become another program, or has taken back all that it shared"
            }
            Self::FirstThreadExited => {
                "the exporter's first thread has exited, so the kernel gives nothing of the process although it lives"
            }
            Self::FdLimit { limit: Some(limit) } => {
                return write!(f, "the process may not open more files (its limit is {limit})");
            }
            Self::FdLimit { limit: None } => "no more files can be opened: the limit of the process or of the machine is reached",
            Self::GpuNotVisible => "the GPU that holds the exporter's memory is not visible to this process",
            Self::NoHandleType => "the allocator asked for no handle type when it made the memory, so nobody can share it",
            Self::FabricOnly => "the allocator asked for a fabric handle only when it made the memory",
            Self::NoListener { socket_dir: false } => "nobody listens under the exporter's socket name in this network namespace",
            Self::NoListener { socket_dir: true } => {
                "nobody listens under the exporter's socket name, neither in this network namespace nor in the socket directory"
            }
            Self::Unknown => "the cause was not found",
        };
        f.write_str(text)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text)?;
        for (at, command) in self.commands.iter().enumerate() {
            write!(f, "{} `{command}`", if at == 0 { ":" } else { ", or" })?;
        }
        Ok(())
    }
}

impl Diagnosis {
    /// What would open the other way, the exporter's broker, where that was tried in vain as well.
    pub fn other_way(&self) -> Option<&'static str> {
        match (self.cause, self.facts.broker?) {
            (Cause::OtherPidNamespace | Cause::ExporterGone | Cause::NoListener { .. }, _) => None,
            (_, BrokerFailure::NoListener { socket_dir: false }) => Some(
                "Or let the exporter hand the memory over by its socket, which was not found: leave its broker switched on, and where the processes are in \
                 different containers set CUDA_IPC_SOCKET_DIR in both to a directory that both mount",
            ),
            (_, BrokerFailure::NoListener { socket_dir: true }) => {
                Some("Or let the exporter hand the memory over by its socket, which was found neither by name nor in the socket directory")
            }
            _ => None,
        }
    }
}
