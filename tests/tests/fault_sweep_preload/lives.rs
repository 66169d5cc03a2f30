//! Short lives of a process that has UCX with the preload library in front of it: forked before anything was used, so that a failure may be in the first use of all.
//!
//! # Safety
//! The unsafe here is a variable that is set while a child has one thread.

use core::fmt::Write as _;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Mutex;

use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::points::{Callee, Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::{Snapshot, wait_until};
use cuda_ipc_tests::sweep::failures;
use cuda_ipc_tests::uct::{Stopped, Uct};

use crate::children::{self, Said};

/// More than a refusal is remembered the first time.
const SOON: Duration = Duration::from_secs(10);

/// What a life has: the driver, and UCX's module.
#[derive(Clone, Copy)]
pub(crate) struct Life {
    pub(crate) importer: Importer,
    pub(crate) uct: Uct,
}

/// What UCX does with the lane, and what it gets: nothing if all is well, or where it was stopped. The bytes that it gets are checked inside.
pub(crate) type Operation<'a> = Box<dyn FnMut() -> Result<(), Stopped> + 'a>;
/// Sets a life up for its operation.
pub(crate) type Begin<'a> = dyn Fn(Life) -> Operation<'a> + 'a;

/// What a process has, as text, with fds by kind: after a failure the same thing may have another number.
fn census(life: &Life) -> String {
    let Snapshot { fds, driver, memory_files, threads } = Snapshot::take(&life.importer.fake);
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    // Where the kernel is said to have no getrandom(2), the crate of that name opens this once and keeps it.
    for link in fds.into_values().filter(|link| link.as_os_str() != "/dev/urandom") {
        let kind: String = link.to_string_lossy().chars().filter(|c| !c.is_ascii_digit()).collect();
        // Of the parent's, as many as there are just now.
        if kind.starts_with("pipe:") {
            continue;
        }
        *kinds.entry(kind).or_default() += 1;
    }
    // What is kept of the one peer: a pidfd, or a connection with its broker, or both, as its routes were needed.
    let kept = ["anon_inode:[pidfd]", "socket:[]"].map(|kind| kinds.get(kind).copied().unwrap_or(0));
    if kept == [1, 0] || kept == [0, 1] || kept == [1, 1] {
        kinds.retain(|kind, _| !kind.starts_with("anon_inode:[pidfd") && !kind.starts_with("socket"));
        kinds.insert("a peer".to_owned(), 1);
    }
    format!("{kinds:?} {driver:?} {memory_files:?} {threads} threads")
}

/// A point by its name and how many of that name came before, since another thread's doings may move the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) callee: Callee,
    pub(crate) name: &'static str,
    pub(crate) number: usize,
}

impl Place {
    /// Reads what a child tells: callee, name and number.
    pub(crate) fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split(' ').collect();
        let callee = if words[0] == "Libc" { Callee::Libc } else { Callee::Driver };
        // A few hundred bytes for each sweep.
        Self { callee, name: words[1].to_owned().leak(), number: words[2].parse().expect("a number") }
    }
}

/// How a life went.
#[derive(Debug)]
pub(crate) struct Told {
    /// Whether the operation has come to the place.
    pub(crate) reached: bool,
    /// How the first operation ended: empty, or the function and its answer that stopped it.
    pub(crate) stopped: Option<(String, u32)>,
    /// What the preload library has said meanwhile.
    pub(crate) said: String,
    /// Places of the operation, in their order.
    pub(crate) places: Vec<Place>,
}

impl Told {
    pub(crate) fn stopped_at(&self) -> &str {
        self.stopped.as_ref().map_or("", |(name, _)| name)
    }

    pub(crate) fn stopped_with(&self) -> i32 {
        self.stopped.as_ref().map_or(0, |&(_, code)| code.cast_signed())
    }
}

/// What a sweep has done.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) places: usize,
    pub(crate) runs: usize,
    /// Runs in which the lane was kept, in which it was lost, and which did not come to their call.
    pub(crate) kept: usize,
    pub(crate) lost: usize,
    pub(crate) passed: usize,
    pub(crate) functions: BTreeMap<&'static str, usize>,
}

/// How many lives there are at a time: they wait more than they work.
const AT_A_TIME: usize = 6;

