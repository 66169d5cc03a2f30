//! The fake driver itself: what only it promises, or what a GPU promises and the other tests rely on.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, Ordering};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cuda_driver_sys::CUresult;
use cuda_ipc_tests::driver::{Cuda, Fake, FakeConfig, Inside};

const CHUNK: usize = 2 << 20;
const POSIX_FD: u32 = 1;

fn start() -> (Cuda, Fake) {
    let cuda = Cuda::start();
    cuda.enter_primary(0);
    (cuda, Fake::find().expect("the fake driver"))
}

fn free_bytes(cuda: &Cuda) -> usize {
    cuda.mem_info().expect("cuMemGetInfo").0
}

#[test]
fn free_memory_is_seen_by_all_processes() {
    let Some(me) = Inside::enter("free_memory_is_seen_by_all_processes", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    if me.role() == "other" {
        let chunk = cuda.mem_chunk(4 * CHUNK, 0, POSIX_FD).expect("a chunk");
        me.tell("made");
        me.listen();
        cuda.mem_drop_chunk(4 * CHUNK, chunk).expect("the end of it");
        me.tell("dropped");
        me.listen();
        return;
    }
    let before = free_bytes(&cuda);
    let mut other = me.spawn("other").expect("a process");
    assert_eq!(other.listen(), "made");
    assert_eq!(free_bytes(&cuda), before - 4 * CHUNK);
    assert_eq!(fake.device(0).handles, 1);
    assert_eq!(fake.device(0).mapped_bytes, 4 * CHUNK as u64);
    other.tell("drop");
    assert_eq!(other.listen(), "dropped");
    assert_eq!(free_bytes(&cuda), before);
    other.finish();
}

#[test]
fn death_gives_memory_back() {
    let Some(me) = Inside::enter("death_gives_memory_back", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    if me.role() == "victim" {
        cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
        cuda.mem_alloc(3 * CHUNK).expect("an allocation");
        me.tell("made");
        me.listen();
        return;
    }
    let before = free_bytes(&cuda);
    let mut victim = me.spawn("victim").expect("a process");
    assert_eq!(victim.listen(), "made");
    assert_eq!(free_bytes(&cuda), before - 4 * CHUNK);
    victim.kill().expect("kill");
    assert_eq!(free_bytes(&cuda), before);
    assert_eq!((fake.device(0).processes, fake.device(0).handles), (1, 0));
}

#[test]
fn an_exported_fd_pins_memory() {
    let Some(me) = Inside::enter("an_exported_fd_pins_memory", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    if me.role() == "exporter" {
        let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
        cuda.fill(chunk.1, 0x5a, CHUNK).expect("a fill");
        let fd = cuda.mem_export_fd(chunk.0).expect("an export");
        me.tell(&fd.to_string());
        me.listen();
        cuda.mem_drop_chunk(CHUNK, chunk).expect("the end of it");
        me.tell("dropped");
        me.listen();
        return;
    }
    let before = free_bytes(&cuda);
    let mut exporter = me.spawn("exporter").expect("a process");
    let number: i32 = exporter.listen().parse().expect("an fd number");
    let fetched = fetch(exporter.pid(), number);
    exporter.tell("drop");
    assert_eq!(exporter.listen(), "dropped");
    assert_eq!(free_bytes(&cuda), before - CHUNK, "the exporter's fd and the fetched one are open");
    exporter.kill().expect("kill");
    assert_eq!(free_bytes(&cuda), before - CHUNK, "the fetched fd is open");
    assert_eq!(fake.device(0).orphans, 1);

    let handle = cuda.mem_import_fd(fetched.as_raw_fd()).expect("an import");
    drop(fetched);
    assert_eq!(free_bytes(&cuda), before - CHUNK, "the handle pins");
    let address = cuda.mem_reserve(CHUNK).expect("addresses");
    cuda.mem_map(address, CHUNK, 0, handle).expect("a mapping");
    cuda.mem_release(handle).expect("a release");
    cuda.mem_set_access(address, CHUNK, 0, 3).expect("access");
    assert!(cuda.is_filled(address, 0x5a, CHUNK).expect("a read"), "a dead process's bytes, as long as somebody has them");
    assert_eq!(free_bytes(&cuda), before - CHUNK, "the mapping pins");
    cuda.mem_unmap(address, CHUNK).expect("an unmapping");
    assert_eq!(free_bytes(&cuda), before);

    // What is given back reads as zeros when it comes again.
    let (_, address) = cuda.mem_chunk(before, 0, 0).expect("all memory there is");
    assert!(cuda.is_filled(address, 0, 64 << 20).expect("a read"));
}

#[test]
fn fds_of_one_device_share_an_inode_and_none_is_held_for_a_chunk() {
    let Some(_) = Inside::enter("fds_of_one_device_share_an_inode_and_none_is_held_for_a_chunk", &FakeConfig::default()) else { return };
    let (cuda, _) = start();
    let open_before = open_fds();
    let handles: Vec<u64> = (0..4).map(|_| cuda.mem_create(CHUNK, 0, POSIX_FD).expect("a chunk")).collect();
    assert_eq!(open_fds(), open_before);
    let fds: Vec<OwnedFd> = handles.iter().map(|&handle| own(cuda.mem_export_fd(handle).expect("an export"))).collect();
    let identity = |fd: &OwnedFd| nix::sys::stat::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).expect("fstat");
    assert!(fds.iter().all(|fd| identity(fd) == identity(&fds[0])));
    let flags = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GETFD).expect("F_GETFD");
    assert_eq!(flags, libc::FD_CLOEXEC);
    // Each fd is its chunk, and a new open of the same file is none.
    for (fd, &handle) in fds.iter().zip(&handles) {
        let imported = cuda.mem_import_fd(fd.as_raw_fd()).expect("an import");
        assert_ne!(imported, handle);
        cuda.mem_release(imported).expect("a release");
    }
    let path = format!("/proc/self/fd/{}", fds[0].as_raw_fd());
    let fresh = std::fs::File::open(path).expect("the export file");
    assert_eq!(cuda.mem_import_fd(fresh.as_raw_fd()), Err(CUresult::CUDA_ERROR_UNKNOWN));
}

#[test]
fn forty_thousand_chunks_fit_default_limits() {
    let config = FakeConfig { memory_bytes: Some(100 << 30), ..FakeConfig::default() };
    let Some(_) = Inside::enter("forty_thousand_chunks_fit_default_limits", &config) else { return };
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, 1024, 1024).expect("a limit");
    let (cuda, fake) = start();
    const COUNT: usize = 40_000;
    let began = std::time::Instant::now();
    let base = cuda.mem_reserve(COUNT * CHUNK).expect("addresses");
    for index in 0..COUNT {
        let handle = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("a chunk");
        cuda.mem_map(base + (index * CHUNK) as u64, CHUNK, 0, handle).expect("a mapping");
        cuda.mem_release(handle).expect("a release");
    }
    cuda.mem_set_access(base, COUNT * CHUNK, 0, 3).expect("access");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps").lines().count();
    assert!(maps < 1000, "{maps} maps");
    assert_eq!(fake.counters().mappings, COUNT as u64);
    for index in (0..COUNT).step_by(997) {
        let address = base + (index * CHUNK) as u64;
        assert_eq!(cuda.address_range(address + 5), Ok((address, CHUNK)));
        cuda.fill(address, u8::try_from(index % 251).expect("a byte"), 4096).expect("a fill");
    }
    for index in (0..COUNT).step_by(997) {
        let address = base + (index * CHUNK) as u64;
        assert_eq!(cuda.is_filled(address, u8::try_from(index % 251).expect("a byte"), 4096), Ok(true));
    }
    cuda.mem_unmap(base, COUNT * CHUNK).expect("one unmapping");
    assert_eq!(fake.device(0).used_bytes, 0);
    println!("40 000 chunks: {:?}", began.elapsed());
}

