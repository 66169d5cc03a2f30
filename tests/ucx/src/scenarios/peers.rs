//! Who the peers are: other releases, other namespaces, several devices, oneself, and those that end.

use crate::Outcome;
use crate::memory::{CHUNK, Local, POSIX_FD, Way};
use crate::player::{Player, Setup};
use crate::world::{World, connect};

use super::expect;

/// Peers with other releases of UCX: whatever route they find, the bytes are right, and the pair of one release beside them has the lane.
pub(super) fn other_releases(world: &mut World) -> Outcome {
    for other in world.others() {
        let [mut a, mut b, mut c] =
            world.players([("a", Setup::preload()), ("b", Setup::preload()), ("other", Setup::preload().wheel(&other))])?;
        connect(&mut a, &mut b)?;
        connect(&mut a, &mut c)?;
        let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
        let shared = a.share(base, 3 * CHUNK)?;
        let theirs = c.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
        let their_key = c.share(theirs, 3 * CHUNK)?;
        let (at_a, at_b, at_c) = (a.buffer(3 * CHUNK)?, b.buffer(3 * CHUNK)?, c.buffer(3 * CHUNK)?);
        a.fill(base, 3 * CHUNK, 1, 0)?;
        c.fill(theirs, 3 * CHUNK, 2, 0)?;
        let remote = c.open(&a, &shared)?;
        let route = c.transfer(Way::Get, &remote, 0, at_c, 3 * CHUNK)?;
        c.check(at_c.address, 3 * CHUNK, 1, 0).map_err(|error| format!("{} reads: {error}", other.name))?;
        let back = a.open(&c, &their_key)?;
        a.transfer(Way::Get, &back, 0, at_a, 3 * CHUNK)?;
        a.check(at_a.address, 3 * CHUNK, 2, 0).map_err(|error| format!("reading {}: {error}", other.name))?;
        let remote = b.open(&a, &shared)?;
        b.read(&remote, 0, at_b, 3 * CHUNK, 1, 0).map_err(|error| format!("beside {}: {error}", other.name))?;
        world.notes.push(format!("{}: {}", other.name, if route.is_lane() { "lane" } else { "other route" }));
        a.is_clean()?;
    }
    Ok(())
}

/// Two containers, each with a process 1, on one GPU. UCX before 1.21 takes two processes of one number for one, and cuda_ipc does not go to itself; where
/// UCX can tell, the lane is there.
pub(super) fn pid_namespaces(world: &mut World) -> Outcome {
    let can_tell = world.wheel.is_at_least("1.21");
    apart(world, Setup::preload().namespace(), Setup::preload().namespace(), can_tell)
}

/// Two containers whose processes have different numbers: the lane, by the broker.
pub(super) fn other_pid_namespaces(world: &mut World) -> Outcome {
    apart(world, Setup::preload().namespace(), Setup::preload().second_in_namespace(), true)
}

fn apart(world: &mut World, a: Setup, b: Setup, by_the_lane: bool) -> Outcome {
    let (mut a, mut b) = world.pair(a, b)?;
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    // The same addresses mean something else in the other process, if they mean anything.
    a.fill(base, 3 * CHUNK, 1, 0)?;
    let shared = a.share(base, 3 * CHUNK)?;
    let buffer = b.buffer(3 * CHUNK)?;
    if b.reserve_at(base, 8 * CHUNK).is_ok() {
        b.chunks(base, CHUNK, 3, POSIX_FD)?;
        b.fill(base, 3 * CHUNK, 2, 0)?;
    }
    let remote = b.open(&a, &shared)?;
    let route = b.transfer(Way::Get, &remote, 0, buffer, 3 * CHUNK)?;
    b.check(buffer.address, 3 * CHUNK, 1, 0).map_err(|error| format!("by `{}`: {error}", route.0))?;
    b.fill(buffer.address, CHUNK, 3, 0)?;
    b.transfer(Way::Put, &remote, CHUNK, buffer, CHUNK)?;
    a.check(base + CHUNK, CHUNK, 3, 0)?;
    expect(route.is_lane() == by_the_lane, &format!("read by `{}`", route.0))?;
    a.is_clean()?;
    b.is_clean()
}

/// One process uses a peer's memory from both of its devices, wherever that memory is.
pub(super) fn two_devices(world: &mut World) -> Outcome {
    world.set("FAKE_CUDA_DEVICES", "2");
    let [mut first, mut second, mut b] =
        world.players([("first", Setup::preload()), ("second", Setup::preload().device(1)), ("b", Setup::preload())])?;
    for a in [&mut first, &mut second] {
        connect(a, &mut b)?;
        from_both_devices(a, &mut b).map_err(|error| format!("memory on the {} device: {error}", a.name))?;
    }
    b.is_clean()
}

