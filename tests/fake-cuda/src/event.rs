//! Events: marks in the queue of asynchronous work (`stream.rs`).

use cuda_driver_sys::{CUevent, CUevent_st, CUresult, CUstream_st};

use crate::abi::{Answer, Handle, Out, handle};
use crate::process::{self, Process};

/// One event.
pub(crate) struct Event {
    /// The queue entry it stands for.
    at: u64,
    context: u64,
}

const FIRST_EVENT: u64 = 0xe7_0000_0000;

/// `cuEventCreate`.
pub(crate) fn create(out: Out<CUevent>, _flags: u32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    process.streams.last_handle += 0x100;
    let number = FIRST_EVENT + process.streams.last_handle;
    process.streams.events.insert(number, Event { at: 0, context });
    out.set(handle(number))
}

/// `cuEventRecord`.
pub(crate) fn record(event: Handle<CUevent_st>, stream: Handle<CUstream_st>) -> Answer {
    let mut process = process::lock()?;
    let number = process.stream(stream.id())?;
    let last = process.streams.live.get(&number).map_or(0, |stream| stream.last);
    let event = process.streams.events.get_mut(&event.id()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    event.at = last;
    Ok(())
}

/// `cuEventQuery`.
pub(crate) fn query(event: Handle<CUevent_st>) -> Answer {
    let process = process::lock()?;
    let event = process.streams.events.get(&event.id()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    if process.streams.is_done(event.at) { process.check_context(event.context) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
}

/// `cuEventSynchronize`.
pub(crate) fn synchronize(event: Handle<CUevent_st>) -> Answer {
    let process = process::lock()?;
    let event = process.streams.events.get(&event.id()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    let (at, context) = (event.at, event.context);
    Process::finish(process, at).check_context(context)
}

/// `cuEventDestroy_v2`.
pub(crate) fn destroy(event: Handle<CUevent_st>) -> Answer {
    let mut process = process::lock()?;
    let number = event.id();
    process.check_context(process.streams.events.get(&number).map_or(0, |event| event.context))?;
    process.streams.events.remove(&number).map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// `cuEventElapsedTime`: no time passes on the fake.
pub(crate) fn elapsed(out: Out<f32>, start: Handle<CUevent_st>, end: Handle<CUevent_st>) -> Answer {
    let process = process::lock()?;
    let known = process.streams.events.contains_key(&start.id()) && process.streams.events.contains_key(&end.id());
    if known { out.set(0.0) } else { Err(CUresult::CUDA_ERROR_INVALID_HANDLE) }
}

/// `cuStreamWaitEvent`: one queue keeps the order anyway.
pub(crate) fn wait(stream: Handle<CUstream_st>, event: Handle<CUevent_st>, _flags: u32) -> Answer {
    let mut process = process::lock()?;
    process.stream(stream.id())?;
    process.streams.events.get(&event.id()).map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}
