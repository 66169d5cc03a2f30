//! The judgement: which cause the facts prove.
//!
//! The order is the kernel's own. A filter answers before the kernel sees the call; the kernel then looks whether it has the call, whether the number names a
//! process, and in `ptrace_may_access` at ids, dumpable, capabilities and Yama. CAP_SYS_PTRACE in the target's user namespace lifts all of these but Yama's
//! scope 3. Source: `__ptrace_may_access` and `__pidfd_fget` in the kernel, `Documentation/admin-guide/LSM/Yama.rst`, seccomp(2).

use super::{BrokerFailure, Call, Cause, Facts, Failure, Life, Trial, Yama};
use crate::reason;

// Linux's numbers, the same on every architecture that CUDA runs on.
const EPERM: i32 = 1;
const ESRCH: i32 = 3;
const EBADF: i32 = 9;
const EACCES: i32 = 13;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const ENOSYS: i32 = 38;

/// The cause that `facts` prove; [`Cause::Unknown`] where they prove none, or contradict each other.
///
/// Total and pure: any facts give a cause, the same facts the same.
pub fn find(facts: &Facts) -> Cause {
    match (of_failure(facts), facts.broker) {
        // Why the other way is closed is proven where this one's reason is not.
        (Cause::Unknown, Some(broker @ (BrokerFailure::OtherUser | BrokerFailure::UnmappedUser))) => of_broker(broker, facts),
        (cause, _) => cause,
    }
}

fn of_failure(facts: &Facts) -> Cause {
    match facts.failure {
        Failure::Export(cause) => of_export(cause),
        Failure::Call(_, EMFILE | ENFILE) | Failure::OwnCall(EMFILE | ENFILE) => out_of_files(facts),
        Failure::OwnCall(_) | Failure::Other => Cause::Unknown,
        // What it left behind explains no driver error: the exporter's end comes first.
        _ if facts.peer.life == Life::Exited => Cause::ExporterGone,
        Failure::Ended => Cause::ExporterGone,
        Failure::NotTheExporter => unless(facts.peer.same_pid_namespace == Some(false), Cause::ExporterGone),
        Failure::OtherPidNamespace => unless(facts.peer.same_pid_namespace == Some(true), Cause::OtherPidNamespace),
        Failure::Driver(_) if facts.gpu_visible == Some(false) => Cause::GpuNotVisible,
        Failure::Driver(_) => Cause::Unknown,
        Failure::Broker(broker) => of_broker(broker, facts),
        Failure::Call(call, ENOSYS) => no_such_call(call, facts),
        Failure::Call(call, errno @ (EPERM | EACCES)) => refused(call, errno, facts),
        Failure::Call(Call::PidfdOpen, ESRCH) => no_such_process(facts),
        Failure::Call(Call::PidfdGetfd, ESRCH) if facts.peer.life == Life::LivesWithoutFirstThread => Cause::FirstThreadExited,
        // The kernel was ready to give it, and the table of the key is not there.
        Failure::Call(Call::PidfdGetfd, EBADF) => unless(facts.peer.same_pid_namespace != Some(true), Cause::ExporterGone),
        // ESRCH of getfd alone is not death.
        Failure::Call(..) => Cause::Unknown,
    }
}

const fn unless(contradicted: bool, cause: Cause) -> Cause {
    if contradicted { Cause::Unknown } else { cause }
}

const fn of_export(cause: reason::Cause) -> Cause {
    match cause {
        reason::Cause::NoHandleType | reason::Cause::PoolWithoutHandle => Cause::NoHandleType,
        reason::Cause::FabricOnly => Cause::FabricOnly,
        reason::Cause::TooManyFiles { limit } => Cause::FdLimit { limit: Some(limit) },
        _ => Cause::Unknown,
    }
}

const fn out_of_files(facts: &Facts) -> Cause {
    match facts.failure {
        Failure::Call(_, ENFILE) | Failure::OwnCall(ENFILE) => Cause::FdLimit { limit: None },
        _ => Cause::FdLimit { limit: facts.open_files_limit },
    }
}

const fn of_broker(broker: BrokerFailure, facts: &Facts) -> Cause {
    match broker {
        BrokerFailure::NoListener { socket_dir } => Cause::NoListener { socket_dir },
        // A user who is a stranger here is one whatever his number looks like.
        BrokerFailure::UnmappedUser => unless(matches!(facts.peer.same_user_namespace, Some(true)), Cause::OtherUserNamespace),
        BrokerFailure::OtherUser => unless(matches!(facts.peer.same_ids, Some(true)), Cause::OtherUid),
        BrokerFailure::OutOfFiles(ENFILE) => Cause::FdLimit { limit: None },
        BrokerFailure::OutOfFiles(_) => Cause::FdLimit { limit: facts.open_files_limit },
        BrokerFailure::Other => Cause::Unknown,
    }
}

