//! Every struct that the table's functions take has the size, alignment and offsets of cudarc's independently generated bindings.
//!
//! The bindings assert what libclang saw on the machine that generated them; this compares with what someone else's run saw.

use core::mem::{align_of, offset_of, size_of};

use cuda_driver_sys as ours;
use cudarc::driver::sys as theirs;

/// Compares one struct and the named fields.
macro_rules! same_layout {
    ($test:ident: $name:ident { $($field:ident),* }) => {
        #[test]
        fn $test() {
            assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), "size");
            assert_eq!(align_of::<ours::$name>(), align_of::<theirs::$name>(), "alignment");
            $(assert_eq!(offset_of!(ours::$name, $field), offset_of!(theirs::$name, $field), stringify!($field));)*
        }
    };
}

same_layout!(uuid: CUuuid { bytes });
same_layout!(ipc_mem_handle: CUipcMemHandle_v1 { reserved });
same_layout!(mem_location: CUmemLocation { type_, id });
same_layout!(mem_access_desc: CUmemAccessDesc_v1 { location, flags });
same_layout!(mem_allocation_prop: CUmemAllocationProp_v1 { type_, requestedHandleTypes, location, win32HandleMetaData, allocFlags });
same_layout!(mem_allocation_flags: CUmemAllocationProp_st__bindgen_ty_1 { compressionType, gpuDirectRDMACapable, usage, reserved });
same_layout!(mem_pool_props: CUmemPoolProps_v1 { allocType, handleTypes, location, win32SecurityAttributes, maxSize, usage, reserved });
same_layout!(mem_pool_ptr_export_data: CUmemPoolPtrExportData_v1 { reserved });
same_layout!(memcpy_attributes: CUmemcpyAttributes_v1 { srcAccessOrder, srcLocHint, dstLocHint, flags });

#[test]
fn scalars() {
    assert_eq!(size_of::<ours::CUdeviceptr>(), size_of::<theirs::CUdeviceptr>());
    assert_eq!(size_of::<ours::CUdevice>(), size_of::<theirs::CUdevice>());
    assert_eq!(size_of::<ours::CUmemGenericAllocationHandle_v1>(), size_of::<theirs::CUmemGenericAllocationHandle>());
    assert_eq!(size_of::<ours::CUresult>(), size_of::<theirs::CUresult>());
    assert_eq!(size_of::<ours::CUcontext>(), size_of::<theirs::CUcontext>());
}

/// The location accessors see the field that 13.x headers moved into a union of the same size.
#[test]
fn location_accessors() {
    let location = ours::device_location(7);
    assert_eq!(location.type_, ours::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE);
    assert_eq!(ours::location_id(&location), 7);
    assert_eq!(offset_of!(ours::CUmemLocation, id) + size_of::<i32>(), size_of::<ours::CUmemLocation>());
}
