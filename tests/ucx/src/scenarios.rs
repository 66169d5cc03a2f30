//! The scenarios: what is to be right, each a function.

mod environment;
mod library;
mod matrix;
mod memory;
mod peers;
mod pools;
mod reports;
mod segments;
mod settings;
mod trees;

use crate::Outcome;
use crate::world::World;

/// One scenario.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// What has to be so.
    pub(crate) about: &'static str,
    pub(crate) run: fn(&mut World) -> Outcome,
    /// Why it is not run unless asked for: the part of the library that it needs is not there.
    pub(crate) pending: Option<&'static str>,
    pub(crate) with: With,
}

/// Which UCX a scenario is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum With {
    /// Packages with the preload library.
    Packages,
    /// UCX that was built from its sources, with the lane in it.
    Trees,
    /// Either.
    Both,
}

/// All of them.
pub(crate) const SCENARIOS: &[Scenario] = &[
    now("library/no-tail-jumps", "UCX's CUDA module calls what is interposed, and never jumps there", library::no_tail_jumps),
    now("library/inert", "a process without that module has no thread, fd, library or output of it", library::inert),
    now("matrix/stock", "without the library, chunks with a POSIX fd are never moved by the lane", matrix::stock),
    both("matrix/preload", "with it they are, whatever their number and whichever part is registered and moved", matrix::preload),
    both("matrix/hooks", "also with UCM's default hooks in the driver", matrix::hooks),
    now("matrix/one-sided", "a peer without it still moves bytes, by another route, and one with it beside by the lane", matrix::one_sided),
    now("matrix/untouched", "memory of cuMemAlloc, of no handle type, and real fabric handles are UCX's business", matrix::untouched),
    now("matrix/pool-stock", "without the library, memory of a pool that was made for POSIX fds is never moved by the lane", pools::stock),
    both("matrix/pool", "with it it is: several allocations, parts of them, both ways, and in both directions", pools::preload),
    both("matrix/pool-hooks", "also with UCM's default hooks in the driver", pools::hooks),
    both("matrix/pool-one-sided", "a peer without the library still moves bytes, by another route", pools::one_sided),
    both("matrix/pool-untouched", "pools of no handle type and real fabric pools are UCX's business", pools::untouched),
    both("matrix/pool-cache-off", "pointers are freed after every transfer", pools::cache_off),
    both("matrix/pool-freed", "what is freed fails, comes back on both sides, and its place is good for what comes after it", pools::freed),
    both("matrix/pool-freed-hooks", "the same where UCM reports the free", pools::freed_with_hooks),
    both("matrix/pool-two-devices", "two devices of a process use a peer's pool, in whichever order they come to it", pools::two_devices),
    now("matrix/pool-reloc", "UCM's relocating hooks cost the lane of a pool, and nothing else", pools::relocating_hooks),
    now("matrix/pool-explained", "keys of pools are counted in the report at exit", pools::explained),
    both("matrix/pool-reused-place", "an old key never reaches what the driver has put in the place of its memory", pools::reused_place),
    both(
        "segments/neighbour-freed",
        "of two registrations in a segment one is freed, the other is read with its old key",
        segments::neighbour_freed,
    ),
    both(
        "segments/keys-of-age",
        "keys from before and after growth are used in turn, with transfers in flight",
        segments::keys_of_different_age,
    ),
    both(
        "segments/re-created",
        "a segment grows, shrinks, and comes again at its address with other contents and length",
        segments::recreated,
    ),
    both("segments/side-by-side", "two reservations at touching addresses are two", segments::side_by_side),
    now(
        "segments/sleep-wake",
        "memory that comes again at its addresses under a living registration is read at once",
        segments::sleep_and_wake,
    ),
    both("segments/failed-read", "a read of what is gone is an error, or with UCX 1.18 the end of the process", segments::failed_read),
    now("peers/other-releases", "peers with other releases of UCX get right bytes", peers::other_releases),
    both("peers/pid-namespaces", "two containers' process 1 on one device are two processes", peers::pid_namespaces),
    both("peers/other-namespaces", "processes of two PID namespaces have the lane by the broker", peers::other_pid_namespaces),
    both("peers/two-devices", "two devices of a process use a peer's memory, from before and from later", peers::two_devices),
    both("peers/dead-key-first", "a first key of somebody who has ended does not cost the lane to others", peers::dead_key_first),
    both("peers/neighbour-killed", "one of two peers is killed while bytes of both move", peers::neighbour_killed),
    both("peers/own-key", "a process that opens its own key copies on the device, by whichever way", peers::own_key),
    now("peers/own-window", "a process whose cuda_ipc opens its own key has a window of it", peers::own_window),
    both("peers/ends", "memory of a peer that has ended comes back, and its successor is another", peers::peer_ends),
    both("settings/cache-off", "UCX_CUDA_IPC_CACHE=n", settings::cache_off),
    both("settings/cache-of-one", "UCX_CUDA_IPC_CACHE_MAX_REGIONS=1", settings::cache_of_one),
    now("settings/small-cache", "UCX_CUDA_IPC_CACHE_MAX_SIZE below one region", settings::small_cache),
    both("settings/stream-destroyed", "UCX ends while its copies run, and their memory is freed", settings::stream_destroyed),
    both("settings/freed-while-copied", "a copy outlives what it reads", settings::freed_while_copied),
    now("settings/region-destroyed", "UCX takes a region down while a copy uses it", settings::region_destroyed_in_use),
    now("environment/map", "CUDA_IPC_MAP=lazy: an import maps one chunk, and without it what there is", environment::map),
    now("environment/route", "CUDA_IPC_ROUTE and CUDA_IPC_BROKER decide how a peer is reached, and whether", environment::route),
    now("environment/socket-dir", "CUDA_IPC_SOCKET_DIR has the broker's socket, and importers find it", environment::socket_dir),
    now("environment/limits", "CUDA_IPC_CACHE_MAX_SIZE and CUDA_IPC_CACHE_MAX_WINDOWS bound what stays mapped", environment::limits),
    now("environment/wrong", "a value that is not taken is named once, and nothing else changes", environment::wrong),
    now("reports/run", "cuda-ipc run is all that it takes, where there is an NVLink and where not", reports::by_command),
    now("reports/explain", "at its end a process says what was shared, imported and refused, if asked", reports::explain),
    now("reports/quiet", "otherwise it says what was lost, once, and nothing else", reports::quiet),
    now("reports/reloc", "UCM's relocating hooks cost the lane at most, and are named", reports::relocating_hooks),
    now("reports/deepbind", "a module that is bound past the library costs the lane at most, and is named", reports::deepbind),
    both("memory/back-by-sweep", "memory is back within 500 ms of a free that nobody reports", memory::back_by_sweep),
    both("memory/back-by-event", "and within 20 ms plus unmapping of one that UCM reports", memory::back_by_event),
    both("memory/create-after-free", "what is free can be had at once, what was freed soon after", memory::create_after_free),
    later(
        "memory/create-at-once",
        "what was freed can be had at once",
        memory::create_at_once,
        "an importer's mapping keeps the memory for the milliseconds until it is unmapped, and no exporter waits for that",
    ),
    now("memory/changing-addresses", "address space is bounded if UCX's cache is", memory::changing_addresses),
    later(
        "memory/addresses-no-limit",
        "address space is bounded, whatever UCX keeps",
        memory::addresses_without_limit,
        "a window keeps its addresses for as long as UCX has a region of it, and before 1.21 UCX has no limit to that",
    ),
    both("memory/forked-workers", "children that live on hold nothing", memory::forked_workers),
    tree("tree/broker", "the lane by the broker alone", trees::broker),
    tree("tree/off", "with UCX_CUDA_IPC_POSIX_FD=n on one side bytes are right, and the other pairs keep the lane", trees::off),
    tree("tree/other-trees", "peers with other releases, with the lane and without it, get right bytes", trees::others),
    tree("tree/parts", "long copies are submitted in parts, and if one is refused nothing of the others goes on", trees::parts),
    tree("tree/hit", "what a hit costs, and what UCX's own costs", trees::hit),
    both("memory/steady", "fds, memory and GPU memory stay as they are over many rounds", memory::steady),
];

const fn now(name: &'static str, about: &'static str, run: fn(&mut World) -> Outcome) -> Scenario {
    Scenario { name, about, run, pending: None, with: With::Packages }
}

const fn tree(name: &'static str, about: &'static str, run: fn(&mut World) -> Outcome) -> Scenario {
    Scenario { name, about, run, pending: None, with: With::Trees }
}

const fn both(name: &'static str, about: &'static str, run: fn(&mut World) -> Outcome) -> Scenario {
    Scenario { name, about, run, pending: None, with: With::Both }
}

const fn later(name: &'static str, about: &'static str, run: fn(&mut World) -> Outcome, reason: &'static str) -> Scenario {
    Scenario { name, about, run, pending: Some(reason), with: With::Packages }
}

fn expect(so: bool, what: &str) -> Outcome {
    if so { Ok(()) } else { Err(what.to_owned()) }
}

/// Ends a process.
#[allow(unsafe_code, reason = "there is no safe way to signal a process that is no child of this one")]
fn kill(pid: i32) {
    // SAFETY: kill takes no pointers; the pid is of a child of a player, which nobody else reaps before this.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}
