//! Whom not to ask again yet, children that own nothing, captures of other threads, and a second device.

use core::time::Duration;

use cuda_driver_sys::CUresult;
use cuda_ipc_cache::{CacheErrorKind, CacheOptions};
use cuda_ipc_tests::driver::FakeConfig;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::snapshot::wait_until;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use crate::support::*;

fn backoff(ms: u64) -> impl FnOnce(&mut CacheOptions) {
    move |options| {
        options.sweep = false;
        options.first_backoff = Duration::from_millis(ms);
        options.last_backoff = Duration::from_millis(4 * ms);
    }
}

/// An exporter whose table cannot be fetched for a while; what makes it reachable again is returned.
fn hide_table(remote: &mut Remote, table_fd: u32) -> String {
    let copy = remote.ask(&format!("open /proc/self/fd/{table_fd}"));
    remote.ask(&format!("put {table_fd} /dev/null"));
    format!("put {table_fd} /proc/self/fd/{copy}")
}

#[test]
fn a_refusal_is_remembered_for_its_peer_and_expires() {
    let Some(world) = enter(test_name!(a_refusal_is_remembered_for_its_peer_and_expires)) else { return };
    let (mut refusing, mut other) = (world.remote(), world.remote());
    let memory = refusing.memory(4 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = refusing.export(&memory, 0, CHUNK);
    let (_, second_rkey) = refusing.export(&memory, 0, CHUNK);
    let others = other.memory(4 * CHUNK, &[(CHUNK, 11)]);
    let (_, others_rkey) = other.export(&others, 0, CHUNK);
    let show = hide_table(&mut refusing, key(&rkey).table_fd);

    let cache = world.cache(backoff(2500));
    let first = try_window(&cache, &rkey).unwrap_err();
    let CacheErrorKind::Import(cause) = first.kind else { panic!("{first}") };
    for rkey in [&rkey, &second_rkey, &rkey] {
        let again = try_window(&cache, rkey).unwrap_err();
        assert_eq!(again.kind, CacheErrorKind::Refused(cause), "at once, and with the cause");
        assert!(again.retryable());
    }
    assert_eq!((cache.stats().refused, cache.stats().refused_again), (1, 3));
    drop(world.verify(&window(&cache, &others_rkey), &others, 0, CHUNK));

    // Reachable again, and found so once the refusal has expired; no sooner.
    refusing.ask(&show);
    assert!(matches!(try_window(&cache, &rkey).unwrap_err().kind, CacheErrorKind::Refused(_)));
    assert!(wait_until(Duration::from_secs(20), || try_window(&cache, &rkey).is_ok()));
    drop(world.verify(&window(&cache, &rkey), &memory, 0, CHUNK));
    assert_eq!((cache.stats().refused, cache.stats().peers), (1, 2));
    refusing.finish();
    other.finish();
    world.close(cache);
}

#[test]
fn a_refusal_that_is_repeated_lasts_longer() {
    let Some(world) = enter(test_name!(a_refusal_that_is_repeated_lasts_longer)) else { return };
    let mut remote = world.remote();
    let memory = remote.memory(4 * CHUNK, &[(CHUNK, 1)]);
    let (_, rkey) = remote.export(&memory, 0, CHUNK);
    hide_table(&mut remote, key(&rkey).table_fd);
    let cache = world.cache(backoff(50));
    let began = std::time::Instant::now();
    // After 0, 50, 150, 350, 550 and 750 ms.
    while cache.stats().refused < 6 {
        assert!(try_window(&cache, &rkey).is_err());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(began.elapsed() >= Duration::from_millis(750), "{:?}", began.elapsed());
    remote.finish();
    world.close(cache);
}

/// B43.
#[test]
fn a_forked_child_forgets_everything_and_calls_nobody() {
    let Some(world) = enter(test_name!(a_forked_child_forgets_everything_and_calls_nobody)) else { return };
    for keep_idle in [true, false] {
        let mut remote = world.remote();
        let memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
        let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
        let cache = world.cache(|options| options.keep_idle = keep_idle);
        let window = window(&cache, &rkey);
        drop(world.verify(&window, &memory, CHUNK, CHUNK));
        let lease = world.verify(&window, &memory, 0, CHUNK);
        // A window of its own, whose chunks are gone and whose address space is not.
        let writable = cache.window(&key(&rkey), 0, true, soon()).unwrap();
        drop(writable.lease(memory.base, CHUNK, soon()).unwrap());
        let before = world.counters();

        // Locks are held all the time, by threads that no child has.
        let stop = core::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(core::sync::atomic::Ordering::Relaxed) {
                    cache.stats();
                }
            });
            for _ in 0..20 {
                // SAFETY: the child uses the cache, which must not lock, allocates a little, and exits without unwinding.
                match unsafe { fork() }.unwrap() {
                    ForkResult::Child => {
                        let refused = window.try_lease(memory.base, CHUNK).is_none()
                            && window.lease(memory.base, CHUNK, in_ms(100)).is_err_and(|error| error.kind == CacheErrorKind::Forked)
                            && try_window(&cache, &rkey).is_err_and(|error| error.kind == CacheErrorKind::Forked)
                            && cache.peer(key(&rkey).nonce).is_none()
                            && cache.trim() == 0
                            && cache.purge_peer(key(&rkey).nonce) == 0;
                        drop(child_copy(&lease));
                        drop(child_copy(&writable));
                        drop(child_copy(&cache));
                        // SAFETY: ends the child.
                        unsafe { libc::_exit(i32::from(!refused)) }
                    }
                    ForkResult::Parent { child } => {
                        let mut status = None;
                        let ended = wait_until(Duration::from_secs(10), || {
                            status = waitpid(child, Some(nix::sys::wait::WaitPidFlag::WNOHANG)).ok();
                            !matches!(status, Some(WaitStatus::StillAlive))
                        });
                        if !ended {
                            let _ = nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL);
                        }
                        assert_eq!(status, Some(WaitStatus::Exited(child, 0)));
                    }
                }
            }
            stop.store(true, core::sync::atomic::Ordering::Relaxed);
        });
        let after = world.counters();
        assert_eq!((after.calls_after_fork, after.mappings, after.reservations), (0, before.mappings, before.reservations));
        memory.verify(&world.importer.cuda, lease.address(), 0, CHUNK).expect("the parent's mapping");
        drop(lease);
        drop(world.verify(&window, &memory, 0, 2 * CHUNK));
        drop((window, writable));
        remote.finish();
        world.close(cache);
    }
}

