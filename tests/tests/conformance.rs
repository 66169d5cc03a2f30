//! The same questions to the fake driver and to a real one.
//!
//! Runs against the driver that the loader finds, and against the fake where it finds none. Every answer is printed as `conformance: FACT = ANSWER`. What
//! was measured on an H200 is asserted; the rest is printed with `open:`, so that two runs can be compared. Each test is a process of its own, because a
//! real driver may not recover from some of the questions. At most some hundred MiB of device memory are used. The file is as long as the list of questions.

use core::ffi::c_void;
use core::fmt::Debug;
use core::time::Duration;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cuda_driver_sys::{
    CUdevice_attribute as DeviceAttribute, CUdeviceptr, CUmemAllocationType, CUpointer_attribute as PointerAttribute, CUresult, CUstream,
    location_id,
};
use cuda_ipc_tests::driver::{Answer, Cuda, Fake, Inside};

const CHUNK: usize = 2 << 20;
const NONE: u32 = 0;
const POSIX_FD: u32 = 1;
const FABRIC: u32 = 8;
const READ: u32 = 1;
const READ_WRITE: u32 = 3;

/// Collects answers; dropping it fails the test if a known one was different.
struct Facts {
    cuda: Cuda,
    wrong: Vec<String>,
}

impl Facts {
    fn start() -> (Cuda, Self) {
        let cuda = Cuda::start();
        cuda.enter_primary(0);
        println!("conformance: driver = {}", if Fake::find().is_some() { "fake" } else { "real" });
        (cuda, Self { cuda, wrong: Vec::new() })
    }

    /// A fact that was measured.
    fn known<T: Debug + PartialEq>(&mut self, fact: &str, observed: T, expected: T) {
        println!("conformance: {fact} = {observed:?}");
        if observed != expected {
            self.wrong.push(format!("{fact} = {observed:?}, expected {expected:?}"));
        }
    }

    /// A code that was measured.
    fn code<T>(&mut self, fact: &str, observed: Answer<T>, expected: CUresult) {
        let observed = observed.err().unwrap_or(CUresult::CUDA_SUCCESS);
        println!("conformance: {fact} = {}", self.name(observed));
        if observed != expected {
            self.wrong.push(format!("{fact} = {}, expected {}", self.name(observed), self.name(expected)));
        }
    }

    /// What nobody has measured yet.
    fn open(&self, fact: &str, observed: impl Debug) {
        println!("conformance: open: {fact} = {observed:?}");
    }

    /// A code that nobody has measured yet.
    fn open_code<T>(&self, fact: &str, observed: &Answer<T>) {
        println!("conformance: open: {fact} = {}", self.outcome(observed));
    }

    fn outcome<T>(&self, observed: &Answer<T>) -> String {
        self.name(observed.as_ref().err().copied().unwrap_or(CUresult::CUDA_SUCCESS))
    }

    fn name(&self, code: CUresult) -> String {
        let mut text = core::ptr::null();
        // SAFETY: a live out pointer.
        let found = unsafe { (self.cuda.raw.cuGetErrorName)(code, &raw mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return code.0.to_string();
        }
        // SAFETY: the driver's own static string.
        let name = unsafe { core::ffi::CStr::from_ptr(text) };
        format!("{} ({})", name.to_string_lossy(), code.0)
    }
}

impl Drop for Facts {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.wrong.is_empty(), "the driver differs:\n{}", self.wrong.join("\n"));
        }
    }
}

const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;
const OK: CUresult = CUresult::CUDA_SUCCESS;

/// Chunks of `CHUNK` bytes one after another in one reservation, with access to all of them.
struct Row {
    cuda: Cuda,
    base: CUdeviceptr,
    reserved: usize,
    handles: Vec<u64>,
}

impl Row {
    fn new(cuda: Cuda, chunks: usize, reserved_chunks: usize) -> Self {
        let row = Self::without_access(cuda, chunks, reserved_chunks);
        cuda.mem_set_access(row.base, chunks * CHUNK, 0, READ_WRITE).expect("cuMemSetAccess over many mappings");
        row
    }

