//! What /proc says of a process, and what that says about looking into it.
//!
//! Source: proc_pid_stat(5), proc_pid_status(5), proc_pid_ns(5), proc_pid_uid_map(5), PR_SET_DUMPABLE(2const), ptrace(2) "Ptrace access mode checking".

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pidfd_sys::Errno;

use crate::diagnosis::{Life, PeerFacts};

/// Lines of a status file. `None`: not there, or not understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// Real, effective and saved user.
    pub(super) uids: Option<[u32; 3]>,
    /// Real, effective and saved group.
    pub(super) gids: Option<[u32; 3]>,
    /// The capabilities that it may use.
    pub(super) permitted: Option<u64>,
    /// Those that it uses now.
    pub(super) effective: Option<u64>,
    /// 0: no filter of system calls.
    pub(super) seccomp: Option<u32>,
    /// In how many nested PID namespaces it has a number, as far as they are below the reader's.
    pub(super) pid_depth: Option<usize>,
}

/// `CAP_SYS_PTRACE`, capability.h.
const SYS_PTRACE: u32 = 19;

impl Status {
    /// This thread's; filters of system calls are per thread.
    pub(super) fn of_this_thread() -> Option<Self> {
        Self::read("/proc/thread-self/status").or_else(|| Self::read("/proc/self/status"))
    }

    fn of(pid: u32) -> Option<Self> {
        Self::read(&format!("/proc/{pid}/status"))
    }

    fn read(path: &str) -> Option<Self> {
        // A name may be any bytes.
        Some(Self::parse(&String::from_utf8_lossy(&std::fs::read(path).ok()?)))
    }

    fn parse(text: &str) -> Self {
        let mut status = Self::default();
        for (name, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match name {
                "Uid" => status.uids = three(value),
                "Gid" => status.gids = three(value),
                "CapPrm" => status.permitted = u64::from_str_radix(value, 16).ok(),
                "CapEff" => status.effective = u64::from_str_radix(value, 16).ok(),
                "Seccomp" => status.seccomp = value.parse().ok(),
                "NSpid" => status.pid_depth = Some(value.split_whitespace().count()),
                _ => {}
            }
        }
        status
    }

    /// Whether it has CAP_SYS_PTRACE in its user namespace.
    pub(super) fn may_trace(&self) -> Option<bool> {
        self.effective.map(|effective| effective >> SYS_PTRACE & 1 == 1)
    }
}

/// The first three numbers.
fn three(text: &str) -> Option<[u32; 3]> {
    let mut numbers = text.split_whitespace().map(|number| number.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}

/// Whether numbers in /proc are those of this process's PID namespace. Where another one's /proc is mounted they are strangers'.
pub(super) fn proc_counts_as_we_do() -> bool {
    std::fs::read_link("/proc/self").is_ok_and(|number| number.to_str().is_some_and(|number| number.parse() == Ok(std::process::id())))
}

/// Which threads of a process live that has not exited yet.
///
/// They end one by one, which may take long where GPU memory has to go. A thread that the kernel has begun to end, or has killed, does not come back.
pub(super) fn life(pid: u32) -> Life {
    let tasks = format!("/proc/{pid}/task");
    let first = is_living(&Path::new(&tasks).join(pid.to_string()));
    if first == Some(true) {
        return Life::Lives;
    }
    let threads = std::fs::read_dir(&tasks).into_iter().flatten().filter_map(Result::ok);
    let known: Vec<bool> = threads.filter_map(|thread| is_living(&thread.path())).collect();
    match (first, known.contains(&true)) {
        (Some(_), true) => Life::LivesWithoutFirstThread,
        (None, true) => Life::Lives,
        (_, false) if known.is_empty() => Life::Unknown,
        (_, false) => Life::Exited,
    }
}

/// Whether a thread neither ends nor has been told to; `None` if it cannot be looked at, or is no more.
fn is_living(thread: &Path) -> Option<bool> {
    /// `PF_EXITING` and `PF_SIGNALED` of sched.h: the kernel has begun to end it, or a signal has killed it and its core is being dumped.
    const ENDING: u32 = 0x4 | 0x400;
    const SIGKILL: u64 = 1 << (9 - 1);
    let stat = String::from_utf8_lossy(&std::fs::read(thread.join("stat")).ok()?).into_owned();
    // The name before it may hold anything. State, parent, group, session, terminal, its group, flags.
    let flags: u32 = stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse().ok()?;
    let status = String::from_utf8_lossy(&std::fs::read(thread.join("status")).ok()?).into_owned();
    let mut pending = status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")));
    let killed = pending.any(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & SIGKILL != 0));
    Some(flags & ENDING == 0 && !killed)
}

