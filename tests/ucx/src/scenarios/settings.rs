//! UCX's own settings and habits: its cache off or small, and streams that it destroys while they run.

use crate::Outcome;
use crate::memory::{CHUNK, Local, POSIX_FD, Remote, Way};
use crate::player::Setup;
use crate::world::World;

use super::expect;

/// Regions are unmapped after every transfer.
pub(super) fn cache_off(world: &mut World) -> Outcome {
    world.set("UCX_CUDA_IPC_CACHE", "n");
    in_flight(world)
}

/// Room for one region: every transfer from another reservation makes room.
pub(super) fn cache_of_one(world: &mut World) -> Outcome {
    world.set("UCX_CUDA_IPC_CACHE_MAX_REGIONS", "1");
    in_flight(world)
}

/// Room for less than one region.
pub(super) fn small_cache(world: &mut World) -> Outcome {
    world.set("UCX_CUDA_IPC_CACHE_MAX_SIZE", "4M");
    in_flight(world)
}

/// Transfers from four reservations at once, again and again.
fn in_flight(world: &mut World) -> Outcome {
    world.set("FAKE_CUDA_ASYNC", "2");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let mut remotes: Vec<Remote> = Vec::new();
    for seed in 0..4 {
        let base = a.segment(CHUNK, 3, 16 * CHUNK, POSIX_FD)?;
        a.fill(base, 3 * CHUNK, seed, 0)?;
        let shared = a.share(base, 3 * CHUNK)?;
        remotes.push(b.open(&a, &shared)?);
    }
    let part = CHUNK / 2;
    let buffers: Vec<Local> = (0..8).map(|_| b.buffer(part)).collect::<Outcome<_>>()?;
    for round in 0..20_u64 {
        let mut flying = Vec::new();
        for (number, &local) in (0_u64..).zip(&buffers) {
            let seed = (round + number) % 4;
            let at = (round * 5 + number) * 65536 % (2 * CHUNK);
            let remote = &remotes[usize::try_from(seed).unwrap_or(0)];
            flying.push((b.begin(Way::Get, remote, at, local, part)?, seed, at, local));
        }
        for (transfer, seed, at, local) in flying {
            b.finish(&transfer)?;
            b.check(local.address, part, seed, at)?;
            expect(transfer.route.is_lane(), &format!("went by `{}`", transfer.route.0))?;
        }
    }
    a.is_clean()?;
    b.is_clean()
}

/// UCX goes, with its streams, while a copy runs; then the memory is freed.
pub(super) fn stream_destroyed(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(CHUNK)?;
    let before = a.used_bytes(0)?;
    let base = a.segment(CHUNK, 2, 4 * CHUNK, POSIX_FD)?;
    a.fill(base, 2 * CHUNK, 1, 0)?;
    let shared = a.share(base, 2 * CHUNK)?;
    let remote = b.open(&a, &shared)?;
    b.read(&remote, 0, buffer, CHUNK, 1, 0)?;
    b.fill(buffer.address, CHUNK, 2, 0)?;
    b.ask("async 400000")?;
    let transfer = b.begin(Way::Get, &remote, CHUNK, buffer, CHUNK)?;
    expect(transfer.route.is_lane(), "not by the lane")?;
    let destroyed = b.calls("cuStreamDestroy_v2")?;
    b.ask("close")?;
    expect(b.calls("cuStreamDestroy_v2")? > destroyed, "UCX has destroyed no stream: this tests nothing")?;
    a.unmap(base, 2 * CHUNK)?;
    expect(a.wait_for_used(0, before, 1500)?.is_some(), "the memory does not come back")?;
    b.check(buffer.address, CHUNK, 1, CHUNK)?;
    b.is_clean()
}

/// A copy runs for longer than it takes to free and re-create what it reads.
pub(super) fn freed_while_copied(world: &mut World) -> Outcome {
    re_created_while_copied(world, 4 * CHUNK)
}

/// The same in a longer reservation: UCX takes its region of the old one down while the copy uses it.
pub(super) fn region_destroyed_in_use(world: &mut World) -> Outcome {
    re_created_while_copied(world, 8 * CHUNK)
}

fn re_created_while_copied(world: &mut World, next_len: u64) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let (first, second) = (b.buffer(2 * CHUNK)?, b.buffer(2 * CHUNK)?);
    let base = 16 << 40;
    a.reserve_at(base, 4 * CHUNK)?;
    let mut len = 4 * CHUNK;
    for seed in [1, 3, 5] {
        a.chunks(base, CHUNK, 2, POSIX_FD)?;
        a.fill(base, 2 * CHUNK, seed, 0)?;
        let old = a.share(base, 2 * CHUNK)?;
        let old = b.open(&a, &old)?;
        b.read(&old, 0, first, 2 * CHUNK, seed, 0)?;
        b.ask("async 300000")?;
        let slow = b.begin(Way::Get, &old, 0, first, 2 * CHUNK)?;
        a.unmap(base, 2 * CHUNK)?;
        a.unreserve(base, len)?;
        len = if len == next_len { 4 * CHUNK } else { next_len };
        a.reserve_at(base, len)?;
        a.chunks(base, CHUNK, 2, POSIX_FD)?;
        a.fill(base, 2 * CHUNK, seed + 1, 0)?;
        let new = a.share(base, 2 * CHUNK)?;
        let new = b.open(&a, &new)?;
        let later = b.begin(Way::Get, &new, 0, second, 2 * CHUNK)?;
        b.finish(&slow)?;
        b.finish(&later)?;
        // What was there when the copy was asked for was kept for it.
        b.check(first.address, 2 * CHUNK, seed, 0).map_err(|error| format!("the old: {error}"))?;
        b.check(second.address, 2 * CHUNK, seed + 1, 0).map_err(|error| format!("the new: {error}"))?;
        b.ask("async 0")?;
        b.read(&new, 0, first, 2 * CHUNK, seed + 1, 0)?;
        a.unmap(base, 2 * CHUNK)?;
    }
    a.is_clean()?;
    b.is_clean()
}
