//! Legacy IPC handles of `cuMemAlloc` memory.
//!
//! Calls go by `driver.rs`, under its chapter on safety: pointers are to live locals, and a handle is bytes that the driver judges.

use cuda_driver_sys::{CUdeviceptr, CUipcMemHandle_v1, CUresult};

use super::{Context, Cuda, DriverError, released};

/// The one flag of `cuIpcOpenMemHandle`, which it demands: peer access between devices is enabled where it is needed.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

impl Cuda {
    /// Handle, base and length of the allocation that holds `address`; asked in the context it was made in.
    ///
    /// Source: cuMemGetAddressRange, cuIpcGetMemHandle.
    pub(crate) fn export_legacy(&self, context: Context, address: u64) -> Result<([u8; 64], (u64, u64)), DriverError> {
        self.in_context(context, || {
            let range = self.allocation(address)?;
            let mut handle = CUipcMemHandle_v1 { reserved: [0; 64] };
            call!(self, cuIpcGetMemHandle(&raw mut handle, range.0))?;
            Ok((handle.reserved.map(|byte| byte.to_ne_bytes()[0]), range))
        })
    }

    /// Maps the allocation of another process that `handle` stands for, in `context`. Source: cuIpcOpenMemHandle.
    pub(crate) fn open_legacy(&self, context: Context, handle: &[u8; 64]) -> Result<u64, DriverError> {
        let handle = CUipcMemHandle_v1 { reserved: handle.map(|byte| core::ffi::c_char::from_ne_bytes([byte])) };
        self.in_context(context, || {
            let mut address: CUdeviceptr = 0;
            call!(self, cuIpcOpenMemHandle(&raw mut address, handle, LAZY_ENABLE_PEER_ACCESS))?;
            Ok(address)
        })
    }

    /// Unmaps it again, in the context that it was opened in. Tried twice: a mapping that stays pins the exporter's memory. Source: cuIpcCloseMemHandle.
    pub(crate) fn close_legacy(&self, context: Context, address: u64) -> Result<(), DriverError> {
        let close = || self.in_context(context, || call!(self, cuIpcCloseMemHandle(address)));
        released(close().or_else(|_| close()))
    }
}
