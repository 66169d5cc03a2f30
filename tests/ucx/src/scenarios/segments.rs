//! One reservation, several registrations: what becomes of each when others come and go.

use crate::Outcome;
use crate::memory::{CHUNK, Local, POSIX_FD, Remote, Way};
use crate::player::Setup;
use crate::world::World;

/// Two tensors of three chunks in one segment; the second is freed.
pub(super) fn neighbour_freed(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(6 * CHUNK)?;
    let base = a.segment(CHUNK, 6, 32 * CHUNK, POSIX_FD)?;
    let half = 3 * CHUNK;
    a.fill(base, 2 * half, 1, 0)?;
    let (first, second) = (a.share(base, half)?, a.share(base + half, half)?);
    let (first, second) = (b.open(&a, &first)?, b.open(&a, &second)?);
    b.read(&first, 0, buffer, half, 1, 0)?;
    b.read(&second, 0, buffer, half, 1, half)?;
    a.unmap(base + half, half)?;
    // Both while the freed part is being unmapped and after that.
    for _ in 0..20 {
        b.read(&first, 0, buffer, half, 1, 0)?;
        std::thread::sleep(core::time::Duration::from_millis(10));
    }
    for at in [0, half - 100] {
        b.finds_it_gone(&second, at, buffer, 100)?;
    }
    b.read(&first, CHUNK - 50, buffer, 100, 1, CHUNK - 50)?;
    a.is_clean()?;
    b.is_clean()
}

/// A segment grows; keys from before and after are used in turn, several transfers at a time.
pub(super) fn keys_of_different_age(world: &mut World) -> Outcome {
    world.set("FAKE_CUDA_ASYNC", "2");
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let base = a.reserve(64 * CHUNK)?;
    let mut keys: Vec<(Remote, u64)> = Vec::new();
    for generation in 1..=4 {
        a.chunks(base + (generation - 1) * 4 * CHUNK, CHUNK, 4, POSIX_FD)?;
        a.fill(base + (generation - 1) * 4 * CHUNK, 4 * CHUNK, 1, (generation - 1) * 4 * CHUNK)?;
        let shared = a.share(base, generation * 4 * CHUNK)?;
        keys.push((b.open(&a, &shared)?, shared.len));
    }
    let part = CHUNK / 4;
    let buffers: Vec<Local> = (0..8).map(|_| b.buffer(part)).collect::<Outcome<_>>()?;
    for round in 0..25_u64 {
        let mut flying = Vec::new();
        for (number, &local) in (0_u64..).zip(&buffers) {
            let (remote, len) = &keys[usize::try_from((round + number) % 4).unwrap_or(0)];
            // Some of them across a border of chunks.
            let at = (round * 7 + number * 3) * (part + 4096) % (len - part);
            flying.push((b.begin(Way::Get, remote, at, local, part)?, at, local));
        }
        for (transfer, at, local) in flying {
            b.finish(&transfer)?;
            b.check(local.address, part, 1, at)?;
            if !transfer.route.is_lane() {
                return Err(format!("went by `{}`", transfer.route.0));
            }
        }
    }
    world.notes.push(format!("{} imports", b.counters()?.imports));
    b.is_clean()
}

/// Grows, shrinks, is freed, comes again at the same address with other contents, then with another length of the reservation.
pub(super) fn recreated(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(8 * CHUNK)?;
    let reserved = 16 * CHUNK;
    // Where nothing else comes, so that all of it can be had again.
    let base = 16 << 40;
    a.reserve_at(base, reserved)?;
    a.chunks(base, CHUNK, 2, POSIX_FD)?;
    a.fill(base, 2 * CHUNK, 1, 0)?;
    let small = a.share(base, 2 * CHUNK)?;
    let old = b.open(&a, &small)?;
    b.read(&old, 0, buffer, 2 * CHUNK, 1, 0)?;

    a.chunks(base + 2 * CHUNK, CHUNK, 4, POSIX_FD)?;
    a.fill(base, 6 * CHUNK, 2, 0)?;
    let large = a.share(base, 6 * CHUNK)?;
    let grown = b.open(&a, &large)?;
    b.read(&grown, 0, buffer, 6 * CHUNK, 2, 0)?;
    b.read(&old, 0, buffer, 2 * CHUNK, 2, 0)?;

    a.deregister(large.memory)?;
    a.unmap(base + 3 * CHUNK, 3 * CHUNK)?;
    b.read(&old, 0, buffer, 2 * CHUNK, 2, 0)?;
    b.read(&grown, 0, buffer, 3 * CHUNK, 2, 0)?;
    b.finds_it_gone(&grown, 3 * CHUNK, buffer, CHUNK)?;

    let (mut mapped, mut len) = (3 * CHUNK, reserved);
    for (seed, next_len) in [(3, reserved), (4, reserved), (5, 2 * reserved), (6, reserved / 2), (7, reserved)] {
        a.unmap(base, mapped)?;
        a.unreserve(base, len)?;
        (mapped, len) = (4 * CHUNK, next_len);
        a.reserve_at(base, len)?;
        a.chunks(base, CHUNK, 4, POSIX_FD)?;
        a.fill(base, mapped, seed, 0)?;
        let new = a.share(base, mapped)?;
        let new = b.open(&a, &new)?;
        b.read(&new, 0, buffer, mapped, seed, 0).map_err(|error| format!("re-created as {seed}: {error}"))?;
        // The key of the first life: what is there now, or an error, and never what was there.
        if b.survives_failed_reads && b.try_transfer(Way::Get, &old, 0, buffer, 2 * CHUNK)?.is_ok() {
            b.check(buffer.address, 2 * CHUNK, seed, 0).map_err(|error| format!("old key, re-created as {seed}: {error}"))?;
        }
        b.read(&new, CHUNK, buffer, CHUNK, seed, CHUNK).map_err(|error| format!("new key after the old, as {seed}: {error}"))?;
    }
    a.is_clean()?;
    b.is_clean()
}

