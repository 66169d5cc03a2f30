//! GPU memory, address space and fds come back, whoever still has a key.

use std::time::{Duration, Instant};

use crate::Outcome;
use crate::memory::{CHUNK, Local, POSIX_FD, Remote};
use crate::player::{Answer, Player, Setup};
use crate::world::World;

use super::expect;

const MI: u64 = 1 << 20;
const GI: u64 = 1 << 30;

/// A segment that `b` has read, so that it is mapped there.
fn read_segment(a: &mut Player, b: &mut Player, chunks: u64, buffer: Local) -> Outcome<(u64, Remote)> {
    let base = a.segment(CHUNK, chunks, 2 * chunks * CHUNK, POSIX_FD)?;
    a.fill(base, CHUNK, 1, 0)?;
    let shared = a.share(base, chunks * CHUNK)?;
    let remote = b.open(a, &shared)?;
    b.read(&remote, 0, buffer, CHUNK, 1, 0)?;
    Ok((base, remote))
}

/// Memory is back within 500 ms of a free that nobody reports.
pub(super) fn back_by_sweep(world: &mut World) -> Outcome {
    back(world, &Setup::preload(), 500)
}

/// And within 20 ms, and what unmapping takes, of one that UCM reports.
pub(super) fn back_by_event(world: &mut World) -> Outcome {
    back(world, &Setup::preload().hooks(), 60)
}

fn back(world: &mut World, setup: &Setup, limit_ms: u64) -> Outcome {
    let (mut a, mut b) = world.pair(setup.clone(), setup.clone())?;
    let buffer = b.buffer(CHUNK)?;
    let before = a.used_bytes(0)?;
    let mut times = Vec::new();
    for _ in 0..5 {
        let (base, remote) = read_segment(&mut a, &mut b, 32, buffer)?;
        a.unmap(base, 32 * CHUNK)?;
        // UCX has the region in its cache, and b has the key.
        let took = a.wait_for_used(0, before, 5 * limit_ms)?.ok_or("the memory does not come back")?;
        times.push(took);
        b.finds_it_gone(&remote, 0, buffer, CHUNK)?;
        a.unreserve(base, 64 * CHUNK)?;
    }
    times.sort_unstable();
    world.notes.push(format!("after {times:?} ms"));
    // Other processes of this machine may take the time of one round, not of most.
    expect(times[2] <= limit_ms, &format!("memory came back after {times:?} ms"))?;
    a.is_clean()?;
    b.is_clean()
}

/// Free, then at once all that is free; and all that was freed, as soon as importers have let go.
pub(super) fn create_after_free(world: &mut World) -> Outcome {
    recreate(world, Duration::from_millis(60))
}

/// Free, then at once all that was freed, as in a stock run.
pub(super) fn create_at_once(world: &mut World) -> Outcome {
    recreate(world, Duration::ZERO)
}

fn recreate(world: &mut World, patience: Duration) -> Outcome {
    world.set("FAKE_CUDA_MEMORY", "256M");
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(CHUNK)?;
    let before = a.numbers("info")?[0];
    let mut refused = 0;
    for round in 0..5 {
        let chunks = 90;
        let (base, _) = read_segment(&mut a, &mut b, chunks, buffer)?;
        a.unmap(base, chunks * CHUNK)?;
        let start = Instant::now();
        if !patience.is_zero() {
            let free = a.numbers("info")?[0];
            expect(create(&mut a, free)?, &format!("round {round}: {} MiB that are free cannot be had", free / MI))?;
        }
        while !create(&mut a, before)? {
            refused += 1;
            expect(start.elapsed() <= patience, &format!("round {round}: {} MiB that were freed cannot be had", before / MI))?;
        }
        a.unreserve(base, 2 * chunks * CHUNK)?;
    }
    world.notes.push(format!("{refused} tries too early"));
    b.is_clean()
}

/// Makes physical memory and gives it back; whether there was so much.
fn create(a: &mut Player, bytes: u64) -> Outcome<bool> {
    match a.try_ask(&format!("create {bytes} {POSIX_FD}"))? {
        Answer::Ok(handle) => a.ask(&format!("release {handle}")).map(|_| true),
        Answer::Refused(2, _) => Ok(false),
        Answer::Refused(code, _) => Err(format!("cuMemCreate: {code}")),
    }
}

/// Reservations at addresses that never come again, with a limit on what UCX keeps of them.
pub(super) fn changing_addresses(world: &mut World) -> Outcome {
    // UCX has no such limit before; then the windows of a process end at their own.
    let rounds = if world.wheel.is_at_least("1.21") { 250 } else { 150 };
    world.set("UCX_CUDA_IPC_CACHE_MAX_SIZE", "16T");
    reserve_anew(world, rounds)
}

/// The same while UCX keeps a region for each.
pub(super) fn addresses_without_limit(world: &mut World) -> Outcome {
    reserve_anew(world, 250)
}

