//! Handles that leave the process.

use core::time::Duration;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cuda_driver_sys::{CUmemAllocationType, CUpointer_attribute as PointerAttribute, CUresult, location_id};
use cuda_ipc_tests::driver::Inside;

use crate::facts::{Facts, Row, big, own};
use crate::pointers::describe;
use crate::{CHUNK, INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, OK, POSIX_FD, READ, READ_WRITE, UNKNOWN};

#[test]
fn exporting() {
    let Some(_) = Inside::enter_with_any_driver("sharing::exporting") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 3, 8);
    let fds: Vec<OwnedFd> = row.handles.iter().map(|&handle| own(cuda.mem_export_fd(handle).expect("an export"))).collect();
    let stat = |fd: &OwnedFd| nix::sys::stat::fstat(fd).expect("fstat");
    facts.known("exports of one device share an inode", fds.iter().all(|fd| stat(fd).st_ino == stat(&fds[0]).st_ino), true);
    let flags = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GETFD).expect("F_GETFD");
    facts.known("an exported fd is close-on-exec", flags == libc::FD_CLOEXEC, true);
    // True on the H200. The fake's are of a regular file: a device node needs a kernel driver.
    facts.open(
        "an exported fd is a character device",
        nix::sys::stat::SFlag::from_bits_truncate(stat(&fds[0]).st_mode) == nix::sys::stat::SFlag::S_IFCHR,
    );
    let second = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    facts.known("exporting twice gives two fds", second.as_raw_fd() != fds[0].as_raw_fd(), true);

    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    facts.code("import of /dev/null", cuda.mem_import_fd(null.as_raw_fd()), UNKNOWN);
    let memory = nix::sys::memfd::memfd_create(c"foreign", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).expect("memfd_create");
    facts.code("import of a memfd", cuda.mem_import_fd(memory.as_raw_fd()), UNKNOWN);
    facts.code("import of a closed number", cuda.mem_import_fd(987), UNKNOWN);
    let again = std::fs::File::open(format!("/proc/self/fd/{}", fds[0].as_raw_fd())).expect("the same file");
    facts.code("import of a fresh fd of the same file", cuda.mem_import_fd(again.as_raw_fd()), UNKNOWN);
    facts.code("import of fd -1", cuda.mem_import_fd(-1), UNKNOWN);

    let imported = cuda.mem_import_fd(fds[0].as_raw_fd()).expect("an import");
    facts.known("import in the exporting process gives the exporter's handle", imported == row.handles[0], false);
    let prop = cuda.mem_properties(imported).expect("properties");
    let seen = (prop.type_, location_id(&prop.location), prop.requestedHandleTypes.0);
    facts.known(
        "properties of an imported handle: type, device, handle types",
        seen,
        (CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED, 0, 0),
    );
    facts.code("export of an imported handle", cuda.mem_export_fd(imported).map(own), INVALID_VALUE);
    facts.known("a second import gives another handle", cuda.mem_import_fd(fds[0].as_raw_fd()).map(|second| second != imported), Ok(true));
    facts.code("cuMemMap of an imported handle at half its size", cuda.mem_map(row.at(4), CHUNK / 2, 0, imported), NOT_SUPPORTED);
    cuda.mem_map(row.at(4), CHUNK, 0, imported).expect("cuMemMap");
    cuda.mem_set_access(row.at(4), CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
    attributes(&mut facts, "an imported mapping", row.at(4), &[(10, "0"), (14, "0"), (7, "set")]);
    facts.known("an import in the same process has the exporter's BUFFER_ID", cuda.buffer_id(row.at(4)) == cuda.buffer_id(row.base), false);
    facts.code("retain from an imported mapping", cuda.mem_retain(row.at(4)).and_then(|handle| cuda.mem_release(handle)), OK);
    facts.code(
        "export of the handle retained from an imported mapping",
        {
            let retained = cuda.mem_retain(row.at(4)).expect("a retain");
            let answer = cuda.mem_export_fd(retained).map(own);
            cuda.mem_release(retained).expect("a release");
            answer
        },
        INVALID_VALUE,
    );
    let pool = cuda.pool_create(0, POSIX_FD).expect("cuMemPoolCreate");
    let pool_fd = own(cuda.pool_export_fd(pool).expect("an export"));
    facts.code("import of a pool's fd as memory", cuda.mem_import_fd(pool_fd.as_raw_fd()), NOT_SUPPORTED);
    facts.code("import of memory's fd as a pool", cuda.pool_import_fd(fds[0].as_raw_fd()), NOT_SUPPORTED);
    facts.code("import of a pool in its own process", cuda.pool_import_fd(pool_fd.as_raw_fd()), OK);
    facts.code(
        "legacy handle opened in its own process",
        {
            let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
            cuda.ipc_get(plain).and_then(|handle| cuda.ipc_open(handle))
        },
        INVALID_CONTEXT,
    );
}

