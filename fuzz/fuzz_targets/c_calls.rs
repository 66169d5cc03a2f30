//! Sequences of calls of the C ABI: any order, handles that are stale, made up or of another kind, sizes and settings of all sorts, keys that are right, changed or
//! this process's own, with another process that really exports. Each answer is a documented status, none says that a panic was caught, and when all that was made
//! has been given back, the process has what it had.
//!
//! Pointers are good or null, as the header asks. Needs the fake driver, as `cargo xtask fuzz` sets it up.
//!
//! # Safety
//! The unsafe here is the calls, each with pointers to live values of this file's that are at least as long as the sizes that go with them; and what `exporter.rs`
//! says.
#![no_main]

#[path = "../exporter.rs"]
mod exporter;

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use cuda_ipc::config::cuda_ipc_config_t;
use cuda_ipc::context::*;
use cuda_ipc::export::*;
use cuda_ipc::handles::*;
use cuda_ipc::import::*;
use cuda_ipc::last_error::{cuda_ipc_error_t, cuda_ipc_last_error};
use cuda_ipc::lease::*;
use cuda_ipc::probe::*;
use cuda_ipc::stats::*;
use cuda_ipc::status::*;
use cuda_ipc::version::*;
use cuda_ipc_tests::driver::FakeCounters;
use cuda_ipc_tests::importer::Importer;
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::snapshot::{open_fds, threads, wait_until};
use exporter::{CHUNK, RKEY_LEN, Shared};
use libfuzzer_sys::fuzz_target;

/// Handles of one kind that are kept at most, the ended ones included.
const SLOTS: usize = 4;
/// Calls at most.
const CALLS: usize = 40;

struct World {
    importer: Importer,
    /// What the other process shares.
    shared: Shared,
    /// Addresses of this process's memory: chunks, of `cuMemAlloc`, of a pool.
    addresses: [u64; 3],
}

static WORLD: OnceLock<World> = OnceLock::new();

fuzz_target!(
    init: {
        // Before this process has threads or a driver: the exporter is forked from it.
        let shared = Shared::start();
        let importer = Importer::start();
        let mut memory = Memory::reserve(importer.cuda, 16 * CHUNK, 0).expect("a reservation");
        for chunk in 0..3 {
            memory.map(chunk * CHUNK, CHUNK, chunk).expect("a chunk");
        }
        let plain = importer.cuda.mem_alloc(1 << 20).expect("memory");
        let pool = importer.cuda.pool_create(0, 1).expect("a pool");
        let pooled = importer.cuda.alloc_from_pool(1 << 20, pool, std::ptr::null_mut()).expect("memory of a pool");
        let addresses = [memory.base(), plain, pooled];
        std::mem::forget(memory);
        assert!(WORLD.set(World { importer, shared, addresses }).is_ok());
        // A context, an export, an import and a lease. That succeeds, and what is there for good afterwards is set up: the fork handler, the driver's table.
        let honest = [[1, 0, 0, 0, 0, 0, 0, 0], [3, 0, 0, 0, 2, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0], [12, 0, 0, 0, 2, 0, 0, 2]];
        run(honest.as_flattened(), true);
    },
    |bytes: &[u8]| {
        let world = WORLD.get().expect("made at the start");
        let before = (left(world.importer.fake.counters()), open_fds(), threads());
        run(bytes, false);
        // Threads of contexts end in their own time.
        let now = || (left(world.importer.fake.counters()), open_fds(), threads());
        if !wait_until(Duration::from_secs(5), || now() == before) {
            assert_eq!(before, now(), "something is left, or gone");
        }
        assert_eq!(world.importer.fake.counters().internal_errors, 0);
    }
);

fn left(counters: FakeCounters) -> [u64; 5] {
    [counters.handles, counters.mappings, counters.reservations, counters.pools, counters.primary_retains]
}

/// Handles by kind, in the order of contexts, exports, windows, leases.
#[derive(Default)]
struct Handles([[u64; SLOTS]; 4], [usize; 4]);

impl Handles {
    fn keep(&mut self, kind: usize, id: u64) {
        self.0[kind][self.1[kind] % SLOTS] = id;
        self.1[kind] += 1;
    }

    /// One that was given out, mostly; of another kind, or made up.
    fn pick(&self, kind: usize, byte: u8) -> u64 {
        let slot = usize::from(byte) % SLOTS;
        match byte {
            0..200 => self.0[kind][slot],
            200..220 => self.0[(kind + 1) % 4][slot],
            220..240 => self.0[kind][slot] ^ 1 << (byte % 64),
            _ => u64::from(byte) << 32 | 7,
        }
    }
}

/// Room for the structures, any of whose sizes a call may name.
const ROOM: usize = 1024;

