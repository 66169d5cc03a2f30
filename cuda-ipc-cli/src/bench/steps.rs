//! Where the time of an operation goes: by driver call, and what is left for everything else.
//!
//! Runs of their own, with a driver whose calls are led past a clock (`gpu/timed.rs`): two looks at the clock for each call, some 50 ns, are in these figures
//! and not in those of the comparisons.

use comfy_table::Table;
use serde::{Deserialize, Serialize};

use super::samples::{Spread, Way, take_turns};
use crate::failure::Failure;
use crate::gpu::{Call, take_calls};
use crate::peer_process::Link;

/// How often is enough: a split is no comparison.
const REPS: u32 = 20;
pub(super) const TITLE: &str = "Where the time goes (runs of their own; each call is led past a clock, which takes some 50 ns)";

/// One driver call, or everything else. Medians, in microseconds, of all such calls of one operation together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Step {
    step: String,
    floor_calls: u64,
    floor_us: f64,
    ours_calls: u64,
    ours_us: f64,
}

/// What is no driver call: fetching and closing fds, look-ups, our own work.
const REST: &str = "everything else";

/// Splits two ways to do the same. Each says how long its operation took; the driver calls of its undoing must be others.
pub(super) fn measure(
    reps: u32,
    link: &mut Link,
    mut floor: impl FnMut() -> Result<f64, Failure>,
    mut ours: impl FnMut() -> Result<f64, Failure>,
) -> Result<Vec<Step>, Failure> {
    let (mut floors, mut all_ours) = (Vec::new(), Vec::new());
    {
        let mut floor = watched(&mut floor, &mut floors);
        let mut ours = watched(&mut ours, &mut all_ours);
        take_turns(reps.min(REPS), |done, total| link.progress("where the time goes", done, total), &mut [&mut floor, &mut ours])?;
    }
    let names: Vec<&'static str> = floors.iter().chain(&all_ours).flat_map(|sample| sample.calls.iter().map(|call| call.name)).collect();
    let mut steps = Vec::<Step>::new();
    for name in names.into_iter().chain([REST]) {
        if steps.iter().all(|step| step.step != name) {
            let ((floor_calls, floor_us), (ours_calls, ours_us)) = (of(&floors, name), of(&all_ours, name));
            steps.push(Step { step: name.to_owned(), floor_calls, floor_us, ours_calls, ours_us });
        }
    }
    Ok(steps)
}

/// One run of one way.
struct Sample {
    calls: Vec<Call>,
    rest_us: f64,
}

/// The way, with its driver calls kept.
fn watched<'a>(way: Way<'a>, samples: &'a mut Vec<Sample>) -> impl FnMut() -> Result<f64, Failure> + 'a {
    move || {
        take_calls();
        let us = way()?;
        let calls = take_calls();
        let rest_us = us - calls.iter().map(|call| call.us).sum::<f64>();
        samples.push(Sample { calls, rest_us });
        Ok(us)
    }
}

/// Median number of calls and of microseconds of one step. The first samples are for warming up.
fn of(samples: &[Sample], name: &str) -> (u64, f64) {
    let counted = samples.get(2..).unwrap_or(samples);
    let (mut numbers, mut times) = (Vec::new(), Vec::new());
    for sample in counted {
        let call = sample.calls.iter().find(|call| call.name == name);
        numbers.push(call.map_or(0, |call| call.number));
        times.push(if name == REST { sample.rest_us } else { call.map_or(0.0, |call| call.us) });
    }
    numbers.sort_unstable();
    (numbers.get(numbers.len() / 2).copied().unwrap_or_default(), Spread::of(&times).median)
}

/// A table of the splits for several numbers of chunks.
pub(super) fn table<'a>(splits: impl Iterator<Item = (usize, &'a [Step])>) -> Table {
    let mut table = super::table(&["chunks", "step", "floor calls", "floor us", "ours calls", "ours us", "ours less floor, us"]);
    for (chunks, steps) in splits {
        for Step { step, floor_calls, floor_us, ours_calls, ours_us } in steps {
            let calls = |number: u64| if step == REST { "-".to_owned() } else { number.to_string() };
            table.add_row([
                chunks.to_string(),
                step.clone(),
                calls(*floor_calls),
                format!("{floor_us:.1}"),
                calls(*ours_calls),
                format!("{ours_us:.1}"),
                format!("{:.1}", ours_us - floor_us),
            ]);
        }
    }
    table
}