#[test]
fn out_of_fds() {
    let Some(_) = Inside::enter_with_any_driver("sharing::out_of_fds") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 2, 2);
    let fd = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    let (soft, hard) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).expect("getrlimit");
    let limit = |soft| nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, soft, hard).expect("setrlimit");
    // No number below the limit is free.
    let highest = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(0)).map(own).expect("dup");
    limit(u64::try_from(highest.as_raw_fd()).expect("a number") + 1);
    facts.code("export without a free fd", cuda.mem_export_fd(row.handles[1]).map(own), CUresult::CUDA_ERROR_OPERATING_SYSTEM);
    facts.code("import without a free fd", cuda.mem_import_fd(fd.as_raw_fd()).map(|handle| cuda.mem_release(handle)), OK);
    facts.code("cuMemCreate without a free fd", cuda.mem_create(CHUNK, 0, POSIX_FD).map(|handle| cuda.mem_release(handle)), OK);
    facts.code("cuMemGetInfo without a free fd", cuda.mem_info(), OK);
    limit(soft);
    facts.code("export with free fds again", cuda.mem_export_fd(row.handles[1]).map(own), OK);
    facts.code("import with free fds again", cuda.mem_import_fd(fd.as_raw_fd()).map(|handle| cuda.mem_release(handle)), OK);
}