    fn without_access(cuda: Cuda, chunks: usize, reserved_chunks: usize) -> Self {
        let reserved = reserved_chunks * CHUNK;
        let base = cuda.mem_reserve(reserved).expect("cuMemAddressReserve");
        let handles: Vec<u64> = (0..chunks).map(|_| cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate")).collect();
        for (index, &handle) in handles.iter().enumerate() {
            cuda.mem_map(base + (index * CHUNK) as u64, CHUNK, 0, handle).expect("cuMemMap");
        }
        Self { cuda, base, reserved, handles }
    }

    fn at(&self, index: usize) -> CUdeviceptr {
        self.base + (index * CHUNK) as u64
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        // Chunk by chunk: a test may have unmapped some.
        for index in 0..self.handles.len() {
            let _ = self.cuda.mem_unmap(self.at(index), CHUNK);
            let _ = self.cuda.mem_release(self.handles[index]);
        }
        let _ = self.cuda.mem_address_free(self.base, self.reserved);
    }
}

#[test]
fn device() {
    let Some(_) = Inside::enter_with_any_driver("device") else { return };
    let (cuda, mut facts) = Facts::start();
    facts.open("cuDriverGetVersion", cuda.driver_version());
    facts.open("cuDeviceGetName", cuda.device_name(0));
    let attributes = [
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED, 1),
        ("POSIX_FILE_DESCRIPTOR_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
        ("FABRIC_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1),
        ("MEMPOOL_SUPPORTED_HANDLE_TYPES", DeviceAttribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 9),
        ("UNIFIED_ADDRESSING", DeviceAttribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
    ];
    for (name, attribute, expected) in attributes {
        facts.known(&format!("device attribute {name}"), cuda.device_attribute(attribute, 0), Ok(expected));
    }
    for (name, attribute) in [
        ("MEMORY_POOLS_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        ("IPC_EVENT_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
        ("PAGEABLE_MEMORY_ACCESS", DeviceAttribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
        ("DMA_BUF_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        ("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
        ("MULTICAST_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),
        ("HOST_REGISTER_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
    ] {
        facts.open(&format!("device attribute {name}"), cuda.device_attribute(attribute, 0));
    }
    facts.known("allocation granularity", cuda.granularity(0), Ok(CHUNK));
    facts.open_code("cuDeviceGet of a device that is not there", &cuda.device(99));
}

#[test]
fn creation() {
    let Some(_) = Inside::enter_with_any_driver("creation") else { return };
    let (cuda, mut facts) = Facts::start();
    facts.code("cuMemCreate with FABRIC", cuda.mem_create(CHUNK, 0, FABRIC), CUresult::CUDA_ERROR_NOT_PERMITTED);
    facts.code("cuMemCreate with POSIX_FD and FABRIC", cuda.mem_create(CHUNK, 0, POSIX_FD | FABRIC), CUresult::CUDA_ERROR_NOT_PERMITTED);
    facts.open_code("cuMemCreate of half a granule", &cuda.mem_create(CHUNK / 2, 0, POSIX_FD));
    facts.open_code("cuMemCreate of nothing", &cuda.mem_create(0, 0, POSIX_FD));
    facts.open_code("cuMemCreate with WIN32", &cuda.mem_create(CHUNK, 0, 2));
    facts.open_code("cuMemCreate on a device that is not there", &cuda.mem_create(CHUNK, 99, POSIX_FD));
    let total = cuda.mem_info().expect("cuMemGetInfo").1;
    facts.open_code("cuMemCreate of twice the memory", &cuda.mem_create((2 * total).next_multiple_of(CHUNK), 0, POSIX_FD));
    facts.open_code("cuMemAddressReserve of half a granule", &cuda.mem_reserve(CHUNK / 2));
    facts.open_code("cuMemAddressReserve of nothing", &cuda.mem_reserve(0));
    facts.open_code("cuMemAddressReserve of 2^60 bytes", &cuda.mem_reserve(1 << 60));
    facts.open_code("cuMemAlloc of nothing", &cuda.mem_alloc(0));
    facts.open_code("cuMemAlloc of twice the memory", &cuda.mem_alloc(2 * total));

    let none = cuda.mem_create(CHUNK, 0, NONE).expect("cuMemCreate");
    facts.code("export of a handle made with type NONE", cuda.mem_export_fd(none), INVALID_VALUE);
    let handle = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    let prop = cuda.mem_properties(handle).expect("properties");
    facts.open("handle types of a handle made with POSIX_FD", prop.requestedHandleTypes.0);
    cuda.mem_release(none).expect("cuMemRelease");
    cuda.mem_release(handle).expect("cuMemRelease");
    facts.open_code("cuMemRelease of 0", &cuda.mem_release(0));
}

#[test]
fn mapping() {
    let Some(_) = Inside::enter_with_any_driver("mapping") else { return };
    let (cuda, mut facts) = Facts::start();
    let base = cuda.mem_reserve(8 * CHUNK).expect("cuMemAddressReserve");
    let small = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    let large = cuda.mem_create(2 * CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    facts.code("cuMemMap of twice the size", cuda.mem_map(base, 2 * CHUNK, 0, small), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let try_map = |fact: &str, address, size, offset, handle| {
        let answer = cuda.mem_map(address, size, offset, handle);
        facts.open_code(fact, &answer);
        if answer.is_ok() {
            facts.open_code(&format!("{fact}: cuMemUnmap"), &cuda.mem_unmap(address, size));
        }
    };
    try_map("cuMemMap of half the chunk", base, CHUNK, 0, large);
    try_map("cuMemMap of the chunk's second half", base, CHUNK, CHUNK, large);
    try_map("cuMemMap with an offset and the whole size", base, 2 * CHUNK, CHUNK, large);
    try_map("cuMemMap between granules", base + 4096, CHUNK, 0, small);
    try_map("cuMemMap of no handle", base, CHUNK, 0, 0);
    try_map("cuMemMap past the reservation", base + 7 * CHUNK as u64, 2 * CHUNK, 0, large);
    try_map("cuMemMap outside of reservations", 1 << 40, CHUNK, 0, small);

    cuda.mem_map(base, CHUNK, 0, small).expect("cuMemMap");
    facts.open_code("cuMemMap where something is mapped", &cuda.mem_map(base, 2 * CHUNK, 0, large));
    cuda.mem_map(base + CHUNK as u64, 2 * CHUNK, 0, large).expect("cuMemMap");
    facts.open_code("cuMemAddressFree with mappings", &cuda.mem_address_free(base, 8 * CHUNK));
    facts.open_code("cuMemAddressFree of a part", &cuda.mem_address_free(base + 4 * CHUNK as u64, 4 * CHUNK));
    facts.open_code("cuMemAddressFree of the first part", &cuda.mem_address_free(base, CHUNK));
    facts.open_code("cuMemUnmap of half a mapping", &cuda.mem_unmap(base + CHUNK as u64, CHUNK));
    facts.open_code("cuMemUnmap of a mapping and half of the next", &cuda.mem_unmap(base, 2 * CHUNK));
    facts.open_code("cuMemUnmap of nothing mapped", &cuda.mem_unmap(base + 5 * CHUNK as u64, CHUNK));
    facts.open_code("cuMemUnmap over a mapping and unmapped room behind it", &cuda.mem_unmap(base + CHUNK as u64, 3 * CHUNK));
    facts.open_code("is it mapped after that", &cuda.address_range(base + CHUNK as u64));
    let _ = cuda.mem_map(base + CHUNK as u64, 2 * CHUNK, 0, large);
    facts.open_code("one cuMemUnmap over two mappings of different sizes", &cuda.mem_unmap(base, 3 * CHUNK));

    cuda.mem_map(base, CHUNK, 0, small).expect("cuMemMap");
    let another = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    cuda.mem_map(base + 2 * CHUNK as u64, CHUNK, 0, another).expect("cuMemMap");
    facts.open_code("cuMemUnmap over mapping, hole, mapping", &cuda.mem_unmap(base, 3 * CHUNK));
    let left = (cuda.address_range(base).is_ok(), cuda.address_range(base + 2 * CHUNK as u64).is_ok());
    facts.open("what is mapped after that", left);
    for offset in [0, 2] {
        let _ = cuda.mem_unmap(base + offset * CHUNK as u64, CHUNK);
    }
    cuda.mem_map(base, CHUNK, 0, small).expect("cuMemMap");
    facts.open_code("cuMemRelease with a live mapping", &cuda.mem_release(small));
    let retained = cuda.mem_retain(base);
    facts.open_code("retain from the mapping of a released handle", &retained);
    if let Ok(retained) = retained {
        facts.open("the retained handle has the old value", retained == small);
        facts.open_code("export of the retained handle", &cuda.mem_export_fd(retained).map(own));
        facts.open_code("release of the retained handle", &cuda.mem_release(retained));
    }
    let inner = cuda.mem_retain(base + 12_345);
    facts.open_code("retain of an inner address", &inner);
    let _ = inner.map(|handle| cuda.mem_release(handle));
    // Last, because a driver may do what it is asked.
    facts.open_code("cuMemRelease once more", &cuda.mem_release(small));
    facts.open_code("cuMemMap of a released handle", &cuda.mem_map(base + CHUNK as u64, CHUNK, 0, small));
    facts.open_code("properties of a released handle", &cuda.mem_properties(small));
    facts.open_code("export of a released handle", &cuda.mem_export_fd(small).map(own));
    let _ = (cuda.mem_unmap(base, CHUNK), cuda.mem_unmap(base + CHUNK as u64, CHUNK));
    facts
        .open_code("cuMemAddressFree twice", &cuda.mem_address_free(base, 8 * CHUNK).and_then(|()| cuda.mem_address_free(base, 8 * CHUNK)));
    let _ = (cuda.mem_release(large), cuda.mem_release(another));
}

#[test]
fn access() {
    let Some(_) = Inside::enter_with_any_driver("access") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::without_access(cuda, 4, 8);
    facts.open_code("copy into a mapping without access", &cuda.fill(row.base, 1, 1));
    facts.open_code("copy from a mapping without access", &cuda.is_filled(row.base, 0, 1));
    facts.open("cuMemGetAccess before any is set", cuda.mem_get_access(row.base, 0));
    facts.code("cuMemSetAccess on a range not wholly mapped", cuda.mem_set_access(row.base, 5 * CHUNK, 0, READ_WRITE), INVALID_VALUE);
    facts.open_code("cuMemSetAccess on half a chunk", &cuda.mem_set_access(row.base, CHUNK / 2, 0, READ_WRITE));
    facts.open_code("cuMemSetAccess on unmapped room", &cuda.mem_set_access(row.at(5), CHUNK, 0, READ_WRITE));
    facts.open_code("cuMemSetAccess for a device that is not there", &cuda.mem_set_access(row.base, CHUNK, 99, READ_WRITE));
    facts.open_code("cuMemSetAccess with rights 2", &cuda.mem_set_access(row.base, CHUNK, 0, 2));
    facts.open_code("cuMemSetAccess on the first of four", &cuda.mem_set_access(row.base, CHUNK, 0, READ_WRITE));
    facts.open_code("copy over a chunk with and one without access", &cuda.fill(row.base, 1, 2 * CHUNK));
    facts.code("one cuMemSetAccess over many mappings", cuda.mem_set_access(row.base, 4 * CHUNK, 0, READ_WRITE), OK);
    facts.known("cuMemGetAccess", cuda.mem_get_access(row.base, 0), Ok(u64::from(READ_WRITE)));
    facts.code("copy over many chunks", cuda.fill(row.base, 0x11, 4 * CHUNK), OK);
    facts.known("the bytes", cuda.is_filled(row.base, 0x11, 4 * CHUNK), Ok(true));
    facts.code("copy that leaves the mappings", cuda.fill(row.at(3), 1, 2 * CHUNK), INVALID_VALUE);
    facts.code("copy into unmapped room", cuda.fill(row.at(5), 1, 1), INVALID_VALUE);

    facts.code("cuMemSetAccess read only", cuda.mem_set_access(row.base, CHUNK, 0, READ), OK);
    facts.code("copy from a read-only mapping", cuda.copy(row.at(1), row.base, CHUNK), OK);
    facts.code("copy into a read-only mapping", cuda.copy(row.base, row.at(1), CHUNK), INVALID_VALUE);
    facts.open_code("host copy into a read-only mapping", &cuda.write(row.base, &[1; 16]));
    facts.open_code("memset of a read-only mapping", &cuda.fill(row.base, 1, 16));
    facts.open_code("copy into a read-only and a writable mapping", &cuda.fill(row.base, 1, 2 * CHUNK));
    facts.open_code("cuMemSetAccess back to none", &cuda.mem_set_access(row.base, CHUNK, 0, 0));
    facts.open_code("copy from a mapping whose access was taken", &cuda.is_filled(row.base, 0x11, 16));
    facts.open_code("cuMemSetAccess again", &cuda.mem_set_access(row.base, CHUNK, 0, READ_WRITE));

    // Two reservations side by side.
    let first = cuda.mem_reserve(2 * CHUNK).expect("cuMemAddressReserve");
    cuda.mem_address_free(first, 2 * CHUNK).expect("cuMemAddressFree");
    let (low, high) = (cuda.mem_reserve_at(CHUNK, first), cuda.mem_reserve_at(CHUNK, first + CHUNK as u64));
    let (Ok(low), Ok(high)) = (low, high) else { panic!("cuMemAddressReserve") };
    facts.open("reservations at wished-for addresses", (low == first, high == first + CHUNK as u64));
    if high == low + CHUNK as u64 {
        for address in [low, high] {
            let handle = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
            cuda.mem_map(address, CHUNK, 0, handle).expect("cuMemMap");
            cuda.mem_release(handle).expect("cuMemRelease");
        }
        facts.open_code("cuMemSetAccess over two reservations", &cuda.mem_set_access(low, 2 * CHUNK, 0, READ_WRITE));
        for address in [low, high] {
            cuda.mem_set_access(address, CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
        }
        facts.open_code("copy over two reservations", &cuda.fill(low, 1, 2 * CHUNK));
        facts.open_code("cuMemUnmap over two reservations", &cuda.mem_unmap(low, 2 * CHUNK));
        for address in [low, high] {
            let _ = cuda.mem_unmap(address, CHUNK);
        }
    }
    let _ = (cuda.mem_address_free(low, CHUNK), cuda.mem_address_free(high, CHUNK));
}

#[test]
fn pointers() {
    let Some(_) = Inside::enter_with_any_driver("pointers") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 3, 8);
    let inner = row.at(1) + 4711;
    let attribute = |attribute, address| cuda.attribute(attribute, address);
    facts.known("cuMemGetAddressRange on VMM memory is the chunk", cuda.address_range(inner) == Ok((row.at(1), CHUNK)), true);
    let range = (
        attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inner),
        attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, inner),
    );
    facts.known("RANGE is the reservation", range == (Ok(row.base), Ok(8 * CHUNK as u64)), true);
    let range = (
        attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, inner),
        attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE, inner),
    );
    facts.known("MAPPING is the chunk", range == (Ok(row.at(1)), Ok(CHUNK as u64)), true);
    let ids: Vec<_> = (0..3).map(|index| cuda.buffer_id(row.at(index)).expect("BUFFER_ID")).collect();
    facts.known("every chunk has its own BUFFER_ID", ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], true);
    facts.known("a chunk has one BUFFER_ID", cuda.buffer_id(inner) == Ok(ids[1]), true);

    let legacy = PointerAttribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    let types = PointerAttribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES;
    let pool_of = PointerAttribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
    let mut classify = |what: &str, address, expected: (u64, u64, bool)| {
        let seen = (attribute(legacy, address), attribute(types, address), attribute(pool_of, address).map(|pool| pool != 0));
        facts.known(&format!("{what}: legacy, handle types, has pool"), seen, (Ok(expected.0), Ok(expected.1), Ok(expected.2)));
    };
    classify("VMM with POSIX_FD", row.base, (0, 1, false));
    let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    classify("cuMemAlloc", plain, (1, 0, false));
    let stream = core::ptr::null_mut();
    let default = cuda.alloc_async(CHUNK, stream).expect("cuMemAllocAsync");
    classify("default pool", default, (0, 0, true));
    let pool = cuda.pool_create(0, POSIX_FD).expect("cuMemPoolCreate");
    let pooled = cuda.alloc_from_pool(CHUNK, pool, stream).expect("cuMemAllocFromPoolAsync");
    cuda.stream_synchronize(stream).expect("cuStreamSynchronize");
    classify("pool with POSIX_FD", pooled, (0, 1, true));
    let default_pool = cuda.default_pool(0).expect("cuDeviceGetDefaultMemPool");
    facts.code("export of the default pool", cuda.pool_export_fd(default_pool).map(own), INVALID_VALUE);
    facts.code("retain on cuMemAlloc memory", cuda.mem_retain(plain), INVALID_VALUE);
    facts.code("retain on pool memory", cuda.mem_retain(pooled), INVALID_VALUE);
    facts.open_code("export of a pointer of the default pool", &cuda.pool_export_pointer(default));
    facts.open_code("cuIpcGetMemHandle on VMM memory", &cuda.ipc_get(row.base));
    facts.open_code("cuIpcGetMemHandle on pool memory", &cuda.ipc_get(pooled));
    facts.open("cuMemGetAddressRange of 1000 bytes of cuMemAlloc", {
        let some = cuda.mem_alloc(1000).expect("cuMemAlloc");
        let range = cuda.address_range(some + 10).map(|(base, size)| (base == some, size));
        cuda.mem_free(some).expect("cuMemFree");
        range
    });

    // Everything about every kind of pointer.
    let mut on_heap = vec![0_u8; 64];
    let host = cuda.mem_host_alloc(CHUNK).expect("cuMemHostAlloc");
    let managed = cuda.mem_alloc_managed(CHUNK).expect("cuMemAllocManaged");
    let no_access = Row::without_access(cuda, 1, 1);
    let freed = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    cuda.mem_free(freed).expect("cuMemFree");
    let kinds = [
        ("VMM", row.base),
        ("VMM without access", no_access.base),
        ("unmapped room of a reservation", row.at(5)),
        ("cuMemAlloc", plain),
        ("freed cuMemAlloc", freed),
        ("default pool", default),
        ("POSIX_FD pool", pooled),
        ("managed", managed),
        ("cuMemHostAlloc", host.addr() as u64),
        ("heap", on_heap.as_mut_ptr().addr() as u64),
        ("null", 0),
        ("address 2^40", 1 << 40),
    ];
    for (kind, address) in kinds {
        facts.open(
            &format!("cuMemGetAddressRange of {kind}"),
            describe(&facts, cuda.address_range(address).map(|(base, _)| u64::from(base == address))),
        );
        for number in 1..=21 {
            let attribute = PointerAttribute(number);
            let one = describe(&facts, cuda.attribute(attribute, address));
            let many = describe(&facts, cuda.attribute_plural(attribute, address));
            facts.open(&format!("attribute {number} of {kind}: singular, plural, bytes"), (one, many, width(&cuda, attribute, address)));
        }
    }
    // Last, because a driver may do what it is asked.
    facts.open_code("cuMemFree of VMM memory", &cuda.mem_free(row.base));
    facts.open_code("cuMemFree of an inner address", &cuda.mem_free(plain + 512));
    facts.open_code("cuMemUnmap of cuMemAlloc memory", &cuda.mem_unmap(plain, CHUNK));
    let _ = (cuda.mem_free(plain), cuda.free_async(default, stream), cuda.free_async(pooled, stream), cuda.mem_free(managed));
    let _ = (cuda.mem_free_host(host), cuda.pool_destroy(pool));
}

/// A value that two runs can be compared by: small numbers as they are, others only as not null.
fn describe(facts: &Facts, value: Answer<u64>) -> String {
    match value {
        Ok(value @ 0..4096) => value.to_string(),
        Ok(value) if value == u64::from((-2_i32).cast_unsigned()) => "-2".to_owned(),
        Ok(value) if value == u64::from(u32::MAX) => "-1".to_owned(),
        Ok(_) => "set".to_owned(),
        Err(code) => facts.name(code),
    }
}

/// How many bytes the driver writes for an attribute.
fn width(cuda: &Cuda, attribute: PointerAttribute, address: CUdeviceptr) -> usize {
    [0xaa_u8, 0x55]
        .map(|filler| {
            let mut bytes = [filler; 32];
            let place = bytes.as_mut_ptr().cast::<c_void>();
            // SAFETY: no attribute is longer than the array.
            let code = unsafe { (cuda.raw.cuPointerGetAttribute)(place, attribute, address) };
            if code == OK { bytes.iter().rposition(|&byte| byte != filler).map_or(0, |last| last + 1) } else { 0 }
        })
        .into_iter()
        .max()
        .unwrap_or(0)
}

#[test]
fn buffer_ids() {
    let Some(_) = Inside::enter_with_any_driver("buffer_ids") else { return };
    let (cuda, facts) = Facts::start();
    let row = Row::new(cuda, 2, 8);
    let handle = row.handles[0];
    let first = cuda.buffer_id(row.base).expect("BUFFER_ID");
    facts.open_code("one handle mapped a second time", &cuda.mem_map(row.at(4), CHUNK, 0, handle));
    facts.open_code("access to the second mapping", &cuda.mem_set_access(row.at(4), CHUNK, 0, READ_WRITE));
    facts.open("two mappings of one handle have one BUFFER_ID", cuda.buffer_id(row.at(4)).map(|id| id == first));
    facts.open("the first keeps its BUFFER_ID meanwhile", cuda.buffer_id(row.base).map(|id| id == first));
    facts.open("bytes written through one are read through the other", {
        cuda.fill(row.base, 0x42, CHUNK).expect("a fill");
        cuda.is_filled(row.at(4), 0x42, CHUNK)
    });
    cuda.mem_unmap(row.at(4), CHUNK).expect("cuMemUnmap");
    facts.open("the first keeps its BUFFER_ID when the second goes", cuda.buffer_id(row.base).map(|id| id == first));

    let remap = |address| {
        cuda.mem_map(address, CHUNK, 0, handle).expect("cuMemMap");
        cuda.mem_set_access(address, CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
        cuda.buffer_id(address)
    };
    cuda.mem_unmap(row.base, CHUNK).expect("cuMemUnmap");
    facts.open_code("BUFFER_ID after cuMemUnmap", &cuda.buffer_id(row.base));
    facts.open("remapped at the same address: the old BUFFER_ID", remap(row.base).map(|id| id == first));
    cuda.mem_unmap(row.base, CHUNK).expect("cuMemUnmap");
    facts.open("remapped at another address: the old BUFFER_ID", remap(row.at(5)).map(|id| id == first));
    cuda.mem_unmap(row.at(5), CHUNK).expect("cuMemUnmap");
    let other = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    cuda.mem_map(row.base, CHUNK, 0, other).expect("cuMemMap");
    cuda.mem_release(other).expect("cuMemRelease");
    facts.open("another chunk at the old address: the old BUFFER_ID", cuda.buffer_id(row.base).map(|id| id == first));
    facts.open_code("BUFFER_ID of a mapping without access", &cuda.buffer_id(row.base));
    facts.open("BUFFER_ID does not change with cuMemSetAccess", {
        let before = cuda.buffer_id(row.base);
        cuda.mem_set_access(row.base, CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
        before == cuda.buffer_id(row.base)
    });
    let fresh = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    let id = cuda.buffer_id(fresh);
    cuda.mem_free(fresh).expect("cuMemFree");
    let again = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    facts.open("cuMemAlloc after cuMemFree: same address, same BUFFER_ID", (again == fresh, cuda.buffer_id(again) == id));
    let ids: Vec<u64> =
        (0..3).map(|_| cuda.mem_chunk(CHUNK, 0, POSIX_FD).and_then(|chunk| cuda.buffer_id(chunk.1)).expect("an id")).collect();
    facts.open("BUFFER_IDs go up", ids.is_sorted());
}

#[test]
fn without_context() {
    let Some(_) = Inside::enter_with_any_driver("without_context") else { return };
    let (cuda, facts) = Facts::start();
    let row = Row::new(cuda, 1, 4);
    let fd = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    let (base, handle) = (row.base, row.handles[0]);
    let (plain, room) = (cuda.mem_alloc(CHUNK).expect("cuMemAlloc"), row.at(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let facts = &facts;
            let say = |what: &str, answer: Answer| facts.open_code(&format!("without a context: {what}"), &answer);
            facts.open("without a context: cuCtxGetCurrent is null", cuda.ctx_get_current().map(|context| context.is_null()));
            say("BUFFER_ID", cuda.buffer_id(base).map(drop));
            say("BUFFER_ID of cuMemAlloc memory", cuda.buffer_id(plain).map(drop));
            say("RANGE_START_ADDR", cuda.attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, base).map(drop));
            say("plural BUFFER_ID", cuda.attribute_plural(PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, base).map(drop));
            say("cuMemGetAddressRange", cuda.address_range(base).map(drop));
            say("cuMemGetAddressRange of cuMemAlloc memory", cuda.address_range(plain).map(drop));
            say("cuMemGetAccess", cuda.mem_get_access(base, 0).map(drop));
            say("cuMemRetainAllocationHandle", cuda.mem_retain(base).and_then(|handle| cuda.mem_release(handle)));
            say("properties", cuda.mem_properties(handle).map(drop));
            say("export", cuda.mem_export_fd(handle).map(|fd| drop(own(fd))));
            say("cuMemCreate", cuda.mem_create(CHUNK, 0, POSIX_FD).and_then(|handle| cuda.mem_release(handle)));
            say("cuMemAddressReserve", cuda.mem_reserve(CHUNK).and_then(|base| cuda.mem_address_free(base, CHUNK)));
            let imported = cuda.mem_import_fd(fd.as_raw_fd());
            say("import", imported.map(drop));
            if let Ok(imported) = imported {
                say("cuMemMap", cuda.mem_map(room, CHUNK, 0, imported));
                say("cuMemSetAccess", cuda.mem_set_access(room, CHUNK, 0, READ_WRITE));
                say("cuMemUnmap", cuda.mem_unmap(room, CHUNK));
                say("cuMemRelease", cuda.mem_release(imported));
            }
            say("cuMemGetInfo", cuda.mem_info().map(drop));
            say("cuMemAlloc", cuda.mem_alloc(CHUNK).and_then(|address| cuda.mem_free(address)));
            say("cuMemcpy from VMM memory", cuda.is_filled(base, 0, 16).map(drop));
            say("cuStreamCreate", cuda.stream_create(0).and_then(|stream| cuda.stream_destroy(stream)));
            say("cuEventCreate", cuda.event_create().and_then(|event| cuda.event_destroy(event)));
            say("cuPointerGetAttribute of a foreign pointer", cuda.buffer_id(1 << 40).map(drop));
            say("cuIpcGetMemHandle", cuda.ipc_get(plain).map(drop));
            say("cuMemPoolCreate", cuda.pool_create(0, POSIX_FD).and_then(|pool| cuda.pool_destroy(pool)));
            say("cuMemFree", cuda.mem_free(plain));
        });
    });
}

#[test]
fn contexts() {
    let Some(_) = Inside::enter_with_any_driver("contexts") else { return };
    let cuda = Cuda::load();
    let facts = Facts { cuda, wrong: Vec::new() };
    facts.open_code("before cuInit: cuDeviceGetCount", &cuda.device_count());
    facts.open_code("before cuInit: BUFFER_ID", &cuda.buffer_id(1 << 40));
    facts.open_code("before cuInit: cuMemGetAddressRange", &cuda.address_range(1 << 40));
    facts.open_code("before cuInit: cuDriverGetVersion", &cuda.driver_version());
    cuda.init().expect("cuInit");
    facts.open_code("cuMemCreate while no context exists", &cuda.mem_create(CHUNK, 0, POSIX_FD));
    facts.open_code("cuPointerGetAttribute while no context exists", &cuda.buffer_id(1 << 40));
    facts.open_code("cuDevicePrimaryCtxRelease of an inactive one", &cuda.primary_release(0));
    let first = cuda.enter_primary(0);
    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
    let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    facts.open_code("cuCtxPopCurrent", &cuda.ctx_pop());
    facts.open_code("cuCtxPopCurrent of an empty stack", &cuda.ctx_pop());
    cuda.ctx_set_current(first).expect("cuCtxSetCurrent");
    facts.open_code("last cuDevicePrimaryCtxRelease", &cuda.primary_release(0));
    facts.open_code("after it: cuCtxGetCurrent", &cuda.ctx_get_current());
    facts.open_code("after it: cuMemGetInfo", &cuda.mem_info());
    facts.open_code("after it: BUFFER_ID of VMM memory", &cuda.buffer_id(chunk.1));
    facts.open_code("after it: BUFFER_ID of cuMemAlloc memory", &cuda.buffer_id(plain));
    facts.open_code("after it: cuMemRetainAllocationHandle", &cuda.mem_retain(chunk.1));
    facts.open_code("after it: export of the handle", &cuda.mem_export_fd(chunk.0).map(own));
    let second = cuda.enter_primary(0);
    facts.open("the primary context has the same handle again", second == first);
    facts.open_code("retained again: BUFFER_ID of VMM memory", &cuda.buffer_id(chunk.1));
    facts.open_code("retained again: copy from VMM memory", &cuda.is_filled(chunk.1, 0, 16));
    let own_context = cuda.ctx_create(0).expect("cuCtxCreate");
    facts.open_code("in another context: copy from VMM memory", &cuda.is_filled(chunk.1, 0, 16));
    facts.open_code("cuCtxDestroy of the current context", &cuda.ctx_destroy(own_context));
    facts.open("the context before is current then", cuda.ctx_get_current().map(|context| context == second));
}

#[test]
fn exporting() {
    let Some(_) = Inside::enter_with_any_driver("exporting") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 3, 8);
    let fds: Vec<OwnedFd> = row.handles.iter().map(|&handle| own(cuda.mem_export_fd(handle).expect("an export"))).collect();
    let stat = |fd: &OwnedFd| nix::sys::stat::fstat(fd).expect("fstat");
    facts.known("exports of one device share an inode", fds.iter().all(|fd| stat(fd).st_ino == stat(&fds[0]).st_ino), true);
    let flags = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GETFD).expect("F_GETFD");
    facts.known("an exported fd is close-on-exec", flags == libc::FD_CLOEXEC, true);
    facts.open(
        "an exported fd is a character device",
        nix::sys::stat::SFlag::from_bits_truncate(stat(&fds[0]).st_mode) == nix::sys::stat::SFlag::S_IFCHR,
    );
    let second = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    facts.open("exporting twice gives two fds", second.as_raw_fd() != fds[0].as_raw_fd());

    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    facts.code("import of /dev/null", cuda.mem_import_fd(null.as_raw_fd()), UNKNOWN);
    let memory = nix::sys::memfd::memfd_create(c"foreign", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).expect("memfd_create");
    facts.code("import of a memfd", cuda.mem_import_fd(memory.as_raw_fd()), UNKNOWN);
    facts.code("import of a closed number", cuda.mem_import_fd(987), UNKNOWN);
    let again = std::fs::File::open(format!("/proc/self/fd/{}", fds[0].as_raw_fd())).expect("the same file");
    facts.code("import of a fresh fd of the same file", cuda.mem_import_fd(again.as_raw_fd()), UNKNOWN);
    facts.open_code("import of fd -1", &cuda.mem_import_fd(-1));

    let imported = cuda.mem_import_fd(fds[0].as_raw_fd()).expect("an import");
    facts.open("import in the exporting process gives the exporter's handle", imported == row.handles[0]);
    let prop = cuda.mem_properties(imported).expect("properties");
    let seen = (prop.type_, location_id(&prop.location), prop.requestedHandleTypes.0);
    facts.known(
        "properties of an imported handle: type, device, handle types",
        seen,
        (CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED, 0, 0),
    );
    facts.open_code("export of an imported handle", &cuda.mem_export_fd(imported).map(own));
    facts.open("a second import gives another handle", cuda.mem_import_fd(fds[0].as_raw_fd()).map(|second| second != imported));
    facts.open_code("cuMemMap of an imported handle at half its size", &cuda.mem_map(row.at(4), CHUNK / 2, 0, imported));
    cuda.mem_map(row.at(4), CHUNK, 0, imported).expect("cuMemMap");
    cuda.mem_set_access(row.at(4), CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
    for number in [10, 14, 7] {
        let value = describe(&facts, cuda.attribute(PointerAttribute(number), row.at(4)));
        facts.open(&format!("attribute {number} of an imported mapping"), if number == 7 { "unprinted".to_owned() } else { value });
    }
    facts.open("an import in the same process has the exporter's BUFFER_ID", cuda.buffer_id(row.at(4)) == cuda.buffer_id(row.base));
    facts.open_code("retain from an imported mapping", &cuda.mem_retain(row.at(4)).and_then(|handle| cuda.mem_release(handle)));
    facts.open_code("export of the handle retained from an imported mapping", &{
        let retained = cuda.mem_retain(row.at(4)).expect("a retain");
        let answer = cuda.mem_export_fd(retained).map(own);
        cuda.mem_release(retained).expect("a release");
        answer
    });
    let pool = cuda.pool_create(0, POSIX_FD).expect("cuMemPoolCreate");
    let pool_fd = own(cuda.pool_export_fd(pool).expect("an export"));
    facts.open_code("import of a pool's fd as memory", &cuda.mem_import_fd(pool_fd.as_raw_fd()));
    facts.open_code("import of memory's fd as a pool", &cuda.pool_import_fd(fds[0].as_raw_fd()));
    facts.open_code("import of a pool in its own process", &cuda.pool_import_fd(pool_fd.as_raw_fd()));
    facts.open_code("legacy handle opened in its own process", &{
        let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
        cuda.ipc_get(plain).and_then(|handle| cuda.ipc_open(handle))
    });
}

#[test]
fn out_of_fds() {
    let Some(_) = Inside::enter_with_any_driver("out_of_fds") else { return };
    let (cuda, facts) = Facts::start();
    let row = Row::new(cuda, 2, 2);
    let fd = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    let (soft, hard) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).expect("getrlimit");
    let limit = |soft| nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, soft, hard).expect("setrlimit");
    // No number below the limit is free.
    let highest = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(0)).map(own).expect("dup");
    limit(u64::try_from(highest.as_raw_fd()).expect("a number") + 1);
    facts.open_code("export without a free fd", &cuda.mem_export_fd(row.handles[1]).map(own));
    facts.open_code("import without a free fd", &cuda.mem_import_fd(fd.as_raw_fd()).map(|handle| cuda.mem_release(handle)));
    facts.open_code("cuMemCreate without a free fd", &cuda.mem_create(CHUNK, 0, POSIX_FD).map(|handle| cuda.mem_release(handle)));
    facts.open_code("cuMemGetInfo without a free fd", &cuda.mem_info());
    limit(soft);
    facts.open_code("export with free fds again", &cuda.mem_export_fd(row.handles[1]).map(own));
    facts.open_code("import with free fds again", &cuda.mem_import_fd(fd.as_raw_fd()).map(|handle| cuda.mem_release(handle)));
}

