//! UCX built from its sources, with the lane in it: what only that has, beside the scenarios that it shares with the preload library.
//!
//! `Setup::preload` is the lane here too, and `Setup::stock` is `UCX_CUDA_IPC_POSIX_FD=n`, which leaves what the release itself can do: from 1.22 on, one chunk.

use std::process::Command;

use crate::Outcome;
use crate::memory::{CHUNK, Local, POSIX_FD, Remote, Way};
use crate::player::{Player, Setup};
use crate::wheel::Wheel;
use crate::world::{World, connect};

use super::expect;
use super::matrix::{self, BUFFER, Lane, SHARED};

/// The lane by the broker alone.
pub(super) fn broker(world: &mut World) -> Outcome {
    needs_lane(&world.wheel)?;
    world.set("UCX_CUDA_IPC_POSIX_FD_ROUTE", "broker");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(BUFFER)?;
    let before = b.calls("cuMemImportFromShareableHandle")?;
    for case in &SHARED[..4] {
        matrix::check(&mut a, &mut b, buffer, case, Lane::Yes, BUFFER)?;
    }
    expect(b.calls("cuMemImportFromShareableHandle")? > before, "nothing was imported")?;
    a.is_clean()?;
    b.is_clean()
}

/// Off on one side: bytes are right both ways, and a pair beside it keeps the lane.
pub(super) fn off(world: &mut World) -> Outcome {
    needs_lane(&world.wheel)?;
    let [mut a, mut b, mut without] = world.players([("a", Setup::preload()), ("b", Setup::preload()), ("without", Setup::stock())])?;
    connect(&mut a, &mut b)?;
    connect(&mut a, &mut without)?;
    let at_without = without.buffer(BUFFER)?;
    let at_b = b.buffer(BUFFER)?;
    matrix::check(&mut a, &mut without, at_without, &SHARED[1], Lane::No, 1 << 20)?;
    reads_one_chunk(&mut a, &mut without, world, true)?;
    matrix::check(&mut a, &mut b, at_b, &SHARED[3], Lane::Yes, BUFFER)?;
    a.is_clean()?;
    b.is_clean()
}

/// Peers with the other trees: those with the lane use it, whatever their release; those without it are served by another route, and their own keys work as ever.
pub(super) fn others(world: &mut World) -> Outcome {
    if !world.wheel.has_lane {
        return Ok(());
    }
    for other in world.others() {
        pair_of_trees(world, &other).map_err(|error| format!("with {}: {error}", other.name))?;
    }
    Ok(())
}

fn pair_of_trees(world: &mut World, other: &Wheel) -> Outcome {
    let theirs = if other.has_lane { Setup::preload() } else { Setup::stock() };
    let [mut a, mut b, mut c] = world.players([("a", Setup::preload()), ("b", Setup::preload()), ("other", theirs.wheel(other))])?;
    connect(&mut a, &mut b)?;
    connect(&mut a, &mut c)?;
    let (at_b, at_c) = (b.buffer(BUFFER)?, c.buffer(BUFFER)?);
    let lane = if other.has_lane { Lane::Yes } else { Lane::No };
    matrix::check(&mut a, &mut c, at_c, &SHARED[1], lane, 1 << 20).map_err(|error| format!("reading from this one: {error}"))?;
    if other.has_lane {
        let at_a = a.buffer(BUFFER)?;
        matrix::check(&mut c, &mut a, at_a, &SHARED[1], Lane::Yes, BUFFER).map_err(|error| format!("reading from that one: {error}"))?;
    } else {
        let same_layout = world.wheel.is_at_least("1.22") == other.is_at_least("1.22");
        reads_one_chunk(&mut a, &mut c, world, same_layout)?;
        let said = c.said()?;
        let lines = said.lines().filter(|line| line.contains("unsupported key handle type")).count();
        world.notes.push(format!("{} says {lines} times that it does not know our handle type", other.name));
    }
    matrix::check(&mut a, &mut b, at_b, &SHARED[1], Lane::Yes, BUFFER).map_err(|error| format!("beside it: {error}"))?;
    a.is_clean()?;
    b.is_clean()
}

