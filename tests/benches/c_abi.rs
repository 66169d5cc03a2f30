//! What a lease costs through the C ABI, against the Rust call in the same run: a hit, taken and ended, by C code that calls the built libcuda_ipc.so.
//!
//!     cargo build --release -p cuda-ipc-ffi -p fake-cuda -p fake-nvml && cargo bench -p cuda-ipc-tests --bench c_abi
//!
//! Not part of CI: it asserts nothing about time. Both sides lease the same windows' memory in the same random order, in alternating batches.
//!
//! # Safety
//! The unsafe here is opening two libraries and calling their functions by the types that the C header gives them.

#![allow(clippy::unwrap_used, reason = "a benchmark")]

use core::ffi::{CStr, c_void};
use core::hint::black_box;
use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheOptions, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_tests::driver::{FakeConfig, Inside, TestDir};
use cuda_ipc_tests::exporter::{self, Remote};
use cuda_ipc_tests::importer::{Importer, LONG, key};

const CHUNK: u64 = 2 << 20;
/// Short batches: most of them run without being interrupted, also on a busy machine.
const LEASES: usize = 1 << 12;
const PAIRS: usize = 301;

type Lease = unsafe extern "C" fn(u64, u64, u64, u64, *mut u64, *mut u64) -> i32;
type End = unsafe extern "C" fn(u64) -> i32;
type Create = unsafe extern "C" fn(*const c_void, *mut u64) -> i32;
type Import = unsafe extern "C" fn(u64, *const c_void, usize, *const c_void, u64, *mut u64) -> i32;
type Loop = unsafe extern "C" fn(Lease, End, *const u64, *const u64, *const u32, u64) -> u64;

/// A handle is a structure of one number, which the calling conventions here pass as the number.
struct Abi {
    lease: Lease,
    end: End,
    create: Create,
    import: Import,
}

fn open(path: &Path) -> *mut c_void {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a C string; the library's constructors do nothing but what Rust's runtime does.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{}", path.display());
    library
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?}");
    address
}

impl Abi {
    fn open(path: &Path) -> Self {
        let library = open(path);
        Self {
            // SAFETY: as the header declares it.
            lease: unsafe { core::mem::transmute::<*mut c_void, Lease>(symbol(library, c"cuda_ipc_lease")) },
            // SAFETY: as the header declares it.
            end: unsafe { core::mem::transmute::<*mut c_void, End>(symbol(library, c"cuda_ipc_lease_end")) },
            // SAFETY: as the header declares it.
            create: unsafe { core::mem::transmute::<*mut c_void, Create>(symbol(library, c"cuda_ipc_context_create")) },
            // SAFETY: as the header declares it.
            import: unsafe { core::mem::transmute::<*mut c_void, Import>(symbol(library, c"cuda_ipc_import")) },
        }
    }
}

/// The C loop, compiled for this run.
fn compile(folder: &TestDir) -> Loop {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = folder.path().join("lease_loop.so");
    let mut command = Command::new("gcc");
    command.args(["-O2", "-shared", "-fPIC", "-I"]).arg(here.join("../cuda-ipc-ffi/include"));
    command.arg(here.join("benches/lease_loop.c")).arg("-o").arg(&library);
    assert!(command.status().unwrap().success());
    // SAFETY: the type that the C file gives it.
    unsafe { core::mem::transmute::<*mut c_void, Loop>(symbol(open(&library), c"lease_loop")) }
}

fn by_rust(windows: &[Arc<Window>], bases: &[u64], order: &[u32], deadline: Deadline) -> u64 {
    let mut failed = 0;
    for (at, &place) in order.iter().enumerate() {
        match windows[place as usize].lease(bases[place as usize] + at as u64 % 4096, 64, deadline) {
            Ok(lease) => drop(black_box(lease)),
            Err(_) => failed += 1,
        }
    }
    failed
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    // Run as a test, nothing is to be measured.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let Some(me) = Inside::enter("c_abi", &FakeConfig::default()) else { return };
    if me.role() == exporter::ROLE {
        return exporter::serve(&me);
    }
    let (importer, mut remote) = (Importer::start(), Remote::start(&me));
    let folder = TestDir::new().unwrap();
    let exe = std::env::current_exe().unwrap();
    let library = exe.ancestors().skip(2).map(|dir| dir.join("libcuda_ipc.so")).find(|path| path.exists());
    let abi = Abi::open(&library.expect("cargo build --release -p cuda-ipc-ffi"));
    let lease_loop = compile(&folder);

    let cache = Cache::new(importer.core, CacheOptions::default());
    let mut context = 0;
    // SAFETY: null is no configuration, and a live local.
    assert_eq!(unsafe { (abi.create)(core::ptr::null(), &raw mut context) }, 0);
    let (mut rust, mut c, mut bases) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..256 {
        let memory = remote.marked_memory_at(CHUNK, 0, &[(CHUNK, number)]);
        let (_, rkey) = remote.export(&memory, 0, CHUNK);
        let window = cache.window(&key(&rkey), 0, false, Deadline::after(LONG)).unwrap();
        drop(window.lease(memory.base, CHUNK, Deadline::after(LONG)).unwrap());
        let (bytes, mut handle) = (rkey.encode(), 0);
        let (mut lease, mut local) = (0, 0);
        // SAFETY: an rkey of that length, no options, and live locals.
        assert_eq!(unsafe { (abi.import)(context, bytes.as_ptr().cast(), bytes.len(), core::ptr::null(), u64::MAX, &raw mut handle) }, 0);
        // SAFETY: live locals.
        assert_eq!(unsafe { (abi.lease)(handle, memory.base, CHUNK, u64::MAX, &raw mut lease, &raw mut local) }, 0);
        // SAFETY: a number.
        assert_eq!(unsafe { (abi.end)(lease) }, 0);
        rust.push(window);
        c.push(handle);
        bases.push(memory.base);
    }
    let deadline = Deadline::after(LONG);
    println!(
        "{:>8} {:>10} {:>10} {:>8}   (ns for a hit, taken and ended; median of {PAIRS} alternating batches)",
        "windows", "Rust", "C ABI", "ratio"
    );
    for windows in [1, 16, 256] {
        let mut random = 88_172_645_463_325_252_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            u32::try_from(random % windows).unwrap()
        };
        let order: Vec<u32> = (0..LEASES).map(|_| next()).collect();
        let (mut of_rust, mut of_c) = (Vec::new(), Vec::new());
        for _ in 0..PAIRS {
            let start = Instant::now();
            assert_eq!(by_rust(&rust, &bases, &order, deadline), 0);
            of_rust.push(start.elapsed().as_secs_f64() * 1e9 / LEASES as f64);
            let start = Instant::now();
            // SAFETY: arrays with as many entries as `order` names, and `order` of that length.
            let failed = unsafe { lease_loop(abi.lease, abi.end, c.as_ptr(), bases.as_ptr(), order.as_ptr(), LEASES as u64) };
            of_c.push(start.elapsed().as_secs_f64() * 1e9 / LEASES as f64);
            assert_eq!(failed, 0);
        }
        let (rust, c) = (median(of_rust), median(of_c));
        println!("{windows:>8} {rust:>10.1} {c:>10.1} {:>8.2}", c / rust);
    }
    remote.finish();
}