#[test]
fn two_processes() {
    let Some(me) = Inside::enter_with_any_driver("two_processes") else { return };
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
    facts.open_code("cuMemMap of an imported handle at half its size", &cuda.mem_map(address, big() / 2, 0, handle));
    cuda.mem_map(address, big(), 0, handle).expect("cuMemMap");
    cuda.mem_release(handle).expect("cuMemRelease");
    drop(fd);
    cuda.mem_set_access(address, big(), 0, READ_WRITE).expect("cuMemSetAccess");
    facts.known("the importer reads the exporter's bytes", cuda.is_filled(address, 0x5a, big()), Ok(true));
    facts.known("cuMemGetAddressRange of an imported mapping is the chunk", cuda.address_range(address + 99) == Ok((address, big())), true);
    for number in [1, 10, 14] {
        facts.open(
            &format!("attribute {number} of an imported mapping"),
            describe(&facts, cuda.attribute(PointerAttribute(number), address)),
        );
    }

    // Pool.
    let pool_fd = fetch(exporter.pid(), number(1));
    let pool = cuda.pool_import_fd(pool_fd.as_raw_fd());
    facts.code("cuMemPoolImportFromShareableHandle", pool, OK);
    let pool = pool.expect("a pool");
    let data = bytes(words[3]);
    let pointer = cuda.pool_import_pointer(pool, data);
    facts.code("cuMemPoolImportPointer", pointer, OK);
    let pointer = pointer.expect("a pointer");
    facts.open_code("read before cuMemPoolSetAccess", &cuda.is_filled(pointer, 0x99, CHUNK));
    facts.code("cuMemPoolSetAccess", cuda.pool_set_access(pool, 0, READ_WRITE), OK);
    facts.known("the importer reads the pool's bytes", cuda.is_filled(pointer, 0x99, CHUNK), Ok(true));
    facts.known("importing a pointer twice gives the same address", cuda.pool_import_pointer(pool, data) == Ok(pointer), true);
    for number in [1, 7, 10, 14, 17] {
        let value = describe(&facts, cuda.attribute(PointerAttribute(number), pointer));
        facts.open(&format!("attribute {number} of an imported pool pointer"), if number == 7 { "unprinted".to_owned() } else { value });
    }
    facts.open_code("allocation from an imported pool", &cuda.alloc_from_pool(CHUNK, pool, core::ptr::null_mut()));
    facts.open_code("cuMemPoolExportPointer of an imported pointer", &cuda.pool_export_pointer(pointer));
    facts.open_code("cuMemPoolExportToShareableHandle of an imported pool", &cuda.pool_export_fd(pool).map(own));
    facts.open_code("free of the imported pointer", &cuda.mem_free(pointer));
    facts.open_code("free of it a second time", &cuda.mem_free(pointer));
    facts.open_code("cuMemPoolDestroy of an imported pool", &cuda.pool_destroy(pool));

    // Legacy.
    let handle = cuda_driver_sys::CUipcMemHandle_v1 { reserved: bytes(words[2]).map(u8::cast_signed) };
    let opened = cuda.ipc_open(handle);
    facts.open_code("cuIpcOpenMemHandle", &opened);
    if let Ok(opened) = opened {
        facts.open("the importer reads the exporter's bytes by legacy IPC", cuda.is_filled(opened, 0x17, CHUNK));
        facts.open("opened twice: the same address", cuda.ipc_open(handle).map(|second| second == opened));
        for number in [1, 10, 14] {
            facts.open(
                &format!("attribute {number} of an opened legacy handle"),
                describe(&facts, cuda.attribute(PointerAttribute(number), opened)),
            );
        }
        facts.open_code("cuIpcCloseMemHandle", &cuda.ipc_close(opened));
        facts.open_code("cuIpcCloseMemHandle again", &cuda.ipc_close(opened));
        facts.open_code("cuIpcCloseMemHandle a third time", &cuda.ipc_close(opened));
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
    let Some(me) = Inside::enter_with_any_driver("an_fd_pins") else { return };
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
    facts.open("the fd of a killed process pins its memory", close_to(free(), before - big()));
    let handle = cuda.mem_import_fd(fd.as_raw_fd());
    facts.open_code("import from a killed process", &handle);
    drop(fd);
    if let Ok(handle) = handle {
        let address = cuda.mem_reserve(big()).expect("cuMemAddressReserve");
        cuda.mem_map(address, big(), 0, handle).expect("cuMemMap");
        cuda.mem_set_access(address, big(), 0, READ).expect("cuMemSetAccess");
        facts.open("the bytes of a killed process can be read", cuda.is_filled(address, 0x5a, big()));
        cuda.mem_unmap(address, big()).expect("cuMemUnmap");
        cuda.mem_release(handle).expect("cuMemRelease");
    }
    facts.open("then the memory is back", close_to(free(), before));
}

#[test]
fn capture() {
    let Some(_) = Inside::enter_with_any_driver("capture") else { return };
    let (cuda, facts) = Facts::start();
    let row = Row::new(cuda, 1, 4);
    let fd = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    let context = cuda.ctx_get_current().expect("cuCtxGetCurrent").addr();
    let spare = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    let (base, room) = (row.base, row.at(2));
    type Call<'a> = (&'static str, Box<dyn Fn() -> Answer + Sync + 'a>, Box<dyn Fn() + 'a>, Box<dyn Fn() + 'a>);
    let nothing = || Box::new(|| ());
    let map = move || {
        cuda.mem_map(room, CHUNK, 0, spare).expect("cuMemMap");
    };
    let unmap = move || {
        let _ = cuda.mem_unmap(room, CHUNK);
    };
    let calls: Vec<Call<'_>> = vec![
        ("cuMemImportFromShareableHandle", Box::new(|| cuda.mem_import_fd(fd.as_raw_fd()).map(drop)), nothing(), nothing()),
        ("cuMemExportToShareableHandle", Box::new(|| cuda.mem_export_fd(spare).map(|fd| drop(own(fd)))), nothing(), nothing()),
        ("cuMemCreate", Box::new(|| cuda.mem_create(CHUNK, 0, POSIX_FD).map(drop)), nothing(), nothing()),
        ("cuMemAddressReserve", Box::new(|| cuda.mem_reserve(CHUNK).map(drop)), nothing(), nothing()),
        ("cuMemMap", Box::new(move || cuda.mem_map(room, CHUNK, 0, spare)), nothing(), Box::new(unmap)),
        ("cuMemSetAccess", Box::new(move || cuda.mem_set_access(room, CHUNK, 0, READ_WRITE)), Box::new(map), Box::new(unmap)),
        ("cuMemUnmap", Box::new(move || cuda.mem_unmap(room, CHUNK)), Box::new(map), Box::new(unmap)),
        ("cuMemRetainAllocationHandle", Box::new(move || cuda.mem_retain(base).map(drop)), nothing(), nothing()),
        (
            "cuMemRelease",
            Box::new(move || cuda.mem_release(spare)),
            Box::new(move || {
                map();
                let _ = cuda.mem_retain(room);
                unmap()
            }),
            nothing(),
        ),
        ("BUFFER_ID", Box::new(move || cuda.buffer_id(base).map(drop)), nothing(), nothing()),
        ("cuMemGetAddressRange", Box::new(move || cuda.address_range(base).map(drop)), nothing(), nothing()),
        ("cuMemGetInfo", Box::new(move || cuda.mem_info().map(drop)), nothing(), nothing()),
        ("cuMemAlloc", Box::new(move || cuda.mem_alloc(CHUNK).map(drop)), nothing(), nothing()),
        ("cuCtxSynchronize", Box::new(move || cuda.ctx_synchronize()), nothing(), nothing()),
        ("cuMemcpyDtoH", Box::new(move || cuda.is_filled(base, 0, 16).map(drop)), nothing(), nothing()),
        ("cuStreamCreate", Box::new(move || cuda.stream_create(1).map(drop)), nothing(), nothing()),
        ("cuEventCreate", Box::new(move || cuda.event_create().map(drop)), nothing(), nothing()),
    ];
    const MODES: [&str; 3] = ["global", "thread-local", "relaxed"];
    for (name, call, before, after) in &calls {
        for (mode, mode_name) in (0_u32..).zip(MODES) {
            // By another thread with its default mode, by another one that is relaxed, by the capturing thread, by it relaxed.
            let mut seen = Vec::new();
            for (other, relaxed) in [(true, false), (true, true), (false, false), (false, true)] {
                before();
                let stream = cuda.stream_create(1).expect("cuStreamCreate");
                cuda.capture_begin(stream, mode).expect("cuStreamBeginCapture");
                let run = || {
                    if relaxed {
                        cuda.capture_mode(2).expect("relaxed");
                    }
                    let answer = call();
                    if relaxed {
                        cuda.capture_mode(0).expect("global");
                    }
                    answer
                };
                let answer = if other {
                    std::thread::scope(|scope| {
                        let thread = scope.spawn(|| {
                            cuda.ctx_set_current(core::ptr::without_provenance_mut(context)).expect("cuCtxSetCurrent");
                            run()
                        });
                        thread.join().expect("the other thread")
                    })
                } else {
                    run()
                };
                let status = cuda.capture_status(stream).unwrap_or(99);
                let _ = cuda.capture_end(stream).map(|graph| cuda.graph_destroy(graph));
                cuda.stream_destroy(stream).expect("cuStreamDestroy");
                after();
                let code = answer.err().map_or(0, |code| code.0);
                seen.push(format!("{code}{}", ["", "", "!"].get(status as usize).copied().unwrap_or("?")));
            }
            // Codes; `!` where the capture was invalidated.
            facts.open(&format!("{name} during a {mode_name} capture: other thread, other relaxed, same, same relaxed"), seen);
        }
    }
}

