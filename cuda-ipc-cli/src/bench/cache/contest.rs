//! Runs pieces of work on some threads, in turns, and says what an operation of each takes.
//!
//! All threads do the same work at the same time, for a span of time; then the next work has its turn, and after the last one the next repetition begins. So
//! whatever drifts drifts for all of them. The first repetition is for warming up and does not count.

use core::time::Duration;
use std::sync::Barrier;
use std::time::Instant;

use crate::bench::machine;
use crate::bench::samples::Spread;
use crate::failure::Failure;

/// Something that is done over and over.
pub(super) trait Work: Sync {
    /// Does some operations as the thread with this number, and says how many.
    fn batch(&self, thread: usize, rng: &mut Rng) -> Result<u64, Failure>;
}

/// How works are measured.
#[derive(Clone, Copy)]
pub(super) struct Contest<'a> {
    pub(super) reps: u32,
    /// How long a repetition of one work takes at least.
    pub(super) span: Duration,
    /// Where threads are pinned to, if there are enough of these.
    pub(super) cpus: &'a [usize],
}

/// Nanoseconds of one operation, in each repetition, as each of the threads sees it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Times(Vec<f64>);

impl Times {
    pub(super) fn spread(&self) -> Spread {
        Spread::of(&self.0)
    }

    /// Throughput of this over throughput of `other`, in each repetition.
    pub(super) fn throughput_over(&self, other: &Self) -> Spread {
        let ratios: Vec<f64> = self.0.iter().zip(&other.0).map(|(own, other)| other / own).collect();
        Spread::of(&ratios)
    }
}

impl Contest<'_> {
    /// Whether that many threads get a processor each.
    pub(super) fn pins(&self, threads: usize) -> bool {
        threads <= self.cpus.len()
    }

    /// Pins the calling thread as the one with this number of so many.
    pub(super) fn pin(&self, thread: usize, threads: usize) {
        if self.pins(threads)
            && let Some(&cpu) = self.cpus.get(thread)
        {
            machine::pin(cpu);
        }
    }

    /// Measures each of `works` on so many threads.
    #[allow(clippy::cast_precision_loss, reason = "times to be printed")]
    pub(super) fn run(&self, threads: usize, works: &[&dyn Work]) -> Result<Vec<Times>, Failure> {
        let barrier = Barrier::new(threads);
        let one = |thread| {
            self.pin(thread, threads);
            self.thread(thread, works, &barrier)
        };
        let samples: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
            let panicked = |_| Failure::new("measuring", "a thread has panicked");
            handles.into_iter().map(|handle| handle.join().map_err(panicked)?).collect::<Result<_, Failure>>()
        })?;
        let combine = |work: usize, rep: usize| {
            let rates = samples.iter().filter_map(|thread| Some(1.0 / thread.get(work)?.get(rep)?));
            threads as f64 / rates.sum::<f64>()
        };
        let reps = usize::try_from(self.reps).unwrap_or(usize::MAX);
        Ok((0..works.len()).map(|work| Times((0..reps).map(|rep| combine(work, rep)).collect())).collect())
    }

    /// What one thread does: for each work and repetition, nanoseconds of an operation.
    fn thread(&self, thread: usize, works: &[&dyn Work], barrier: &Barrier) -> Result<Vec<Vec<f64>>, Failure> {
        let mut rng = Rng::new(thread);
        let (mut samples, mut failure) = (vec![Vec::new(); works.len()], None);
        for rep in 0..=self.reps {
            for (work, samples) in works.iter().zip(&mut samples) {
                // Also after a failure: the others wait here.
                barrier.wait();
                if failure.is_some() {
                    continue;
                }
                match self.time(*work, thread, &mut rng) {
                    Ok(sample) if rep != 0 => samples.push(sample),
                    Ok(_) => {}
                    Err(error) => failure = Some(error),
                }
            }
        }
        failure.map_or(Ok(samples), Err)
    }

    #[allow(clippy::cast_precision_loss, reason = "a time to be printed")]
    fn time(&self, work: &dyn Work, thread: usize, rng: &mut Rng) -> Result<f64, Failure> {
        let (start, mut operations) = (Instant::now(), 0);
        loop {
            operations += work.batch(thread, rng)?;
            let elapsed = start.elapsed();
            if elapsed >= self.span {
                return Ok(elapsed.as_nanos() as f64 / operations.max(1) as f64);
            }
        }
    }
}

/// Xorshift: cheap, and random enough to defeat caches and predictors.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) const fn new(thread: usize) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ (thread as u64 + 1).wrapping_mul(0xd129_0f5b_3a4c_6e87))
    }

    /// One of `slice`, by the high bits of the next number.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "a product of two 32-bit numbers, shifted by 32, is below the second")]
    pub(super) fn pick<'a, T>(&mut self, slice: &'a [T]) -> Option<&'a T> {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        slice.get((((self.0 >> 32) * slice.len() as u64) >> 32) as usize)
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::{Contest, Rng, Times, Work};
    use crate::failure::Failure;

    struct Sleep(u64);

    impl Work for Sleep {
        fn batch(&self, _: usize, _: &mut Rng) -> Result<u64, Failure> {
            std::thread::sleep(Duration::from_micros(self.0));
            Ok(1)
        }
    }

    struct Fail;

    impl Work for Fail {
        fn batch(&self, thread: usize, _: &mut Rng) -> Result<u64, Failure> {
            if thread == 1 { Err(Failure::new("a test", "it fails")) } else { Ok(1) }
        }
    }

    const CONTEST: Contest<'_> = Contest { reps: 3, span: Duration::from_millis(2), cpus: &[] };

    #[test]
    fn works_are_told_apart() {
        let times = CONTEST.run(2, &[&Sleep(500), &Sleep(2000)]).expect("times");
        let [short, long] = times.as_slice() else { panic!("{times:?}") };
        assert_eq!((short.0.len(), long.0.len()), (3, 3));
        assert!(short.spread().min >= 500e3 && long.spread().min >= 2000e3, "{times:?}");
    }

    #[test]
    fn a_failing_thread_fails_the_contest_and_stops_nobody() {
        assert!(CONTEST.run(3, &[&Fail, &Sleep(10)]).is_err());
    }

    #[test]
    fn half_the_time_is_twice_the_throughput() {
        let spread = Times(vec![1.0, 2.0]).throughput_over(&Times(vec![2.0, 4.0]));
        assert!((spread.median - 2.0).abs() < 1e-12);
    }

    #[test]
    fn every_element_is_picked() {
        let (mut rng, slice, mut seen) = (Rng::new(0), [0, 1, 2, 3, 4], [0; 5]);
        for _ in 0..1000 {
            seen[*rng.pick(&slice).expect("not empty")] += 1;
        }
        assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
    }
}
