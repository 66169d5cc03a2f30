//! The NVML beside the fake driver: `libnvidia-ml.so.1`.
//!
//! It knows the physical devices of `FAKE_CUDA_DEVICES` (1), whatever `CUDA_VISIBLE_DEVICES` says, with the PCI addresses and UUIDs that the fake driver
//! gives them. There is no fabric. NVLinks are there if `FAKE_NVML_LINKS` says how many a device has; their remote end is an NVSwitch. UCX up to 1.19
//! links these functions, later releases look them up, and do without all of NVML where one is missing.
//!
//! # Safety
//! Pointers are the C caller's word: valid for the type of the signature, or null.

use core::ffi::{CStr, c_char, c_void};

/// `nvmlReturn_t`.
type Return = u32;
const SUCCESS: Return = 0;
const INVALID_ARGUMENT: Return = 2;
const NOT_SUPPORTED: Return = 3;
const NOT_FOUND: Return = 6;

/// `nvmlDevice_t`: the device's number plus one.
type Device = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    bus_id: [c_char; 32],
}

/// `nvmlFieldValue_t`, whose value is a union of at most eight bytes.
#[repr(C)]
pub struct FieldValue {
    field_id: u32,
    scope_id: u32,
    timestamp: i64,
    latency_us: i64,
    value_type: u32,
    result: Return,
    value: u64,
}

/// `nvmlGpuFabricInfo_t`.
#[repr(C)]
pub struct FabricInfo {
    cluster: [u8; 16],
    status: Return,
    clique: u32,
    state: u8,
}

/// `nvmlGpuFabricInfoV_t`, as far as all its versions agree.
#[repr(C)]
pub struct FabricInfoV {
    version: u32,
    info: FabricInfo,
}

const FIELD_NVLINK_SPEED_MBPS_COMMON: u32 = 90;
const FIELD_NVLINK_LINK_COUNT: u32 = 91;
const VALUE_TYPE_UNSIGNED_INT: u32 = 1;
/// An H200's NVLink, per link.
const LINK_MBPS: u64 = 26_562;
const NVSWITCH_BUS: u32 = 0x80;
const H200_PCI_ID: u32 = 0x2335_10de;
const NVSWITCH_PCI_ID: u32 = 0x22a3_10de;

/// `nvmlInit_v2`
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Return {
    SUCCESS
}

/// `nvmlInitWithFlags`
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: u32) -> Return {
    SUCCESS
}

/// `nvmlShutdown`
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Return {
    SUCCESS
}

/// `nvmlErrorString`
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: Return) -> *const c_char {
    let text: &CStr = match code {
        SUCCESS => c"The operation was successful",
        INVALID_ARGUMENT => c"Invalid argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// `nvmlDeviceGetCount_v2`
///
/// # Safety
/// See the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> Return {
    store(count, || Some(devices()))
}

/// `nvmlDeviceGetHandleByIndex_v2`
///
/// # Safety
/// See the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Device) -> Return {
    store(device, || (index < devices()).then(|| core::ptr::without_provenance_mut(index as usize + 1)))
}

/// `nvmlDeviceGetName`
///
/// # Safety
/// See the crate; `name` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Device, name: *mut c_char, len: u32) -> Return {
    match index(device) {
        Some(_) => text("Fake CUDA device", name, len),
        None => INVALID_ARGUMENT,
    }
}

/// `nvmlDeviceGetUUID`
///
/// # Safety
/// See the crate; `uuid` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Device, uuid: *mut c_char, len: u32) -> Return {
    match index(device) {
        // As `config.rs` of the fake driver has it.
        Some(gpu) => text(&format!("GPU-fa4ec0da-0000-4000-8000-66616b6500{gpu:02x}"), uuid, len),
        None => INVALID_ARGUMENT,
    }
}

/// `nvmlDeviceGetPciInfo_v3`
///
/// # Safety
/// See the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, info: *mut PciInfo) -> Return {
    // As `device.rs` of the fake driver has it.
    store(info, || index(device).map(|gpu| pci_info(0x10 + gpu, H200_PCI_ID)))
}