/// Two reservations whose addresses touch are two things.
pub(super) fn side_by_side(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(4 * CHUNK)?;
    let len = 4 * CHUNK;
    // Where both fit.
    let left = a.reserve(2 * len)?;
    a.unreserve(left, 2 * len)?;
    a.reserve_at(left, len)?;
    a.reserve_at(left + len, len)?;
    for (seed, base) in [(1, left), (2, left + len)] {
        a.chunks(base, CHUNK, 4, POSIX_FD)?;
        a.fill(base, len, seed, 0)?;
    }
    let (one, two) = (a.share(left, len)?, a.share(left + len, len)?);
    let (one_key, two_key) = (b.open(&a, &one)?, b.open(&a, &two)?);
    for _ in 0..3 {
        b.read(&one_key, 0, buffer, len, 1, 0)?;
        b.read(&two_key, 0, buffer, len, 2, 0)?;
    }
    a.unmap(left, len)?;
    a.unreserve(left, len)?;
    b.read(&two_key, 100, buffer, len - 100, 2, 100)?;
    std::thread::sleep(core::time::Duration::from_millis(600));
    b.read(&two_key, 0, buffer, len, 2, 0)?;
    b.finds_it_gone(&one_key, 0, buffer, 100)?;
    b.is_clean()
}

/// An allocator gives its memory back and takes new memory at the same addresses; whoever has registered them knows nothing of it.
pub(super) fn sleep_and_wake(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(4 * CHUNK)?;
    let base = a.segment(CHUNK, 4, 16 * CHUNK, POSIX_FD)?;
    a.fill(base, 4 * CHUNK, 1, 0)?;
    let shared = a.share(base, 4 * CHUNK)?;
    let remote = b.open(&a, &shared)?;
    b.read(&remote, 0, buffer, 4 * CHUNK, 1, 0)?;
    for seed in 2..6 {
        a.unmap(base, 4 * CHUNK)?;
        b.finds_it_gone(&remote, 0, buffer, 4 * CHUNK)?;
        a.chunks(base, CHUNK, 4, POSIX_FD)?;
        a.fill(base, 4 * CHUNK, seed, 0)?;
        b.read(&remote, 0, buffer, 4 * CHUNK, seed, 0).map_err(|error| format!("awake again: {error}"))?;
    }
    a.is_clean()?;
    b.is_clean()
}

/// A read of memory that is gone fails, and the next one of other memory works. UCX 1.18 has no way to fail a read and ends the process.
pub(super) fn failed_read(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload())?;
    let buffer = b.buffer(2 * CHUNK)?;
    let base = a.segment(CHUNK, 4, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 4 * CHUNK, 1, 0)?;
    let shared = a.share(base, 4 * CHUNK)?;
    let remote = b.open(&a, &shared)?;
    b.read(&remote, 0, buffer, 2 * CHUNK, 1, 0)?;
    a.unmap(base + 2 * CHUNK, 2 * CHUNK)?;
    let read = b.try_transfer(Way::Get, &remote, 2 * CHUNK, buffer, CHUNK);
    if !b.survives_failed_reads {
        let log = std::fs::read_to_string(&b.log).map_err(|error| error.to_string())?;
        world.notes.push("the process is ended by UCX".to_owned());
        return if read.is_err() && log.contains("not implemented") { Ok(()) } else { Err(format!("it lives: {read:?}")) };
    }
    if let Ok(route) = read? {
        return Err(format!("a read of memory that is gone went by `{}`", route.0));
    }
    b.read(&remote, 0, buffer, 2 * CHUNK, 1, 0)?;
    b.is_clean()
}
