//! What memory of a device can be shared by, found out by doing it: attributes may promise what the driver then refuses.
//!
//! # Safety
//! As in `gpu.rs`: every pointer passed is to a live local of the type that the function is told, and none is kept. A fabric handle and a legacy handle are 64
//! bytes (`CUmemFabricHandle`, `CUipcMemHandle`).

#![allow(unsafe_code)]

use core::ffi::c_int;
use std::os::fd::AsFd;

use cuda_driver_sys::{
    CUdevice_attribute, CUipcMemHandle_v1, CUmemAllocationHandleType, CUmemAllocationProp_v1, CUmemAllocationType, CUresult,
    device_location,
};
use cuda_ipc_core::sys::driver::DriverError;
use cuda_ipc_core::table::GRANULE;
use serde::Serialize;

use super::{Gpu, POSIX_FD, code_name, size};

/// How a trial ended.
#[derive(Serialize)]
pub(crate) struct Trial {
    /// What the attribute promises; none where there is no attribute.
    pub(crate) promised: Option<bool>,
    pub(crate) works: bool,
    /// The call that failed, and its code with its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// What was tried on a device.
#[derive(Serialize)]
pub(crate) struct Trials {
    /// A chunk of cuMemCreate: made, exported as an fd, imported.
    pub(crate) posix_fd: Trial,
    /// The same, exported as a fabric handle.
    pub(crate) fabric: Trial,
    /// Memory of cuMemAlloc and its legacy handle.
    pub(crate) legacy: Trial,
}

const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

impl Trials {
    /// Tries all three with 2 MiB each, which are free again afterwards.
    pub(crate) fn on(gpu: &Gpu) -> Self {
        let posix_fd = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        let fabric = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
        Self {
            posix_fd: Trial::new(gpu, Some(posix_fd), by_fd(gpu)),
            fabric: Trial::new(gpu, Some(fabric), by_fabric(gpu)),
            legacy: Trial::new(gpu, None, by_legacy(gpu)),
        }
    }
}

impl Trial {
    fn new(gpu: &Gpu, attribute: Option<CUdevice_attribute>, result: Result<(), DriverError>) -> Self {
        let error = result.err().map(|error| match code_name(&gpu.cuda, error.code) {
            Some(name) => format!("{error} ({name})"),
            None => error.to_string(),
        });
        let promised = attribute.and_then(|attribute| promises(gpu, attribute).ok());
        Self { promised, works: error.is_none(), error }
    }
}

fn promises(gpu: &Gpu, attribute: CUdevice_attribute) -> Result<bool, DriverError> {
    let mut value: c_int = 0;
    call!(gpu.cuda, cuDeviceGetAttribute(&raw mut value, attribute, gpu.ordinal))?;
    Ok(value != 0)
}

fn by_fd(gpu: &Gpu) -> Result<(), DriverError> {
    let handle = create(gpu, POSIX_FD)?;
    let imported = gpu.export_fd(handle).and_then(|fd| gpu.import_fd(fd.as_fd()));
    let released = imported.and_then(|imported| gpu.release(imported));
    gpu.release(handle).and(released)
}

fn by_fabric(gpu: &Gpu) -> Result<(), DriverError> {
    let handle = create(gpu, FABRIC)?;
    let mut fabric = [0_u8; 64];
    let exported = call!(gpu.cuda, cuMemExportToShareableHandle(fabric.as_mut_ptr().cast(), handle, FABRIC, 0));
    gpu.release(handle).and(exported)
}

fn by_legacy(gpu: &Gpu) -> Result<(), DriverError> {
    let address = gpu.alloc(GRANULE)?;
    // SAFETY: a C struct of bytes, for which zero is a value.
    let mut handle: CUipcMemHandle_v1 = unsafe { core::mem::zeroed() };
    let got = call!(gpu.cuda, cuIpcGetMemHandle(&raw mut handle, address));
    gpu.free(address).and(got)
}

fn create(gpu: &Gpu, handle_type: CUmemAllocationHandleType) -> Result<u64, DriverError> {
    // SAFETY: a C struct of integers and a pointer, for which zero is a value (cuMemCreate).
    let mut properties: CUmemAllocationProp_v1 = unsafe { core::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = handle_type;
    properties.location = device_location(gpu.ordinal);
    let mut handle = 0;
    call!(gpu.cuda, cuMemCreate(&raw mut handle, size(GRANULE), &raw const properties, 0)).map(|()| handle)
}