/// In a child, something of the parent's as the child's memory has it, to be dropped there.
fn child_copy<T>(original: &T) -> T {
    // SAFETY: the child exits without dropping the original.
    unsafe { core::ptr::read(original) }
}

/// Imports, unmaps and evictions while another thread captures a stream in the mode that forbids the most.
#[test]
fn another_threads_capture_is_not_disturbed() {
    let Some(world) = enter(test_name!(another_threads_capture_is_not_disturbed)) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(8 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    let (cuda, cache) = (world.importer.cuda, world.cache(|options| options.max_windows = 1));
    let stream = cuda.stream_create(1).unwrap();
    cuda.capture_begin(stream, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cuda.enter_primary(0);
            let read = window(&cache, &rkey);
            drop(read.lease(memory.base, 2 * CHUNK, soon()).expect("an import beside a capture"));
            memory.replace(&mut remote, 0, 11);
            remote.export(&memory, 0, CHUNK);
            drop(read.lease(memory.base, 2 * CHUNK, soon()).expect("a replacement beside a capture"));
            // Address space taken away and given, and a device more.
            let write = cache.window(&key(&rkey), 0, true, soon()).unwrap();
            drop(write.lease(memory.base, CHUNK, soon()).expect("an eviction beside a capture"));
            write.add_device(0, soon()).unwrap();
            // The sweeper's turn.
            remote.ask(&format!("retire {} 0 {}", memory.index, memory.len));
            assert!(wait_until(Duration::from_secs(5), || world.counters().mappings == 0));
            assert!(cache.purge_peer(key(&rkey).nonce) == 0);
        });
    });
    assert_eq!(cuda.capture_status(stream), Ok(1), "active");
    let graph = cuda.capture_end(stream).expect("the capture");
    // And in the capturing thread itself.
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    cuda.capture_begin(stream, 0).unwrap();
    let read = window(&cache, &rkey);
    drop(read.lease(memory.base, 2 * CHUNK, soon()).expect("an import inside a capture"));
    drop(read);
    cuda.graph_destroy(cuda.capture_end(stream).expect("the capture")).unwrap();
    cuda.graph_destroy(graph).unwrap();
    cuda.stream_destroy(stream).unwrap();
    remote.finish();
    world.close(cache);
}

