//! Memory of pools: which of it moves by which route, with right bytes, and what becomes of it when it is freed.
//!
//! Without a context attribute UCX takes pool memory for managed memory, so it is told what it is at every registration.

use crate::Outcome;
use crate::memory::{FABRIC, Local, NO_HANDLE, POSIX_FD, Remote, Shared, Way};
use crate::player::{Player, Setup};
use crate::world::{World, connect};

use super::expect;

const MI: u64 = 1 << 20;

/// Lengths of the allocations of one pool, none of them like another.
const LENGTHS: [u64; 4] = [8 * MI, 2 * MI + 512, 3 * MI - 4096, 100_352];
/// Parts that are moved: offset, and the most bytes.
const PARTS: [(u64, u64); 4] = [(0, 8 * MI), (12345, 70_001), (99_000, 1352), (MI + 1, MI)];

/// Without the library on either side.
pub(super) fn stock(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::stock(), Setup::stock())?;
    let buffer = b.buffer(8 * MI)?;
    let (base, _) = a.pool(8 * MI, POSIX_FD)?;
    both_ways(&mut a, &mut b, (base, 8 * MI), buffer, false)?;
    expect(b.calls("cuMemPoolImportFromShareableHandle")? == 0, "nothing is imported")
}

/// With it on both.
pub(super) fn preload(world: &mut World) -> Outcome {
    all(world, &Setup::preload())
}

/// The same with UCM's hooks, as users have it.
pub(super) fn hooks(world: &mut World) -> Outcome {
    all(world, &Setup::preload().hooks())
}

fn all(world: &mut World, setup: &Setup) -> Outcome {
    let (mut a, mut b) = world.pair(setup.clone(), setup.clone())?;
    let at_a = a.buffer(8 * MI)?;
    let at_b = b.buffer(8 * MI)?;
    several(&mut a, &mut b, at_b)?;
    several(&mut b, &mut a, at_a).map_err(|error| format!("the other direction: {error}"))?;
    // The other end may be such memory too, and of its own pool.
    let (here, _) = b.pool(8 * MI, POSIX_FD)?;
    let here = b.local(here, 8 * MI)?;
    let (there, _) = a.pool(8 * MI, POSIX_FD)?;
    both_ways(&mut a, &mut b, (there, 8 * MI), here, true).map_err(|error| format!("from pool to pool: {error}"))?;
    let (pools, pointers) = (b.calls("cuMemPoolImportFromShareableHandle")?, b.calls("cuMemPoolImportPointer")?);
    let wanted = if world.wheel.has_lane && !setup.hooks {
        // UCX keeps no registration here, whose end takes its export along, and a pool goes with its last: each allocation alone, all of them at once, and the one
        // of the second pool.
        (LENGTHS.len() as u64 + 2, 2 * LENGTHS.len() as u64 + 1)
    } else {
        // UCX keeps registrations, or the library does not learn of their end: one of each, whatever UCX asks for, and however often.
        (2, LENGTHS.len() as u64 + 1)
    };
    expect((pools, pointers) == wanted, &format!("{pools} imports of pools, {pointers} of allocations; {wanted:?} were expected"))?;
    a.is_clean()?;
    b.is_clean()
}

/// Several allocations of one pool, of which all keys live at once.
fn several(a: &mut Player, b: &mut Player, buffer: Local) -> Outcome {
    let mut made = Vec::new();
    let mut pool = None;
    for len in LENGTHS {
        let address = match pool {
            None => {
                let (address, number) = a.pool(len, POSIX_FD)?;
                pool = Some(number);
                address
            }
            Some(pool) => a.pool_more(len, pool)?,
        };
        made.push((address, len));
    }
    for &range in &made {
        both_ways(a, b, range, buffer, true).map_err(|error| format!("{} bytes: {error}", range.1))?;
    }
    // All at once, each with its own pattern; and registered in the middle.
    let mut remotes: Vec<(Remote, u64, u64)> = Vec::new();
    for (seed, &(address, len)) in (100_u64..).zip(&made) {
        a.fill(address, len, seed, 0)?;
        let shared = a.share_as(address + 4097, len - 4097, true)?;
        remotes.push((b.open(a, &shared)?, len - 4097, seed));
    }
    for _ in 0..2 {
        for (remote, len, seed) in &remotes {
            b.read(remote, 0, buffer, *len, *seed, 4097).map_err(|error| format!("inside of an allocation: {error}"))?;
            b.read(remote, len - 700, buffer, 700, *seed, 4097 + len - 700)?;
        }
    }
    Ok(())
}

