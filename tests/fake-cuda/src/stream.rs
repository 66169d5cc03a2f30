//! Streams and the order of asynchronous work.
//!
//! All asynchronous work of the process goes through one queue, first in, first out, so every order that streams and events promise is kept (and some
//! that they do not). With nothing queued and asynchrony off, work is done inside the call. Otherwise a worker thread does it: when it is due, when
//! somebody waits for it, or, with asynchrony on hold, not before that. Callbacks always run on the worker, as they run on a thread of the real
//! driver's. A stream or event is finished when the queue has passed its last entry.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};
use std::sync::MutexGuard;
use std::time::Instant;

use core::ffi::c_void;
use cuda_driver_sys::{CUhostFn, CUresult, CUstream, CUstream_st, CUstreamCallback};

use crate::abi::{Answer, Handle, Out, handle};
use crate::capture::Capture;
use crate::config::Asynchronous;
use crate::copy::Transfer;
use crate::event::Event;
use crate::process::{self, Process};

/// A stream's key: its handle, or a number made from the context for default streams.
pub(crate) type StreamId = u64;

/// One stream.
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) device: usize,
    non_blocking: bool,
    /// Last queue entry.
    pub(crate) last: u64,
    error: Option<CUresult>,
    pub(crate) capture: Option<Capture>,
}

/// What is queued.
pub(crate) enum Work {
    Transfer(Transfer),
    /// `cuLaunchHostFunc`.
    Host(CUhostFn, Data),
    /// `cuStreamAddCallback`: function, stream handle, data.
    Callback(CUstreamCallback, u64, Data),
    /// Free the allocation at this address.
    Free(u64),
}

/// A user's pointer on its way to a callback.
pub(crate) struct Data(*mut c_void);

// SAFETY: the pointer is only handed back to the user's own callback, which the API says runs on another thread.
unsafe impl Send for Data {}

struct Entry {
    number: u64,
    stream: StreamId,
    context: u64,
    due: Instant,
    work: Work,
}

/// All streams and events, and the queue.
#[derive(Default)]
pub(crate) struct Streams {
    pub(crate) live: BTreeMap<StreamId, Stream>,
    pub(crate) events: BTreeMap<u64, Event>,
    queue: VecDeque<Entry>,
    /// Last queue entries of streams that were destroyed, by context: their work is still to be waited for.
    left: BTreeMap<u64, u64>,
    /// Number of the last entry queued, of the last one done, and of the last one that somebody waits for.
    queued: u64,
    done: u64,
    wanted: u64,
    worker: bool,
    pub(crate) last_handle: u64,
}

const FIRST_STREAM: u64 = 0x57_0000_0000;
/// Added to a context's number for the streams that every context has.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

impl Streams {
    /// Number of the last entry.
    pub(crate) fn last(&self) -> u64 {
        self.queued
    }

    /// Nothing is queued, and nothing runs on the worker.
    fn is_idle(&self) -> bool {
        self.is_done(self.queued)
    }

    /// The context of a stream.
    pub(crate) fn context(&self, stream: StreamId) -> u64 {
        self.live.get(&stream).map_or(0, |stream| stream.context)
    }

    /// Whether the queue has passed entry `number`.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.done >= number
    }
}

impl Process {
    /// The stream behind a handle: null, the two special values, or one that `cuStreamCreate` made.
    pub(crate) fn stream(&mut self, number: u64) -> Result<StreamId, CUresult> {
        if number > 2 {
            let context = self.streams.live.get(&number).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?.context;
            return self.check_context(context).map(|()| number);
        }
        let (context, device) = self.working()?;
        let key = context + if number == 2 { PER_THREAD } else { LEGACY };
        self.streams.live.entry(key).or_insert_with(|| Stream::new(context, device, false));
        Ok(key)
    }

    /// Queues work, or does it at once. Takes the lock along, for the bytes move without it.
    pub(crate) fn submit(mut process: MutexGuard<'static, Self>, stream: StreamId, work: Work) -> Answer {
        let mode = process.asynchronous;
        if let Some(state) = process.streams.live.get_mut(&stream)
            && let Some(capture) = &mut state.capture
        {
            // Recorded and never done: the fake has no graphs to launch.
            let result = capture.record();
            if let Work::Transfer(transfer) = work {
                process.copies.end(transfer.number);
            }
            return result;
        }
        let context = process.streams.context(stream);
        let callback = matches!(work, Work::Host(..) | Work::Callback(..));
        if mode == Asynchronous::Off && process.streams.is_idle() && !callback {
            return match work {
                Work::Transfer(transfer) => {
                    drop(process);
                    transfer.finish(context)
                }
                Work::Free(base) => {
                    process.free_from_anywhere(base);
                    Ok(())
                }
                Work::Host(..) | Work::Callback(..) => Ok(()),
            };
        }
        let delay = if let Asynchronous::After(micros) = mode { Duration::from_micros(micros) } else { Duration::ZERO };
        let streams = &mut process.streams;
        streams.queued += 1;
        let number = streams.queued;
        if let Some(state) = streams.live.get_mut(&stream) {
            state.last = number;
        }
        streams.queue.push_back(Entry { number, stream, context, due: Instant::now() + delay, work });
        if !streams.worker {
            streams.worker = spawn_worker();
        }
        process::notify();
        Ok(())
    }