#[test]
fn unmap_under_a_copy() {
    let Some(_) = Inside::enter_with_any_driver("unmap_under_a_copy") else { return };
    let (cuda, facts) = Facts::start();
    if let Some(fake) = Fake::find() {
        fake.set_async(Some(50_000));
    }
    let (from, to) = (cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk"), cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk"));
    let stream: CUstream = cuda.stream_create(1).expect("cuStreamCreate");
    // Long enough that the unmapping comes in the middle.
    let copies = if Fake::find().is_some() { 1 } else { 2000 };
    for _ in 0..copies {
        cuda.copy_async(to.1, from.1, big(), stream).expect("cuMemcpyDtoDAsync");
    }
    let began = std::time::Instant::now();
    facts.open_code("stream while copies run", &cuda.stream_query(stream));
    facts.open_code("cuMemUnmap while copies run", &cuda.mem_unmap(from.1, big()));
    facts.open("cuMemUnmap waited for the copies", cuda.stream_query(stream) != Err(CUresult::CUDA_ERROR_NOT_READY));
    println!("conformance: cuMemUnmap took {:?}", began.elapsed());
    facts.open_code("cuStreamSynchronize after it", &cuda.stream_synchronize(stream));
    facts.open_code("cuCtxSynchronize after it", &cuda.ctx_synchronize());
    facts.open_code("a copy after it", &cuda.is_filled(to.1, 0, 16));
    if let Some(fake) = Fake::require("the count of copies into dead mappings") {
        assert_eq!(fake.counters().copies_into_dead_mappings, 1);
    }
}

/// Large against what a process costs on a GPU; smaller where every byte is a test machine's memory.
fn big() -> usize {
    if Fake::find().is_some() { 32 << 20 } else { 256 << 20 }
}

/// Fetches an fd of a process that this one started.
fn fetch(pid: u32, number: i32) -> OwnedFd {
    // SAFETY: a system call that takes numbers.
    let pidfd = own(i32::try_from(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }).expect("an fd"));
    // SAFETY: as above.
    own(i32::try_from(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) }).expect("an fd"))
}

fn own(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the fd was made just now, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> [u8; 64] {
    core::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hex"))
}
