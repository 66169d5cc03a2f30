//! Contexts for the few calls that need one: legacy handles, and the range of an allocation.
//!
//! Nothing here stays current: a context is pushed for one call and popped after it. A primary context is retained only where the calling thread has none
//! of the device, and for as long as the holder needs it.
//!
//! Calls go by `driver.rs`, under its chapter on safety. A context's number comes from the driver, in this process; one that was destroyed meanwhile is the
//! driver's to refuse.

use cuda_driver_sys::{CUcontext, CUdevice, CUdeviceptr, CUresult};

use super::{Context, Cuda, DriverError, released};

/// A context of a device that is good until it is let go. Plain data: [`Cuda::let_go`] is the holder's duty.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct HeldContext {
    context: Context,
    /// The device whose primary context was retained for this.
    retained: Option<CUdevice>,
}

impl HeldContext {
    /// The context.
    pub(crate) const fn context(&self) -> Context {
        self.context
    }
}

impl Cuda {
    /// The calling thread's context if it is of `device`, else the device's primary one, retained. Source: cuDevicePrimaryCtxRetain.
    pub(crate) fn hold_context(&self, device: CUdevice) -> Result<HeldContext, DriverError> {
        if self.current_device() == Ok(device)
            && let Ok(Some(context)) = self.current_context()
        {
            return Ok(HeldContext { context, retained: None });
        }
        let mut context: CUcontext = core::ptr::null_mut();
        call!(self, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        Ok(HeldContext { context: Context(context as usize), retained: Some(device) })
    }

    /// Gives back what [`Cuda::hold_context`] has retained. Tried twice: a context that stays keeps memory.
    pub(crate) fn let_go(&self, held: HeldContext) -> Result<(), DriverError> {
        let Some(device) = held.retained else { return Ok(()) };
        let release = || call!(self, cuDevicePrimaryCtxRelease(device));
        released(release().or_else(|_| release()))
    }

    /// Runs `body` with a context of `device` current.
    pub(crate) fn with_context_of<T>(&self, device: CUdevice, body: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        let held = self.hold_context(device)?;
        let value = self.in_context(held.context, body);
        let let_go = self.let_go(held);
        value.and_then(|value| let_go.map(|()| value))
    }

    /// Makes a call that needs no context, as far as is known; where the driver says that it does, once more with one of `device`.
    ///
    /// What such a call was for is not done then, so that "no context" is never taken for "released already".
    pub(crate) fn with_context_if_needed<T>(&self, device: CUdevice, call: impl Fn() -> Result<T, DriverError>) -> Result<T, DriverError> {
        const INVALID_CONTEXT: u32 = CUresult::CUDA_ERROR_INVALID_CONTEXT.0;
        match call() {
            Err(DriverError { code: INVALID_CONTEXT, .. }) => self.with_context_of(device, &call),
            other => other,
        }
    }

    /// Base and length in bytes of the allocation that holds `address`. Needs a current context. Source: cuMemGetAddressRange.
    pub(crate) fn allocation(&self, address: u64) -> Result<(u64, u64), DriverError> {
        let (mut base, mut len): (CUdeviceptr, usize) = (0, 0);
        call!(self, cuMemGetAddressRange(&raw mut base, &raw mut len, address))?;
        Ok((base, len as u64))
    }
}
