//! What the library says: at the end if that was asked for, once for a lane that is lost, and otherwise nothing.

use crate::Outcome;
use crate::memory::{CHUNK, POSIX_FD, Way};
use crate::player::{Player, Setup};
use crate::world::{World, connect};

use super::expect;

/// The lines of ours in a log.
fn ours(log: &str) -> Vec<&str> {
    log.lines().filter(|line| line.starts_with("cuda-ipc: ")).collect()
}

/// A line of ours with this in it.
fn line<'a>(log: &'a str, part: &str) -> Outcome<&'a str> {
    ours(log)
        .into_iter()
        .find(|line| line.contains(part))
        .ok_or_else(|| format!("nothing is said of `{part}` in:\n{}", ours(log).join("\n")))
}

/// Three chunks of `a`, read twice by `b` whole; then `a` frees two of them, and `b` finds that out.
fn use_the_lane(a: &mut Player, b: &mut Player) -> Outcome {
    let buffer = b.buffer(3 * CHUNK)?;
    let before = a.used_bytes(0)?;
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 3 * CHUNK, 1, 0)?;
    let shared = a.share(base, 3 * CHUNK)?;
    let remote = b.open(a, &shared)?;
    for _ in 0..2 {
        b.read(&remote, 0, buffer, 3 * CHUNK, 1, 0)?;
    }
    a.unmap(base + CHUNK, 2 * CHUNK)?;
    // Nobody reports this free, so it is found by sweeps.
    expect(a.wait_for_used(0, before + CHUNK, 5000)?.is_some(), "the memory does not come back")?;
    b.finds_it_gone(&remote, 0, buffer, 3 * CHUNK)
}