/// `b` reads and writes parts of memory of `a`'s: bytes, route, and how often the driver copied for it.
fn both_ways(a: &mut Player, b: &mut Player, (base, len): (u64, u64), buffer: Local, by_lane: bool) -> Outcome {
    let shared = a.share_as(base, len, true)?;
    let remote = b.open(a, &shared)?;
    for (seed, (at, most)) in (1_u64..).zip(PARTS) {
        let Some(rest) = len.checked_sub(at).filter(|&rest| rest != 0) else { continue };
        let part = rest.min(most);
        let place = |error: String| format!("{part} bytes at {at}: {error}");
        a.fill(base, len, seed, 0)?;
        b.fill(buffer.address, part, seed + 50, 0)?;
        let copies = b.lane_copies()?;
        let route = b.transfer(Way::Get, &remote, at, buffer, part).map_err(place)?;
        expect(route.is_lane() == by_lane, &format!("reading went by `{}`", route.0)).map_err(place)?;
        b.check(buffer.address, part, seed, at).map_err(place)?;
        b.fill(buffer.address, part, seed + 60, at)?;
        let route = b.transfer(Way::Put, &remote, at, buffer, part).map_err(place)?;
        expect(route.is_lane() == by_lane, &format!("writing went by `{}`", route.0)).map_err(place)?;
        a.check(base + at, part, seed + 60, at).map_err(place)?;
        a.check(base, at, seed, 0).map_err(|error| format!("in front of {}", place(error)))?;
        a.check(base + at + part, len - at - part, seed, at + part).map_err(|error| format!("behind {}", place(error)))?;
        let made = b.lane_copies()? - copies;
        expect(made == if by_lane { 2 } else { 0 }, &format!("{made} copies between devices"))?;
    }
    b.drop_key(remote)?;
    a.deregister(shared.memory)
}

/// One side without it.
pub(super) fn one_sided(world: &mut World) -> Outcome {
    let [mut a, mut b, mut stock] = world.players([("a", Setup::preload()), ("b", Setup::preload()), ("stock", Setup::stock())])?;
    connect(&mut a, &mut b)?;
    connect(&mut a, &mut stock)?;
    let (base, _) = a.pool(2 * MI, POSIX_FD)?;
    let at_stock = stock.buffer(2 * MI)?;
    let at_b = b.buffer(2 * MI)?;
    both_ways(&mut a, &mut stock, (base, 2 * MI), at_stock, false).map_err(|error| format!("by the peer without: {error}"))?;
    both_ways(&mut a, &mut b, (base, 2 * MI), at_b, true).map_err(|error| format!("by the peer with: {error}"))?;
    a.is_clean()?;
    b.is_clean()
}

/// Pools that are none of the library's business: the same with and without it.
pub(super) fn untouched(world: &mut World) -> Outcome {
    world.set("FAKE_CUDA_FABRIC", "1");
    for (name, setup) in [("stock", Setup::stock()), ("preload", Setup::preload())] {
        let (mut a, mut b) = world.pair(setup.clone(), setup)?;
        let buffer = b.buffer(8 * MI)?;
        for (types, by_lane) in [(NO_HANDLE, false), (FABRIC, true), (POSIX_FD | FABRIC, true)] {
            let (base, _) = a.pool(4 * MI, types)?;
            let place = |error| format!("{name}: handle types {types}: {error}");
            both_ways(&mut a, &mut b, (base, 4 * MI), buffer, by_lane).map_err(place)?;
        }
        expect(a.counters()?.exports == 0, "no fd is made")?;
        b.is_clean()?;
    }
    Ok(())
}