#[test]
fn two_processes() {
    let Some(me) = Inside::enter_with_any_driver("sharing::two_processes") else { return };
    let (cuda, mut facts) = Facts::start();
    if me.role() == "exporter" {
        let chunk = cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk");
        cuda.fill(chunk.1, 0x5a, big()).expect("a fill");
        let fd = cuda.mem_export_fd(chunk.0).expect("an export");
        let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
        cuda.fill(plain, 0x17, CHUNK).expect("a fill");
        let legacy = cuda.ipc_get(plain).expect("cuIpcGetMemHandle").reserved.map(|byte| byte.cast_unsigned());
        let pool = cuda.pool_create(0, POSIX_FD).expect("cuMemPoolCreate");
        let pool_fd = cuda.pool_export_fd(pool).expect("an export");
        let stream = core::ptr::null_mut();
        let pooled = cuda.alloc_from_pool(CHUNK, pool, stream).expect("cuMemAllocFromPoolAsync");
        cuda.stream_synchronize(stream).expect("cuStreamSynchronize");
        cuda.fill(pooled, 0x99, CHUNK).expect("a fill");
        let pointer = cuda.pool_export_pointer(pooled).expect("cuMemPoolExportPointer");
        me.tell(&format!("{fd} {pool_fd} {} {}", hex(&legacy), hex(&pointer)));
        me.listen();
        cuda.mem_drop_chunk(big(), chunk).expect("the end of the chunk");
        // SAFETY: the driver gave the fd to us, and nobody uses it any more.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        me.tell("dropped");
        me.listen();
        return;
    }
    let mut exporter = me.spawn("exporter").expect("a process");
    let words = exporter.listen();
    let words: Vec<&str> = words.split(' ').collect();
    let number = |at: usize| words[at].parse::<i32>().expect("an fd number");
    let fd = fetch(exporter.pid(), number(0));
    let handle = cuda.mem_import_fd(fd.as_raw_fd()).expect("an import");
    let address = cuda.mem_reserve(big()).expect("cuMemAddressReserve");
    facts.code("cuMemMap of an imported handle at half its size", cuda.mem_map(address, big() / 2, 0, handle), NOT_SUPPORTED);
    cuda.mem_map(address, big(), 0, handle).expect("cuMemMap");
    cuda.mem_release(handle).expect("cuMemRelease");
    drop(fd);
    cuda.mem_set_access(address, big(), 0, READ_WRITE).expect("cuMemSetAccess");
    facts.known("the importer reads the exporter's bytes", cuda.is_filled(address, 0x5a, big()), Ok(true));
    facts.known("cuMemGetAddressRange of an imported mapping is the chunk", cuda.address_range(address + 99) == Ok((address, big())), true);
    attributes(&mut facts, "an imported mapping", address, &[(1, "0"), (10, "0"), (14, "0")]);

    // Pool.
    let pool_fd = fetch(exporter.pid(), number(1));
    let pool = cuda.pool_import_fd(pool_fd.as_raw_fd());
    facts.code("cuMemPoolImportFromShareableHandle", pool, OK);
    let pool = pool.expect("a pool");
    let data = bytes(words[3]);
    let pointer = cuda.pool_import_pointer(pool, data);
    facts.code("cuMemPoolImportPointer", pointer, OK);
    let pointer = pointer.expect("a pointer");
    facts.code("read before cuMemPoolSetAccess", cuda.is_filled(pointer, 0x99, CHUNK), OK);
    facts.code("cuMemPoolSetAccess", cuda.pool_set_access(pool, 0, READ_WRITE), OK);
    facts.known("the importer reads the pool's bytes", cuda.is_filled(pointer, 0x99, CHUNK), Ok(true));
    facts.known("importing a pointer twice gives the same address", cuda.pool_import_pointer(pool, data) == Ok(pointer), true);
    attributes(&mut facts, "an imported pool pointer", pointer, &[(1, "0"), (7, "set"), (10, "0"), (14, "0"), (17, "set")]);
    facts.code("allocation from an imported pool", cuda.alloc_from_pool(CHUNK, pool, core::ptr::null_mut()), INVALID_VALUE);
    facts.code("cuMemPoolExportPointer of an imported pointer", cuda.pool_export_pointer(pointer), INVALID_VALUE);
    facts.code("cuMemPoolExportToShareableHandle of an imported pool", cuda.pool_export_fd(pool).map(own), INVALID_VALUE);
    // Not asked on a GPU yet.
    facts.open("cuMemGetAddressRange of an imported pool pointer", cuda.address_range(pointer).map(|(base, size)| (base == pointer, size)));
    let reach = |attribute| cuda.attribute(attribute, pointer);
    let (start, size) = (PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE);
    facts.open("RANGE of an imported pool pointer", (reach(start).map(|start| start == pointer), reach(size)));
    facts.open("cuMemPoolSetAccess to read alone", cuda.pool_set_access(pool, 0, READ));
    facts.code("cuMemPoolSetAccess", cuda.pool_set_access(pool, 0, READ_WRITE), OK);
    facts.code("free of the imported pointer", cuda.mem_free(pointer), OK);
    if let Ok(second) = cuda.pool_import_pointer(pool, data) {
        let freed = std::thread::scope(|scope| scope.spawn(|| cuda.mem_free(second)).join());
        facts.open("free of an imported pointer without a context", freed.ok());
    }
    facts.code("free of it a second time", cuda.mem_free(pointer), INVALID_VALUE);
    facts.code("cuMemPoolDestroy of an imported pool", cuda.pool_destroy(pool), OK);

    // Legacy.
    let handle = cuda_driver_sys::CUipcMemHandle_v1 { reserved: bytes(words[2]).map(u8::cast_signed) };
    let opened = cuda.ipc_open(handle);
    facts.code("cuIpcOpenMemHandle", opened, OK);
    if let Ok(opened) = opened {
        facts.known("the importer reads the exporter's bytes by legacy IPC", cuda.is_filled(opened, 0x17, CHUNK), Ok(true));
        facts.known("opened twice: the same address", cuda.ipc_open(handle).map(|second| second == opened), Ok(true));
        attributes(&mut facts, "an opened legacy handle", opened, &[(1, "set"), (10, "0"), (14, "0")]);
        facts.code("cuIpcCloseMemHandle", cuda.ipc_close(opened), OK);
        facts.code("cuIpcCloseMemHandle again", cuda.ipc_close(opened), OK);
        facts.code("cuIpcCloseMemHandle a third time", cuda.ipc_close(opened), INVALID_VALUE);
    }

    // What pins.
    let close_to = |bytes: usize, expected: usize| bytes.abs_diff(expected) <= big() / 4;
    let before = cuda.mem_info().expect("cuMemGetInfo").0;
    exporter.tell("drop");
    assert_eq!(exporter.listen(), "dropped");
    let free = || cuda.mem_info().expect("cuMemGetInfo").0;
    facts.known("a foreign mapping pins memory that its exporter gave up", close_to(free(), before), true);
    facts.known("and its bytes can still be read", cuda.is_filled(address, 0x5a, big()), Ok(true));
    cuda.mem_unmap(address, big()).expect("cuMemUnmap");
    facts.known("unmapping gives it back", close_to(free(), before + big()), true);
    exporter.finish();
}