#[test]
fn a_second_device_gets_access_to_what_is_mapped_and_what_comes() {
    let config = FakeConfig { devices: Some(2), ..FakeConfig::default() };
    let Some(world) = enter_with(test_name!(a_second_device_gets_access_to_what_is_mapped_and_what_comes), &config) else { return };
    let mut remote = world.remote();
    let mut memory = remote.memory(16 * CHUNK, &[(CHUNK, 1), (CHUNK, 2)]);
    memory.map(&mut remote, 4 * CHUNK, CHUNK, 3);
    let (_, rkey) = remote.export(&memory, 0, 2 * CHUNK);
    remote.export(&memory, 4 * CHUNK, CHUNK);
    let cache = world.quiet_cache();
    let cuda = &world.importer.cuda;
    let window = window(&cache, &rkey);
    let local = world.verify(&window, &memory, 0, 2 * CHUNK).address();
    drop(world.verify(&window, &memory, 4 * CHUNK, CHUNK));
    assert_eq!((cuda.mem_get_access(local, 0), cuda.mem_get_access(local, 1)), (Ok(1), Ok(0)));

    // The driver refuses it first: no access, and the window as it was.
    world.importer.fake.add_fault("cuMemSetAccess#2=2");
    let refused = cache.window(&key(&rkey), 1, false, soon()).unwrap_err();
    assert!(matches!(refused.kind, CacheErrorKind::Driver(driver) if driver.call == "cuMemSetAccess"), "{refused}");
    world.importer.fake.clear_faults();
    drop(world.verify(&window, &memory, 0, 2 * CHUNK));

    let (calls, imports) = (world.importer.fake.calls("cuMemSetAccess"), world.counters().imports_made);
    let same = cache.window(&key(&rkey), 1, false, soon()).unwrap();
    assert!(std::sync::Arc::ptr_eq(&window, &same), "one window for all devices");
    assert_eq!(world.importer.fake.calls("cuMemSetAccess") - calls, 2, "one call for each run");
    for offset in [0, CHUNK, 4 * CHUNK] {
        assert_eq!((cuda.mem_get_access(local + offset, 0), cuda.mem_get_access(local + offset, 1)), (Ok(1), Ok(1)));
    }
    assert_eq!(world.counters().imports_made, imports);

    // What comes later, for both at once.
    memory.map(&mut remote, 2 * CHUNK, 2 * CHUNK, 5);
    memory.replace(&mut remote, 4 * CHUNK, 6);
    remote.export(&memory, 0, 5 * CHUNK);
    let lease = world.verify(&window, &memory, 0, 5 * CHUNK);
    cuda.enter_primary(1);
    memory.verify(cuda, lease.address(), 0, 5 * CHUNK).expect("the bytes, by the second device");
    assert_eq!(cuda.fill(lease.address(), 1, 1), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "read only");
    cuda.enter_primary(0);
    assert!(matches!(cache.window(&key(&rkey), 64, false, soon()).unwrap_err().kind, CacheErrorKind::Device(64)));
    drop(lease);
    drop((window, same));
    remote.finish();
    drop(cache);
    assert_eq!(world.counters().mappings, 0);
}