/// UCX frees each pointer when the transfer is over, and imports it again for the next one.
pub(super) fn cache_off(world: &mut World) -> Outcome {
    world.set("UCX_CUDA_IPC_CACHE", "n");
    world.set("FAKE_CUDA_ASYNC", "2");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let mut remotes = Vec::new();
    let (first, pool) = a.pool(4 * MI, POSIX_FD)?;
    for seed in 0..4 {
        let address = if seed == 0 { first } else { a.pool_more(4 * MI, pool)? };
        a.fill(address, 4 * MI, seed, 0)?;
        let shared = a.share_as(address, 4 * MI, true)?;
        remotes.push(b.open(&a, &shared)?);
    }
    let buffers: Vec<Local> = (0..8).map(|_| b.buffer(MI)).collect::<Outcome<_>>()?;
    for round in 0..20_u64 {
        let mut flying = Vec::new();
        for (number, &local) in (0_u64..).zip(&buffers) {
            let seed = (round + number) % 4;
            let at = (round * 5 + number) * 65536 % (3 * MI);
            let remote = &remotes[usize::try_from(seed).unwrap_or(0)];
            flying.push((b.begin(Way::Get, remote, at, local, MI)?, seed, at, local));
        }
        for (transfer, seed, at, local) in flying {
            b.finish(&transfer)?;
            b.check(local.address, MI, seed, at)?;
            expect(transfer.route.is_lane(), &format!("went by `{}`", transfer.route.0))?;
        }
    }
    a.is_clean()?;
    b.is_clean()
}

/// Nobody reports the free.
pub(super) fn freed(world: &mut World) -> Outcome {
    free_and_remake(world, &Setup::preload(), 500)
}

/// UCM does.
pub(super) fn freed_with_hooks(world: &mut World) -> Outcome {
    free_and_remake(world, &Setup::preload().hooks(), 60)
}

fn free_and_remake(world: &mut World, setup: &Setup, limit_ms: u64) -> Outcome {
    let (mut a, mut b) = world.pair(setup.clone(), setup.clone())?;
    let buffer = b.buffer(8 * MI)?;
    // Lives all the time, and is never in the way.
    let (kept, pool) = a.pool(2 * MI, POSIX_FD)?;
    a.fill(kept, 2 * MI, 7, 0)?;
    let shared = a.share_as(kept, 2 * MI, true)?;
    let kept = b.open(&a, &shared)?;
    b.read(&kept, 0, buffer, 2 * MI, 7, 0)?;
    let before = a.used_bytes(0)?;
    let mut times = Vec::new();
    let mut places = Vec::new();
    for round in 0..5_u64 {
        let at = |error: String| format!("round {round}: {error}");
        let base = a.pool_more(64 * MI, pool)?;
        places.push(base);
        a.fill(base, 8 * MI, 10 + round, 0)?;
        let shared: Shared = a.share_as(base, 64 * MI, true)?;
        let remote = b.open(&a, &shared)?;
        b.read(&remote, 0, buffer, 8 * MI, 10 + round, 0).map_err(at)?;
        a.pool_free(base, round % 2 == 0)?;
        // UCX has the region in its cache, and b has the key.
        let took = a.wait_for_used(0, before, 5 * limit_ms)?.ok_or("the memory does not come back")?;
        times.push(took);
        b.finds_it_gone(&remote, 0, buffer, MI).map_err(at)?;
        b.read(&kept, 5, buffer, MI, 7, 5).map_err(|error| at(format!("the neighbour: {error}")))?;
    }
    times.sort_unstable();
    places.dedup();
    world.notes.push(format!("after {times:?} ms, at {} places", places.len()));
    // Other processes of this machine may take the time of one round, not of most.
    expect(times[2] <= limit_ms, &format!("memory came back after {times:?} ms"))?;
    a.is_clean()?;
    b.is_clean()
}