    /// Waits until the queue has passed entry `number`; the lock is free meanwhile.
    pub(crate) fn finish(mut process: MutexGuard<'static, Self>, number: u64) -> MutexGuard<'static, Self> {
        if !process.streams.is_done(number) {
            process.streams.wanted = process.streams.wanted.max(number);
            process::notify();
        }
        while !process.streams.is_done(number) {
            process = process::wait(process, 100_000);
        }
        process
    }

    /// As [`Process::finish`], for what a synchronous call waits for: the context's streams, but not the non-blocking ones.
    pub(crate) fn finish_blocking(process: MutexGuard<'static, Self>, context: u64) -> MutexGuard<'static, Self> {
        if process.streams.is_idle() {
            return process;
        }
        let blocking = process.streams.live.values().filter(|stream| stream.context == context && !stream.non_blocking);
        let last = blocking.map(|stream| stream.last).max().unwrap_or(0);
        Self::finish(process, last)
    }

    /// Lets go of everything that is queued now, as if it had been waited for.
    pub(crate) fn release_queue(&mut self) {
        self.streams.wanted = self.streams.queued;
        process::notify();
    }

    /// The queue's next entry, if it is to be done now, and else how many microseconds to wait.
    fn next_entry(&mut self) -> Result<Entry, u64> {
        let hold = self.asynchronous == Asynchronous::Hold;
        let wanted = self.streams.wanted;
        let Some(front) = self.streams.queue.front() else { return Err(10_000_000) };
        let now = Instant::now();
        if front.number > wanted && hold {
            return Err(10_000_000);
        }
        if front.number > wanted && front.due > now {
            return Err(u64::try_from((front.due - now).as_micros()).unwrap_or(1000) + 1);
        }
        self.streams.queue.pop_front().ok_or(1000)
    }

    fn entry_done(&mut self, number: u64, stream: StreamId, result: Answer) {
        self.streams.done = number;
        if let (Err(code), Some(state)) = (result, self.streams.live.get_mut(&stream)) {
            state.error = Some(code);
        }
        process::notify();
    }

    /// A stream's state after its work up to now: the context's, and the first error since the last question.
    fn take_error(&mut self, stream: StreamId) -> Answer {
        self.check_context(self.streams.context(stream))?;
        match self.streams.live.get_mut(&stream).and_then(|state| state.error.take()) {
            Some(code) => Err(code),
            None => Ok(()),
        }
    }
}

impl Stream {
    fn new(context: u64, device: usize, non_blocking: bool) -> Self {
        Self { context, device, non_blocking, last: 0, error: None, capture: None }
    }
}

/// Starts the worker with all signals blocked: none of the application's may land on it.
fn spawn_worker() -> bool {
    // SAFETY: plain C data that `sigfillset` fills.
    let mut all: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: as for `all`; `pthread_sigmask` fills it.
    let mut before: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: a live set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: two live sets; the thread's mask is put back below.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let started = std::thread::Builder::new().name("fake-cuda".to_owned()).spawn(work);
    // SAFETY: the set that the call above filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.is_ok()
}

/// The worker: does the queue's entries one by one, for ever.
fn work() {
    let Ok(mut process) = process::lock() else { return };
    loop {
        let entry = match process.next_entry() {
            Ok(entry) => entry,
            Err(micros) => {
                process = process::wait(process, micros);
                continue;
            }
        };
        let (number, stream, context) = (entry.number, entry.stream, entry.context);
        let result = match entry.work {
            Work::Transfer(transfer) => {
                let alive = process.copies.is_alive(transfer.number);
                drop(process);
                // Memory that went away before the copy began is somebody else's by now.
                let moved = if alive { transfer.run() } else { Ok(()) };
                process = match process::lock() {
                    Ok(process) => process,
                    Err(_) => return,
                };
                let whole = process.copies.end(transfer.number);
                moved.and(if whole { Ok(()) } else { Err(process.break_context(context)) })
            }
            Work::Host(..) | Work::Callback(..) => {
                drop(process);
                call_back(entry.work);
                process = match process::lock() {
                    Ok(process) => process,
                    Err(_) => return,
                };
                Ok(())
            }
            Work::Free(base) => {
                process.free_from_anywhere(base);
                Ok(())
            }
        };
        process.entry_done(number, stream, result);
    }
}

fn call_back(work: Work) {
    match work {
        // SAFETY: the application gave function and data for exactly this call; the lock is free, so it may take its time.
        Work::Host(Some(function), data) => unsafe { function(data.0) },
        // SAFETY: as above.
        Work::Callback(Some(function), stream, data) => unsafe { function(handle(stream), CUresult::CUDA_SUCCESS, data.0) },
        _ => {}
    }
}

/// `cuStreamCreate`.
pub(crate) fn create(out: Out<CUstream>, flags: u32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (context, device) = process.working()?;
    process.streams.last_handle += 0x100;
    let number = FIRST_STREAM + process.streams.last_handle;
    process.streams.live.insert(number, Stream::new(context, device, flags & 1 != 0));
    out.set(handle(number))
}

/// `cuStreamCreateWithPriority`.
pub(crate) fn create_with_priority(out: Out<CUstream>, flags: u32, _priority: i32) -> Answer {
    create(out, flags)
}

/// `cuStreamDestroy_v2`: what is queued is still done.
pub(crate) fn destroy(stream: Handle<CUstream_st>) -> Answer {
    let mut process = process::lock()?;
    let number = stream.id();
    process.check_context(process.streams.context(number))?;
    let stream = process.streams.live.remove(&number).filter(|_| number > 2).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    let left = process.streams.left.entry(stream.context).or_default();
    *left = stream.last.max(*left);
    Ok(())
}

/// `cuStreamSynchronize`.
pub(crate) fn synchronize(stream: Handle<CUstream_st>) -> Answer {
    let mut process = process::lock()?;
    let number = process.stream_outside_capture(stream.id())?;
    let last = process.streams.live.get(&number).map_or(0, |stream| stream.last);
    process = Process::finish(process, last);
    process.take_error(number)
}

/// `cuStreamQuery`.
pub(crate) fn query(stream: Handle<CUstream_st>) -> Answer {
    let mut process = process::lock()?;
    let number = process.stream_outside_capture(stream.id())?;
    let last = process.streams.live.get(&number).map_or(0, |stream| stream.last);
    if !process.streams.is_done(last) {
        return Err(CUresult::CUDA_ERROR_NOT_READY);
    }
    process.take_error(number)
}

/// `cuCtxSynchronize`: all that was asked for in the context, also by streams that are no more.
pub(crate) fn synchronize_context() -> Answer {
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    process.outside_all_captures(context)?;
    let last = process.streams.live.values().filter(|stream| stream.context == context).map(|stream| stream.last).max().unwrap_or(0);
    let last = process.streams.left.get(&context).map_or(last, |&left| left.max(last));
    process = Process::finish(process, last);
    process.check_context(context)?;
    let streams: Vec<StreamId> = process.streams.live.iter().filter(|(_, stream)| stream.context == context).map(|(&id, _)| id).collect();
    streams.into_iter().map(|stream| process.take_error(stream)).fold(Ok(()), Answer::and)
}

/// `cuLaunchHostFunc`.
pub(crate) fn launch_host(stream: Handle<CUstream_st>, function: CUhostFn, data: Out<c_void>) -> Answer {
    let mut process = process::lock()?;
    let stream = process.stream(stream.id())?;
    Process::submit(process, stream, Work::Host(function, Data(data.raw())))
}

/// `cuStreamAddCallback`.
pub(crate) fn add_callback(stream: Handle<CUstream_st>, function: CUstreamCallback, data: Out<c_void>, _flags: u32) -> Answer {
    let mut process = process::lock()?;
    let number = stream.id();
    let stream = process.stream(number)?;
    Process::submit(process, stream, Work::Callback(function, number, Data(data.raw())))
}

/// `cuStreamGetCtx`.
pub(crate) fn context(stream: Handle<CUstream_st>, out: Out<cuda_driver_sys::CUcontext>) -> Answer {
    let mut process = process::lock()?;
    let number = process.stream(stream.id())?;
    let context = process.streams.context(number);
    out.set(handle(context))
}

/// `cuStreamGetFlags`.
pub(crate) fn flags(stream: Handle<CUstream_st>, out: Out<u32>) -> Answer {
    let mut process = process::lock()?;
    let number = process.stream(stream.id())?;
    out.set(u32::from(process.streams.live.get(&number).is_some_and(|stream| stream.non_blocking)))
}

/// `cuStreamGetId`.
pub(crate) fn id(stream: Handle<CUstream_st>, out: Out<u64>) -> Answer {
    let number = process::lock()?.stream(stream.id())?;
    out.set(number)
}
