//! Samples, pairs of them, and what is said about them.

use core::fmt;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::peer_process::Link;

/// Smallest, middle and largest of some samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Of at least one sample; of none, all are NaN.
    pub(crate) fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (sorted.first(), sorted.last());
        Self { min: min.copied().unwrap_or(f64::NAN), median: median(&sorted), max: max.copied().unwrap_or(f64::NAN) }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} / {:.1} / {:.1}", self.min, self.median, self.max)
    }
}

fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match (sorted.get(middle.wrapping_sub(1)), sorted.get(middle)) {
        (Some(below), Some(above)) if sorted.len().is_multiple_of(2) => f64::midpoint(*below, *above),
        (_, Some(middle)) => *middle,
        _ => f64::NAN,
    }
}

/// Two ways to do the same, in alternation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Comparison {
    pub(crate) floor: Spread,
    pub(crate) ours: Spread,
    /// Ours over floor.
    pub(crate) ratio_of_medians: f64,
    /// Ours over floor in each pair, of which the middle.
    pub(crate) median_of_pair_ratios: f64,
}

impl Comparison {
    /// Of samples that were taken in pairs.
    pub(crate) fn of(floor: &[f64], ours: &[f64]) -> Self {
        let ratios: Vec<f64> = floor.iter().zip(ours).map(|(floor, ours)| ours / floor).collect();
        let (floor, ours) = (Spread::of(floor), Spread::of(ours));
        Self { floor, ours, ratio_of_medians: ours.median / floor.median, median_of_pair_ratios: Spread::of(&ratios).median }
    }
}

/// Takes `reps` pairs, each second one in reverse order, after two that do not count.
pub(crate) fn compare(
    reps: u32,
    link: &mut Link,
    phase: &str,
    mut floor: impl FnMut() -> Result<f64, Failure>,
    mut ours: impl FnMut() -> Result<f64, Failure>,
) -> Result<Comparison, Failure> {
    let samples = take_turns(reps, |done, total| link.progress(phase, done, total), &mut [&mut floor, &mut ours])?;
    let of = |at: usize| samples.get(at).map_or(&[][..], Vec::as_slice);
    Ok(Comparison::of(of(0), of(1)))
}

/// One way to do something; says what it took.
pub(crate) type Way<'a> = &'a mut dyn FnMut() -> Result<f64, Failure>;

/// Goes through all ways in turn, `reps` times, each second time in reverse order, after two times that do not count. Samples by way.
pub(crate) fn take_turns(
    reps: u32,
    mut progress: impl FnMut(u64, u64) -> Result<(), Failure>,
    ways: &mut [Way<'_>],
) -> Result<Vec<Vec<f64>>, Failure> {
    const WARM_UP: u32 = 2;
    let mut samples = vec![Vec::new(); ways.len()];
    for turn in 0..WARM_UP + reps {
        let mut all: Vec<_> = ways.iter_mut().zip(&mut samples).collect();
        if turn % 2 != 0 {
            all.reverse();
        }
        for (way, samples) in all {
            let sample = way()?;
            if turn >= WARM_UP {
                samples.push(sample);
            }
        }
        progress((turn + 1).into(), (WARM_UP + reps).into())?;
    }
    Ok(samples)
}

/// Microseconds, to the nanosecond.
#[allow(clippy::cast_precision_loss, reason = "a time to be printed")]
pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::{Comparison, Spread, take_turns};

    #[test]
    fn a_median_is_the_middle_or_the_mean_of_two() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { min: 1.0, median: 2.0, max: 3.0 });
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]), Spread { min: 1.0, median: 2.5, max: 4.0 });
        assert_eq!(Spread::of(&[7.0]), Spread { min: 7.0, median: 7.0, max: 7.0 });
        assert!(Spread::of(&[]).median.is_nan());
    }

    #[test]
    fn both_ratios_are_ours_over_floor() {
        let comparison = Comparison::of(&[1.0, 2.0, 4.0], &[3.0, 2.0, 4.0]);
        assert!((comparison.ratio_of_medians - 1.5).abs() < 1e-12);
        assert!((comparison.median_of_pair_ratios - 1.0).abs() < 1e-12);
    }

    #[test]
    fn turns_alternate_and_the_first_two_do_not_count() {
        let order = core::cell::RefCell::new(Vec::new());
        let way = |name: u8| {
            order.borrow_mut().push(name);
            Ok(f64::from(name))
        };
        let samples = take_turns(2, |_, _| Ok(()), &mut [&mut || way(1), &mut || way(2), &mut || way(3)]).expect("samples");
        assert_eq!(order.into_inner(), [1, 2, 3, 3, 2, 1, 1, 2, 3, 3, 2, 1]);
        assert_eq!(samples, [[1.0; 2], [2.0; 2], [3.0; 2]]);
    }
}