#[test]
fn faults_hit_the_call_they_name() {
    let config = FakeConfig { faults: Some("cuMemCreate#2=2; cuMemGetAddressRange#1+=500".to_owned()), ..FakeConfig::default() };
    let Some(_) = Inside::enter("faults_hit_the_call_they_name", &config) else { return };
    let (cuda, fake) = start();
    let create = || cuda.mem_create(CHUNK, 0, POSIX_FD);
    let first = create().expect("the first call works");
    assert_eq!(create(), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    create().expect("the third call works");
    assert_eq!(fake.counters().handles, 2, "a fault has no effect");
    assert_eq!(cuda.address_range(first), Err(CUresult::CUDA_ERROR_NOT_FOUND), "rules take base names too");

    fake.clear_faults();
    let began = std::time::Instant::now();
    fake.add_fault("cuMemRelease#*~20ms; cuMemRelease#1=999");
    assert_eq!(cuda.mem_release(first), Err(CUresult::CUDA_ERROR_UNKNOWN));
    cuda.mem_release(first).expect("the second call works");
    assert!(began.elapsed() >= core::time::Duration::from_millis(40));
    assert_eq!((fake.calls("cuMemCreate"), fake.calls("cuMemRelease")), (3, 2));
}

#[test]
fn a_forked_child_is_not_the_parent() {
    let Some(_) = Inside::enter("a_forked_child_is_not_the_parent", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
    let before = fake.device(0);
    // SAFETY: the child makes driver calls that return at once, and exits without unwinding or running handlers.
    match unsafe { nix::unistd::fork() }.expect("fork") {
        nix::unistd::ForkResult::Child => {
            let refused = cuda.mem_create(CHUNK, 0, POSIX_FD) == Err(CUresult::CUDA_ERROR_NOT_INITIALIZED)
                && cuda.init() == Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).expect("waitpid");
            assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
        }
    }
    let after = fake.device(0);
    assert_eq!((after.used_bytes, after.processes), (before.used_bytes, before.processes));
    assert_eq!((after.calls_after_fork, fake.counters().calls_after_fork), (2, 2));
    cuda.mem_drop_chunk(CHUNK, chunk).expect("the parent's state is whole");
    assert_eq!(fake.device(0).used_bytes, 0);
}

#[test]
fn a_child_that_outlives_its_parent_keeps_nothing_alive() {
    let Some(me) = Inside::enter("a_child_that_outlives_its_parent_keeps_nothing_alive", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    if me.role() == "parent" {
        cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
        // SAFETY: the child only sleeps until it is killed, or for so long.
        match unsafe { nix::unistd::fork() }.expect("fork") {
            nix::unistd::ForkResult::Child => {
                std::thread::sleep(core::time::Duration::from_secs(20));
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) };
            }
            nix::unistd::ForkResult::Parent { child } => me.tell(&child.to_string()),
        }
        me.listen();
        return;
    }
    let mut parent = me.spawn("parent").expect("a process");
    let child: i32 = parent.listen().parse().expect("a pid");
    assert_eq!(fake.device(0).used_bytes, CHUNK as u64);
    parent.kill().expect("kill");
    assert_eq!(fake.device(0).used_bytes, 0);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), nix::sys::signal::Signal::SIGKILL).expect("the child was alive");
}