/// `cuda-ipc run` is all that it takes: reads by the lane on a machine without NVLink, which UCX would not do, and a report. With NVLinks nothing is set.
pub(super) fn by_command(world: &mut World) -> Outcome {
    for (links, notes) in [("0", 1), ("4", 0)] {
        world.set("FAKE_NVML_LINKS", links);
        let (mut a, mut b) = world.pair(Setup::by_command(), Setup::by_command())?;
        use_the_lane(&mut a, &mut b)?;
        for (mut player, part) in [(a, "exported: 1 keys"), (b, "imported: 1 keys")] {
            let said = player.exit()?;
            line(&said, part)?;
            let set = ours(&said).iter().filter(|line| line.contains("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y is set")).count();
            expect(set == notes, &format!("with {links} links: {said}"))?;
        }
    }
    // Without the command's setting UCX does not read so: that this is the reason is what is tested here.
    world.set("FAKE_NVML_LINKS", "0");
    world.set("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "n");
    let (mut a, mut b) = world.pair(Setup::by_command(), Setup::by_command())?;
    let refused = use_the_lane(&mut a, &mut b);
    expect(refused.is_err_and(|error| error.contains("read by")), "UCX reads by the lane although it may not")?;
    line(&b.exit()?, "WARN UCX_CUDA_IPC_ENABLE_GET_ZCOPY=n").map(drop)
}

/// With the report.
pub(super) fn explain(world: &mut World) -> Outcome {
    world.set("CUDA_IPC_EXPLAIN", "1");
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    let [mut unused] = world.players([("unused", Setup::preload())])?;
    let mut without = world.start("without", &Setup::preload())?;
    use_the_lane(&mut a, &mut b)?;
    // A child that ends says nothing of its parent's.
    expect(a.number("fork_exit")? == 0 && b.number("fork_exit")? == 0, "a forked child does not end well")?;

    let said = b.exit()?;
    expect(ours(&said).iter().filter(|line| line.contains("EXPLAIN process")).count() == 1, &format!("not one report: {said}"))?;
    line(&said, "exported: nothing")?;
    line(&said, "imported: 1 keys;").and_then(|line| expect(line.contains("in 1 windows of 1 peers now, 3 chunks in all"), line))?;
    // The two that came and the one that was refused, whichever of UCX's ways that was.
    let copied = line(&said, "copied by the lane: 3 ranges")?;
    expect(copied.contains(&format!("{} bytes", 9 * CHUNK)), copied)?;
    line(&said, "refused 1 times, first: a copy was refused")?;

    let said = a.exit()?;
    line(&said, "exported: 1 keys; 1 chunks of 2097152 bytes and 1 fds now, 3 published in all, 2 retired")?;
    line(&said, "imported: nothing")?;
    line(&said, "refused: nothing")?;
    // After UCX has gone.
    unused.ask("close")?;
    let said = unused.exit()?;
    expect(ours(&said).len() >= 2, &format!("no report: {said}"))?;
    line(&said, "refused: nothing")?;
    expect(ours(&without.exit()?).is_empty(), "a process without UCX says something")
}

/// Without it: a line for the copy that was refused, and none for anything else.
pub(super) fn quiet(world: &mut World) -> Outcome {
    let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
    use_the_lane(&mut a, &mut b)?;
    let (a, b) = (a.exit()?, b.exit()?);
    expect(ours(&a).is_empty(), &format!("the exporter says: {a}"))?;
    expect(ours(&b).len() == 1 && line(&b, "WARN a copy was refused").is_ok(), &format!("the importer says: {b}"))?;

    // The levels below and above.
    for (level, warnings, others) in [("off", 0, false), ("error", 0, false), ("info", 1, true), ("debug", 1, true)] {
        world.set("CUDA_IPC_LOG", level);
        let (mut a, mut b) = world.pair(Setup::preload(), Setup::preload())?;
        use_the_lane(&mut a, &mut b)?;
        let said = b.exit()?;
        let warned = ours(&said).iter().filter(|line| line.contains("WARN")).count();
        expect(warned == warnings && (ours(&said).len() > warned) == others, &format!("at level {level}: {said}"))?;
        expect(said.contains("DEBUG imported") == (level == "debug"), &format!("at level {level}: {said}"))?;
    }
    Ok(())
}

/// UCX's CUDA module is loaded with RTLD_DEEPBIND in one of two: it says so at its end, and bytes are right.
pub(super) fn deepbind(world: &mut World) -> Outcome {
    for deep in ["a", "b"] {
        let [mut a, mut b] = [world.start("a", &Setup::preload())?, world.start("b", &Setup::preload())?];
        let module = world.wheel.cuda_module();
        for player in [&mut a, &mut b] {
            if player.name == deep {
                player.ask(&format!("deepbind {}", module.display()))?;
            }
            player.ask("open 0")?;
        }
        connect(&mut a, &mut b)?;
        let buffer = b.buffer(3 * CHUNK)?;
        let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
        a.fill(base, 3 * CHUNK, 1, 0)?;
        let shared = a.share(base, 3 * CHUNK)?;
        let remote = b.open(&a, &shared)?;
        let route = b.transfer(Way::Get, &remote, 0, buffer, 3 * CHUNK)?;
        b.check(buffer.address, 3 * CHUNK, 1, 0)?;
        expect(!route.is_lane(), "the lane is there: this tests nothing")?;
        b.is_clean()?;
        for mut player in [a, b] {
            let said = player.exit()?;
            if player.name == deep {
                line(&said, "RTLD_DEEPBIND").and_then(|line| expect(line.contains("WARN") && line.contains("NIXL_UCX_DEEPBIND"), line))?;
            } else {
                expect(!said.contains("DEEPBIND"), &format!("{} was not loaded so, but says: {said}", player.name))?;
            }
        }
    }
    Ok(())
}

/// UCM's other way to hook, by which calls go past the library: right bytes by another route, and one line that says why.
pub(super) fn relocating_hooks(world: &mut World) -> Outcome {
    world.set("UCX_MEM_CUDA_HOOK_MODE", "reloc");
    let (mut a, mut b) = world.pair(Setup::preload().hooks(), Setup::preload().hooks())?;
    let buffer = b.buffer(3 * CHUNK)?;
    let base = a.segment(CHUNK, 3, 8 * CHUNK, POSIX_FD)?;
    a.fill(base, 3 * CHUNK, 1, 0)?;
    let shared = a.share(base, 3 * CHUNK)?;
    let remote = b.open(&a, &shared)?;
    let route = b.transfer(Way::Get, &remote, 0, buffer, 3 * CHUNK)?;
    b.check(buffer.address, 3 * CHUNK, 1, 0)?;
    expect(!route.is_lane(), "by the lane, past the library")?;
    // The key was refused before UCX could bring our handle to the driver.
    expect(b.calls("cuMemMap")? == 0, "the driver was asked to map")?;
    a.is_clean()?;
    b.is_clean()?;
    for mut player in [a, b] {
        let said = player.exit()?;
        expect(ours(&said).len() == 1, &format!("{} says: {said}", player.name))?;
        line(&said, "WARN UCX_MEM_CUDA_HOOK_MODE=reloc")?;
    }
    Ok(())
}
