//! What the 12.9 headers say otherwise than newer or older ones: accessors instead of fields, one typedef that 13.0 added, and short names of our
//! own.

use crate::bindings::{CUdeviceptr_v2, CUmemLocation, CUmemLocationType, CUmemcpyAttributes_v1, CUresult, CUstream};

/// A device address (`CUdeviceptr`), valid in one process.
pub type CUdeviceptr = crate::bindings::CUdeviceptr_v2;
/// A device ordinal (`CUdevice`), valid in one process.
pub type CUdevice = crate::bindings::CUdevice_v1;

/// Access rights of one location (`CUmemAccessDesc`).
pub type CUmemAccessDesc = crate::bindings::CUmemAccessDesc_v1;
/// A reference to a physical allocation (`CUmemGenericAllocationHandle`).
pub type CUmemGenericAllocationHandle = crate::bindings::CUmemGenericAllocationHandle_v1;

/// `CU_MEMORYTYPE_DEVICE`, as the pointer attribute MEMORY_TYPE reports it: the value is written as an `unsigned int`, and no typedef of the table
/// mentions the enum.
pub const CU_MEMORYTYPE_DEVICE: u32 = 2;

/// A location on the device with this ordinal.
///
/// Built here and nowhere else, because 13.x headers move `id` into an anonymous union of the same size.
pub const fn device_location(ordinal: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}

/// The location's ordinal; its meaning depends on `type_`.
pub const fn location_id(location: &CUmemLocation) -> i32 {
    location.id
}

/// `cuMemcpyBatchAsync_v2` of CUDA 13.0: as [`PFN_cuMemcpyBatchAsync_v12080`](crate::PFN_cuMemcpyBatchAsync_v12080), without `failIdx`.
///
/// Written by hand because only 13.x headers have it and the bindings come from 12.9; `cargo xtask gen-bindings --check` compares it with what
/// bindgen makes of the 13.x headers, so it is spelled as bindgen spells it.
#[allow(non_camel_case_types, non_snake_case)]
pub type PFN_cuMemcpyBatchAsync_v13000 = ::core::option::Option<
    unsafe extern "C" fn(
        dsts: *mut CUdeviceptr_v2,
        srcs: *mut CUdeviceptr_v2,
        sizes: *mut usize,
        count: usize,
        attrs: *mut CUmemcpyAttributes_v1,
        attrIdxs: *mut usize,
        numAttrs: usize,
        hStream: CUstream,
    ) -> CUresult,
>;
