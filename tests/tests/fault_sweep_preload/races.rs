//! What happens in an exporter while UCX imports and copies by the preload library, at each of its calls: right bytes, or UCX is told no and the reason is said.
//!
//! Each happening is there in two ways: it is over before the call is made, and it goes on while the call waits a millisecond and is then made.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Mutex;

use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::driver::Inside;
use cuda_ipc_tests::exporter::{Remote, RemoteMemory};
use cuda_ipc_tests::importer::{Importer, key};
use cuda_ipc_tests::pattern;
use cuda_ipc_tests::points::{Callee, Point, Verdict, Watch};
use cuda_ipc_tests::snapshot::wait_until;
use cuda_ipc_tests::uct::{Stopped, Uct};

use crate::children::{self, Said};
use crate::lives::Place;
use crate::{MIB, enter};

const CHUNK: u64 = 2 * MIB;
/// Chunks at first; one more comes at most.
const CHUNKS: u64 = 2;
const SOON: Duration = Duration::from_secs(10);

/// What may happen to the first chunk, or beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// It is retired and freed.
    Retire,
    /// It is freed without a word; the exporter's sweep finds out.
    Free,
    /// It is replaced, and the new one is exported.
    Replace,
    /// Another one comes behind the last, and is exported.
    Grow,
    /// The process is killed.
    Kill,
}

/// When it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Before,
    Meanwhile,
}

/// An exporter, and what it has in this round.
struct Exporting {
    remote: Mutex<Remote>,
    memory: RemoteMemory,
    rkey: Rkey,
    seed: u64,
}

impl Exporting {
    fn start(me: &Inside) -> Self {
        let mut remote = Remote::start(me);
        remote.ask("exporter_with reserve=64");
        Self::with(remote, 100)
    }

    /// With new memory, in a new reservation.
    fn with(mut remote: Remote, seed: u64) -> Self {
        let chunks: Vec<_> = (0..CHUNKS).map(|chunk| (CHUNK, seed + chunk)).collect();
        let memory = remote.marked_memory_at(16 * MIB, 0, &chunks);
        let (_, rkey) = remote.export(&memory, 0, CHUNKS * CHUNK);
        Self { remote: Mutex::new(remote), memory, rkey, seed }
    }

    /// For the next round, after this one has ended.
    fn renew(self, me: &Inside) -> Self {
        let mut remote = self.remote.into_inner().unwrap();
        if std::fs::read_to_string(format!("/proc/{}/stat", remote.pid)).unwrap().contains(") Z ") {
            remote.kill();
            return Self::start(me);
        }
        remote.ask(&format!("retire {} 0 {}", self.memory.index, 16 * MIB));
        remote.ask(&format!("unreserve {}", self.memory.index));
        Self::with(remote, self.seed + 10)
    }

    fn happens(&self, event: Event) {
        let mut remote = self.remote.lock().unwrap();
        let index = self.memory.index;
        let lines = match event {
            Event::Retire => vec![format!("retire {index} 0 {CHUNK}"), format!("unmap {index} 0")],
            Event::Free => vec![format!("unmap {index} 0")],
            Event::Replace => vec![
                format!("retire {index} 0 {CHUNK}"),
                format!("unmap {index} 0"),
                format!("mark {index} 0 {CHUNK} {}", self.new_seed()),
                format!("export {index} 0 {}", CHUNKS * CHUNK),
            ],
            Event::Grow => vec![
                format!("mark {index} {} {CHUNK} {}", CHUNKS * CHUNK, self.new_seed()),
                format!("export {index} 0 {}", (CHUNKS + 1) * CHUNK),
            ],
            Event::Kill => {
                let pid = nix::unistd::Pid::from_raw(i32::try_from(remote.pid).unwrap());
                nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
                let stat = format!("/proc/{pid}/stat");
                assert!(wait_until(SOON, || std::fs::read_to_string(&stat).unwrap().contains(") Z ")));
                return;
            }
        };
        for line in lines {
            remote.ask(&line);
        }
    }