/// What is known of a process but its life.
pub(super) fn facts(pid: u32) -> PeerFacts {
    let (own, its) = (Status::of_this_thread().unwrap_or_default(), Status::of(pid).unwrap_or_default());
    let ids = |own: Option<[u32; 3]>, its: Option<[u32; 3]>| Some(its?.iter().all(|id| own.is_some_and(|[real, ..]| real == *id)));
    let both = |users: Option<bool>, groups: Option<bool>| match (users, groups) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (users, groups) => Some(users? && groups?),
    };
    let namespace = pidfd_sys::pid_namespace(Some(pid));
    let readable = match namespace {
        Ok(_) => Some(true),
        Err(error) if matches!(error.errno, Errno::EACCES | Errno::EPERM) => Some(false),
        Err(_) => None,
    };
    PeerFacts {
        life: Life::Unknown,
        same_ids: both(ids(own.uids, its.uids), ids(own.gids, its.gids)).filter(|_| own.uids.is_some() && own.gids.is_some()),
        dumpable: dumpable(pid, &its),
        capabilities_covered: own.permitted.zip(its.permitted).map(|(own, its)| its & !own == 0),
        readable,
        same_pid_namespace: same_pid_namespace(namespace.ok(), &own, &its),
        same_user_namespace: same_user_namespace(pid),
    }
}

/// The kernel gives the files of a process that is not dumpable to root. Of root's own processes that tells nothing.
fn dumpable(pid: u32, its: &Status) -> Option<bool> {
    let [_, effective, _] = its.uids?;
    let owner = std::fs::metadata(format!("/proc/{pid}/status")).ok()?.uid();
    match effective {
        0 => None,
        effective => Some(owner == effective),
    }
}

fn same_pid_namespace(its_inode: Option<u64>, own: &Status, its: &Status) -> Option<bool> {
    match its_inode {
        Some(inode) => pidfd_sys::pid_namespace(None).ok().map(|own| own == inode),
        // Deeper than this process: below it. As deep: perhaps beside it, which nobody shows without the right to read.
        None => (own.pid_depth? != its.pid_depth?).then_some(false),
    }
}

fn same_user_namespace(pid: u32) -> Option<bool> {
    if let (Ok(own), Ok(its)) = (pidfd_sys::user_namespace(None), pidfd_sys::user_namespace(Some(pid))) {
        return Some(own == its);
    }
    // Everybody may read how a namespace numbers its users. Equal maps say nothing, different ones are of different namespaces.
    let map = |who: &str| std::fs::read_to_string(format!("/proc/{who}/uid_map")).ok();
    (map("self")? != map(&pid.to_string())?).then_some(false)
}

#[cfg(test)]
mod tests {
    use super::Status;

    #[test]
    fn a_status_file_is_read() {
        let text = "Name:\tUid:\t9\nUmask:\t0022\nUid:\t1000\t1001\t1002\t1003\nGid:\t5\t6\t7\t8\nNSpid:\t77\t1\nCapPrm:\t000001fffeffffff\n\
            CapEff:\t0000000000080000\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        let status = Status::parse(text);
        let want = Status {
            uids: Some([1000, 1001, 1002]),
            gids: Some([5, 6, 7]),
            permitted: Some(0x1ff_feff_ffff),
            effective: Some(1 << 19),
            seccomp: Some(2),
            pid_depth: Some(2),
        };
        assert_eq!(status, want);
        assert_eq!(status.may_trace(), Some(true));
        assert_eq!(Status { effective: Some(!(1 << 19)), ..want }.may_trace(), Some(false));
        assert_eq!(Status::parse("Uid:\t1\t2\nCapEff:\tx\n").may_trace(), None);
        assert_eq!(Status::parse(""), Status::default());
    }
}