/// Lives that each fail at one place in one way; `judge` says whether losing the lane there is right. `begin` is made once for each that run at a time.
#[track_caller]
pub(crate) fn sweep<'a>(make: &(impl Fn() -> Box<Begin<'a>> + Sync), judge: &(impl Fn(&Place, Verdict, &Told) -> bool + Sync)) -> Report {
    // The bytes to compare with are made once, not in each child.
    pattern::granule(0, 0);
    let begin = make();
    let rehearse = |way| {
        let (rehearsal, census) = live(&*begin, None, way);
        assert_eq!(rehearsal.stopped, None, "{rehearsal:?}");
        (rehearsal, census)
    };
    let (rehearsal, census) = rehearse(Expected::Anything);
    rehearse(Expected::All(&census));
    let (_, lesser) = rehearse(Expected::WithoutBroker);
    let mut report = Report { places: rehearsal.places.len(), ..Report::default() };
    let mut jobs = Vec::new();
    for &place in &rehearsal.places {
        *report.functions.entry(place.name).or_default() += 1;
        let failures = failures(&Point { number: 0, callee: place.callee, name: place.name, before: true });
        // An exporter whose broker could not begin tries again after a second: that is waited for once at each place.
        let expected = |at| if at == 0 { Expected::All(&census) } else { Expected::AllOrLess(&census, &lesser) };
        jobs.extend(failures.into_iter().enumerate().map(|(at, verdict)| (place, verdict, expected(at))));
    }
    report.runs = jobs.len();
    let (next, report) = (AtomicUsize::new(0), Mutex::new(report));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                let begin = make();
                while let Some(&(place, verdict, expected)) = jobs.get(next.fetch_add(1, Relaxed)) {
                    let (told, _) = live(&*begin, Some((place, verdict)), expected);
                    let mut report = report.lock().expect("no panic before");
                    match (told.reached, &told.stopped) {
                        (true, None) => report.kept += 1,
                        (true, Some(stopped)) => {
                            let said = &told.said;
                            assert!(
                                judge(&place, verdict, &told),
                                "{place:?} with {verdict:?}: UCX was stopped at {stopped:?}, and this was said: {said}"
                            );
                            report.lost += 1;
                        }
                        (false, stopped) => {
                            assert_eq!(*stopped, None, "{place:?}: {}", told.said);
                            report.passed += 1;
                        }
                    }
                }
            });
        }
    });
    report.into_inner().expect("no panic")
}

/// What a process is to have at the end.
#[derive(Clone, Copy)]
enum Expected<'a> {
    /// To be found out.
    Anything,
    /// The same, of one whose exporter is to have no broker.
    WithoutBroker,
    /// This.
    All(&'a str),
    /// This, or that without a broker.
    AllOrLess(&'a str, &'a str),
}

impl Expected<'_> {
    fn is(self, census: &str, same: usize) -> bool {
        match self {
            // Threads that have done their work end in their own time: what has stayed the same for a while.
            Self::Anything | Self::WithoutBroker => same >= 100,
            Self::All(all) => census == all,
            Self::AllOrLess(all, less) => census == all || census == less,
        }
    }
}

/// One life: the operation once with a failure and then until it works, three times; and what the process has after that, which has to become `expected`.
fn live(begin: &Begin<'_>, failure: Option<(Place, Verdict)>, expected: Expected<'_>) -> (Told, String) {
    parse(&children::hear(|said| in_child(begin, failure, expected, said)))
}

/// What is said where the lane is lost for the life of the process: no driver to build on, at UCX's very first call.
pub(crate) const FOR_GOOD: &str = "WARN cuInit failed with CUresult";
/// Between the parts of what a child tells.
const MARK: char = '\x1e';

fn in_child(begin: &Begin<'_>, failure: Option<(Place, Verdict)>, expected: Expected<'_>, said: &Said) -> String {
    if matches!(expected, Expected::WithoutBroker) {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var("CUDA_IPC_BROKER", "n") };
    }
    let life = Life { importer: Importer::start(), uct: Uct::load() };
    let watch = Watch::of_preload(life.importer.fake);
    let mut operation = begin(life);
    let mut counts: BTreeMap<(Callee, &str), usize> = BTreeMap::new();
    let (mut reached, mut places) = (false, String::new());
    let hook = |point: &Point| {
        if !point.before {
            return Verdict::Go;
        }
        let count = counts.entry((point.callee, point.name)).or_default();
        let place = Place { callee: point.callee, name: point.name, number: *count };
        *count += 1;
        let _ = writeln!(places, "{:?} {} {}", place.callee, place.name, place.number);
        match failure {
            Some((at, verdict)) if at == place => {
                reached = true;
                verdict
            }
            _ => Verdict::Go,
        }
    };
    let outcome = watch.run(hook, &mut operation);
    let words = said.all();
    let stopped = outcome.err().map_or(String::new(), |(name, code)| format!("{}{MARK}{name}", code.0));
    // Where the lane is lost for good, that is no matter of time.
    let for_good = words.contains(FOR_GOOD);
    let mut last = Ok(());
    let works = wait_until(if for_good { Duration::ZERO } else { SOON }, || {
        last = operation();
        last.is_ok()
    });
    assert_ne!(works, for_good, "{last:?}, after {stopped}, and this was said: {}", said.all());
    if for_good {
        return [reached.to_string(), words, String::new(), places, stopped].join(&MARK.to_string());
    }
    operation().expect("and it goes on working");
    let (mut now, mut same) = (census(&life), 0);
    let settled = wait_until(SOON, || {
        let then = core::mem::replace(&mut now, census(&life));
        same = if then == now { same + 1 } else { 0 };
        if same % 200 == 199 {
            operation().expect("and it goes on working");
        }
        expected.is(&now, same)
    });
    if let (false, Expected::All(all) | Expected::AllOrLess(all, _)) = (settled, expected) {
        panic!("{failure:?} leaves {now}, where it is {all} without a failure, and this was said: {}", said.all());
    }
    [reached.to_string(), words, now, places, stopped].join(&MARK.to_string())
}

fn parse(text: &str) -> (Told, String) {
    let parts: Vec<&str> = text.split(MARK).collect();
    let &[reached, said, census, places, ref stopped @ ..] = &parts[..] else { panic!("{text}") };
    let stopped = if let &[code, name] = stopped { Some((name.to_owned(), code.parse().expect("a code"))) } else { None };
    let told = Told { reached: reached == "true", stopped, said: said.to_owned(), places: places.lines().map(Place::parse).collect() };
    (told, census.to_owned())
}
