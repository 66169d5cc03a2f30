//! The scenarios: what is to be right, each a function.

mod matrix;

use crate::Outcome;
use crate::world::World;

/// One scenario.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// What has to be so.
    pub(crate) about: &'static str,
    pub(crate) run: fn(&mut World) -> Outcome,
    /// Why it is not run unless asked for: the part of the library that it needs is not there.
    pub(crate) pending: Option<&'static str>,
}

/// All of them.
pub(crate) const SCENARIOS: &[Scenario] = &[
    now("matrix/stock", "without the library, chunks with a POSIX fd are never moved by the lane", matrix::stock),
    now("matrix/preload", "with it they are, whatever their number and whichever part is registered and moved", matrix::preload),
    now("matrix/hooks", "also with UCM's default hooks in the driver", matrix::hooks),
    now("matrix/one-sided", "a peer without it still moves bytes, by another route, and one with it beside by the lane", matrix::one_sided),
    now("matrix/untouched", "memory of cuMemAlloc, of no handle type, and real fabric handles are UCX's business", matrix::untouched),
];

const fn now(name: &'static str, about: &'static str, run: fn(&mut World) -> Outcome) -> Scenario {
    Scenario { name, about, run, pending: None }
}
