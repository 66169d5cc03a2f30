//! The product's own settings, from the environment: each is shown by what it changes.

use crate::Outcome;
use crate::memory::{CHUNK, Local, POSIX_FD, Remote, Way};
use crate::player::{Player, Setup};
use crate::world::World;

use super::expect;

/// A segment of so many chunks, opened.
fn opened(a: &mut Player, b: &mut Player, chunks: u64) -> Outcome<Remote> {
    let base = a.segment(CHUNK, chunks, chunks * CHUNK, POSIX_FD)?;
    a.fill(base, chunks * CHUNK, 1, 0)?;
    let shared = a.share(base, chunks * CHUNK)?;
    b.open(a, &shared)
}

/// An allocation of a pool, opened.
fn opened_pool(a: &mut Player, b: &mut Player) -> Outcome<Remote> {
    let (base, _) = a.pool(CHUNK, POSIX_FD)?;
    a.fill(base, CHUNK, 1, 0)?;
    let shared = a.share_as(base, CHUNK, true)?;
    b.open(a, &shared)
}

/// What an import maps.
pub(super) fn map(world: &mut World) -> Outcome {
    for (value, at_import) in [("", 8), ("eager", 8), ("lazy", 1)] {
        world.set("CUDA_IPC_MAP", value);
        let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
        let buffer = b.buffer(8 * CHUNK)?;
        let remote = opened(&mut a, &mut b, 8)?;
        let imports = b.counters()?.imports;
        expect(imports == at_import, &format!("CUDA_IPC_MAP={value}: {imports} chunks are mapped at import"))?;
        b.read(&remote, 0, buffer, 8 * CHUNK, 1, 0)?;
        let imports = b.counters()?.imports;
        expect(imports == 8, &format!("CUDA_IPC_MAP={value}: {imports} imports of 8 chunks"))?;
        b.is_clean()?;
    }
    Ok(())
}

/// How peers are reached.
pub(super) fn route(world: &mut World) -> Outcome {
    for (route, broker, by_lane) in [("broker", "y", true), ("pidfd", "n", true), ("broker", "n", false)] {
        world.set("CUDA_IPC_ROUTE", route);
        world.set("CUDA_IPC_BROKER", broker);
        let place = |error: String| format!("CUDA_IPC_ROUTE={route} CUDA_IPC_BROKER={broker}: {error}");
        let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
        let buffer = b.buffer(CHUNK)?;
        let remotes = [opened(&mut a, &mut b, 2)?, opened_pool(&mut a, &mut b)?];
        for remote in &remotes {
            reads(&mut b, remote, buffer, by_lane).map_err(place)?;
        }
        // There is a broker to ask, or none.
        let sockets = broker_sockets(a.pid())?;
        expect((sockets != 0) == (broker == "y"), &format!("{sockets} sockets of brokers")).map_err(place)?;
        b.is_clean()?;
    }
    Ok(())
}

/// How many sockets of brokers a process has. The kernel lists those of everybody in its network.
fn broker_sockets(pid: u32) -> Outcome<usize> {
    let fail = |name: &str, error: std::io::Error| format!("{name}: {error}");
    let fds = format!("/proc/{pid}/fd");
    let entries = std::fs::read_dir(&fds).map_err(|error| fail(&fds, error))?;
    let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let own: Vec<String> = links.filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    let name = format!("/proc/{pid}/net/unix");
    let listed = std::fs::read_to_string(&name).map_err(|error| fail(&name, error))?;
    let is_own = |line: &&str| line.split_whitespace().nth(6).is_some_and(|inode| own.iter().any(|own| own == inode));
    Ok(listed.lines().filter(|line| line.contains("@cuda-ipc")).filter(is_own).count())
}

/// Right bytes, by the lane or not.
fn reads(b: &mut Player, remote: &Remote, buffer: Local, by_lane: bool) -> Outcome {
    b.fill(buffer.address, CHUNK, 9, 0)?;
    let route = b.transfer(Way::Get, remote, 0, buffer, CHUNK)?;
    b.check(buffer.address, CHUNK, 1, 0)?;
    expect(route.is_lane() == by_lane, &format!("went by `{}`", route.0))
}

/// Where the broker's socket file is.
pub(super) fn socket_dir(world: &mut World) -> Outcome {
    let folder = world.file("sockets");
    let name = folder.to_str().ok_or("a path that is no text")?.to_owned();
    world.set("CUDA_IPC_SOCKET_DIR", &name);
    world.set("CUDA_IPC_ROUTE", "broker");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(CHUNK)?;
    let remote = opened(&mut a, &mut b, 2)?;
    reads(&mut b, &remote, buffer, true)?;
    let sockets = std::fs::read_dir(&folder).map_err(|error| format!("{name}: {error}"))?.count();
    expect(sockets == 1, &format!("{sockets} files in the folder"))
}

/// What stays mapped.
pub(super) fn limits(world: &mut World) -> Outcome {
    for (size, windows, once) in [("", "", true), ("4m", "", false), ("", "1", false)] {
        world.set("CUDA_IPC_CACHE_MAX_SIZE", size);
        world.set("CUDA_IPC_CACHE_MAX_WINDOWS", windows);
        let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
        let buffer = b.buffer(CHUNK)?;
        // Pools' windows keep no address space while UCX has a pointer, so both limits are theirs to keep.
        let remotes = [opened_pool(&mut a, &mut b)?, opened_pool(&mut a, &mut b)?, opened_pool(&mut a, &mut b)?];
        for _ in 0..3 {
            for remote in &remotes {
                reads(&mut b, remote, buffer, true)?;
            }
        }
        let imports = b.calls("cuMemPoolImportPointer")?;
        let place = format!("CUDA_IPC_CACHE_MAX_SIZE={size} CUDA_IPC_CACHE_MAX_WINDOWS={windows}: {imports} imports of 3 pools in 9 reads");
        expect((imports == 3) == once, &place)?;
        b.is_clean()?;
    }
    Ok(())
}

/// Values that are not taken.
pub(super) fn wrong(world: &mut World) -> Outcome {
    world.set("CUDA_IPC_MAP", "later");
    world.set("CUDA_IPC_CACHE_MAX_SIZE", "much");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let buffer = b.buffer(CHUNK)?;
    let remotes = [opened(&mut a, &mut b, 2)?, opened(&mut a, &mut b, 2)?];
    for remote in &remotes {
        reads(&mut b, remote, buffer, true)?;
    }
    let said = b.said()?;
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("cuda-ipc: WARN")).collect();
    // One of each kind is said; the others are in the report at exit.
    expect(lines.len() == 1 && lines[0].contains("CUDA_IPC_"), &format!("it says {lines:?}"))
}