fn from_both_devices(a: &mut Player, b: &mut Player) -> Outcome {
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 3 * CHUNK, 1, 0)?;
    let shared = a.share(base, 3 * CHUNK)?;
    let remote = b.open(a, &shared)?;
    let mut buffers: Vec<Local> = Vec::new();
    for device in 0..2 {
        b.ask(&format!("use {device}"))?;
        buffers.push(b.buffer(3 * CHUNK)?);
    }
    for round in 0..3 {
        for (device, &buffer) in buffers.iter().enumerate() {
            b.ask(&format!("use {device}"))?;
            b.read(&remote, 0, buffer, 3 * CHUNK, 1, 0).map_err(|error| format!("device {device}, round {round}: {error}"))?;
        }
        if round == 0 {
            // Chunks that come later are for both, too.
            a.chunks(base + 3 * CHUNK, CHUNK, 2, POSIX_FD)?;
            a.fill(base + 3 * CHUNK, 2 * CHUNK, 1, 3 * CHUNK)?;
            let grown = a.share(base, 5 * CHUNK)?;
            let grown = b.open(a, &grown)?;
            for (device, &buffer) in buffers.iter().enumerate() {
                b.ask(&format!("use {device}"))?;
                b.read(&grown, 3 * CHUNK, buffer, 2 * CHUNK, 1, 3 * CHUNK).map_err(|error| format!("device {device}, grown: {error}"))?;
            }
        }
    }
    Ok(())
}

/// The first key that a process opens is of somebody who has ended: that must not cost it the lane to others.
pub(super) fn dead_key_first(world: &mut World) -> Outcome {
    let [mut a, mut b, mut c] = world.players([("a", Setup::preload()), ("b", Setup::preload()), ("c", Setup::preload())])?;
    connect(&mut a, &mut b)?;
    connect(&mut c, &mut b)?;
    let buffer = b.buffer(3 * CHUNK)?;
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    let dead = a.share(base, 3 * CHUNK)?;
    a.end()?;
    let dead = b.open(&a, &dead)?;
    let said = b.said()?;
    let times = |part: &str| said.matches(part).count();
    let once = if world.wheel.has_lane {
        times("the exporter has exited") == 1 && times(" WARN ") == 1
    } else {
        let explained = times("cuda-ipc: cause: what made the key is gone") == 1 && times("cuda-ipc: remedy: Start it again") == 1;
        explained && times("cuda-ipc: WARN") == 1
    };
    expect(once, "the cause of the loss is not said once")?;
    let base = c.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    c.fill(base, 3 * CHUNK, 1, 0)?;
    let shared = c.share(base, 3 * CHUNK)?;
    let remote = b.open(&c, &shared)?;
    b.read(&remote, 0, buffer, 3 * CHUNK, 1, 0)?;
    b.drop_key(dead)?;
    b.is_clean()
}

/// A process that opens its own key. UCX 1.21 takes cuda_ipc for that, and then there is a window; others copy on the device as they do without the library.
pub(super) fn own_key(world: &mut World) -> Outcome {
    let [mut a] = world.players([("a", Setup::preload())])?;
    let address = a.ask("address")?;
    let endpoint = a.number(&format!("connect {address} 0"))?;
    a.endpoints.insert("a".to_owned(), endpoint);
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 3 * CHUNK, 1, 0)?;
    let shared = a.share(base, 3 * CHUNK)?;
    let buffer = a.buffer(3 * CHUNK)?;
    let remote = a.open_at("a", &shared)?;
    let route = a.transfer(Way::Get, &remote, 100, buffer, 3 * CHUNK - 100)?;
    a.check(buffer.address, 3 * CHUNK - 100, 1, 100)?;
    expect(route.is_lane() || route.0.contains("zero-copy cuda_copy/"), &format!("read by `{}`", route.0))?;
    // UCX with the lane in it is given the memory's own addresses.
    let needed = if route.is_lane() && !world.wheel.has_lane { 3 } else { 0 };
    expect(a.counters()?.imports == needed, "not the chunks imported that the route needs")?;
    a.fill(buffer.address, CHUNK, 2, 0)?;
    a.transfer(Way::Put, &remote, CHUNK, buffer, CHUNK)?;
    a.check(base + CHUNK, CHUNK, 2, 0)?;
    world.notes.push(if route.is_lane() { "lane".to_owned() } else { "cuda_copy".to_owned() });
    a.is_clean()
}