/// `nvmlDeviceGetFieldValues`
///
/// # Safety
/// See the crate; `values` has `count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(device: Device, count: i32, values: *mut FieldValue) -> Return {
    if index(device).is_none() || values.is_null() {
        return INVALID_ARGUMENT;
    }
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the array has `count` entries by the caller's word.
        let place = unsafe { values.add(at) };
        // SAFETY: as above; the entry was initialised by the caller, who asks with it.
        let entry = unsafe { &mut *place };
        entry.timestamp = 0;
        entry.latency_us = 0;
        entry.value_type = VALUE_TYPE_UNSIGNED_INT;
        (entry.result, entry.value) = match entry.field_id {
            FIELD_NVLINK_LINK_COUNT => (SUCCESS, u64::from(links())),
            FIELD_NVLINK_SPEED_MBPS_COMMON if links() > 0 => (SUCCESS, LINK_MBPS),
            _ => (NOT_SUPPORTED, 0),
        };
    }
    SUCCESS
}

/// `nvmlDeviceGetNvLinkState`
///
/// # Safety
/// See the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(device: Device, link: u32, active: *mut u32) -> Return {
    store(active, || index(device).filter(|_| link < links()).map(|_| 1))
}

/// `nvmlDeviceGetNvLinkRemotePciInfo_v2`
///
/// # Safety
/// See the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Device, link: u32, info: *mut PciInfo) -> Return {
    store(info, || index(device).filter(|_| link < links()).map(|_| pci_info(NVSWITCH_BUS, NVSWITCH_PCI_ID)))
}

/// `nvmlDeviceGetGpuFabricInfo`: not supported here, said in the structure, as NVML does.
///
/// # Safety
/// See the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfo(device: Device, info: *mut FabricInfo) -> Return {
    store(info, || index(device).map(|_| FabricInfo::none()))
}

/// `nvmlDeviceGetGpuFabricInfoV`
///
/// # Safety
/// See the crate; the version is filled in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(device: Device, info: *mut FabricInfoV) -> Return {
    if index(device).is_none() || info.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, so a structure that the caller has set a version in.
    unsafe { (*info).info = FabricInfo::none() };
    SUCCESS
}

impl FabricInfo {
    fn none() -> Self {
        Self { cluster: [0; 16], status: NOT_SUPPORTED, clique: 0, state: 0 }
    }
}

fn setting(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn devices() -> u32 {
    setting("FAKE_CUDA_DEVICES", 1)
}

fn links() -> u32 {
    setting("FAKE_NVML_LINKS", 0)
}

fn index(device: Device) -> Option<u32> {
    u32::try_from(device.addr()).ok()?.checked_sub(1).filter(|&index| index < devices())
}

fn pci_info(bus: u32, pci_device_id: u32) -> PciInfo {
    let mut info = PciInfo { bus_id_legacy: [0; 16], domain: 0, bus, device: 0, pci_device_id, pci_subsystem_id: 0, bus_id: [0; 32] };
    write_text(&mut info.bus_id_legacy, &format!("0000:{bus:02X}:00.0"));
    write_text(&mut info.bus_id, &format!("00000000:{bus:02X}:00.0"));
    info
}

fn write_text(place: &mut [c_char], text: &str) {
    for (place, byte) in place.iter_mut().zip(text.bytes()) {
        *place = byte.cast_signed();
    }
}

fn text(text: &str, out: *mut c_char, len: u32) -> Return {
    if out.is_null() || len as usize <= text.len() {
        return INVALID_ARGUMENT;
    }
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        let place = out.wrapping_add(at);
        // SAFETY: the room is `len` bytes by the caller's word, and `at` is below that.
        unsafe { place.write(byte.cast_signed()) };
    }
    SUCCESS
}

fn store<T>(out: *mut T, value: impl FnOnce() -> Option<T>) -> Return {
    match value() {
        Some(value) if !out.is_null() => {
            // SAFETY: not null, so room for a `T` by the caller's word.
            unsafe { out.write(value) };
            SUCCESS
        }
        _ => INVALID_ARGUMENT,
    }
}