    const fn new_seed(&self) -> u64 {
        self.seed + 5
    }
}

/// What each copy of a transfer has brought, by its seed, or where that was stopped; or where the transfer was.
type Transferred = Result<Vec<Result<u64, Stopped>>, Stopped>;

/// UCX in one life.
struct Ucx<'a> {
    importer: Importer,
    uct: Uct,
    exporting: &'a Exporting,
    local: u64,
}

impl Ucx<'_> {
    /// Imports, copies the start of each of so many chunks, and closes.
    fn transfer(&self, chunks: u64) -> Transferred {
        let key = key(&self.exporting.rkey);
        let imported = self.uct.import(&key.encode(), key.len)?;
        let copies =
            (0..chunks).map(|chunk| self.copy(imported.address + chunk * CHUNK + (self.exporting.memory.base - key.base))).collect();
        self.uct.close(imported).unwrap();
        Ok(copies)
    }

    fn copy(&self, from: u64) -> Result<u64, Stopped> {
        let cuda = &self.importer.cuda;
        cuda.fill(self.local, 0xee, 4096).unwrap();
        self.uct.copy(self.local, from, 4096)?;
        cuda.stream_synchronize(null_mut()).unwrap();
        let seeds = (0..CHUNKS).map(|chunk| self.exporting.seed + chunk).chain([self.exporting.new_seed()]);
        let is = |seed: &u64| pattern::check(cuda, self.local, 0, 4096, *seed).is_ok();
        Ok(seeds.into_iter().find(is).expect("bytes that were there at some time"))
    }

    /// What UCX gets at last, when all has happened.
    fn settles(&self, event: Event) -> &'static str {
        let (old, new) = (self.exporting.seed, self.exporting.new_seed());
        let mut last = None;
        let mut becomes = |wanted: &dyn Fn(&Transferred) -> bool, chunks| {
            let settled = wait_until(SOON, || wanted(last.insert(self.transfer(chunks))));
            assert!(settled, "at last: {last:?}");
        };
        match event {
            Event::Retire | Event::Free => {
                becomes(&|got| got.as_ref().is_ok_and(|copies| copies[0].is_err() && copies[1] == Ok(old + 1)), CHUNKS);
                "the rest is there"
            }
            Event::Replace => {
                becomes(&|got| *got == Ok(vec![Ok(new), Ok(old + 1)]), CHUNKS);
                "the new bytes are there"
            }
            Event::Grow => {
                becomes(&|got| *got == Ok(vec![Ok(old), Ok(old + 1), Ok(new)]), CHUNKS + 1);
                "what has come is there, too"
            }
            // Nobody is there any more: what was mapped may have been used to the last.
            Event::Kill => {
                becomes(&|got| got.as_ref().map_or(true, |copies| copies.iter().all(Result::is_err)), CHUNKS);
                "nothing is there"
            }
        }
    }
}

const IDLE: u32 = 0;
const GO: u32 = 1;
const STOP: u32 = 2;

