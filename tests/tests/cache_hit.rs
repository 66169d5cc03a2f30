//! What a hit costs beside time: no driver call, no system call, no allocation.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::alloc::System;
use std::io::Read;
use std::os::fd::AsRawFd;

use cuda_ipc_cache::{Cache, CacheOptions, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_tests::driver::{FakeConfig, Inside};
use cuda_ipc_tests::exporter::{self, Remote, RemoteMemory};
use cuda_ipc_tests::importer::{Importer, LONG, key};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

const CHUNK: u64 = 2 << 20;
const CHUNKS: u64 = 26;
const ROUNDS: u64 = 10_000;

/// Counts what the whole process allocates.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's word, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A window with chunks that are mapped, one of which has died since.
struct Warm {
    importer: Importer,
    remote: Remote,
    memory: RemoteMemory,
    cache: Cache,
    window: std::sync::Arc<Window>,
}

fn warm(test: &str) -> Option<Warm> {
    let me = Inside::enter(test, &FakeConfig::default())?;
    if me.role() == exporter::ROLE {
        exporter::serve(&me);
        return None;
    }
    let (importer, mut remote) = (Importer::start(), Remote::start(&me));
    let chunks: Vec<(u64, u64)> = (0..=CHUNKS).map(|seed| (CHUNK, seed)).collect();
    let memory = remote.memory(64 * CHUNK, &chunks);
    let (_, rkey) = remote.export(&memory, 0, memory.mapped_len());
    let mut options = CacheOptions::default();
    options.sweep = false;
    let cache = Cache::new(importer.core, options);
    let window = cache.window(&key(&rkey), 0, false, Deadline::after(LONG)).unwrap();
    drop(window.lease(memory.base, memory.mapped_len(), Deadline::after(LONG)).unwrap());
    // Another epoch: the first hit of each chunk has to compare.
    remote.ask(&format!("retire {} {} {CHUNK}", memory.index, CHUNKS * CHUNK));
    Some(Warm { importer, remote, memory, cache, window })
}

/// Hits of every kind. False if one was none: whoever calls this may not even print.
fn hits(window: &Window, base: u64, deadline: Deadline) -> bool {
    let Some(held) = window.try_lease(base, CHUNK) else { return false };
    for round in 0..ROUNDS {
        let address = base + round % CHUNKS * CHUNK + round % 4096;
        let one = window.try_lease(address, 64).is_some();
        let all = window.lease(base, CHUNKS * CHUNK, deadline).is_ok_and(|lease| u64::from(lease.chunks()) == CHUNKS);
        let more = window.lease_holding(address, 64, deadline, &[&held]).is_ok();
        if !(one && all && more) {
            return false;
        }
    }
    true
}

#[test]
fn a_hit_calls_no_driver_and_allocates_nothing() {
    let Some(warm) = warm("a_hit_calls_no_driver_and_allocates_nothing") else { return };
    let deadline = Deadline::after(LONG);
    let (calls, misses) = (warm.importer.fake.counters().driver_calls, warm.cache.stats().misses);
    let before = ALLOCATIONS.load(Relaxed);
    let all = hits(&warm.window, warm.memory.base, deadline);
    let allocated = ALLOCATIONS.load(Relaxed) - before;
    assert!(all);
    assert_eq!((allocated, warm.importer.fake.counters().driver_calls - calls, warm.cache.stats().misses - misses), (0, 0, 0));

    // The counters count.
    let before = ALLOCATIONS.load(Relaxed);
    drop(core::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.load(Relaxed) - before, 1);
    warm.remote.finish();
}

/// From here on the kernel kills the process if this thread makes a system call other than read, write, exit and sigreturn.
fn forbid_system_calls() -> bool {
    // SAFETY: two numbers.
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) == 0 }
}

/// The system call `exit`, which ends this thread and, unlike `exit_group`, is allowed.
fn end_thread() -> ! {
    loop {
        // SAFETY: the thread owns nothing that anybody waits for.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

#[test]
fn a_hit_makes_no_system_call() {
    let Some(warm) = warm("a_hit_makes_no_system_call") else { return };
    // First the proof that this forbids anything.
    // SAFETY: the child makes three system calls and ends.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            if forbid_system_calls() {
                // SAFETY: a call without arguments, and the last one.
                unsafe { libc::syscall(libc::SYS_getppid) };
            }
            end_thread();
        }
        ForkResult::Parent { child } => {
            let status = waitpid(child, None).unwrap();
            if status == WaitStatus::Exited(child, 0) {
                println!("skipped: seccomp's strict mode is not to be had here");
                warm.remote.finish();
                return;
            }
            assert_eq!(status, WaitStatus::Signaled(child, Signal::SIGKILL, false));
        }
    }

    let (mut read, write) = std::io::pipe().unwrap();
    let (window, base, deadline, answer) = (warm.window.clone(), warm.memory.base, Deadline::after(LONG), write.as_raw_fd());
    // Not joined: a thread that ends by the bare system call leaves nothing to join.
    let _ = std::thread::spawn(move || {
        let word = [u8::from(forbid_system_calls() && hits(&window, base, deadline))];
        // SAFETY: one byte, and an fd that the test keeps open.
        unsafe { libc::write(answer, word.as_ptr().cast(), 1) };
        end_thread();
    });
    let mut word = [0];
    read.read_exact(&mut word).unwrap();
    assert_eq!(word, [1]);
    drop(write);
    warm.remote.finish();
}