/// `a` reads one chunk from a peer without the lane, by whatever way that release has for it, and `cuMemAlloc` memory by cuda_ipc. But UCX 1.22 has moved the handles
/// in its keys, so that earlier releases and later ones do not understand each other's; that is so without the lane, too.
fn reads_one_chunk(a: &mut Player, without: &mut Player, world: &mut World, same_layout: bool) -> Outcome {
    let buffer = a.buffer(CHUNK)?;
    let base = without.segment(CHUNK, 1, CHUNK, POSIX_FD)?;
    let route = read(a, without, base, buffer, 5)?;
    world.notes.push(format!("its own chunk: {}", if route.is_lane() { "cuda_ipc" } else { "another route" }));
    let plain = without.alloc(CHUNK)?;
    let route = read(a, without, plain, buffer, 6)?;
    expect(route.is_lane() == same_layout, &format!("memory of cuMemAlloc went by `{}`", route.0))
}

fn read(a: &mut Player, from: &mut Player, base: u64, buffer: Local, seed: u64) -> Outcome<crate::memory::Route> {
    from.fill(base, CHUNK, seed, 0)?;
    let shared = from.share(base, CHUNK)?;
    let remote: Remote = a.open(from, &shared)?;
    let route = a.transfer(Way::Get, &remote, 0, buffer, CHUNK)?;
    a.check(buffer.address, CHUNK, seed, 0)?;
    Ok(route)
}

/// A long copy is submitted in parts, whose number does not depend on the memory's; a short one and one of other memory as a whole. If a part is refused, the
/// transfer is, and nothing of it goes on: the memory can go at once.
pub(super) fn parts(world: &mut World) -> Outcome {
    needs_lane(&world.wheel)?;
    // The importer's copies: two of the first transfer, one of each of the next two, then the second of the last.
    world.set("FAKE_CUDA_FAULT", "cuMemcpyDtoDAsync_v2#6=1");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let len = 100 * CHUNK;
    let before = a.used_bytes(0)?;
    let base = a.segment(CHUNK, 100, len, POSIX_FD)?;
    let plain = a.alloc(len)?;
    let buffer = b.buffer(len)?;
    let mut counts = Vec::new();
    let mut remotes = Vec::new();
    for (address, shared, seed) in [(base, len, 1), (base, 20 * CHUNK, 2), (plain, len, 3)] {
        a.fill(address, len, seed, 0)?;
        let key = a.share(address, len)?;
        let remote = b.open(&a, &key)?;
        let copies = b.lane_copies()?;
        b.read(&remote, 0, buffer, shared, seed, 0)?;
        counts.push(b.lane_copies()? - copies);
        remotes.push((remote, key));
    }
    expect(counts == [2, 1, 1], &format!("copies: {counts:?}"))?;
    if world.wheel.is_at_least("1.19") {
        let (remote, _) = &remotes[0];
        // Longer than the memory takes to go.
        b.ask("async 500000")?;
        if b.try_transfer(Way::Put, remote, 0, buffer, len)?.is_ok() {
            return Err("a part was refused, and the transfer was not".to_owned());
        }
    }
    a.unmap(base, len)?;
    let took = a.wait_for_used(0, before + 2 * len, 2000)?.ok_or("the memory does not come back")?;
    world.notes.push(format!("memory back after {took} ms"));
    a.is_clean()?;
    b.is_clean()
}

/// What a hit costs, beside UCX's own in the same run.
pub(super) fn hit(world: &mut World) -> Outcome {
    needs_lane(&world.wheel)?;
    if !world.wheel.is_at_least("1.22") {
        world.notes.push("not measured: the program knows the keys of 1.22 and later".to_owned());
        return Ok(());
    }
    let program = world.wheel.hit()?;
    for regions in ["1", "100"] {
        let mut command = Command::new(&program);
        world.environment(&mut command, &Setup::preload());
        // No events of memory: nothing is freed here.
        command.env("UCX_MEM_EVENTS", "n").arg(world.wheel.cuda_module()).args([regions, "21"]);
        let output = command.output().map_err(|error| format!("{}: {error}", program.display()))?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        expect(output.status.success(), &format!("{}: {said}{}", program.display(), String::from_utf8_lossy(&output.stderr)))?;
        world.notes.push(format!("ns with {regions} regions: {said}"));
    }
    Ok(())
}

fn needs_lane(wheel: &Wheel) -> Outcome {
    expect(wheel.has_lane, &format!("{} was not linked with libcuda_ipc", wheel.name))
}