/// In a child: one transfer with the event at its place, and then until all has settled. Tells the places, and how it went.
fn in_child(exporting: &Exporting, at: Option<(Place, Event, When)>, said: &Said) -> String {
    let importer = Importer::start();
    let ucx = Ucx { importer, uct: Uct::load(), exporting, local: importer.cuda.mem_alloc(4096).unwrap() };
    let watch = Watch::of_preload(importer.fake);
    let wanted = AtomicU32::new(IDLE);
    let (mut counts, mut places, mut reached) = (BTreeMap::<(Callee, &str), usize>::new(), String::new(), false);
    let outcome = std::thread::scope(|scope| {
        // Elsewhere, as far as the calls of this thread are concerned.
        scope.spawn(|| {
            loop {
                match (wanted.load(Ordering::Acquire), at) {
                    (GO, Some((_, event, _))) => {
                        exporting.happens(event);
                        wanted.store(IDLE, Ordering::Release);
                    }
                    (STOP, _) => return,
                    _ => std::thread::sleep(Duration::from_micros(20)),
                }
            }
        });
        let hook = |point: &Point| {
            if point.before {
                let count = counts.entry((point.callee, point.name)).or_default();
                let place = Place { callee: point.callee, name: point.name, number: *count };
                *count += 1;
                places += &format!("{:?} {} {}\n", place.callee, place.name, place.number);
                if let Some((_, _, when)) = at.filter(|(wanted, ..)| *wanted == place) {
                    reached = true;
                    wanted.store(GO, Ordering::Release);
                    match when {
                        When::Before => assert!(wait_until(SOON, || wanted.load(Ordering::Acquire) == IDLE)),
                        When::Meanwhile => std::thread::sleep(Duration::from_millis(1)),
                    }
                }
            }
            Verdict::Go
        };
        let outcome = watch.run(hook, || ucx.transfer(CHUNKS));
        assert!(wait_until(SOON, || wanted.load(Ordering::Acquire) == IDLE));
        wanted.store(STOP, Ordering::Release);
        outcome
    });
    let Some((place, event, when)) = at else { return places };
    let what = format!("{event:?} {when:?} {place:?}: {outcome:?}, and this was said: {}", said.all());
    // Whether it comes to a call is a matter of what has happened before it, but it was there when nothing had.
    assert!(reached, "{what}");
    let (old, new) = (exporting.seed, exporting.new_seed());
    let is_right = |chunk: u64, seed: u64| seed == old + chunk || chunk == 0 && seed == new && event == Event::Replace;
    let name = match &outcome {
        Ok(copies) if copies.iter().all(Result::is_ok) => "all bytes",
        Ok(_) => "a copy was refused",
        Err(_) => "no lane",
    };
    for (chunk, copied) in outcome.iter().flatten().enumerate() {
        match copied {
            Ok(seed) => assert!(is_right(chunk as u64, *seed), "{what}"),
            // What nothing has happened to is there, as long as its process is.
            Err(_) => assert!((chunk == 0 || event == Event::Kill) && said.all().contains("WARN a copy was refused"), "{what}"),
        }
    }
    assert!(outcome.is_ok() || event != Event::Grow && said.all().contains("WARN the lane is lost"), "{what}");
    let settled = ucx.settles(event);
    let counters = importer.fake.counters();
    assert_eq!((counters.handles, counters.copies_into_dead_mappings, counters.internal_errors), (0, 0, 0), "{what}");
    format!("{name}, then {settled}")
}

#[test]
fn whatever_happens_at_a_call_ucx_gets_right_bytes_or_a_reason() {
    let Some((me, remote)) = enter("races::whatever_happens_at_a_call_ucx_gets_right_bytes_or_a_reason") else { return };
    remote.finish();
    pattern::granule(0, 0);
    let mut exporting = Exporting::start(&me);
    let places: Vec<Place> = children::hear(|said| in_child(&exporting, None, said)).lines().map(Place::parse).collect();
    let (mut rounds, mut outcomes) = (0, BTreeMap::<String, usize>::new());
    let events = [
        (Event::Retire, When::Before),
        (Event::Retire, When::Meanwhile),
        (Event::Replace, When::Before),
        (Event::Replace, When::Meanwhile),
        (Event::Grow, When::Before),
        (Event::Free, When::Before),
        (Event::Kill, When::Before),
    ];
    for &place in &places {
        for (event, when) in events {
            exporting = exporting.renew(&me);
            let outcome = children::hear(|said| in_child(&exporting, Some((place, event, when)), said));
            *outcomes.entry(format!("{event:?}: {outcome}")).or_default() += 1;
            rounds += 1;
        }
    }
    println!("{rounds} rounds at {} calls: {outcomes:?}", places.len());
    assert!(places.len() >= 45 && rounds >= 315, "{} calls, {rounds} rounds", places.len());
}
