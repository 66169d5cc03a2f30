//! What a pointer is.

use core::ffi::c_void;

use cuda_driver_sys::{CUdeviceptr, CUpointer_attribute as PointerAttribute};
use cuda_ipc_tests::driver::{Answer, Cuda, Inside};

use crate::facts::{Facts, Row, own};
use crate::{CHUNK, INVALID_VALUE, NOT_FOUND, OK, POSIX_FD, READ_WRITE};

/// Bytes of each attribute, from number 1 on, where there is a value.
const WIDTHS: [usize; 21] = [8, 4, 8, 8, 12, 4, 8, 4, 4, 4, 8, 8, 4, 8, 4, 4, 8, 8, 8, 8, 4];
/// Attributes 1 to 21 of every kind of memory: what the singular call answers, `-` where it refuses.
const VALUES: [(&str, &str); 7] = [
    ("VMM", "0 2 set - 0 1 set 0 0 0 set set 1 1 0 3 0 set set set 0"),
    ("VMM without access", "0 2 - - 0 1 set 0 0 0 set set 1 1 0 0 0 set set set 0"),
    ("cuMemAlloc", "set 2 set - 0 1 set 0 0 1 set set 1 0 1 3 0 set set set 1"),
    ("default pool", "0 2 set - 0 1 set 0 0 0 set set 1 0 0 3 set set set set 0"),
    ("POSIX_FD pool", "0 2 set - 0 1 set 0 0 0 set set 1 1 0 3 set set set set 0"),
    ("managed", "set 2 set set 0 1 set 1 0 0 set set 1 0 0 3 0 set set set 0"),
    ("cuMemHostAlloc", "set 1 set set - 0 set 0 0 0 set set 1 0 0 3 0 set set set 0"),
];
/// The same where there is no memory, which the singular call always refuses: what the plural one answers.
const PLURAL: [(&str, &str); 5] = [
    ("unmapped room of a reservation", "0 0 0 set - 0 0 0 -2 0 set set 0 0 0 0 0 0 0 0 0"),
    ("freed cuMemAlloc", NO_MEMORY),
    ("heap", NO_MEMORY),
    ("null", "0 0 0 0 - 0 0 0 -2 0 0 0 0 0 0 0 0 0 0 0 0"),
    ("address 2^40", NO_MEMORY),
];
const NO_MEMORY: &str = "0 0 0 set - 0 0 0 -2 0 0 0 0 0 0 0 0 0 0 0 0";

#[test]
fn pointers() {
    let Some(_) = Inside::enter_with_any_driver("pointers::pointers") else { return };
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
    facts.code("export of a pointer of the default pool", cuda.pool_export_pointer(default), INVALID_VALUE);
    facts.code("cuIpcGetMemHandle on VMM memory", cuda.ipc_get(row.base), INVALID_VALUE);
    facts.code("cuIpcGetMemHandle on pool memory", cuda.ipc_get(pooled), INVALID_VALUE);
    facts.known(
        "cuMemGetAddressRange of 1000 bytes of cuMemAlloc",
        {
            let some = cuda.mem_alloc(1000).expect("cuMemAlloc");
            let range = cuda.address_range(some + 10).map(|(base, size)| (base == some, size));
            cuda.mem_free(some).expect("cuMemFree");
            range
        },
        Ok((true, 1000)),
    );

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
        everything(&mut facts, kind, address);
    }
    // Last, because a driver may do what it is asked.
    facts.code("cuMemFree of VMM memory", cuda.mem_free(row.base), INVALID_VALUE);
    facts.code("cuMemFree of an inner address", cuda.mem_free(plain + 512), INVALID_VALUE);
    facts.code("cuMemUnmap of cuMemAlloc memory", cuda.mem_unmap(plain, CHUNK), INVALID_VALUE);
    let _ = (cuda.mem_free(plain), cuda.free_async(default, stream), cuda.free_async(pooled, stream), cuda.mem_free(managed));
    let _ = (cuda.mem_free_host(host), cuda.pool_destroy(pool));
}

