//! Which kinds of memory move by which route, with right bytes, both ways.

use crate::Outcome;
use crate::memory::{CHUNK, FABRIC, Local, NO_HANDLE, POSIX_FD, Shared, Way};
use crate::player::{Player, Setup};
use crate::world::{World, connect};

use super::expect;

/// What is made, what of it is registered, and which parts of that are moved: bytes, offsets from the start.
pub(super) struct Case {
    name: &'static str,
    make: Make,
    /// Offset and length of what is registered.
    registered: (u64, u64),
    /// Offset in what is registered, and length.
    moved: &'static [(u64, u64)],
}

/// How memory is made.
#[derive(Clone, Copy)]
pub(super) enum Make {
    /// Chunks of so many bytes, how many, in a reservation of so many bytes, of these handle types.
    Chunks(u64, u64, u64, u32),
    /// `cuMemAlloc`.
    Plain(u64),
}

const MI: u64 = 1 << 20;
const GI: u64 = 1 << 30;
/// Bytes of the local buffer, and the most that is moved at a time.
pub(super) const BUFFER: u64 = 60 * MI;

/// Memory that only the library brings to the lane.
pub(super) const SHARED: &[Case] = &[
    Case { name: "1 chunk", make: Make::Chunks(CHUNK, 1, CHUNK, POSIX_FD), registered: (0, CHUNK), moved: &[(0, CHUNK), (4097, 12345)] },
    Case {
        name: "4 chunks",
        make: Make::Chunks(CHUNK, 4, 4 * CHUNK, POSIX_FD),
        registered: (0, 4 * CHUNK),
        moved: &[(0, 4 * CHUNK), (CHUNK - 100, 200), (3 * CHUNK + 1, CHUNK - 1)],
    },
    Case {
        name: "inside of 4 chunks",
        make: Make::Chunks(CHUNK, 4, 16 * CHUNK, POSIX_FD),
        registered: (CHUNK / 2 + 64, 2 * CHUNK + 4096),
        moved: &[(0, 2 * CHUNK + 4096), (CHUNK / 2 - 65, 130), (777, MI)],
    },
    Case {
        name: "26 chunks",
        make: Make::Chunks(CHUNK, 26, 26 * CHUNK, POSIX_FD),
        registered: (0, 26 * CHUNK),
        moved: &[(0, 26 * CHUNK), (25 * CHUNK, CHUNK)],
    },
    Case {
        name: "3 chunks of 20 MiB in 160 GiB",
        make: Make::Chunks(20 * MI, 3, 160 * GI, POSIX_FD),
        registered: (0, 60 * MI),
        moved: &[(0, 60 * MI), (20 * MI - 1, 2)],
    },
    Case {
        name: "400 chunks",
        make: Make::Chunks(CHUNK, 400, 512 * CHUNK, POSIX_FD),
        registered: (0, 400 * CHUNK),
        moved: &[(0, 4 * MI), (400 * MI - 1000, 2 * MI), (799 * MI, MI)],
    },
];

/// Without the library on either side.
pub(super) fn stock(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::stock(), Setup::stock())?;
    let buffer = b.buffer(BUFFER)?;
    for case in SHARED {
        // Emulation is slow; the parts are as good as the whole.
        check(&mut a, &mut b, buffer, case, Lane::No, 4 * MI).map_err(|error| format!("{}: {error}", case.name))?;
    }
    expect(b.counters()?.imports == 0, "nothing is imported")
}

/// With it on both.
pub(super) fn preload(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    all(world, &mut a, &mut b)
}

/// The same with UCM's hooks, as users have it.
pub(super) fn hooks(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    all(world, &mut a, &mut b)
}

fn all(world: &mut World, a: &mut Player, b: &mut Player) -> Outcome {
    let buffer = b.buffer(BUFFER)?;
    for case in SHARED {
        check(a, b, buffer, case, Lane::Yes, BUFFER).map_err(|error| format!("{}: {error}", case.name))?;
    }
    // The other end may be such memory too.
    let there = b.segment(CHUNK, 4, 8 * CHUNK, POSIX_FD)?;
    let there = b.local(there + 100, 3 * CHUNK)?;
    let case = &SHARED[1];
    check(a, b, there, case, Lane::Yes, 3 * CHUNK).map_err(|error| format!("into chunks: {error}"))?;
    let imports = b.counters()?.imports;
    let chunks: u64 = SHARED.iter().chain([case]).map(|case| if let Make::Chunks(_, count, ..) = case.make { count } else { 0 }).sum();
    expect(imports <= chunks, &format!("{imports} imports for {chunks} chunks"))?;
    world.notes.push(format!("{imports} imports"));
    a.is_clean()?;
    b.is_clean()
}

