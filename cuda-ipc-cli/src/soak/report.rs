//! What a soak has done, as text and as JSON.

use core::fmt::Write;
use core::time::Duration;
use std::collections::BTreeMap;

use serde::Serialize;

use super::exporter::{Shared, What};
use super::importer::Used;
use super::memory::Change;
use super::state::State;
use super::{ROUTES, States};
use crate::gpu::GpuFacts;
use crate::size;

/// Counts of a whole run.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Totals {
    pub(super) steps: u64,
    /// Steps by what they did, and memory made by kind.
    did: BTreeMap<&'static str, u64>,
    kinds: BTreeMap<&'static str, u64>,
    routes: [Route; 2],
    /// Exporters that were killed, and that ended by themselves.
    pub(super) kills: u64,
    pub(super) ends: u64,
    /// Times at which everybody let go of everything, before the end.
    pub(super) rests: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Route {
    leases: u64,
    chunks: u64,
    imported: u64,
    bytes: u64,
    lease_us: f64,
    /// Ranges that were looked for in vain, as they should be.
    gone: u64,
}

impl Totals {
    pub(super) fn step(&mut self, shared: &Shared) {
        self.steps += 1;
        let did = match shared.what {
            What::Made => "made",
            What::Changed(Change::Grow) => "grown",
            What::Changed(Change::Shrink) => "shrunk",
            What::Changed(Change::Replace) => "replaced",
            What::Freed => "freed",
            What::Again => "used_again",
        };
        *self.did.entry(did).or_default() += 1;
        if shared.what == What::Made {
            *self.kinds.entry(shared.kind.name()).or_default() += 1;
        }
    }

    pub(super) fn used(&mut self, at: usize, used: &Used) {
        let Some(route) = self.routes.get_mut(at) else { return };
        route.leases += u64::from(used.chunks != 0);
        route.chunks += used.chunks;
        route.imported += used.imported;
        route.bytes += used.bytes;
        route.lease_us += used.lease_us;
        route.gone += u64::from(used.gone);
    }
}

#[derive(Serialize)]
pub(super) struct Report<'a> {
    #[serde(flatten)]
    facts: GpuFacts,
    seed: u64,
    seconds: f64,
    #[serde(flatten)]
    totals: Totals,
    first: BTreeMap<&'static str, State>,
    last: BTreeMap<&'static str, State>,
    findings: &'a [String],
}

impl<'a> Report<'a> {
    pub(super) fn new(
        facts: GpuFacts,
        seed: u64,
        elapsed: Duration,
        totals: Totals,
        first: &States,
        last: &States,
        findings: &'a [String],
    ) -> Self {
        let by_name = |states: &States| states.iter().copied().collect();
        Self { facts, seed, seconds: elapsed.as_secs_f64(), totals, first: by_name(first), last: by_name(last), findings }
    }

    pub(super) fn text(&self) -> String {
        let Self { facts, seed, seconds, totals, first, last, findings } = self;
        let mut text = format!("soak of {seconds:.0} s on {} (driver {}), seed {seed}\n", facts.gpu, facts.driver);
        let counts =
            |counts: &BTreeMap<&str, u64>| counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ");
        let mut line = |what: &str, value: String| {
            // Writing to a text does not fail.
            let _ = writeln!(text, "  {what:20}{value}");
        };
        line("steps", format!("{}, {:.0} a second: {}", totals.steps, rate(totals.steps, *seconds), counts(&totals.did)));
        line("memory made", counts(&totals.kinds));
        for (name, route) in ROUTES.iter().zip(&totals.routes) {
            let mean = if route.leases == 0 { 0.0 } else { route.lease_us / route.leases as f64 };
            line(
                &format!("by {name}"),
                format!(
                    "{} leases of {} chunks, {} of them imported, {mean:.0} us each; {} compared, {:.1} MB/s; {} gone as told",
                    route.leases,
                    route.chunks,
                    route.imported,
                    size::human(route.bytes),
                    route.bytes as f64 / seconds / 1e6,
                    route.gone
                ),
            );
        }
        line("second exporter", format!("killed {} times, ended {} times", totals.kills, totals.ends));
        for (name, now) in last {
            let then = first.get(name).map_or_else(String::new, state);
            line(name, format!("{then}; at the end {}", state(now)));
        }
        let leaks = if findings.is_empty() { "none".to_owned() } else { findings.len().to_string() };
        line("findings", leaks);
        text
    }
}

fn rate(count: u64, seconds: f64) -> f64 {
    count as f64 / seconds
}

/// What processes hold, in one line.
pub(super) fn states(states: &States) -> String {
    states.iter().map(|(name, now)| format!("{name} {}", state(now))).collect::<Vec<_>>().join("; ")
}

fn state(state: &State) -> String {
    let live = state.live.map_or_else(String::new, |live| format!(", {} mappings", live.mappings));
    format!("{} fds, {} threads, {} resident{live}", state.fds, state.threads, size::human(state.resident))
}