fn run(bytes: &[u8], is_honest: bool) {
    let world = WORLD.get().expect("made at the start");
    let mut handles = Handles::default();
    let mut own_rkey = [0_u8; RKEY_LEN];
    for call in bytes.as_chunks::<8>().0.iter().take(CALLS) {
        let status = make(world, call, &mut handles, &mut own_rkey);
        look_at(status);
        assert!(!is_honest || status == CUDA_IPC_OK, "{call:?}: {status}");
    }
    for lease in handles.0[3] {
        look_at(cuda_ipc_lease_end(cuda_ipc_lease_t { id: lease }));
    }
    for window in handles.0[2] {
        look_at(cuda_ipc_window_release(cuda_ipc_window_t { id: window }));
    }
    for export in handles.0[1] {
        look_at(cuda_ipc_export_release(cuda_ipc_export_t { id: export }));
    }
    for context in handles.0[0] {
        look_at(cuda_ipc_context_destroy(cuda_ipc_context_t { id: context }));
    }
}

/// Whatever is answered has a text, and none is the library's own fault.
fn look_at(status: cuda_ipc_status_t) {
    assert!(status <= 0 && status != CUDA_IPC_ERR_INTERNAL, "{status}");
    // SAFETY: a constant of the library's.
    let text = unsafe { CStr::from_ptr(cuda_ipc_status_string(status)) };
    assert!(!text.is_empty() && !text.to_string_lossy().contains("unknown"), "{status}: {text:?}");
}

