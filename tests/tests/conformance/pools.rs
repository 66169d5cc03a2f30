//! Memory of pools: what an exporter of it rests on. None of these answers has been seen on a GPU by those who wrote them down, so none is asserted but on the
//! fake driver, whose answers the exporter is written for.

use core::ptr::null_mut;

use cuda_driver_sys::{CUpointer_attribute as PointerAttribute, CUresult};
use cuda_ipc_tests::driver::{Fake, Inside};

use crate::POSIX_FD;
use crate::facts::{Facts, own};

/// No whole number of anything.
const ODD: usize = (5 << 20) + 512;

#[test]
fn memory_of_pools() {
    let Some(_) = Inside::enter_with_any_driver("pools::memory_of_pools") else { return };
    let (cuda, mut facts) = Facts::start();
    let is_fake = Fake::find().is_some();
    let pool = cuda.pool_create(0, POSIX_FD).expect("cuMemPoolCreate");
    let alloc = || {
        let address = cuda.alloc_from_pool(ODD, pool, null_mut()).expect("cuMemAllocFromPoolAsync");
        cuda.stream_synchronize(null_mut()).expect("cuStreamSynchronize");
        address
    };
    let mut say = |fact: &str, holds: bool| {
        if is_fake { facts.known(fact, holds, true) } else { facts.open(fact, holds) }
    };
    let (address, neighbour) = (alloc(), alloc());
    let attribute = |attribute, address| cuda.attribute(attribute, address);
    let of_pool = attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address + 17);
    say("MEMPOOL_HANDLE of pool memory is what cuMemPoolCreate gave", of_pool == Ok(pool.addr() as u64));
    say("cuMemGetAddressRange of pool memory is the allocation", cuda.address_range(address + 4711) == Ok((address, ODD)));
    let range = (
        attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + 4711),
        attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address + 4711),
    );
    say("RANGE of pool memory is the allocation", range == (Ok(address), Ok(ODD as u64)));
    let data = cuda.pool_export_pointer(address);
    say("cuMemPoolExportPointer gives equal bytes each time", data.is_ok() && data == cuda.pool_export_pointer(address));
    say("and other bytes for other memory", data != cuda.pool_export_pointer(neighbour));
    let number = pool.expose_provenance();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let pool = core::ptr::with_exposed_provenance_mut(number);
            say("without a context: cuMemPoolExportToShareableHandle", cuda.pool_export_fd(pool).map(own).is_ok());
            say("without a context: cuMemPoolExportPointer", cuda.pool_export_pointer(address).is_ok());
        });
    });
    let id = cuda.buffer_id(address);
    say("allocations of a pool have BUFFER_IDs of their own", id.is_ok() && id != cuda.buffer_id(neighbour));
    cuda.free_async(address, null_mut()).expect("cuMemFreeAsync");
    cuda.stream_synchronize(null_mut()).expect("cuStreamSynchronize");
    say("freed pool memory has no BUFFER_ID", cuda.buffer_id(address) == Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let again = alloc();
    say("memory allocated anew has another BUFFER_ID", cuda.buffer_id(again) != id);
    facts.open("a pool gives the same address again", again == address);
    for address in [again, neighbour] {
        cuda.free_async(address, null_mut()).expect("cuMemFreeAsync");
    }
    cuda.stream_synchronize(null_mut()).expect("cuStreamSynchronize");
    cuda.pool_destroy(pool).expect("cuMemPoolDestroy");
}
