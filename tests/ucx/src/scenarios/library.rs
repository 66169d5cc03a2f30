//! The library itself: that it does nothing where there is nothing to do, and can tell whose calls it answers.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use crate::Outcome;
use crate::jumps;
use crate::player::{Player, Setup};
use crate::world::World;

use super::expect;

/// Functions that UCX cannot do the lane without: if these are not found, the search is wrong.
const CERTAIN: [&str; 5] = ["cuMemMap", "cuMemUnmap", "cuMemGetAddressRange_v2", "cuMemExportToShareableHandle", "cuMemcpyDtoDAsync_v2"];

/// UCX's CUDA module calls what is interposed, and never jumps there.
pub(super) fn no_tail_jumps(world: &mut World) -> Outcome {
    let names = jumps::interposed(&world.built.preload)?;
    let uses = jumps::uses(&world.wheel.cuda_module(), &names)?;
    for name in CERTAIN {
        expect(names.iter().any(|found| found == name), &format!("the library does not export {name}"))?;
        expect(uses.calls.iter().any(|(found, _)| found == name), &format!("no call of {name} was found"))?;
    }
    expect(uses.jumps.is_empty(), &format!("jumps (in, to): {:?}", uses.jumps))?;
    world.notes.push(format!("{} calls of {} functions", uses.calls.iter().map(|(_, count)| count).sum::<usize>(), uses.calls.len()));
    Ok(())
}

/// What a process has, as the kernel shows it.
#[derive(PartialEq, Eq, Debug)]
struct Traces {
    threads: usize,
    fds: Vec<String>,
    /// Libraries, without the one that was preloaded.
    libraries: BTreeSet<String>,
    said: String,
}

impl Traces {
    fn of(player: &Player) -> Outcome<Self> {
        let folder = format!("/proc/{}", player.pid());
        let failed = |error: std::io::Error| format!("{folder}: {error}");
        let threads = std::fs::read_dir(format!("{folder}/task")).map_err(failed)?.count();
        let mut fds = Vec::new();
        for fd in std::fs::read_dir(format!("{folder}/fd")).map_err(failed)? {
            let link = std::fs::read_link(fd.map_err(failed)?.path()).map_err(failed)?;
            let kind = link.to_string_lossy().split(['[', '.']).next().unwrap_or_default().to_owned();
            // The log has another name in each process.
            fds.push(if kind.starts_with('/') { "file".to_owned() } else { kind });
        }
        fds.sort();
        let maps = std::fs::read_to_string(format!("{folder}/maps")).map_err(failed)?;
        let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).filter(|path| path.contains(".so"));
        let libraries = paths.filter(|path| !path.contains("libcuda_ipc_preload")).map(str::to_owned).collect();
        let said = std::fs::read_to_string(&player.log).map_err(failed)?;
        Ok(Self { threads, fds, libraries, said })
    }
}

/// A process that never loads UCX's CUDA module is the same with and without it.
pub(super) fn inert(world: &mut World) -> Outcome {
    let mut traces = Vec::new();
    for (name, setup) in [("plain", Setup::stock()), ("preloaded", Setup::preload())] {
        let mut player = world.start(name, &setup)?;
        // It has begun when it answers.
        player.try_ask("nothing")?;
        traces.push(Traces::of(&player)?);
        player.end()?;
    }
    let [plain, preloaded] = traces.as_slice() else { return Err("two traces".to_owned()) };
    let unwanted = preloaded.libraries.difference(&plain.libraries).filter(|path| !path.contains("libgcc_s"));
    let unwanted: Vec<&String> = unwanted.collect();
    expect(unwanted.is_empty(), &format!("it brings {unwanted:?}"))?;
    expect(preloaded.threads == 1, &format!("{} threads", preloaded.threads))?;
    expect(preloaded.fds == plain.fds, &format!("fds: {:?} instead of {:?}", preloaded.fds, plain.fds))?;
    expect(preloaded.said.is_empty(), &format!("it says: {}", preloaded.said))?;
    let what = traced(world)?;
    world.notes.push(what);
    Ok(())
}

/// The same with the system calls of a whole life, where strace is installed and may trace.
fn traced(world: &World) -> Outcome<String> {
    let trace = world.file("trace");
    let mut command = Command::new("strace");
    world.environment(&mut command, &Setup::stock());
    command.args(["-f", "-qq", "-e", "trace=process,network,memfd_create,openat", "-o"]).arg(&trace);
    let mut preload = std::ffi::OsString::from("LD_PRELOAD=");
    preload.push(&world.built.preload);
    command.arg("-E").arg(preload).arg(world.wheel.program());
    let output = match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => output,
        Ok(output) => return Ok(format!("strace cannot trace here: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => return Ok(format!("not traced: strace: {error}")),
    };
    expect(output.stdout.is_empty() && output.stderr.is_empty(), "it says something")?;
    let text = std::fs::read_to_string(&trace).map_err(|error| error.to_string())?;
    expect(text.contains("libcuda_ipc_preload"), "the trace does not show that the library was loaded")?;
    let unwanted = ["clone", "fork", "socket(", "connect(", "bind(", "memfd_create", "libcuda.so"];
    let found = text.lines().find(|line| unwanted.iter().any(|word| line.contains(word)));
    expect(found.is_none(), &format!("a process without UCX does this: {}", found.unwrap_or_default()))?;
    Ok("traced".to_owned())
}
