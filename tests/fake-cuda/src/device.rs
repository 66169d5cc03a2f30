//! Devices: how many, which, and what they can do. The answers are an H200's where the project asks, and zero elsewhere.

use core::ffi::{CStr, c_char};

use cuda_driver_sys::{CUdevice_attribute, CUresult, CUuuid};

use crate::abi::{Answer, INVALID, In, Out};
use crate::config;
use crate::process;

/// The version the fake claims: CUDA 13.0.
pub(crate) const VERSION: i32 = 13000;

/// `cuDriverGetVersion`.
pub(crate) fn version(out: Out<i32>) -> Answer {
    out.set(VERSION)
}

/// `cuDeviceGetCount`.
pub(crate) fn count(out: Out<i32>) -> Answer {
    let count = process::lock()?.devices.len();
    out.set(i32::try_from(count).unwrap_or(0))
}

/// `cuDeviceGet`.
pub(crate) fn get(out: Out<i32>, ordinal: i32) -> Answer {
    process::lock()?.device(ordinal)?;
    out.set(ordinal)
}

/// `cuDeviceGetName`.
pub(crate) fn name(out: Out<c_char>, len: i32, device: i32) -> Answer {
    process::lock()?.device(device)?;
    text(out, len, c"Fake CUDA device")
}

/// `cuDeviceGetUuid`, both versions.
pub(crate) fn uuid(out: Out<CUuuid>, device: i32) -> Answer {
    let process = process::lock()?;
    let gpu = process.devices[process.device(device)?];
    out.set(CUuuid { bytes: config::uuid(gpu).map(u8::cast_signed) })
}

/// `cuDeviceTotalMem_v2`.
pub(crate) fn total_memory(out: Out<usize>, device: i32) -> Answer {
    let process = process::lock()?;
    process.device(device)?;
    let memory = process.registry.lock().memory;
    out.set(usize::try_from(memory).unwrap_or(0))
}

/// `cuDeviceCanAccessPeer`.
pub(crate) fn can_access_peer(out: Out<i32>, device: i32, peer: i32) -> Answer {
    let process = process::lock()?;
    process.device(device)?;
    process.device(peer)?;
    out.set(i32::from(device != peer && process.peers))
}

/// `cuDeviceGetPCIBusId`.
pub(crate) fn pci_bus_id(out: Out<c_char>, len: i32, device: i32) -> Answer {
    let process = process::lock()?;
    let gpu = process.devices[process.device(device)?];
    let id = std::ffi::CString::new(format!("0000:{:02X}:00.0", pci_bus(gpu))).map_err(|_| INVALID)?;
    text(out, len, &id)
}

/// `cuDeviceGetByPCIBusId`.
pub(crate) fn by_pci_bus_id(out: Out<i32>, id: In<c_char>) -> Answer {
    out.check()?;
    let process = process::lock()?;
    let mut bus = 0;
    // "DDDD:BB:DD.F"; only the bus differs between fake devices.
    for index in 5..7 {
        let digit = u8::try_from(id.at(index)?).ok().and_then(|c| char::from(c).to_digit(16)).ok_or(INVALID)?;
        bus = bus * 16 + digit;
    }
    let found = process.devices.iter().position(|&gpu| pci_bus(gpu) == bus).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    out.set(i32::try_from(found).unwrap_or(-1))
}

/// `cuDeviceComputeCapability`.
pub(crate) fn compute_capability(major: Out<i32>, minor: Out<i32>, device: i32) -> Answer {
    process::lock()?.device(device)?;
    major.set(9)?;
    minor.set(0)
}

/// `cuDeviceGetAttribute`.
pub(crate) fn attribute(out: Out<i32>, attribute: CUdevice_attribute, device: i32) -> Answer {
    let process = process::lock()?;
    let gpu = process.devices[process.device(device)?];
    if attribute.0 == 0 || attribute.0 >= 200 {
        return Err(INVALID);
    }
    out.set(match attribute {
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => pci_bus(gpu).cast_signed(),
        other => ATTRIBUTES.iter().find(|row| row.0 == other).map_or(0, |row| row.1),
    })
}

/// `cuMemGetInfo_v2`: free memory as every process of the fake machine sees it.
pub(crate) fn memory_info(free: Out<usize>, total: Out<usize>) -> Answer {
    let process = process::lock()?;
    let (_, device) = process.working()?;
    let gpu = process.devices[device];
    let mut locked = process.registry.lock();
    locked.sweep();
    let (used, memory) = (locked.gpus[gpu].used_bytes, locked.memory);
    free.set(usize::try_from(memory.saturating_sub(used)).unwrap_or(0))?;
    total.set(usize::try_from(memory).unwrap_or(0))
}

/// The PCI bus number of a physical device; `fake-nvml` says the same.
fn pci_bus(gpu: usize) -> u32 {
    0x10 + u32::try_from(gpu).unwrap_or(0)
}

fn text(out: Out<c_char>, len: i32, text: &CStr) -> Answer {
    out.check()?;
    let room = usize::try_from(len).map_err(|_| INVALID)?;
    let bytes = text.to_bytes_with_nul();
    for (index, &byte) in bytes.iter().enumerate().take(room) {
        let last = index + 1 == room;
        out.set_at(index, if last { 0 } else { byte.cast_signed() })?;
    }
    Ok(())
}

const ATTRIBUTES: &[(CUdevice_attribute, i32)] = &[
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH, i32::MAX),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_980_000),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3_201_000),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 9),
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1),
    // As on the H200 without IMEX: the attribute says yes, creation says no. DMA_BUF_SUPPORTED is 0 where the H200 has 1: there is no dma-buf of a file.
    (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1),
];
