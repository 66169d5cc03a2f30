//! The fault sweep: an operation run once for each of its points and each way in which that point can fail.
//!
//! After every run, failed or not, the process must have what it had before, and the operation must work again.

use core::time::Duration;
use std::collections::BTreeMap;

use crate::driver::Fake;
use crate::points::{Callee, Point, Verdict, Watch};
use crate::snapshot::{self, Snapshot, wait_until};

/// What a driver call may answer: wrong arguments, no memory, no permission, a broken or vanishing driver.
pub const CODES: [i32; 8] = [1, 2, 4, 201, 304, 709, 800, 999];
/// What a system call may answer, wherever its manual page says so or a sandbox makes it.
pub const ERRNOS: [i32; 11] = [
    libc::EMFILE,
    libc::ENFILE,
    libc::ENOMEM,
    libc::EPERM,
    libc::ENOSYS,
    libc::EBADF,
    libc::ESRCH,
    libc::EINVAL,
    libc::EINTR,
    libc::EACCES,
    libc::EAGAIN,
];

/// The ways in which a point can fail.
pub fn failures(point: &Point) -> Vec<Verdict> {
    match (point.callee, point.name) {
        (Callee::Driver, _) => CODES.map(Verdict::Fail).to_vec(),
        // The kernel has let go of the number or the range whatever it reports.
        (_, "close" | "munmap") => ERRNOS.map(Verdict::FailAfter).to_vec(),
        // They have no way to fail: a limit that is there, and the standard library's own look, in test builds, at whether an fd is open.
        (_, "getrlimit" | "fcntl(F_GETFD)") => Vec::new(),
        // Of an fd that is open.
        (_, "fstat") => ERRNOS.into_iter().filter(|&errno| errno != libc::EBADF).map(Verdict::Fail).collect(),
        _ => ERRNOS.map(Verdict::Fail).to_vec(),
    }
}

/// How an operation ended: well, or with an error's text.
pub type Outcome = Result<(), String>;

/// What a sweep has done.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Points of the operation.
    pub points: usize,
    /// Runs with a failure in them.
    pub runs: usize,
    /// Points at which the operation succeeded in spite of a failure, by function.
    pub survived: BTreeMap<&'static str, usize>,
    /// Points by function.
    pub functions: BTreeMap<&'static str, usize>,
}

/// A sweep over one operation.
pub struct Sweep<'a> {
    /// Watches the operation.
    pub watch: Watch,
    /// Counts what is left.
    pub fake: Fake,
    /// The operation. It cleans up after success, and verifies what it got.
    pub operation: &'a mut dyn FnMut() -> Outcome,
    /// Whether this outcome is right where this point failed so.
    pub judge: &'a dyn Fn(&Point, Verdict, &Outcome) -> bool,
}

impl Sweep<'_> {
    /// Fails each point in each way; panics at the first outcome that is wrong, and at the first thing left behind.
    #[track_caller]
    pub fn run(&mut self) -> Report {
        let (before, points) = self.rehearse();
        let mut report = Report { points: points.len(), ..Report::default() };
        for point in &points {
            *report.functions.entry(point.name).or_default() += 1;
            let mut survived = false;
            for verdict in failures(point) {
                let outcome = self.fail_one(point, verdict);
                let what = format!("{point:?} with {verdict:?}: {outcome:?}");
                assert!((self.judge)(point, verdict, &outcome), "wrong outcome of {what}");
                before.assert_settles(&self.fake, &what);
                (self.operation)().unwrap_or_else(|error| panic!("it does not work any more after {what}: {error}"));
                report.runs += 1;
                survived |= outcome.is_ok();
            }
            if survived {
                *report.survived.entry(point.name).or_default() += 1;
            }
        }
        before.assert_settles(&self.fake, "the whole sweep");
        report
    }

    /// Fails each point and then each later one of what is left of the run, its undoing above all. Returns the number of runs.
    ///
    /// A release that fails twice cannot be made good, so those pairs are left out.
    #[track_caller]
    pub fn run_pairs(&mut self) -> usize {
        let (before, points) = self.rehearse();
        let mut runs = 0;
        for first in &points {
            let Some(&verdict) = failures(first).get(1) else { continue };
            let later = self.points_after(first, verdict);
            for second in later.iter().filter(|second| !(is_release(first) && second.name == first.name)) {
                let Some(&also) = failures(second).get(1) else { continue };
                let hook = |point: &Point| match point {
                    point if point == first => verdict,
                    point if point == second => also,
                    _ => Verdict::Go,
                };
                let outcome = self.watch.run(hook, &mut *self.operation);
                let what = format!("{first:?} with {verdict:?} and {second:?} with {also:?}: {outcome:?}");
                let right = (self.judge)(first, verdict, &outcome) || (self.judge)(second, also, &outcome);
                assert!(right, "wrong outcome of {what}");
                before.assert_settles(&self.fake, &what);
                runs += 1;
            }
            (self.operation)().unwrap_or_else(|error| panic!("it does not work any more after pairs with {first:?}: {error}"));
        }
        runs
    }

    /// Runs the operation without failures: what must be there after each run, and its points.
    fn rehearse(&mut self) -> (Snapshot, Vec<Point>) {
        let threads = snapshot::threads();
        (self.operation)().expect("a first run, which may set things up for good");
        assert!(wait_until(Duration::from_secs(5), || snapshot::threads() <= threads), "a thread stays");
        let before = Snapshot::take(&self.fake);
        let (outcome, points) = self.watch.list(&mut *self.operation);
        outcome.expect("a run without failures");
        before.assert_settles(&self.fake, "a run without failures");
        (before, points)
    }

    fn points_after(&mut self, first: &Point, verdict: Verdict) -> Vec<Point> {
        let mut later = Vec::new();
        let hook = |point: &Point| {
            if point.number > first.number && point.before {
                later.push(*point);
            }
            if point == first { verdict } else { Verdict::Go }
        };
        // How it ends is `run`'s to judge.
        let _ = self.watch.run(hook, &mut *self.operation);
        later
    }

    fn fail_one(&mut self, at: &Point, verdict: Verdict) -> Outcome {
        let mut reached = false;
        let hook = |point: &Point| {
            if point.number != at.number || !point.before {
                return Verdict::Go;
            }
            assert_eq!(point, at, "the operation takes the same way each time");
            reached = true;
            verdict
        };
        let outcome = self.watch.run(hook, &mut *self.operation);
        assert!(reached, "{at:?}");
        outcome
    }
}

fn is_release(point: &Point) -> bool {
    matches!(
        point.name,
        "cuMemRelease"
            | "cuMemUnmap"
            | "cuMemAddressFree"
            | "cuMemFree"
            | "cuMemPoolDestroy"
            | "cuIpcCloseMemHandle"
            | "cuCtxPopCurrent"
            | "cuDevicePrimaryCtxRelease"
    )
}

impl core::fmt::Debug for Sweep<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Sweep")
    }
}

/// Whether an error's text names what failed: the driver function with its code, or the errno.
pub fn names(text: &str, point: &Point, verdict: Verdict) -> bool {
    let (Verdict::Fail(code) | Verdict::FailAfter(code)) = verdict else { return false };
    match point.callee {
        Callee::Driver => text.contains(&format!("{} failed with CUresult {code}", point.name)),
        Callee::Libc => {
            let said = text.contains(&format!("({code})")) || text.contains(&format!("errno {code}"));
            let what = match point.name {
                "open" | "read" => "boot_id",
                "stat" | "statx" => "/proc/",
                "posix_madvise" => "madvise",
                name => name,
            };
            said && text.contains(what)
        }
    }
}
