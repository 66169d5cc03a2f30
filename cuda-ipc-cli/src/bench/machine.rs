//! What a report says about the machine's processor, and which of its cores threads are pinned to.

use std::collections::BTreeSet;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// The processor, for a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// Its model, as the kernel names it.
    cpu: String,
    /// Logical processors that this process may use.
    cpus: usize,
    /// Physical cores among these.
    cores: usize,
}

impl Machine {
    pub(super) fn of_this_process() -> Self {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpus = cpus();
        Self { cpu: model(&text), cores: cpus.iter().map(|&cpu| siblings(cpu)).collect::<BTreeSet<_>>().len(), cpus: cpus.len() }
    }

    pub(super) fn line(&self) -> String {
        let Self { cpu, cpus, cores } = self;
        format!("{cpu}, {cpus} logical processors on {cores} cores")
    }
}

/// `model name` on x86-64; on other architectures what there is of it.
fn model(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let value = cpuinfo.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
        value.map(|value| value.trim().to_owned())
    };
    field("model name").or_else(|| Some(format!("CPU part {}", field("CPU part")?))).unwrap_or_else(|| "unknown processor".to_owned())
}

/// The logical processors that this process may use: one of each core first, then the second ones, so that a few threads do not share a core.
pub(super) fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let mut seen = BTreeSet::new();
    let (mut firsts, mut others) = (Vec::new(), Vec::new());
    for cpu in allowed {
        if seen.insert(siblings(cpu)) { firsts.push(cpu) } else { others.push(cpu) }
    }
    firsts.append(&mut others);
    firsts
}

/// What names the core of a logical processor; where the kernel does not say, each is a core.
fn siblings(cpu: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    std::fs::read_to_string(path).map_or_else(|_| cpu.to_string(), |list| list.trim().to_owned())
}

/// Keeps the calling thread on one logical processor. Where that is refused it stays where it may be.
pub(super) fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    let _ = sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use super::{Machine, cpus, model};

    #[test]
    fn the_model_is_found_where_there_is_one() {
        assert_eq!(model("processor\t: 0\nmodel name\t: AMD EPYC 9654\nmodel name\t: again\n"), "AMD EPYC 9654");
        assert_eq!(model("processor\t: 0\nCPU part\t: 0xd4f\n"), "CPU part 0xd4f");
        assert_eq!(model(""), "unknown processor");
    }

    #[test]
    fn every_processor_is_listed_once() {
        let mut list = cpus();
        let machine = Machine::of_this_process();
        assert!(machine.cores >= 1 && machine.cores <= machine.cpus);
        assert_eq!(machine.cpus, list.len());
        list.sort_unstable();
        list.dedup();
        assert_eq!(machine.cpus, list.len());
    }
}