fn reserve_anew(world: &mut World, rounds: u64) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(CHUNK)?;
    let before = a.used_bytes(0)?;
    let reserved = 320 * GI;
    for round in 0..rounds {
        // Below where the kernel puts programs and libraries, and more in all than a process may have windows for.
        let base = (4 << 40) + round * (reserved + 64 * CHUNK);
        a.reserve_at(base, reserved)?;
        a.chunks(base, CHUNK, 2, POSIX_FD)?;
        a.fill(base, CHUNK, round, 0)?;
        let shared = a.share(base, 2 * CHUNK)?;
        let remote = b.open(&a, &shared)?;
        let at = |error: String| format!("round {round}: {error}");
        b.read(&remote, 0, buffer, CHUNK, round, 0).map_err(at)?;
        b.drop_key(remote)?;
        a.deregister(shared.memory)?;
        a.unmap(base, 2 * CHUNK)?;
        a.unreserve(base, reserved)?;
    }
    let counters = b.counters()?;
    world.notes.push(format!("{rounds} rounds, {} GiB reserved", counters.reserved_bytes / GI));
    expect(counters.reserved_bytes <= 64 << 40, "address space grows without a limit")?;
    expect(a.wait_for_used(0, before, 1000)?.is_some(), "memory does not come back")?;
    b.is_clean()
}

/// Children that live on, as the workers of a data loader do, hold nothing.
pub(super) fn forked_workers(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(CHUNK)?;
    let before = a.used_bytes(0)?;
    let (base, remote) = read_segment(&mut a, &mut b, 32, buffer)?;
    let mut children = Vec::new();
    for player in [&mut a, &mut b] {
        for _ in 0..2 {
            children.push(Child(player.number("fork")?));
        }
    }
    b.read(&remote, 0, buffer, CHUNK, 1, 0)?;
    a.unmap(base, 32 * CHUNK)?;
    let took = a.wait_for_used(0, before, 2000)?;
    expect(took.is_some_and(|took| took <= 500), &format!("memory came back after {took:?} ms"))?;
    // And after the forks everything works as before.
    let (_, remote) = read_segment(&mut a, &mut b, 8, buffer)?;
    b.read(&remote, 0, buffer, CHUNK, 1, 0)?;
    drop(children);
    a.is_clean()?;
    b.is_clean()
}

/// A child that is killed at the end.
struct Child(u64);

impl Drop for Child {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.0) {
            super::kill(pid);
        }
    }
}

/// Allocate, register, transfer, deregister, free, for a while: nothing grows.
pub(super) fn steady(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(4 * CHUNK)?;
    let end = Instant::now() + world.soak;
    let mut first = None;
    let mut rounds = 0_u64;
    let start = Instant::now();
    while Instant::now() < end {
        let base = a.segment(CHUNK, 4, 16 * CHUNK, POSIX_FD)?;
        a.fill(base, 4 * CHUNK, rounds, 0)?;
        let shared = a.share(base, 4 * CHUNK)?;
        let remote = b.open(&a, &shared)?;
        b.read(&remote, 0, buffer, 4 * CHUNK, rounds, 0)?;
        b.drop_key(remote)?;
        a.deregister(shared.memory)?;
        a.unmap(base, 4 * CHUNK)?;
        a.unreserve(base, 16 * CHUNK)?;
        rounds += 1;
        if first.is_none() && start.elapsed() > world.soak / 4 {
            first = Some(Footprint::of(&mut a, &mut b)?);
        }
    }
    let (first, last) = (first.ok_or("too short")?, Footprint::of(&mut a, &mut b)?);
    world.notes.push(format!("{rounds} rounds"));
    expect(first.fds == last.fds, &format!("fds: {:?}, then {:?}", first.fds, last.fds))?;
    expect(first.used == last.used, &format!("GPU memory: {} KiB, then {} KiB", first.used >> 10, last.used >> 10))?;
    let grown: Vec<u64> = first.resident.iter().zip(last.resident).map(|(&first, last)| last.saturating_sub(first)).collect();
    world.notes.push(format!("resident grew by {grown:?} KiB"));
    expect(grown.iter().all(|&grown| grown <= 4096), &format!("resident memory grew by {grown:?} KiB"))?;
    a.is_clean()?;
    b.is_clean()
}

/// What two processes hold.
struct Footprint {
    fds: [usize; 2],
    resident: [u64; 2],
    used: u64,
}

impl Footprint {
    fn of(a: &mut Player, b: &mut Player) -> Outcome<Self> {
        // What is freed goes within this time.
        std::thread::sleep(Duration::from_millis(700));
        Ok(Self { fds: [a.fds()?, b.fds()?], resident: [a.resident_kib()?, b.resident_kib()?], used: a.used_bytes(0)? })
    }
}