/// Asks for every attribute in both ways.
fn everything(facts: &mut Facts, kind: &str, address: CUdeviceptr) {
    let cuda = facts.cuda;
    let values = |table: &[(&str, &'static str)]| table.iter().find(|row| row.0 == kind).map(|row| row.1.split(' ').collect::<Vec<_>>());
    let (singular, plural) = (values(&VALUES), values(&PLURAL));
    let is_memory = singular.is_some();
    let range = if is_memory && kind != "VMM without access" { "1".to_owned() } else { facts.name(NOT_FOUND) };
    let seen = cuda.address_range(address).map(|(base, _)| u64::from(base == address));
    facts.known(&format!("cuMemGetAddressRange of {kind}"), describe(facts, 0, seen), range);

    let singular = singular.unwrap_or_else(|| vec!["-"; 21]);
    // Of memory, the plural call says 0 where the singular one has nothing to say. It has no P2P tokens.
    let plural = plural.unwrap_or_else(|| {
        (1..).zip(&singular).map(|(number, &value)| if number == 5 { "-" } else { if value == "-" { "0" } else { value } }).collect()
    });
    for (number, ((one, many), bytes)) in (1..).zip(singular.into_iter().zip(plural).zip(WIDTHS)) {
        let attribute = PointerAttribute(number);
        let in_words = |value: &str| if value == "-" { facts.name(INVALID_VALUE) } else { value.to_owned() };
        let expected = (in_words(one), in_words(many), if one == "-" { 0 } else { bytes });
        let one = describe(facts, number, cuda.attribute(attribute, address));
        let many = describe(facts, number, cuda.attribute_plural(attribute, address));
        let seen = (one, many, width(&cuda, attribute, address));
        facts.known(&format!("attribute {number} of {kind}: singular, plural, bytes"), seen, expected);
    }
}

/// A value that two runs can be compared by: small numbers as they are, others, and all ids, only as not null.
pub(crate) fn describe(facts: &Facts, number: u32, value: Answer<u64>) -> String {
    // BUFFER_ID and MEMORY_BLOCK_ID count up from wherever the driver likes.
    let is_id = matches!(number, 7 | 20);
    match value {
        Ok(value @ 0..4096) if value == 0 || !is_id => value.to_string(),
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
    let Some(_) = Inside::enter_with_any_driver("pointers::buffer_ids") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 2, 8);
    let handle = row.handles[0];
    let first = cuda.buffer_id(row.base).expect("BUFFER_ID");
    facts.code("one handle mapped a second time", cuda.mem_map(row.at(4), CHUNK, 0, handle), OK);
    facts.code("access to the second mapping", cuda.mem_set_access(row.at(4), CHUNK, 0, READ_WRITE), OK);
    facts.known("two mappings of one handle have one BUFFER_ID", cuda.buffer_id(row.at(4)).map(|id| id == first), Ok(false));
    facts.known("the first keeps its BUFFER_ID meanwhile", cuda.buffer_id(row.base).map(|id| id == first), Ok(true));
    facts.known(
        "bytes written through one are read through the other",
        {
            cuda.fill(row.base, 0x42, CHUNK).expect("a fill");
            cuda.is_filled(row.at(4), 0x42, CHUNK)
        },
        Ok(true),
    );
    cuda.mem_unmap(row.at(4), CHUNK).expect("cuMemUnmap");
    facts.known("the first keeps its BUFFER_ID when the second goes", cuda.buffer_id(row.base).map(|id| id == first), Ok(true));

    let remap = |address| {
        cuda.mem_map(address, CHUNK, 0, handle).expect("cuMemMap");
        cuda.mem_set_access(address, CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
        cuda.buffer_id(address)
    };
    cuda.mem_unmap(row.base, CHUNK).expect("cuMemUnmap");
    facts.code("BUFFER_ID after cuMemUnmap", cuda.buffer_id(row.base), INVALID_VALUE);
    facts.known("remapped at the same address: the old BUFFER_ID", remap(row.base).map(|id| id == first), Ok(false));
    cuda.mem_unmap(row.base, CHUNK).expect("cuMemUnmap");
    facts.known("remapped at another address: the old BUFFER_ID", remap(row.at(5)).map(|id| id == first), Ok(false));
    cuda.mem_unmap(row.at(5), CHUNK).expect("cuMemUnmap");
    let other = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    cuda.mem_map(row.base, CHUNK, 0, other).expect("cuMemMap");
    cuda.mem_release(other).expect("cuMemRelease");
    facts.known("another chunk at the old address: the old BUFFER_ID", cuda.buffer_id(row.base).map(|id| id == first), Ok(false));
    facts.code("BUFFER_ID of a mapping without access", cuda.buffer_id(row.base), OK);
    facts.known(
        "BUFFER_ID does not change with cuMemSetAccess",
        {
            let before = cuda.buffer_id(row.base);
            cuda.mem_set_access(row.base, CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
            before == cuda.buffer_id(row.base)
        },
        true,
    );
    let fresh = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    let id = cuda.buffer_id(fresh);
    cuda.mem_free(fresh).expect("cuMemFree");
    let again = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    facts.known("cuMemAlloc after cuMemFree: same address, same BUFFER_ID", (again == fresh, cuda.buffer_id(again) == id), (true, false));
    let ids: Vec<u64> =
        (0..3).map(|_| cuda.mem_chunk(CHUNK, 0, POSIX_FD).and_then(|chunk| cuda.buffer_id(chunk.1)).expect("an id")).collect();
    facts.known("BUFFER_IDs go up", ids.is_sorted(), true);
}
