//! Whether UCX will see an NVLink: asked of NVML in the way in which UCX asks.

use std::ffi::OsStr;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::structs::device::FieldId;

/// The name under which programs open NVML.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// `NVML_FI_DEV_NVLINK_LINK_COUNT`.
const LINK_COUNT: FieldId = FieldId(91);

/// Whether the machine's first GPU has NVLinks, all with something at their other end. `None` if NVML is not there or does not say.
///
/// Source: `uct_cuda_ipc_get_device_nvlinks` of UCX, which looks at the first GPU only and takes it for all.
pub(super) fn look() -> Option<bool> {
    let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init().ok()?;
    let device = nvml.device_by_index(0).ok()?;
    let count = device.field_values_for(&[LINK_COUNT]).ok()?.into_iter().next()?.ok()?.value;
    let Ok(SampleValue::U32(count)) = count else { return Some(false) };
    Some(count > 0 && (0..count).all(|link| device.link_wrapper_for(link).remote_pci_info().is_ok()))
}
