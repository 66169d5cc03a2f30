//! Virtual memory management within one process.

use cuda_driver_sys::CUpointer_attribute as PointerAttribute;
use cuda_ipc_tests::driver::{Cuda, Inside};

use crate::facts::{Facts, Row, own};
use crate::{CHUNK, INVALID_VALUE, NOT_SUPPORTED, OK, POSIX_FD, READ, READ_WRITE};

#[test]
fn mapping() {
    let Some(_) = Inside::enter_with_any_driver("mapping::mapping") else { return };
    let (cuda, mut facts) = Facts::start();
    let base = cuda.mem_reserve(8 * CHUNK).expect("cuMemAddressReserve");
    let small = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    let large = cuda.mem_create(2 * CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    facts.code("cuMemMap of twice the size", cuda.mem_map(base, 2 * CHUNK, 0, small), NOT_SUPPORTED);
    facts.code("cuMemMap of half the chunk", cuda.mem_map(base, CHUNK, 0, large), NOT_SUPPORTED);
    facts.code("cuMemMap of the chunk's second half", cuda.mem_map(base, CHUNK, CHUNK, large), NOT_SUPPORTED);
    facts.code("cuMemMap with an offset and the whole size", cuda.mem_map(base, 2 * CHUNK, CHUNK, large), NOT_SUPPORTED);
    facts.code("cuMemMap between granules", cuda.mem_map(base + 4096, CHUNK, 0, small), INVALID_VALUE);
    facts.code("cuMemMap of no handle", cuda.mem_map(base, CHUNK, 0, 0), INVALID_VALUE);
    facts.code("cuMemMap outside of reservations", cuda.mem_map(1 << 40, CHUNK, 0, small), INVALID_VALUE);
    past_the_end(&cuda, &mut facts);

    cuda.mem_map(base, CHUNK, 0, small).expect("cuMemMap");
    facts.code("cuMemMap where something is mapped", cuda.mem_map(base, 2 * CHUNK, 0, large), INVALID_VALUE);
    cuda.mem_map(base + CHUNK as u64, 2 * CHUNK, 0, large).expect("cuMemMap");
    facts.code("cuMemAddressFree with mappings", cuda.mem_address_free(base, 8 * CHUNK), INVALID_VALUE);
    facts.code("cuMemAddressFree of a part", cuda.mem_address_free(base + 4 * CHUNK as u64, 4 * CHUNK), INVALID_VALUE);
    facts.code("cuMemAddressFree of the first part", cuda.mem_address_free(base, CHUNK), INVALID_VALUE);
    facts.code("cuMemUnmap of half a mapping", cuda.mem_unmap(base + CHUNK as u64, CHUNK), INVALID_VALUE);
    facts.code("cuMemUnmap of a mapping and half of the next", cuda.mem_unmap(base, 2 * CHUNK), INVALID_VALUE);
    facts.code("cuMemUnmap of nothing mapped", cuda.mem_unmap(base + 5 * CHUNK as u64, CHUNK), OK);
    facts.code("cuMemUnmap over a mapping and unmapped room behind it", cuda.mem_unmap(base + CHUNK as u64, 3 * CHUNK), OK);
    facts.code("BUFFER_ID after that", cuda.buffer_id(base + CHUNK as u64), INVALID_VALUE);
    let _ = cuda.mem_map(base + CHUNK as u64, 2 * CHUNK, 0, large);
    facts.code("one cuMemUnmap over two mappings of different sizes", cuda.mem_unmap(base, 3 * CHUNK), OK);

    cuda.mem_map(base, CHUNK, 0, small).expect("cuMemMap");
    let another = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    cuda.mem_map(base + 2 * CHUNK as u64, CHUNK, 0, another).expect("cuMemMap");
    facts.code("cuMemUnmap over mapping, hole, mapping", cuda.mem_unmap(base, 3 * CHUNK), OK);
    let left = [0, 2].map(|at| cuda.buffer_id(base + at * CHUNK as u64).is_ok());
    facts.known("have they a BUFFER_ID after that", left, [false, false]);
    for offset in [0, 2] {
        let _ = cuda.mem_unmap(base + offset * CHUNK as u64, CHUNK);
    }
    cuda.mem_map(base, CHUNK, 0, small).expect("cuMemMap");
    facts.code("cuMemRelease with a live mapping", cuda.mem_release(small), OK);
    let retained = cuda.mem_retain(base);
    facts.code("retain from the mapping of a released handle", retained, OK);
    if let Ok(retained) = retained {
        facts.known("the retained handle has the old value", retained == small, true);
        facts.code("export of the retained handle", cuda.mem_export_fd(retained).map(own), OK);
        facts.code("release of the retained handle", cuda.mem_release(retained), OK);
    }
    let inner = cuda.mem_retain(base + 12_345);
    facts.code("retain of an inner address", inner, OK);
    let _ = inner.map(|handle| cuda.mem_release(handle));
    // Last, because a driver may do what it is asked.
    facts.code("cuMemRelease once more", cuda.mem_release(small), INVALID_VALUE);
    facts.code("cuMemMap of a released handle", cuda.mem_map(base + CHUNK as u64, CHUNK, 0, small), OK);
    facts.code("properties of a released handle", cuda.mem_properties(small), OK);
    facts.code("export of a released handle", cuda.mem_export_fd(small).map(own), OK);
    let _ = (cuda.mem_unmap(base, CHUNK), cuda.mem_unmap(base + CHUNK as u64, CHUNK));
    facts.code("cuMemAddressFree", cuda.mem_address_free(base, 8 * CHUNK), OK);
    facts.code("cuMemAddressFree again", cuda.mem_address_free(base, 8 * CHUNK), INVALID_VALUE);
    let _ = (cuda.mem_release(large), cuda.mem_release(another));
}

#[test]
fn access() {
    let Some(_) = Inside::enter_with_any_driver("mapping::access") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::without_access(cuda, 4, 8);
    facts.code("copy into a mapping without access", cuda.fill(row.base, 1, 1), INVALID_VALUE);
    facts.code("copy from a mapping without access", cuda.is_filled(row.base, 0, 1), INVALID_VALUE);
    facts.known("cuMemGetAccess before any is set", cuda.mem_get_access(row.base, 0), Ok(0));
    facts.code("cuMemSetAccess on a range not wholly mapped", cuda.mem_set_access(row.base, 5 * CHUNK, 0, READ_WRITE), INVALID_VALUE);
    facts.code("cuMemSetAccess on half a chunk", cuda.mem_set_access(row.base, CHUNK / 2, 0, READ_WRITE), INVALID_VALUE);
    facts.code("cuMemSetAccess on unmapped room", cuda.mem_set_access(row.at(5), CHUNK, 0, READ_WRITE), INVALID_VALUE);
    facts.code("cuMemSetAccess for a device that is not there", cuda.mem_set_access(row.base, CHUNK, 99, READ_WRITE), INVALID_VALUE);
    facts.code("cuMemSetAccess with rights 2", cuda.mem_set_access(row.base, CHUNK, 0, 2), INVALID_VALUE);
    facts.code("cuMemSetAccess on the first of four", cuda.mem_set_access(row.base, CHUNK, 0, READ_WRITE), OK);
    facts.code("copy over a chunk with and one without access", cuda.fill(row.base, 1, 2 * CHUNK), INVALID_VALUE);
    facts.code("one cuMemSetAccess over many mappings", cuda.mem_set_access(row.base, 4 * CHUNK, 0, READ_WRITE), OK);
    facts.known("cuMemGetAccess", cuda.mem_get_access(row.base, 0), Ok(u64::from(READ_WRITE)));
    facts.code("copy over many chunks", cuda.fill(row.base, 0x11, 4 * CHUNK), OK);
    facts.known("the bytes", cuda.is_filled(row.base, 0x11, 4 * CHUNK), Ok(true));
    facts.code("copy that leaves the mappings", cuda.fill(row.at(3), 1, 2 * CHUNK), INVALID_VALUE);
    facts.code("copy into unmapped room", cuda.fill(row.at(5), 1, 1), INVALID_VALUE);

    facts.code("cuMemSetAccess read only", cuda.mem_set_access(row.base, CHUNK, 0, READ), OK);
    facts.code("copy from a read-only mapping", cuda.copy(row.at(1), row.base, CHUNK), OK);
    facts.code("copy into a read-only mapping", cuda.copy(row.base, row.at(1), CHUNK), INVALID_VALUE);
    facts.code("host copy into a read-only mapping", cuda.write(row.base, &[1; 16]), INVALID_VALUE);
    facts.code("memset of a read-only mapping", cuda.fill(row.base, 1, 16), INVALID_VALUE);
    facts.code("copy into a read-only and a writable mapping", cuda.fill(row.base, 1, 2 * CHUNK), INVALID_VALUE);
    facts.code("cuMemSetAccess back to none", cuda.mem_set_access(row.base, CHUNK, 0, 0), OK);
    facts.code("copy from a mapping whose access was taken", cuda.is_filled(row.base, 0x11, 16), INVALID_VALUE);
    facts.code("cuMemSetAccess again", cuda.mem_set_access(row.base, CHUNK, 0, READ_WRITE), OK);

    // Two reservations side by side.
    let first = cuda.mem_reserve(2 * CHUNK).expect("cuMemAddressReserve");
    cuda.mem_address_free(first, 2 * CHUNK).expect("cuMemAddressFree");
    let (low, high) = (cuda.mem_reserve_at(CHUNK, first), cuda.mem_reserve_at(CHUNK, first + CHUNK as u64));
    let (Ok(low), Ok(high)) = (low, high) else { panic!("cuMemAddressReserve") };
    facts.known("reservations at wished-for addresses", (low == first, high == first + CHUNK as u64), (true, true));
    if high == low + CHUNK as u64 {
        let both = cuda.mem_create(2 * CHUNK, 0, POSIX_FD).expect("cuMemCreate");
        let mapped = cuda.mem_map(low, 2 * CHUNK, 0, both);
        facts.code("cuMemMap over two reservations", mapped, OK);
        if mapped.is_ok() {
            facts.code("cuMemAddressFree of the second of them", cuda.mem_address_free(high, CHUNK), INVALID_VALUE);
            facts.code("cuMemUnmap over them", cuda.mem_unmap(low, 2 * CHUNK), OK);
        }
        cuda.mem_release(both).expect("cuMemRelease");
        for address in [low, high] {
            let handle = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
            cuda.mem_map(address, CHUNK, 0, handle).expect("cuMemMap");
            cuda.mem_release(handle).expect("cuMemRelease");
        }
        facts.code("cuMemSetAccess over two reservations", cuda.mem_set_access(low, 2 * CHUNK, 0, READ_WRITE), OK);
        for address in [low, high] {
            cuda.mem_set_access(address, CHUNK, 0, READ_WRITE).expect("cuMemSetAccess");
        }
        facts.code("copy over two reservations", cuda.fill(low, 1, 2 * CHUNK), OK);
        facts.code("cuMemUnmap over two reservations", cuda.mem_unmap(low, 2 * CHUNK), OK);
        for address in [low, high] {
            let _ = cuda.mem_unmap(address, CHUNK);
        }
    }
    let _ = (cuda.mem_address_free(low, CHUNK), cuda.mem_address_free(high, CHUNK));
}

/// Ranges that begin in a reservation and end outside.
fn past_the_end(cuda: &Cuda, facts: &mut Facts) {
    let chunk = cuda.mem_create(2 * CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    // Nothing is behind the reservation, because it was there a moment ago.
    let room = cuda.mem_reserve(4 * CHUNK).expect("cuMemAddressReserve");
    cuda.mem_address_free(room, 4 * CHUNK).expect("cuMemAddressFree");
    let base = cuda.mem_reserve_at(CHUNK, room).expect("cuMemAddressReserve");
    let mapped = cuda.mem_map(base, 2 * CHUNK, 0, chunk);
    facts.code("cuMemMap past the reservation", mapped, OK);
    if mapped.is_ok() {
        facts.code("cuMemSetAccess past the reservation", cuda.mem_set_access(base, 2 * CHUNK, 0, READ_WRITE), OK);
        facts.code("copy past the reservation", cuda.fill(base, 1, 2 * CHUNK), OK);
        facts.known(
            "RANGE_SIZE past the reservation",
            cuda.attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, base + CHUNK as u64),
            Ok(0),
        );
        facts.code("cuMemUnmap of a mapping past the reservation", cuda.mem_unmap(base, 2 * CHUNK), OK);
    }
    facts.code("cuMemUnmap past the reservation of nothing", cuda.mem_unmap(base, 2 * CHUNK), OK);
    facts.code("cuMemUnmap of no bytes", cuda.mem_unmap(base, 0), INVALID_VALUE);
    facts.code("cuMemUnmap between granules", cuda.mem_unmap(base + 4096, CHUNK), OK);
    facts.code("cuMemUnmap outside of reservations", cuda.mem_unmap(1 << 40, CHUNK), INVALID_VALUE);
    let _ = (cuda.mem_address_free(base, CHUNK), cuda.mem_release(chunk));
}
