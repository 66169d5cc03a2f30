//! Stream capture, as far as it forbids things: nothing is recorded that could be launched.
//!
//! The rule is `cuThreadExchangeStreamCaptureMode`'s. A potentially unsafe call fails, and invalidates the captures in its way, if the calling thread
//! has a capture of its own that was not begun relaxed, or if its mode is global and any other thread has a capture that was begun global; a relaxed
//! thread may make it. Virtual memory management and synchronous copies are not among these calls; `cuCtxSynchronize` spoils every capture of its
//! context, whoever calls it.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use cuda_driver_sys::{CUgraph, CUgraph_st, CUresult, CUstream_st, CUstreamCaptureMode, CUstreamCaptureStatus};

use crate::abi::{Answer, Handle, INVALID, Out, handle};
use crate::process::{self, Process};
use crate::stream::StreamId;

/// A capture in progress.
pub(crate) struct Capture {
    mode: u32,
    thread: u64,
    invalid: bool,
}

const GLOBAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL.0;
const RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0;

/// Captures in progress, so that calls need not take the lock to see that there are none.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);
static THREADS: AtomicU64 = AtomicU64::new(1);
static GRAPHS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

fn thread() -> u64 {
    THREAD.with(|number| {
        if number.get() == 0 {
            number.set(THREADS.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

impl Capture {
    /// Takes a call on the stream into the graph.
    pub(crate) fn record(&mut self) -> Answer {
        if self.invalid { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }
}

/// Fails a call that a capture forbids.
pub(crate) fn check_unsafe_call() -> Answer {
    let mode = MODE.get();
    if ACTIVE.load(Relaxed) == 0 || mode == RELAXED {
        return Ok(());
    }
    let me = thread();
    let mut process = process::lock()?;
    let mut allowed = true;
    for capture in process.streams.live.values_mut().filter_map(|stream| stream.capture.as_mut()) {
        let mine = capture.thread == me && capture.mode != RELAXED;
        let other = capture.thread != me && capture.mode == GLOBAL && mode == GLOBAL;
        if mine || other {
            capture.invalid = true;
            allowed = false;
        }
    }
    if allowed { Ok(()) } else { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) }
}

impl Process {
    /// Fails, and invalidates the captures of the context, if it has any.
    pub(crate) fn outside_all_captures(&mut self, context: u64) -> Answer {
        let mut none = true;
        for stream in self.streams.live.values_mut().filter(|stream| stream.context == context) {
            if let Some(capture) = &mut stream.capture {
                capture.invalid = true;
                none = false;
            }
        }
        if none { Ok(()) } else { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// The stream, for a call that a capture on it forbids.
    pub(crate) fn stream_outside_capture(&mut self, number: u64) -> Result<StreamId, CUresult> {
        let stream = self.stream(number)?;
        match self.streams.live.get_mut(&stream).and_then(|state| state.capture.as_mut()) {
            Some(capture) => {
                capture.invalid = true;
                Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(stream),
        }
    }
}

/// `cuThreadExchangeStreamCaptureMode`.
pub(crate) fn exchange_mode(mode: Out<CUstreamCaptureMode>) -> Answer {
    let wanted = mode.get()?.0;
    if wanted > RELAXED {
        return Err(INVALID);
    }
    mode.set(CUstreamCaptureMode(MODE.replace(wanted)))
}

/// `cuStreamBeginCapture_v2`.
pub(crate) fn begin(stream: Handle<CUstream_st>, mode: CUstreamCaptureMode) -> Answer {
    let mut process = process::lock()?;
    let number = stream.id();
    let stream = process.stream(number)?;
    let state = process.streams.live.get_mut(&stream).ok_or(INVALID)?;
    if number <= 1 {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if state.capture.is_some() || mode.0 > RELAXED {
        return Err(INVALID);
    }
    state.capture = Some(Capture { mode: mode.0, thread: thread(), invalid: false });
    ACTIVE.fetch_add(1, Relaxed);
    Ok(())
}

/// `cuStreamEndCapture`.
pub(crate) fn end(stream: Handle<CUstream_st>, graph: Out<CUgraph>) -> Answer {
    let mut process = process::lock()?;
    let stream = process.stream(stream.id())?;
    let state = process.streams.live.get_mut(&stream).ok_or(INVALID)?;
    let Some(capture) = &state.capture else { return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) };
    if capture.mode != RELAXED && capture.thread != thread() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    let invalid = capture.invalid;
    state.capture = None;
    ACTIVE.fetch_sub(1, Relaxed);
    if invalid {
        graph.set(core::ptr::null_mut())?;
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    graph.set(handle(0x69_0000_0000 + GRAPHS.fetch_add(1, Relaxed) * 0x100))
}

/// `cuStreamIsCapturing`.
pub(crate) fn is_capturing(stream: Handle<CUstream_st>, out: Out<CUstreamCaptureStatus>) -> Answer {
    let mut process = process::lock()?;
    let stream = process.stream(stream.id())?;
    out.set(match process.streams.live.get(&stream).and_then(|state| state.capture.as_ref()) {
        None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        Some(capture) if capture.invalid => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        Some(_) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
    })
}

/// `cuGraphDestroy`.
pub(crate) fn graph_destroy(graph: Handle<CUgraph_st>) -> Answer {
    if graph.id() == 0 { Err(INVALID) } else { Ok(()) }
}