/// The same below UCP: cuda_ipc opens the key, and what it gets is a window.
pub(super) fn own_window(world: &mut World) -> Outcome {
    let [mut a] = world.players([("a", Setup::preload())])?;
    let before = a.used_bytes(0)?;
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 3 * CHUNK, 1, 0)?;
    let opened = a.numbers(&format!("own_key {base} {}", 3 * CHUNK))?;
    expect(a.counters()?.imports == 3, "not three chunks imported")?;
    if let [1, local] = opened[..] {
        expect(local != base, "it is the pointer itself")?;
        a.check(local, 3 * CHUNK, 1, 0)?;
        a.fill(local + CHUNK, CHUNK, 2, 0)?;
        a.check(base + CHUNK, CHUNK, 2, 0)?;
        world.notes.push("by its pointer".to_owned());
    }
    // It holds what is freed no longer than a peer's window does.
    a.unmap(base, 2 * CHUNK)?;
    expect(a.wait_for_used(0, before + CHUNK, 2000)?.is_some(), "what was freed does not come back")?;
    a.is_clean()
}

/// Of two peers one is killed while bytes of both move. The other one's transfers, keys and new memory are as before.
pub(super) fn neighbour_killed(world: &mut World) -> Outcome {
    world.set("FAKE_CUDA_ASYNC", "150");
    let [mut a, mut b, mut c] = world.players([("a", Setup::preload()), ("b", Setup::preload()), ("c", Setup::preload())])?;
    connect(&mut a, &mut b)?;
    connect(&mut c, &mut b)?;
    let buffers: Vec<Local> = (0..6).map(|_| b.buffer(3 * CHUNK)).collect::<Outcome<_>>()?;
    let before = b.used_bytes(0)?;
    let mut remotes = Vec::new();
    for (seed, player) in [(1, &mut a), (2, &mut c)] {
        let base = player.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
        player.fill(base, 3 * CHUNK, seed, 0)?;
        let shared = player.share(base, 3 * CHUNK)?;
        let remote = b.open(player, &shared)?;
        b.read(&remote, 0, buffers[0], 3 * CHUNK, seed, 0)?;
        remotes.push(remote);
    }
    let [of_a, of_c] = remotes.as_slice() else { return Err("two keys".to_owned()) };
    let mut flying = Vec::new();
    for (number, &local) in buffers.iter().enumerate() {
        let (remote, seed) = if number % 2 == 0 { (of_a, 1) } else { (of_c, 2) };
        flying.push((b.begin(Way::Get, remote, 0, local, 3 * CHUNK)?, seed, local));
    }
    super::kill(i32::try_from(c.pid()).map_err(|error| error.to_string())?);
    drop(c);
    // What was under way has its memory until it is done.
    for (transfer, seed, local) in flying {
        b.finish(&transfer)?;
        b.check(local.address, 3 * CHUNK, seed, 0)?;
        expect(transfer.route.is_lane(), &format!("went by `{}`", transfer.route.0))?;
    }
    expect(b.wait_for_used(0, before + 3 * CHUNK, 2000)?.is_some(), "the memory of the killed process does not come back")?;
    b.finds_it_gone(of_c, 0, buffers[0], CHUNK)?;
    b.read(of_a, 100, buffers[0], 3 * CHUNK - 100, 1, 100)?;
    let base = a.segment(CHUNK, 2, 4 * CHUNK, POSIX_FD)?;
    a.fill(base, 2 * CHUNK, 3, 0)?;
    let shared = a.share(base, 2 * CHUNK)?;
    let new = b.open(&a, &shared)?;
    b.read(&new, 0, buffers[1], 2 * CHUNK, 3, 0)?;
    a.is_clean()?;
    b.is_clean()
}

/// A peer ends; what it had comes back, and its successor is somebody else.
pub(super) fn peer_ends(world: &mut World) -> Outcome {
    let [mut a, mut b] = world.players([("a", Setup::preload()), ("b", Setup::preload())])?;
    connect(&mut a, &mut b)?;
    let buffer = b.buffer(4 * CHUNK)?;
    let before = b.used_bytes(0)?;
    let base = a.segment(CHUNK, 4, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 4 * CHUNK, 1, 0)?;
    let shared = a.share(base, 4 * CHUNK)?;
    let remote = b.open(&a, &shared)?;
    b.read(&remote, 0, buffer, 4 * CHUNK, 1, 0)?;
    a.end()?;
    let came_back = b.wait_for_used(0, before, 1000)?;
    expect(came_back.is_some(), "memory of a process that has ended does not come back")?;
    b.finds_it_gone(&remote, 0, buffer, CHUNK)?;
    let [mut c] = world.players([("c", Setup::preload())])?;
    connect(&mut c, &mut b)?;
    let base = c.segment(CHUNK, 4, 8 * CHUNK, POSIX_FD)?;
    c.fill(base, 4 * CHUNK, 2, 0)?;
    let shared = c.share(base, 4 * CHUNK)?;
    let remote = b.open(&c, &shared)?;
    b.read(&remote, 0, buffer, 4 * CHUNK, 2, 0)?;
    b.is_clean()
}
