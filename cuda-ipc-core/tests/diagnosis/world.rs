//! A model of the kernel's rules, written from its manuals and not from the judgement: which calls succeed in a world of which everything is known.

use cuda_ipc_core::diagnosis::{Call, Facts, Failure, KernelVersion, Life, PeerFacts, Trial, Yama};

use crate::{ENOSYS, EPERM, ESRCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    None,
    /// On calls that are none of ours.
    OfOthers,
    On(Call, i32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerLife {
    Lives,
    WithoutFirstThread,
    Zombie,
    Reaped,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) kernel: KernelVersion,
    /// The calls are missing whatever the version says.
    pub(crate) sandbox: bool,
    pub(crate) filter: Filter,
    pub(crate) yama: Yama,
    /// The peer has named the importer by PR_SET_PTRACER.
    pub(crate) named: bool,
    pub(crate) same_ids: bool,
    pub(crate) dumpable: bool,
    pub(crate) capabilities_covered: bool,
    pub(crate) may_trace: bool,
    pub(crate) same_user_namespace: bool,
    pub(crate) same_pid_namespace: bool,
    pub(crate) life: PeerLife,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Itself,
    Neighbour,
    Peer,
}

pub(crate) const OLD: KernelVersion = KernelVersion { major: 4, minor: 19 };
pub(crate) const HALF: KernelVersion = KernelVersion { major: 5, minor: 4 };
pub(crate) const NEW: KernelVersion = KernelVersion { major: 6, minor: 1 };

impl World {
    /// Calls `visit` with every world in which the peer's pid counts here, and one of those in which it does not.
    pub(crate) fn for_each(mut visit: impl FnMut(Self)) {
        let yamas = [Yama::Absent, Yama::Scope(0), Yama::Scope(1), Yama::Scope(2), Yama::Scope(3)];
        let calls = [Call::PidfdOpen, Call::PidfdGetfd];
        let on = calls.into_iter().flat_map(|call| [Filter::On(call, EPERM), Filter::On(call, ENOSYS)]);
        let filters: Vec<Filter> = [Filter::None, Filter::OfOthers].into_iter().chain(on).collect();
        let lives = [PeerLife::Lives, PeerLife::WithoutFirstThread, PeerLife::Zombie, PeerLife::Reaped];
        for kernel in [OLD, HALF, NEW] {
            for &filter in &filters {
                for yama in yamas {
                    for life in lives {
                        for bits in 0_u32..1 << 8 {
                            let bit = |at: u32| bits >> at & 1 == 1;
                            let world = Self {
                                kernel,
                                sandbox: bit(0) && filter == Filter::None,
                                filter,
                                yama,
                                named: bit(1),
                                same_ids: bit(2),
                                dumpable: bit(3),
                                capabilities_covered: bit(4),
                                may_trace: bit(5),
                                same_user_namespace: bit(6),
                                same_pid_namespace: bit(7) || bits != 0,
                                life,
                            };
                            visit(world);
                        }
                    }
                }
            }
        }
    }

    fn capability_counts(&self) -> bool {
        self.may_trace && self.same_user_namespace
    }

    /// What reading and attaching both ask of the peer.
    fn may_read(&self) -> bool {
        self.capability_counts() || (self.same_ids && self.dumpable && self.capabilities_covered && self.same_user_namespace)
    }

    fn yama_allows(&self, capability_counts: bool, named: bool) -> bool {
        match self.yama {
            Yama::Absent | Yama::Scope(0) => true,
            Yama::Scope(1) => named || capability_counts,
            Yama::Scope(2) => capability_counts,
            Yama::Scope(_) => false,
        }
    }

    fn call(&self, call: Call, target: Target) -> Result<(), i32> {
        if let Filter::On(filtered, errno) = self.filter
            && filtered == call
        {
            return Err(errno);
        }
        if self.sandbox || self.kernel < call.since() {
            return Err(ENOSYS);
        }
        match (call, target) {
            (Call::PidfdOpen, Target::Peer) if self.life == PeerLife::Reaped => Err(ESRCH),
            (Call::PidfdOpen, _) | (_, Target::Itself) => Ok(()),
            (_, Target::Neighbour) => {
                if self.yama_allows(self.may_trace, false) {
                    Ok(())
                } else {
                    Err(EPERM)
                }
            }
            (_, Target::Peer) => match self.may_read() && self.yama_allows(self.capability_counts(), self.named) {
                false => Err(EPERM),
                true if self.life == PeerLife::Lives => Ok(()),
                true => Err(ESRCH),
            },
        }
    }

    /// What an importer reports; `None` if it succeeds.
    pub(crate) fn failure(&self) -> Option<Failure> {
        if !self.same_pid_namespace {
            return Some(Failure::OtherPidNamespace);
        }
        if let Err(errno) = self.call(Call::PidfdOpen, Target::Peer) {
            return Some(Failure::Call(Call::PidfdOpen, errno));
        }
        match self.call(Call::PidfdGetfd, Target::Peer) {
            Ok(()) => None,
            Err(_) if self.life == PeerLife::Zombie => Some(Failure::Ended),
            Err(errno) => Some(Failure::Call(Call::PidfdGetfd, errno)),
        }
    }

    /// All that can be known.
    pub(crate) fn facts(&self, failure: Failure) -> Facts {
        let there = self.life != PeerLife::Reaped && self.same_pid_namespace;
        let opens = self.call(Call::PidfdOpen, Target::Peer).is_ok() && there;
        let trial = |target| match failure {
            Failure::Call(Call::PidfdGetfd, _) if self.call(Call::PidfdOpen, target).is_err() => Trial::NotDone,
            Failure::Call(call, _) => self.call(call, target).map_or_else(Trial::Fails, |()| Trial::Works),
            _ => Trial::NotDone,
        };
        Facts {
            kernel: Some(self.kernel),
            filtered: Some(self.filter != Filter::None),
            yama: Some(self.yama),
            on_self: trial(Target::Itself),
            on_neighbour: trial(Target::Neighbour),
            may_trace: Some(self.may_trace),
            peer: PeerFacts {
                life: match self.life {
                    _ if !opens => Life::Unknown,
                    PeerLife::Lives => Life::Lives,
                    PeerLife::WithoutFirstThread => Life::LivesWithoutFirstThread,
                    PeerLife::Zombie | PeerLife::Reaped => Life::Exited,
                },
                same_ids: there.then_some(self.same_ids),
                dumpable: there.then_some(self.dumpable),
                capabilities_covered: there.then_some(self.capabilities_covered),
                readable: there.then(|| self.may_read()),
                same_pid_namespace: Some(self.same_pid_namespace),
                same_user_namespace: there.then_some(self.same_user_namespace),
            },
            ..Facts::of(failure)
        }
    }

    /// Names of the causes that by themselves would make an import fail.
    pub(crate) fn barriers(&self) -> Vec<&'static str> {
        let counts = self.capability_counts();
        let missing = self.sandbox || self.kernel < Call::PidfdGetfd.since();
        let yama = match self.yama {
            Yama::Scope(1) => "yama-scope-1",
            Yama::Scope(2) => "yama-scope-2",
            _ => "yama-scope-3",
        };
        [
            (matches!(self.filter, Filter::On(..)), "seccomp"),
            (missing, "kernel-without-call"),
            (!self.yama_allows(counts, self.named), yama),
            (!counts && !self.same_ids, "other-uid"),
            (!counts && !self.dumpable, "not-dumpable"),
            (!counts && !self.capabilities_covered, "more-capabilities"),
            (!self.same_user_namespace, "other-user-namespace"),
            (!self.same_pid_namespace, "other-pid-namespace"),
            (matches!(self.life, PeerLife::Zombie | PeerLife::Reaped), "exporter-gone"),
            (self.life == PeerLife::WithoutFirstThread, "first-thread-exited"),
        ]
        .into_iter()
        .filter_map(|(is, name)| is.then_some(name))
        .collect()
    }

    /// The world after somebody has followed the remedy.
    pub(crate) fn repaired(mut self, cause: &str) -> Self {
        match cause {
            "seccomp" => self.filter = Filter::OfOthers,
            "kernel-without-call" => (self.kernel, self.sandbox) = (NEW, false),
            "yama-scope-1" | "yama-scope-2" | "yama-scope-3" => self.yama = Yama::Scope(0),
            "other-uid" => self.same_ids = true,
            "not-dumpable" => self.dumpable = true,
            "more-capabilities" => self.capabilities_covered = true,
            "other-user-namespace" => self.same_user_namespace = true,
            "other-pid-namespace" => self.same_pid_namespace = true,
            "exporter-gone" | "first-thread-exited" => self.life = PeerLife::Lives,
            other => panic!("{other} is nothing that this world has"),
        }
        self
    }
}
