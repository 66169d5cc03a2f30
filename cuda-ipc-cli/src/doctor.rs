//! `cuda-ipc doctor`: why the lane is or is not there, on this node and towards a process.
//!
//! This file is the command, its verdict and its exit code. What it looks at is in `doctor/`: `gpus.rs` (driver and devices, by trial), `node.rs` (kernel,
//! gates, limits, namespaces), `ucx.rs` (UCX libraries and Python wheels), `process.rs` (the other process), `routes.rs` (the ways, by trial); `text.rs` is the
//! report for people. The JSON object and the text are made from the same values.

mod gpus;
mod node;
mod process;
mod routes;
mod text;
mod ucx;

use std::process::ExitCode;

use serde::Serialize;

use crate::failure::Failure;
use crate::finding::Finding;
use crate::output;
use gpus::Gpus;
use node::Node;
use process::Process;
use routes::Routes;
use ucx::Ucx;

pub(crate) use routes::neighbour;

/// Say why GPU memory can or cannot be shared on this node, and towards a process.
///
/// Looks at the driver and its GPUs (by making, exporting and importing a chunk of 2 MiB), the kernel, filters, limits and namespaces, the UCX libraries of the
/// environment or of the process, and tries each way by which file descriptors can travel. Changes nothing. Run it as the user, and in the container, of the
/// process that imports.
///
/// Exit code: 0 the lane is available, 1 it is degraded, 2 there is none, 64 wrong use.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also look at this process: whether its memory could be had from here, and whether the preload library is active in it
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pid: Option<u32>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// How good it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Lane {
    Available,
    Degraded,
    None,
}

/// All there is to say.
#[derive(Serialize)]
struct Report {
    lane: Lane,
    /// What stands in the way or costs something, the worst first.
    findings: Vec<Finding>,
    gpus: Gpus,
    node: Node,
    routes: Routes,
    ucx: Ucx,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<Process>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let report = Report::make(args.pid);
    if args.json { output::json(&report) } else { output::text(&report) }?;
    Ok(ExitCode::from(report.lane as u8))
}

impl Report {
    fn make(pid: Option<u32>) -> Self {
        let process = pid.map(Process::look);
        // An old library is the other process's where there is one, else the environment's.
        let ucx = Ucx::look(pid);
        let mut report = Self {
            lane: Lane::Available,
            findings: Vec::new(),
            gpus: Gpus::look(),
            node: Node::look(),
            routes: Routes::try_all(),
            ucx,
            process,
        };
        let mut judged = Vec::new();
        report.judge_gpus(&mut judged);
        report.judge_routes(&mut judged);
        report.judge_process(&mut judged);
        report.judge_ucx(&mut judged);
        judged.sort_by_key(|(lane, _)| core::cmp::Reverse(*lane));
        report.lane = judged.first().map_or(Lane::Available, |(lane, _)| *lane);
        report.findings = judged.into_iter().map(|(_, finding)| finding).collect();
        report
    }

    fn judge_gpus(&self, judged: &mut Vec<(Lane, Finding)>) {
        let usable = self.gpus.devices.iter().filter(|device| device.shares_by_fd()).count();
        if let Some(finding) = self.gpus.finding() {
            judged.push((if usable == 0 { Lane::None } else { Lane::Degraded }, finding));
        }
    }

    fn judge_routes(&self, judged: &mut Vec<(Lane, Finding)>) {
        let Routes { pidfd, broker_name, broker_file } = &self.routes;
        let broker = broker_name.works || broker_file.as_ref().is_some_and(|file| file.works);
        // With a process to look at, what holds towards it counts.
        if self.process.is_none()
            && let Some(finding) = &pidfd.finding
        {
            judged.push((if broker { Lane::Degraded } else { Lane::None }, finding.clone()));
        }
        let lost = [Some(broker_name), broker_file.as_ref()].into_iter().flatten().filter_map(|way| way.finding.clone());
        judged.extend(lost.map(|finding| (Lane::Degraded, finding)));
    }

    fn judge_process(&self, judged: &mut Vec<(Lane, Finding)>) {
        let Some(process) = &self.process else { return };
        if let Some(finding) = &process.finding {
            let broker = process.exists && self.broker_reaches(process);
            judged.push((if broker { Lane::Degraded } else { Lane::None }, finding.clone()));
        }
    }

    /// Whether the process's broker could be reached. It has one from its first export on, so that there is none now is no reason against it.
    fn broker_reaches(&self, process: &Process) -> bool {
        let by_name = self.routes.broker_name.works && process.same_network_namespace != Some(false);
        let strangers =
            process.finding.as_ref().is_some_and(|finding| matches!(finding.cause.as_str(), "other-uid" | "other-user-namespace"));
        !strangers && (by_name || self.routes.broker_file.as_ref().is_some_and(|file| file.works))
    }

    fn judge_ucx(&self, judged: &mut Vec<(Lane, Finding)>) {
        let preload = self.process.as_ref().map(|process| process.preload_active);
        let without: Vec<&str> =
            self.ucx.libraries.iter().filter(|library| library.has_arm == Some(false)).map(|library| library.path.as_str()).collect();
        if let (Some(Some(false)), [first, ..]) = (preload, without.as_slice()) {
            judged.push((
                Lane::Degraded,
                Finding::new(
                    "preload-not-active",
                    format!(
                        "the process uses a UCX that was built without the lane ({first}), and the preload library is not active in it"
                    ),
                    "Start the process with the preload library, which this program puts in front of it",
                    &["cuda-ipc run -- <the command>"],
                ),
            ));
        }
    }
}
