//! What is found, as JSON and as a table.

use serde::Serialize;

use super::Way;
use crate::bench::samples::Spread;
use crate::bench::{Tables, table};

/// One round.
pub(super) struct Sample {
    /// Chunks that the importer had leased.
    pub(super) chunks: u64,
    /// From the end of the free (or the kill) until the memory was back.
    pub(super) back_ms: f64,
    /// From just before importers were told.
    pub(super) from_told_ms: Option<f64>,
    /// From the moment when the killed process was reaped.
    pub(super) from_exit_ms: Option<f64>,
    pub(super) local_unmap_ms: f64,
    pub(super) unmapped_dead: u64,
    pub(super) unmapped_purged: u64,
    pub(super) looks: u64,
    pub(super) longest_pause_ms: f64,
}

/// All rounds of one way to free.
#[derive(Serialize)]
pub(super) struct Row {
    way: Way,
    /// Milliseconds from the end of the free (or the kill) until the memory was back.
    back_ms: Spread,
    from_told_ms: Option<Spread>,
    from_exit_ms: Option<Spread>,
    /// What unmapping as many local chunks takes.
    local_unmap_ms: Spread,
    /// What was promised: 20 ms and the unmapping where the free is told, else 500 ms.
    target_ms: f64,
    within_target: bool,
    /// The longest time between two looks of the watcher.
    longest_pause_ms: f64,
    looks: u64,
    /// Chunks that the importer had leased, and what it unmapped for which cause, in each round.
    leased: Vec<u64>,
    unmapped_dead: Vec<u64>,
    unmapped_purged: Vec<u64>,
    samples_ms: Vec<f64>,
}

impl Row {
    pub(super) fn new(way: Way, samples: &[Sample]) -> Self {
        let all = |value: fn(&Sample) -> f64| Spread::of(&samples.iter().map(value).collect::<Vec<_>>());
        let some = |value: fn(&Sample) -> Option<f64>| {
            let values: Vec<f64> = samples.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| Spread::of(&values))
        };
        let each = |value: fn(&Sample) -> u64| samples.iter().map(value).collect();
        let (back_ms, local_unmap_ms) = (all(|sample| sample.back_ms), all(|sample| sample.local_unmap_ms));
        let target_ms = if way == Way::Retired { 20.0 + local_unmap_ms.median } else { 500.0 };
        Self {
            way,
            back_ms,
            from_told_ms: some(|sample| sample.from_told_ms),
            from_exit_ms: some(|sample| sample.from_exit_ms),
            local_unmap_ms,
            target_ms,
            within_target: back_ms.max <= target_ms,
            longest_pause_ms: all(|sample| sample.longest_pause_ms).max,
            looks: samples.iter().map(|sample| sample.looks).sum(),
            leased: each(|sample| sample.chunks),
            unmapped_dead: each(|sample| sample.unmapped_dead),
            unmapped_purged: each(|sample| sample.unmapped_purged),
            samples_ms: samples.iter().map(|sample| sample.back_ms).collect(),
        }
    }
}

/// Milliseconds.
#[allow(clippy::cast_precision_loss, reason = "a time to be printed")]
pub(super) fn ms(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e6
}

pub(super) fn tables(rows: &[Row]) -> Tables {
    let mut back = table(&[
        "how",
        "back after ms: min / median / max",
        "target ms",
        "met",
        "from before the word, ms",
        "from the end of the process, ms",
        "unmapping as much local memory, ms",
        "longest pause of the watcher, ms",
    ]);
    let optional = |spread: Option<Spread>| spread.map_or_else(|| "-".to_owned(), |spread| spread.to_string());
    for row in rows {
        back.add_row([
            row.way.name().to_owned(),
            row.back_ms.to_string(),
            format!("{:.1}", row.target_ms),
            if row.within_target { "yes" } else { "no" }.to_owned(),
            optional(row.from_told_ms),
            optional(row.from_exit_ms),
            row.local_unmap_ms.to_string(),
            format!("{:.1}", row.longest_pause_ms),
        ]);
    }
    vec![("From the end of the free, or the kill, until a third process sees all of the memory free again; the importer is idle", back)]
}