/// Makes one call: the first byte says which, the others what with.
fn make(world: &World, call: &[u8; 8], handles: &mut Handles, own_rkey: &mut [u8; RKEY_LEN]) -> cuda_ipc_status_t {
    let &[what, a, b, c, d, e, f, g] = call;
    let context = cuda_ipc_context_t { id: handles.pick(0, a) };
    let export = cuda_ipc_export_t { id: handles.pick(1, a) };
    let window = cuda_ipc_window_t { id: handles.pick(2, a) };
    let timeout = [0, 1000, 1_000_000][usize::from(g % 3)];
    let near = |base: u64, byte: u8| base.wrapping_add(u64::from(byte) << 17);
    let address = match b {
        0..200 => near(world.addresses[usize::from(b % 3)], c),
        200..240 => near(world.shared.base, c),
        _ => u64::from(c) << 56 | u64::from(d),
    };
    let length = match e {
        0..240 => u64::from(d) << 16 | u64::from(e & 1),
        _ => u64::MAX - u64::from(d),
    };
    let mut room = [f; ROOM];
    // A structure as long as it says, or longer, or not long enough.
    let sized = |room: &mut [u8; ROOM], right: usize| {
        let size = match g {
            0..180 => right,
            180..200 => ROOM,
            _ => usize::from(f),
        };
        room[..8].copy_from_slice(&size.to_ne_bytes());
    };
    let (mut count, mut number) = (0_u64, 0_usize);
    let maybe = |pointer: *mut u64| if f == 255 { std::ptr::null_mut() } else { pointer };
    // SAFETY: see the file's chapter, here and below.
    unsafe {
        match what % 25 {
            0 => cuda_ipc_config_init(room.as_mut_ptr().cast(), usize::from(a).min(ROOM)),
            1 => {
                let mut config = std::mem::zeroed::<cuda_ipc_config_t>();
                look_at(cuda_ipc_config_init(&raw mut config, size_of::<cuda_ipc_config_t>()));
                if a > 64 {
                    config.broker = u32::from(b % 4);
                    config.importer_sweeps = u32::from(c % 4);
                    config.exporter_sweep_ms = [0, 1, 100, u32::MAX][usize::from(d % 4)];
                    config.keep_idle = u32::from(e % 4);
                    config.cache_max_size = u64::from(f) << 18;
                    config.cache_max_windows = u64::from(g);
                    config.route = u32::from(a % 5);
                    config.map = u32::from(b / 4 % 4);
                    config.fd_reserve = u64::from(c) << (d % 64);
                    config.log_level = i32::from(e % 8);
                    config.cache_max_address_space = u64::from(f) << (g % 64);
                }
                let mut made = cuda_ipc_context_t { id: 0 };
                let status = cuda_ipc_context_create(if a == 64 { std::ptr::null() } else { &raw const config }, &raw mut made);
                if status == CUDA_IPC_OK {
                    // Only so many are kept, and none is lost.
                    let old = handles.0[0][handles.1[0] % SLOTS];
                    look_at(cuda_ipc_context_destroy(cuda_ipc_context_t { id: old }));
                    handles.keep(0, made.id);
                }
                status
            }
            2 => cuda_ipc_context_destroy(context),
            3 => {
                let mut made = cuda_ipc_export_t { id: 0 };
                let status = cuda_ipc_export(context, address, length, &raw mut made);
                if status == CUDA_IPC_OK {
                    look_at(cuda_ipc_export_release(cuda_ipc_export_t { id: handles.0[1][handles.1[1] % SLOTS] }));
                    handles.keep(1, made.id);
                    look_at(cuda_ipc_export_rkey(made, own_rkey.as_mut_ptr().cast(), RKEY_LEN, &raw mut number));
                }
                status
            }
            4 => {
                sized(&mut room, size_of::<cuda_ipc_export_info_t>());
                cuda_ipc_export_info(export, room.as_mut_ptr().cast())
            }
            5 => {
                let mut handle_type = 0_u32;
                cuda_ipc_export_payload(export, room.as_mut_ptr().cast(), usize::from(b), &raw mut handle_type)
            }
            6 => cuda_ipc_export_rkey(export, room.as_mut_ptr().cast(), usize::from(b), &raw mut number),
            7 => cuda_ipc_export_release(export),
            8 | 9 => {
                // The other process's, this one's own, or one of these with some bytes changed.
                let mut rkey = if b < 160 { world.shared.rkey } else { *own_rkey };
                if b % 4 == 3 {
                    rkey[usize::from(c) % RKEY_LEN] ^= d;
                    rkey[usize::from(e) % RKEY_LEN] = f;
                }
                let options = cuda_ipc_import_options_t {
                    size: if e < 250 { size_of::<cuda_ipc_import_options_t>() } else { usize::from(e) },
                    flags: u32::from(if c < 200 { c % 4 } else { c }),
                    device: i32::from(if d < 200 { 0 } else { d }),
                };
                let mut made = cuda_ipc_window_t { id: 0 };
                let options = if f == 254 { std::ptr::null() } else { &raw const options };
                let status = if what % 25 == 8 {
                    let length = if f == 253 { usize::from(g) % RKEY_LEN } else { RKEY_LEN };
                    cuda_ipc_import(context, rkey.as_ptr().cast(), length, options, 1_000_000_000, &raw mut made)
                } else {
                    let payload: *const c_void = rkey[40..].as_ptr().cast();
                    let (base, len) = if b < 160 { (world.shared.base, world.shared.len) } else { (address, length) };
                    cuda_ipc_import_payload(context, u32::from(g % 4), payload, 64, base, len, options, 1_000_000_000, &raw mut made)
                };
                if status == CUDA_IPC_OK {
                    look_at(cuda_ipc_window_release(cuda_ipc_window_t { id: handles.0[2][handles.1[2] % SLOTS] }));
                    handles.keep(2, made.id);
                }
                status
            }
            10 => {
                sized(&mut room, size_of::<cuda_ipc_window_info_t>());
                cuda_ipc_window_info(window, room.as_mut_ptr().cast())
            }
            11 => cuda_ipc_window_release(window),
            12..15 => {
                let (from, len) = match b {
                    0..200 => (near(world.shared.base, c), u64::from(d) << 16 | 1),
                    _ => (address, length),
                };
                let (mut made, mut local) = (cuda_ipc_lease_t { id: 0 }, 0_u64);
                let holding: [cuda_ipc_lease_t; SLOTS] = std::array::from_fn(|slot| cuda_ipc_lease_t { id: handles.0[3][slot] });
                let status = if what % 25 == 14 {
                    cuda_ipc_lease_holding(
                        window,
                        from,
                        len,
                        timeout,
                        holding.as_ptr(),
                        usize::from(e) % (SLOTS + 1),
                        &raw mut made,
                        &raw mut local,
                    )
                } else {
                    cuda_ipc_lease(window, from, len, timeout, &raw mut made, &raw mut local)
                };
                if status == CUDA_IPC_OK {
                    look_at(cuda_ipc_lease_end(cuda_ipc_lease_t { id: handles.0[3][handles.1[3] % SLOTS] }));
                    handles.keep(3, made.id);
                    // Of this process's own memory a lease is the address itself, whatever is there.
                    let is_own = (world.addresses[0]..world.addresses[0] + 16 * CHUNK).contains(&local);
                    let read = world.importer.cuda.read(&mut [0; 1], local);
                    assert!(is_own || read.is_ok(), "what is leased can be read: {read:?}");
                }
                status
            }
            15 => cuda_ipc_lease_end(cuda_ipc_lease_t { id: handles.pick(3, a) }),
            16 => cuda_ipc_retire(context, address, length, maybe(&raw mut count)),
            17 => cuda_ipc_sweep(context, maybe(&raw mut count)),
            18 => cuda_ipc_trim(context, maybe(&raw mut count)),
            19 => {
                let peer = if b < 200 { world.shared.peer } else { u64::from(b) };
                cuda_ipc_purge_peer(context, peer, maybe(&raw mut count))
            }
            20 => {
                sized(&mut room, size_of::<cuda_ipc_probe_t>());
                cuda_ipc_probe(context, address, room.as_mut_ptr().cast())
            }
            21 => cuda_ipc_probe_text(context, address, room.as_mut_ptr().cast(), usize::from(g) * 4, &raw mut number),
            22 => {
                sized(&mut room, size_of::<cuda_ipc_stats_t>());
                cuda_ipc_stats(context, room.as_mut_ptr().cast())
            }
            23 => {
                sized(&mut room, size_of::<cuda_ipc_error_t>());
                cuda_ipc_last_error(room.as_mut_ptr().cast())
            }
            _ => {
                let status = -i32::from(a) - 256 * i32::from(b % 2);
                assert!(!cuda_ipc_status_string(status).is_null() && (0..=1).contains(&cuda_ipc_status_is_retryable(status)));
                assert!(cuda_ipc_version() > 0 && !cuda_ipc_version_string().is_null());
                CUDA_IPC_OK
            }
        }
    }
}