#[test]
fn closing_all_fds_hurts_nobody() {
    let Some(_) = Inside::enter("closing_all_fds_hurts_nobody", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
    // SAFETY: nothing in this process uses an fd above 2 afterwards.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    assert_eq!(rc, 0);
    cuda.fill(chunk.1, 1, CHUNK).expect("a fill");
    let fd = own(cuda.mem_export_fd(chunk.0).expect("an export"));
    cuda.mem_import_fd(fd.as_raw_fd()).expect("an import");
    assert_eq!(fake.device(0).processes, 1);
}

#[test]
fn visible_devices_are_a_view_of_the_machine() {
    let config = FakeConfig { devices: Some(3), visible_devices: Some("2,0".to_owned()), ..FakeConfig::default() };
    let Some(me) = Inside::enter("visible_devices_are_a_view_of_the_machine", &config) else { return };
    let (cuda, fake) = start();
    if me.role() == "all" {
        assert_eq!(cuda.device_count(), Ok(3));
        let uuid: Vec<_> = (0..3).map(|device| cuda.device_uuid(device).expect("a uuid")).collect();
        me.tell(&format!("{:?} {:?}", uuid[2], uuid[0]));
        return;
    }
    assert_eq!(cuda.device_count(), Ok(2));
    let mut all = me
        .spawn_with("all", |command| {
            command.env_remove("CUDA_VISIBLE_DEVICES");
        })
        .expect("a process");
    assert_eq!(all.listen(), format!("{:?} {:?}", cuda.device_uuid(0).expect("a uuid"), cuda.device_uuid(1).expect("a uuid")));
    all.finish();
    cuda.mem_create(CHUNK, 0, POSIX_FD).expect("a chunk on the first visible device");
    assert_eq!(fake.device(2).used_bytes, CHUNK as u64);
    // Rights are per device.
    let (_, address) = cuda.mem_chunk(CHUNK, 1, POSIX_FD).expect("a chunk");
    assert_eq!(cuda.fill(address, 1, 1), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "device 0 is current and has no access");
    cuda.mem_set_access(address, CHUNK, 0, 1).expect("access");
    assert_eq!(cuda.is_filled(address, 0, CHUNK), Ok(true));
    assert_eq!(cuda.fill(address, 1, 1), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "read only");
}

#[test]
fn addresses_run_out() {
    let config = FakeConfig { va_bytes: Some(1 << 30), memory_bytes: Some(200 << 30), ..FakeConfig::default() };
    let Some(_) = Inside::enter("addresses_run_out", &config) else { return };
    let (cuda, _) = start();
    assert_eq!(cuda.mem_info(), Ok((200 << 30, 200 << 30)));
    let first = cuda.mem_reserve(1 << 30).expect("all addresses");
    assert_eq!(cuda.mem_reserve(CHUNK), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    cuda.mem_address_free(first, 1 << 30).expect("addresses back");
    assert_eq!(cuda.mem_reserve_at(CHUNK, first), Ok(first), "a free address is given where it is wished for");
}

#[test]
fn asynchronous_copies_finish_when_told() {
    let config = FakeConfig { asynchronous: Some("hold".to_owned()), ..FakeConfig::default() };
    let Some(_) = Inside::enter("asynchronous_copies_finish_when_told", &config) else { return };
    let (cuda, fake) = start();
    let (a, b) = (cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk"), cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk"));
    let stream = cuda.stream_create(1).expect("a stream");
    let event = cuda.event_create().expect("an event");
    cuda.fill_async(a.1, 7, CHUNK, stream).expect("a fill");
    cuda.copy_async(b.1, a.1, CHUNK, stream).expect("a copy");
    cuda.event_record(event, stream).expect("a record");
    assert_eq!(cuda.stream_query(stream), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(cuda.event_query(event), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(cuda.is_filled(b.1, 0, CHUNK), Ok(true), "a synchronous copy does not wait for a non-blocking stream");
    fake.release_queue();
    cuda.event_synchronize(event).expect("an event");
    assert_eq!(cuda.stream_query(stream), Ok(()));
    assert_eq!(cuda.is_filled(b.1, 7, CHUNK), Ok(true));
    assert_eq!(fake.counters().copies_into_dead_mappings, 0);

    fake.set_async(Some(2000));
    cuda.fill_async(b.1, 9, CHUNK, stream).expect("a fill");
    assert_eq!(cuda.stream_query(stream), Err(CUresult::CUDA_ERROR_NOT_READY));
    while cuda.stream_query(stream).is_err() {
        std::thread::yield_now();
    }
    assert_eq!(cuda.is_filled(b.1, 9, CHUNK), Ok(true));

    // Unmapping under a copy is what a GPU would not forgive.
    fake.set_async(None);
    cuda.copy_async(b.1, a.1, CHUNK, stream).expect("a copy");
    cuda.mem_unmap(a.1, CHUNK).expect("an unmapping");
    assert_eq!(fake.counters().copies_into_dead_mappings, 1);
    assert_eq!(cuda.stream_synchronize(stream), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(cuda.event_query(event), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), "nor ever forgives");
    assert_eq!(cuda.fill(b.1, 1, CHUNK), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(cuda.stream_synchronize(stream), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
}

#[test]
fn an_fd_that_a_child_inherited_pins_memory() {
    let Some(_) = Inside::enter("an_fd_that_a_child_inherited_pins_memory", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
    let fd = own(cuda.mem_export_fd(chunk.0).expect("an export"));
    // SAFETY: the child only sleeps until it is killed, or for so long.
    let child = match unsafe { nix::unistd::fork() }.expect("fork") {
        nix::unistd::ForkResult::Child => {
            std::thread::sleep(core::time::Duration::from_secs(20));
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        nix::unistd::ForkResult::Parent { child } => child,
    };
    drop(fd);
    cuda.mem_drop_chunk(CHUNK, chunk).expect("the end of the chunk");
    assert_eq!((fake.device(0).used_bytes, fake.device(0).orphans), (CHUNK as u64, 1));
    nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).expect("kill");
    nix::sys::wait::waitpid(child, None).expect("waitpid");
    assert_eq!((fake.device(0).used_bytes, fake.device(0).orphans), (0, 0));
}

#[test]
fn death_at_any_moment_leaves_the_machine_whole() {
    let Some(me) = Inside::enter("death_at_any_moment_leaves_the_machine_whole", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    if me.role() == "busy" {
        me.tell("busy");
        let mut kept = Vec::new();
        for round in 0_usize.. {
            kept.push(cuda.mem_chunk((1 + round % 3) * CHUNK, 0, POSIX_FD).expect("a chunk"));
            drop(own(cuda.mem_export_fd(kept[kept.len() - 1].0).expect("an export")));
            if kept.len() > 40 {
                for (at, chunk) in kept.drain(..).enumerate() {
                    cuda.mem_drop_chunk((1 + (round + 1 - 41 + at) % 3) * CHUNK, chunk).expect("the end of a chunk");
                }
            }
        }
    }
    for round in 0..12 {
        let mut busy: Vec<_> = (0..3).map(|_| me.spawn("busy").expect("a process")).collect();
        for peer in &mut busy {
            assert_eq!(peer.listen(), "busy");
        }
        std::thread::sleep(core::time::Duration::from_micros(500 + 1700 * round));
        for peer in busy {
            peer.kill().expect("kill");
        }
        assert_eq!((fake.device(0).used_bytes, fake.device(0).orphans, fake.device(0).processes), (0, 0, 1));
    }
    let total = cuda.mem_info().expect("cuMemGetInfo").1;
    cuda.mem_create(total, 0, POSIX_FD).expect("all memory there is");
    assert_eq!(cuda.mem_create(CHUNK, 0, POSIX_FD), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
}

#[test]
fn threads_do_not_disturb_each_other() {
    let Some(_) = Inside::enter("threads_do_not_disturb_each_other", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    std::thread::scope(|scope| {
        for value in 1..=4 {
            scope.spawn(move || {
                cuda.enter_primary(0);
                for _ in 0..60 {
                    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
                    let fd = own(cuda.mem_export_fd(chunk.0).expect("an export"));
                    cuda.fill(chunk.1, value, CHUNK).expect("a fill");
                    let handle = cuda.mem_import_fd(fd.as_raw_fd()).expect("an import");
                    let second = cuda.mem_reserve(CHUNK).expect("addresses");
                    cuda.mem_map(second, CHUNK, 0, handle).expect("a mapping");
                    cuda.mem_set_access(second, CHUNK, 0, 1).expect("access");
                    cuda.mem_drop_chunk(CHUNK, chunk).expect("the end of the chunk");
                    assert_eq!(cuda.is_filled(second, value, CHUNK), Ok(true));
                    cuda.mem_drop_chunk(CHUNK, (handle, second)).expect("the end of the import");
                }
            });
        }
    });
    let counters = fake.counters();
    assert_eq!((counters.handles, counters.mappings, counters.reservations), (0, 0, 0));
    assert_eq!((counters.copies_into_dead_mappings, counters.internal_errors), (0, 0));
    assert_eq!(fake.device(0).used_bytes, 0);
}

#[test]
fn orderly_exit_gives_memory_back() {
    let Some(me) = Inside::enter("orderly_exit_gives_memory_back", &FakeConfig::default()) else { return };
    let (cuda, fake) = start();
    if me.role() == "leaver" {
        let chunk = cuda.mem_chunk(8 * CHUNK, 0, POSIX_FD).expect("a chunk");
        cuda.fill(chunk.1, 1, 8 * CHUNK).expect("a fill");
        return;
    }
    let arena = std::path::Path::new(&std::env::var_os("FAKE_CUDA_DIR").expect("a machine")).join("gpu0.arena");
    me.spawn("leaver").expect("a process").finish();
    // Before anybody sweeps: the pages are gone from the file.
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(arena).expect("the arena"));
    assert_eq!(blocks, 0);
    assert_eq!(fake.device(0).used_bytes, 0);
}

#[test]
fn a_callback_holds_its_stream() {
    let Some(_) = Inside::enter("a_callback_holds_its_stream", &FakeConfig::default()) else { return };
    let (cuda, _) = start();
    static GO: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn wait(_: *mut c_void) {
        while !GO.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }
    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
    let stream = cuda.stream_create(1).expect("a stream");
    // SAFETY: a function of this program, which takes no data.
    unsafe { cuda.launch_host(stream, Some(wait), core::ptr::null_mut()) }.expect("a callback");
    cuda.fill_async(chunk.1, 3, CHUNK, stream).expect("a fill");
    assert_eq!(cuda.stream_query(stream), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(cuda.is_filled(chunk.1, 0, CHUNK), Ok(true));
    GO.store(true, Ordering::Release);
    cuda.stream_synchronize(stream).expect("the callback has returned");
    assert_eq!(cuda.is_filled(chunk.1, 3, CHUNK), Ok(true));
}

/// Fetches an fd of another process.
fn fetch(pid: u32, number: i32) -> OwnedFd {
    // SAFETY: two system calls that take numbers.
    let pidfd = own(i32::try_from(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }).expect("an fd"));
    // SAFETY: as above.
    own(i32::try_from(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) }).expect("an fd"))
}

fn own(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the fd was made just now, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}
