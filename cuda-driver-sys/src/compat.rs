//! What the 12.9 headers say otherwise than newer or older ones: accessors instead of fields, and short names of our own.

use crate::bindings::{CUmemLocation, CUmemLocationType};

/// A device address (`CUdeviceptr`), valid in one process.
pub type CUdeviceptr = crate::bindings::CUdeviceptr_v2;
/// A device ordinal (`CUdevice`), valid in one process.
pub type CUdevice = crate::bindings::CUdevice_v1;

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
