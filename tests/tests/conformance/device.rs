//! What the device says of itself, and what it gives.

use cuda_driver_sys::{CUdevice_attribute as DeviceAttribute, CUresult};
use cuda_ipc_tests::driver::Inside;

use crate::facts::Facts;
use crate::{CHUNK, FABRIC, INVALID_VALUE, NONE, OUT_OF_MEMORY, POSIX_FD};

#[test]
fn device() {
    let Some(_) = Inside::enter_with_any_driver("device::device") else { return };
    let (cuda, mut facts) = Facts::start();
    // The machine's own.
    facts.open("cuDriverGetVersion", cuda.driver_version());
    facts.open("cuDeviceGetName", cuda.device_name(0));
    let attributes = [
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED, 1),
        ("POSIX_FILE_DESCRIPTOR_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
        ("FABRIC_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1),
        ("MEMPOOL_SUPPORTED_HANDLE_TYPES", DeviceAttribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 9),
        ("UNIFIED_ADDRESSING", DeviceAttribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
        ("MEMORY_POOLS_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1),
        ("IPC_EVENT_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1),
        ("PAGEABLE_MEMORY_ACCESS", DeviceAttribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0),
        ("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1),
        ("MULTICAST_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0),
        ("HOST_REGISTER_SUPPORTED", DeviceAttribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1),
    ];
    for (name, attribute, expected) in attributes {
        facts.known(&format!("device attribute {name}"), cuda.device_attribute(attribute, 0), Ok(expected));
    }
    // 1 on the H200. The fake's memory is a file, and only a kernel driver can make a dma-buf of it.
    facts.open("device attribute DMA_BUF_SUPPORTED", cuda.device_attribute(DeviceAttribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0));
    facts.known("allocation granularity", cuda.granularity(0), Ok(CHUNK));
    facts.code("cuDeviceGet of a device that is not there", cuda.device(99), CUresult::CUDA_ERROR_INVALID_DEVICE);
}

#[test]
fn creation() {
    let Some(_) = Inside::enter_with_any_driver("device::creation") else { return };
    let (cuda, mut facts) = Facts::start();
    facts.code("cuMemCreate with FABRIC", cuda.mem_create(CHUNK, 0, FABRIC), CUresult::CUDA_ERROR_NOT_PERMITTED);
    facts.code("cuMemCreate with POSIX_FD and FABRIC", cuda.mem_create(CHUNK, 0, POSIX_FD | FABRIC), CUresult::CUDA_ERROR_NOT_PERMITTED);
    facts.code("cuMemCreate of half a granule", cuda.mem_create(CHUNK / 2, 0, POSIX_FD), INVALID_VALUE);
    facts.code("cuMemCreate of nothing", cuda.mem_create(0, 0, POSIX_FD), INVALID_VALUE);
    facts.code("cuMemCreate with WIN32", cuda.mem_create(CHUNK, 0, 2), INVALID_VALUE);
    facts.code("cuMemCreate on a device that is not there", cuda.mem_create(CHUNK, 99, POSIX_FD), CUresult::CUDA_ERROR_INVALID_DEVICE);
    let total = cuda.mem_info().expect("cuMemGetInfo").1;
    facts.code("cuMemCreate of twice the memory", cuda.mem_create((2 * total).next_multiple_of(CHUNK), 0, POSIX_FD), OUT_OF_MEMORY);
    facts.code("cuMemAddressReserve of half a granule", cuda.mem_reserve(CHUNK / 2), INVALID_VALUE);
    facts.code("cuMemAddressReserve of nothing", cuda.mem_reserve(0), INVALID_VALUE);
    facts.code("cuMemAddressReserve of 2^60 bytes", cuda.mem_reserve(1 << 60), OUT_OF_MEMORY);
    facts.code("cuMemAlloc of nothing", cuda.mem_alloc(0), INVALID_VALUE);
    facts.code("cuMemAlloc of twice the memory", cuda.mem_alloc(2 * total), OUT_OF_MEMORY);

    let none = cuda.mem_create(CHUNK, 0, NONE).expect("cuMemCreate");
    facts.code("export of a handle made with type NONE", cuda.mem_export_fd(none), INVALID_VALUE);
    let handle = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    let prop = cuda.mem_properties(handle).expect("properties");
    facts.known("handle types of a handle made with POSIX_FD", prop.requestedHandleTypes.0, 1);
    cuda.mem_release(none).expect("cuMemRelease");
    cuda.mem_release(handle).expect("cuMemRelease");
    facts.code("cuMemRelease of 0", cuda.mem_release(0), INVALID_VALUE);
}