/// A window's place is the driver's choice. What is freed there and taken by memory of the process itself, or by another peer's, is not what an old key names.
pub(super) fn reused_place(world: &mut World) -> Outcome {
    let [mut a, mut c, mut b] = world.players([("a", Setup::preload()), ("c", Setup::preload()), ("b", Setup::preload())])?;
    connect(&mut a, &mut b)?;
    connect(&mut c, &mut b)?;
    let buffer = b.buffer(4 * MI)?;
    let (base, _) = a.pool(4 * MI, POSIX_FD)?;
    a.fill(base, 4 * MI, 1, 0)?;
    let shared = a.share_as(base, 4 * MI, true)?;
    let old = b.open(&a, &shared)?;
    b.read(&old, 0, buffer, 4 * MI, 1, 0)?;
    let before = a.used_bytes(0)?;
    a.pool_free(base, false)?;
    expect(a.wait_for_used(0, before - 4 * MI, 2000)?.is_some(), "the memory does not come back")?;
    // Both of the length that has become free there.
    let (other, _) = c.pool(4 * MI, POSIX_FD)?;
    c.fill(other, 4 * MI, 2, 0)?;
    let shared = c.share_as(other, 4 * MI, true)?;
    let new = b.open(&c, &shared)?;
    b.read(&new, 0, buffer, 4 * MI, 2, 0)?;
    let (own, _) = b.pool(4 * MI, POSIX_FD)?;
    b.fill(own, 4 * MI, 3, 0)?;
    let local = b.local(own, 4 * MI)?;
    b.read(&new, 0, local, 4 * MI, 2, 0)?;
    b.fill(own, 4 * MI, 3, 0)?;
    // By writing: what an old key must not change is the worst that it could do.
    if b.try_transfer(Way::Put, &old, 0, buffer, MI)?.is_ok() {
        return Err("memory that is gone was written to".to_owned());
    }
    c.check(other, 4 * MI, 2, 0)?;
    b.check(own, 4 * MI, 3, 0)?;
    b.read(&new, 0, local, 4 * MI, 2, 0)?;
    a.is_clean()?;
    c.is_clean()?;
    b.is_clean()
}

/// UCX asks for access to a pool for the device that imports its first pointer, and never again.
pub(super) fn two_devices(world: &mut World) -> Outcome {
    world.set("FAKE_CUDA_DEVICES", "2");
    let [mut first, mut second, mut b] =
        world.players([("first", Setup::preload()), ("second", Setup::preload().device(1)), ("b", Setup::preload())])?;
    for a in [&mut first, &mut second] {
        connect(a, &mut b)?;
        let (base, pool) = a.pool(4 * MI, POSIX_FD)?;
        let more = a.pool_more(4 * MI, pool)?;
        let mut remotes = Vec::new();
        for (seed, address) in [(1, base), (2, more)] {
            a.fill(address, 4 * MI, seed, 0)?;
            let shared = a.share_as(address, 4 * MI, true)?;
            remotes.push((b.open(a, &shared)?, seed));
        }
        for round in 0..2 {
            for device in 0..2 {
                b.ask(&format!("use {device}"))?;
                let buffer = b.buffer(4 * MI)?;
                for (remote, seed) in &remotes {
                    let place = |error| format!("memory of the {} device, device {device}, round {round}: {error}", a.name);
                    b.read(remote, 0, buffer, 4 * MI, *seed, 0).map_err(place)?;
                }
            }
        }
        b.ask("use 0")?;
    }
    b.is_clean()
}

/// What is counted at the end.
pub(super) fn explained(world: &mut World) -> Outcome {
    world.set("CUDA_IPC_EXPLAIN", "1");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(4 * MI)?;
    let (base, pool) = a.pool(4 * MI, POSIX_FD)?;
    let more = a.pool_more(4 * MI, pool)?;
    for address in [base, more] {
        a.fill(address, 4 * MI, 1, 0)?;
        let shared = a.share_as(address, 4 * MI, true)?;
        let remote = b.open(&a, &shared)?;
        b.read(&remote, 0, buffer, 4 * MI, 1, 0)?;
    }
    // The importer first: it lets go of what was a dead peer's.
    let (b, a) = (b.exit()?, a.exit()?);
    for (said, wanted) in
        [(&a, "exported: 2 keys; 2 chunks of 8388608 bytes"), (&b, "imported: 2 keys; 2 chunks of 8388608 bytes"), (&b, "refused: nothing")]
    {
        expect(said.contains(wanted), &format!("no `{wanted}` in: {said}"))?;
    }
    Ok(())
}

/// Hooks that lead UCX's frees past the library: no address of the library's may come to the driver by them.
pub(super) fn relocating_hooks(world: &mut World) -> Outcome {
    world.set("UCX_MEM_CUDA_HOOK_MODE", "reloc");
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(4 * MI)?;
    let (base, _) = a.pool(4 * MI, POSIX_FD)?;
    both_ways(&mut a, &mut b, (base, 4 * MI), buffer, false)?;
    expect(b.calls("cuMemPoolImportPointer")? == 0, "something was imported")?;
    a.is_clean()?;
    b.is_clean()
}