/// The call does not exist: the kernel is too old, a sandbox has none, or a filter says so.
fn no_such_call(call: Call, facts: &Facts) -> Cause {
    if works_anywhere(facts) || matches!(facts.on_self, Trial::Fails(errno) if errno != ENOSYS) {
        return Cause::Unknown;
    }
    match (facts.kernel, facts.filtered) {
        (Some(kernel), _) if kernel < call.since() => Cause::KernelWithoutCall { call },
        // It has the version, and nothing filters: not Linux itself, as in gVisor.
        (_, Some(false)) => Cause::KernelWithoutCall { call },
        (Some(_), Some(true)) => Cause::Seccomp { call, errno: ENOSYS },
        _ => Cause::Unknown,
    }
}

/// The pid is nobody's. In the namespace in which it counts that is its end; in another it says nothing.
const fn no_such_process(facts: &Facts) -> Cause {
    match (facts.peer.same_pid_namespace, facts.peer.life) {
        (_, Life::Lives | Life::LivesWithoutFirstThread) => Cause::Unknown,
        (Some(true), _) => Cause::ExporterGone,
        (Some(false), _) => Cause::OtherPidNamespace,
        (None, _) => Cause::Unknown,
    }
}

/// Whether the call works on some process, so that neither a filter nor an old kernel is the cause.
const fn works_anywhere(facts: &Facts) -> bool {
    matches!(facts.on_self, Trial::Works) || matches!(facts.on_neighbour, Trial::Works)
}

fn refused(call: Call, errno: i32, facts: &Facts) -> Cause {
    match facts.on_self {
        // Nobody but a filter keeps a process from itself.
        Trial::Fails(EPERM | EACCES) => {
            unless(facts.filtered == Some(false) || facts.on_neighbour == Trial::Works, Cause::Seccomp { call, errno })
        }
        Trial::Fails(_) => Cause::Unknown,
        Trial::Works => match call {
            Call::PidfdGetfd if errno == EPERM => no_access(facts),
            _ => Cause::Unknown,
        },
        Trial::NotDone if works_anywhere(facts) => Cause::Unknown,
        // The kernel itself never refuses to open.
        Trial::NotDone if call == Call::PidfdOpen && facts.filtered == Some(true) => Cause::Seccomp { call, errno },
        // A filter cannot be told from the rest.
        Trial::NotDone => Cause::Unknown,
    }
}

/// The kernel has the call, no filter stops it, and the answer for this exporter is EPERM.
fn no_access(facts: &Facts) -> Cause {
    let peer = &facts.peer;
    let neighbour_works = facts.on_neighbour == Trial::Works;
    if let Some(Yama::Scope(scope @ 3..)) = facts.yama {
        // Nobody, whatever he may do.
        return unless(neighbour_works, Cause::Yama { scope });
    }
    let readable = peer.readable == Some(true);
    if peer.same_user_namespace == Some(false) {
        // A capability that does not reach there, and ids that are others there.
        return unless(readable, Cause::OtherUserNamespace);
    }
    if facts.may_trace != Some(false) {
        // With the capability none of the rest refuses; without knowledge of it none is proven.
        return Cause::Unknown;
    }
    if readable {
        // So it is nothing of what both questions ask, and what only the second one asks is Yama's.
        return match facts.yama {
            _ if peer.same_ids == Some(false) || peer.dumpable == Some(false) || peer.capabilities_covered == Some(false) => Cause::Unknown,
            Some(Yama::Scope(1)) => Cause::Yama { scope: 1 },
            Some(Yama::Scope(2)) => unless(neighbour_works, Cause::Yama { scope: 2 }),
            _ => Cause::Unknown,
        };
    }
    if peer.same_ids == Some(false) {
        return Cause::OtherUid;
    }
    if peer.dumpable == Some(false) {
        return Cause::NotDumpable;
    }
    if peer.capabilities_covered == Some(false) {
        return Cause::MoreCapabilities;
    }
    match facts.yama {
        Some(Yama::Scope(2)) => unless(neighbour_works, Cause::Yama { scope: 2 }),
        // Some may pass scope 1, so everything else has to be out of question.
        Some(Yama::Scope(1)) if all_else_is_fine(facts) => Cause::Yama { scope: 1 },
        _ => Cause::Unknown,
    }
}

fn all_else_is_fine(facts: &Facts) -> bool {
    let peer = &facts.peer;
    let fine = [peer.same_ids, peer.dumpable, peer.capabilities_covered, peer.same_user_namespace];
    peer.readable.is_none() && fine.iter().all(|fact| *fact == Some(true))
}