/// One side without it: its other routes still work, and the pair beside it keeps the lane.
pub(super) fn one_sided(world: &mut World) -> Outcome {
    let [mut a, mut b, mut stock] = world.players([("a", Setup::preload()), ("b", Setup::preload()), ("stock", Setup::stock())])?;
    connect(&mut a, &mut b)?;
    connect(&mut a, &mut stock)?;
    let case = &SHARED[1];
    let at_stock = stock.buffer(BUFFER)?;
    let at_a = a.buffer(BUFFER)?;
    let at_b = b.buffer(BUFFER)?;
    check(&mut a, &mut stock, at_stock, case, Lane::No, MI).map_err(|error| format!("read by the peer without: {error}"))?;
    check(&mut stock, &mut a, at_a, case, Lane::No, MI).map_err(|error| format!("reading from the peer without: {error}"))?;
    check(&mut a, &mut b, at_b, case, Lane::Yes, BUFFER).map_err(|error| format!("afterwards between those with: {error}"))?;
    check(&mut a, &mut stock, at_stock, case, Lane::No, MI).map_err(|error| format!("read again by the peer without: {error}"))?;
    check(&mut b, &mut a, at_a, case, Lane::Yes, BUFFER).map_err(|error| format!("and back: {error}"))?;
    a.is_clean()?;
    b.is_clean()
}

/// Memory that is none of the library's business: the same with and without it.
pub(super) fn untouched(world: &mut World) -> Outcome {
    let plain = Case { name: "cuMemAlloc", make: Make::Plain(8 * MI), registered: (4096, 6 * MI), moved: &[(0, 6 * MI), (100, 1000)] };
    let private = Case {
        name: "no handle type",
        make: Make::Chunks(CHUNK, 2, 2 * CHUNK, NO_HANDLE),
        registered: (0, 2 * CHUNK),
        moved: &[(0, CHUNK), (CHUNK - 10, 20)],
    };
    let fabric =
        Case { name: "fabric", make: Make::Chunks(4 * MI, 1, 4 * MI, FABRIC), registered: (0, 4 * MI), moved: &[(0, 4 * MI), (5, 77)] };
    world.set("FAKE_CUDA_FABRIC", "1");
    let setups = [("stock", Setup::stock()), ("preload", Setup::preload())];
    for (name, setup) in setups {
        let (mut a, mut b) = world.pair(setup.clone(), setup)?;
        let buffer = b.buffer(BUFFER)?;
        for (case, lane) in [(&plain, Lane::Yes), (&private, Lane::No), (&fabric, Lane::Yes)] {
            check(&mut a, &mut b, buffer, case, lane, BUFFER).map_err(|error| format!("{name}: {}: {error}", case.name))?;
        }
        expect(a.counters()?.exports == 0, "no fd is made")?;
        b.is_clean()?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lane {
    Yes,
    No,
}

/// `b` reads and writes what `a` makes: bytes, route, and how often the driver copied for it. At most `most` bytes at a time.
pub(super) fn check(a: &mut Player, b: &mut Player, buffer: Local, case: &Case, lane: Lane, most: u64) -> Outcome {
    let (base, bytes) = match case.make {
        Make::Chunks(bytes, count, reserved, types) => (a.segment(bytes, count, reserved, types)?, bytes * count),
        Make::Plain(bytes) => (a.alloc(bytes)?, bytes),
    };
    let (offset, len) = case.registered;
    let shared: Shared = a.share(base + offset, len)?;
    let remote = b.open(a, &shared)?;
    for (seed, &(at, len)) in (1_u64..).zip(case.moved) {
        let len = len.min(most).min(buffer.len);
        let place = |error: String| format!("{len} bytes at {at}: {error}");
        // Around what is moved there is something that must stay as it is.
        let (start, end) = ((offset + at).saturating_sub(64), (offset + at + len + 64).min(bytes));
        a.fill(base + start, end - start, seed, start)?;
        b.fill(buffer.address, len, seed + 100, 0)?;
        let copies = b.lane_copies()?;
        let route = b.transfer(Way::Get, &remote, at, buffer, len).map_err(place)?;
        expect(route.is_lane() == (lane == Lane::Yes), &format!("wanted the lane: {lane:?}, reading went by `{}`", route.0))
            .map_err(place)?;
        b.check(buffer.address, len, seed, offset + at).map_err(place)?;
        b.fill(buffer.address, len, seed + 200, offset + at)?;
        let route = b.transfer(Way::Put, &remote, at, buffer, len).map_err(place)?;
        expect(route.is_lane() == (lane == Lane::Yes), &format!("wanted the lane: {lane:?}, writing went by `{}`", route.0))
            .map_err(place)?;
        a.check(base + offset + at, len, seed + 200, offset + at).map_err(place)?;
        a.check(base + start, offset + at - start, seed, start).map_err(|error| format!("in front of {}", place(error)))?;
        a.check(base + offset + at + len, end - offset - at - len, seed, offset + at + len)
            .map_err(|error| format!("behind {}", place(error)))?;
        let made = b.lane_copies()? - copies;
        expect(made == if lane == Lane::Yes { 2 } else { 0 }, &format!("{made} copies between devices"))?;
    }
    b.drop_key(remote)?;
    a.deregister(shared.memory)
}
