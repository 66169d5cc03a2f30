//! Whole imports from a hostile process: its table is a real memory file in another process, its words are what the input says, and some of them change while the
//! importer reads: between its driver calls, and at any time by another thread. That costs an error, no more, and nothing is left behind.
//!
//! Needs the fake driver, as `cargo xtask fuzz` sets it up. What another thread does comes at another moment each time, so an input need not do the same twice.
#![no_main]

#[path = "../hostile.rs"]
mod hostile;

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::importer::{ConnectOptions, Deadline, Import, Peer, PooledImport, Route};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_tests::importer::{Importer, READ};
use cuda_ipc_tests::snapshot::open_fds;
use hostile::{CHUNK, Edit, Hostile};
use libfuzzer_sys::fuzz_target;

/// More than any honest import takes, less than libFuzzer's patience.
const PATIENCE: Duration = Duration::from_secs(2);

struct World {
    hostile: Hostile,
    importer: Importer,
}

static WORLD: OnceLock<World> = OnceLock::new();

thread_local! {
    /// Edits that wait for a driver call, by its number.
    static WAITING: RefCell<Vec<(u8, Edit)>> = const { RefCell::new(Vec::new()) };
    static CALLS: Cell<u8> = const { Cell::new(0) };
}

extern "C" fn at_driver_call(_name: *const u8, _len: usize, _before: c_int) -> c_int {
    let number = CALLS.get();
    CALLS.set(number.saturating_add(1));
    WAITING.with_borrow(|waiting| {
        waiting.iter().filter(|(at, _)| *at == number).for_each(|(_, edit)| edit.apply(&world().hostile));
    });
    0
}

fn world() -> &'static World {
    WORLD.get().expect("made at the start")
}

fuzz_target!(
    init: {
        // Before this process has threads or a driver: the hostile one is forked from it.
        let hostile = Hostile::start();
        assert!(WORLD.set(World { hostile, importer: Importer::start() }).is_ok());
        // What is there for good afterwards is set up by an honest import.
        import(&[0; 4], true);
    },
    |bytes: &[u8]| import(bytes, false)
);

/// Four bytes say how to import what; each eight after them are an edit.
fn import(bytes: &[u8], is_honest: bool) {
    let World { hostile, importer } = world();
    let Some((&[how, first, len, _], edits)) = bytes.split_first_chunk::<4>() else { return };
    hostile.restore();
    let (mut restless, mut waiting) = (Vec::new(), Vec::new());
    for edit in edits.as_chunks::<8>().0.iter().take(32) {
        match edit[0] {
            0..100 => Edit::read(edit).apply(hostile),
            at @ 100..200 => waiting.push((at - 100, Edit::read(edit))),
            _ => restless.push(Edit::read(edit)),
        }
    }
    let fds = (!is_honest).then(open_fds);
    let before = importer.fake.counters();
    WAITING.set(waiting);
    CALLS.set(0);
    importer.fake.set_hook(Some(at_driver_call));
    let key = hostile.key;
    let base = key.base + u64::from(first % 4) * CHUNK;
    let outcome = hostile.while_changing(&restless, || act(importer, how, &key, base, CHUNK * (1 + u64::from(len % 4))));
    importer.fake.set_hook(None);
    match outcome {
        Ok(()) => {}
        Err(text) => assert!(!text.is_empty() && !is_honest, "an honest table: {text}"),
    }
    let after = importer.fake.counters();
    assert_eq!(after.internal_errors, 0);
    let left = |counters: cuda_ipc_tests::driver::FakeCounters| {
        (counters.handles, counters.mappings, counters.reservations, counters.reserved_bytes, counters.pools)
    };
    if !is_honest {
        assert_eq!(left(before), left(after), "something is left, or gone");
        assert_eq!(fds, Some(open_fds()), "an fd is left, or gone");
    }
}

fn act(importer: &Importer, how: u8, key: &Key, base: u64, len: u64) -> Result<(), String> {
    let deadline = Deadline::after(PATIENCE);
    if how & 3 == 1 {
        let mut options = CacheOptions::default();
        options.sweep = false;
        options.connect = ConnectOptions::default().with_route(Route::Pidfd);
        let cache = Cache::new(importer.core, options);
        let window = cache.window(key, 0, false, deadline).map_err(text)?;
        for _ in 0..2 {
            let lease = window.lease(base, len, deadline).map_err(text)?;
            importer.cuda.read(&mut [0; 64], lease.address()).expect("what is leased can be read");
        }
        cache.trim();
        return Ok(());
    }
    let connect = ConnectOptions::default().with_route(Route::Pidfd);
    let peer = Arc::new(Peer::connect_with(key, &connect, deadline).map_err(text)?);
    if how & 3 == 2 {
        // A slot of the pool's allocation that may hold anything.
        let key = Key { kind: KeyKind::PoolAllocation { slot: u32::from(how >> 2) % 8 }, base, len, ..*key };
        return PooledImport::new(&importer.core, &peer, &key, &[0], deadline).map(drop).map_err(text);
    }
    let import = Import::new(&importer.core, &peer, key, base, len, READ, deadline).map_err(text)?;
    assert_eq!(import.len(), len);
    let mut bytes = [0; 64];
    importer.cuda.read(&mut bytes, import.address()).expect("what is imported can be read");
    importer.cuda.read(&mut bytes, import.address() + len - 64).expect("to its end");
    import.close().map_err(text)
}

fn text(error: impl core::fmt::Display) -> String {
    error.to_string()
}