#[test]
fn an_fd_pins() {
    let Some(me) = Inside::enter_with_any_driver("sharing::an_fd_pins") else { return };
    let (cuda, mut facts) = Facts::start();
    if me.role() == "exporter" {
        let chunk = cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk");
        cuda.fill(chunk.1, 0x5a, big()).expect("a fill");
        me.tell(&cuda.mem_export_fd(chunk.0).expect("an export").to_string());
        me.listen();
        return;
    }
    let close_to = |bytes: usize, expected: usize| bytes.abs_diff(expected) <= big() / 4;
    let free = || cuda.mem_info().expect("cuMemGetInfo").0;
    // The other process's context is there in one measurement and not in the other, so only this process's memory is compared.
    let before = free();
    let chunk = cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk");
    let fd = own(cuda.mem_export_fd(chunk.0).expect("an export"));
    cuda.mem_drop_chunk(big(), chunk).expect("the end of the chunk");
    facts.known("an exported fd alone pins memory", close_to(free(), before - big()), true);
    drop(fd);
    facts.known("closing it gives the memory back", close_to(free(), before), true);

    let mut exporter = me.spawn("exporter").expect("a process");
    let number: i32 = exporter.listen().parse().expect("an fd number");
    let fd = fetch(exporter.pid(), number);
    exporter.kill().expect("kill");
    std::thread::sleep(Duration::from_millis(500));
    facts.known("the fd of a killed process pins its memory", close_to(free(), before - big()), true);
    let handle = cuda.mem_import_fd(fd.as_raw_fd());
    facts.code("import from a killed process", handle, OK);
    drop(fd);
    if let Ok(handle) = handle {
        let address = cuda.mem_reserve(big()).expect("cuMemAddressReserve");
        cuda.mem_map(address, big(), 0, handle).expect("cuMemMap");
        cuda.mem_set_access(address, big(), 0, READ).expect("cuMemSetAccess");
        facts.known("the bytes of a killed process can be read", cuda.is_filled(address, 0x5a, big()), Ok(true));
        cuda.mem_unmap(address, big()).expect("cuMemUnmap");
        cuda.mem_release(handle).expect("cuMemRelease");
    }
    facts.known("then the memory is back", close_to(free(), before), true);
}

/// Asks for some attributes by number.
fn attributes(facts: &mut Facts, what: &str, address: u64, expected: &[(u32, &str)]) {
    for &(number, expected) in expected {
        let value = describe(facts, number, facts.cuda.attribute(PointerAttribute(number), address));
        facts.known(&format!("attribute {number} of {what}"), value, expected.to_owned());
    }
}

/// Fetches an fd of a process that this one started.
fn fetch(pid: u32, number: i32) -> OwnedFd {
    // SAFETY: a system call that takes numbers.
    let pidfd = own(i32::try_from(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }).expect("an fd"));
    // SAFETY: as above.
    own(i32::try_from(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) }).expect("an fd"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> [u8; 64] {
    core::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hex"))
}
