//! What a process holds when it has nothing to do, and what may have grown between two such moments.

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::gpu::{Gpu, LiveObjects, live_objects};
use crate::size;

/// What one process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) fds: u64,
    pub(super) threads: u64,
    /// Resident memory in bytes.
    pub(super) resident: u64,
    /// Of the fake driver only.
    pub(super) live: Option<LiveObjects>,
    /// Free memory of the GPU in bytes, for all processes.
    pub(super) gpu_free: u64,
    /// Windows and peers of a cache.
    pub(super) windows: u64,
    pub(super) peers: u64,
}

/// Resident memory may grow by this and by a tenth: allocators keep what they had once.
const RESIDENT_MAY_GROW: u64 = 16 << 20;
/// A real driver keeps some memory of the GPU for itself, and it does not tell when.
const GPU_MAY_KEEP: u64 = 64 << 20;

impl State {
    /// Of this process.
    pub(super) fn take(gpu: &Gpu, windows: u64, peers: u64) -> Result<Self, Failure> {
        let step = "looking at this process";
        let count = |path: &str| -> Result<u64, Failure> { Ok(std::fs::read_dir(path).map_err(Failure::at(step))?.count() as u64) };
        let status = std::fs::read_to_string("/proc/self/status").map_err(Failure::at(step))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let resident = resident.ok_or_else(|| Failure::new(step, "its status has no VmRSS"))?;
        Ok(Self {
            fds: count("/proc/self/fd")?,
            threads: count("/proc/self/task")?,
            resident: resident << 10,
            live: live_objects(),
            gpu_free: gpu.memory().map_err(gpu.at("asking for the free memory"))?.0,
            windows,
            peers,
        })
    }

    /// The same but for memory, which needs no time to settle.
    pub(super) fn is_settled_like(&self, other: &Self) -> bool {
        let counts = |state: &Self| (state.fds, state.threads, state.live, state.windows, state.peers);
        counts(self) == counts(other)
    }

    /// What `now` has more than this state, in sentences. The GPU's free memory says nothing where others use it (`shared_gpu`).
    pub(super) fn findings(&self, name: &str, now: &Self, shared_gpu: bool) -> Vec<String> {
        let mut findings = Vec::new();
        let mut check = |what: &str, then: u64, now: u64, allowed: u64| {
            if now > then + allowed {
                findings.push(format!("{name}: {what} grew from {then} to {now}"));
            }
        };
        check("open fds", self.fds, now.fds, 0);
        check("threads", self.threads, now.threads, 0);
        check("windows", self.windows, now.windows, 0);
        check("peers", self.peers, now.peers, 0);
        if let (Some(then), Some(now)) = (self.live, now.live) {
            check("handles", then.handles, now.handles, 0);
            check("mappings", then.mappings, now.mappings, 0);
            check("mapped bytes", then.mapped_bytes, now.mapped_bytes, 0);
            check("reservations", then.reservations, now.reservations, 0);
            check("reserved bytes", then.reserved_bytes, now.reserved_bytes, 0);
        }
        check("resident memory", self.resident, now.resident, RESIDENT_MAY_GROW + self.resident / 10);
        let keep = if self.live.is_some() { 0 } else { GPU_MAY_KEEP };
        if !shared_gpu && now.gpu_free + keep < self.gpu_free {
            findings.push(format!("the GPU: free memory fell from {} to {}", size::human(self.gpu_free), size::human(now.gpu_free)));
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::{LiveObjects, RESIDENT_MAY_GROW, State};

    const START: State = State {
        fds: 9,
        threads: 2,
        resident: 100 << 20,
        live: Some(LiveObjects { handles: 0, mappings: 1, mapped_bytes: 2, reservations: 3, reserved_bytes: 4 }),
        gpu_free: 5 << 30,
        windows: 0,
        peers: 0,
    };

    #[test]
    fn each_thing_that_grows_is_found_alone() {
        assert!(START.findings("x", &START, false).is_empty());
        let live = START.live.expect("counts");
        let worse = [
            State { fds: 10, ..START },
            State { threads: 3, ..START },
            State { windows: 1, ..START },
            State { peers: 1, ..START },
            State { live: Some(LiveObjects { handles: 1, ..live }), ..START },
            State { live: Some(LiveObjects { mappings: 2, ..live }), ..START },
            State { live: Some(LiveObjects { mapped_bytes: 3, ..live }), ..START },
            State { live: Some(LiveObjects { reservations: 4, ..live }), ..START },
            State { live: Some(LiveObjects { reserved_bytes: 5, ..live }), ..START },
            State { resident: START.resident + START.resident / 10 + RESIDENT_MAY_GROW + 1, ..START },
            State { gpu_free: START.gpu_free - 1, ..START },
        ];
        for state in worse {
            assert_eq!(START.findings("x", &state, false).len(), 1, "{state:?}");
        }
    }

    #[test]
    fn less_is_no_finding_and_a_real_gpu_may_keep_a_little() {
        assert!(START.findings("x", &State { fds: 8, threads: 1, resident: 1, gpu_free: 6 << 30, ..START }, false).is_empty());
        let real = State { live: None, ..START };
        assert!(real.findings("x", &State { gpu_free: real.gpu_free - (32 << 20), ..real }, false).is_empty());
        assert_eq!(real.findings("x", &State { gpu_free: real.gpu_free - (128 << 20), ..real }, false).len(), 1);
        assert!(real.findings("x", &State { gpu_free: real.gpu_free - (128 << 20), ..real }, true).is_empty());
    }
}
