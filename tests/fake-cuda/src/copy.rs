//! Copies and fills: every byte checked against the mappings, then moved through the arenas.
//!
//! Addresses are resolved under the lock; the bytes move outside of it. Meanwhile the copy is on the list of running ones, so that whoever takes a
//! mapping away ([`Copies::retire`]) leaves a mark: on a GPU that is a fault or silent corruption, here it is counted and the copy fails, and with it
//! the context.
//!
//! # Safety
//! Device spans point into arenas, which stay mapped for the life of the process. Host spans are the caller's word, as in the C API.

use std::collections::BTreeMap;

use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;
use cuda_driver_sys::{CUmemcpyAttributes_v1, CUresult, CUstream_st};

use crate::abi::{Answer, Handle, INVALID, In, List, Out};
use crate::file;
use crate::process::{self, Process};
use crate::space::{Access, Kind, Place};
use crate::stream::{StreamId, Work};

/// Bytes at an address of this process.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    at: *mut u8,
    len: u64,
    /// In an arena, where the file system may be out of room.
    arena: bool,
}

// SAFETY: a span is an address and a length; who may touch the bytes, and when, is the caller's word (module doc).
unsafe impl Send for Span {}

/// A copy or fill, resolved.
pub(crate) struct Transfer {
    /// In [`Copies`].
    pub(crate) number: u64,
    to: Vec<Span>,
    from: Source,
}

enum Source {
    Spans(Vec<Span>),
    /// A pattern of one, two or four bytes.
    Fill(u32, u64),
}

/// Copies that were started and have not ended.
#[derive(Default)]
pub(crate) struct Copies {
    live: BTreeMap<u64, Running>,
    last: u64,
}

#[derive(Default)]
struct Running {
    /// Device address ranges it touches.
    ranges: Vec<(u64, u64)>,
    dead: bool,
}

impl Copies {
    fn begin(&mut self, ranges: Vec<(u64, u64)>) -> u64 {
        self.last += 1;
        self.live.insert(self.last, Running { ranges, dead: false });
        self.last
    }

    /// Whether the copy may go on.
    pub(crate) fn is_alive(&self, number: u64) -> bool {
        self.live.get(&number).is_some_and(|copy| !copy.dead)
    }

    /// Ends the copy; whether its memory was there all the time.
    pub(crate) fn end(&mut self, number: u64) -> bool {
        self.live.remove(&number).is_some_and(|copy| !copy.dead)
    }

    /// Marks copies that touch the range; returns how many were newly marked.
    pub(crate) fn retire(&mut self, base: u64, len: u64) -> u64 {
        let mut hit = 0;
        for copy in self.live.values_mut().filter(|copy| !copy.dead) {
            if copy.ranges.iter().any(|&(from, bytes)| from < base + len && base < from + bytes) {
                copy.dead = true;
                hit += 1;
            }
        }
        hit
    }
}

/// Which side of a copy an address is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Device, managed or registered memory: what the driver knows.
    Device,
    /// An address the driver need not know.
    Any,
}

/// One end of a copy.
pub(crate) type End = (u64, Side);

impl Process {
    /// The bytes of a range, if all of it may be touched that way by the device.
    fn spans(&self, (address, side): End, len: u64, right: u64, device: usize) -> Result<Vec<Span>, CUresult> {
        let end = address.checked_add(len).ok_or(INVALID)?;
        let reservation = |at| self.space.reservation_at(at).map(|(base, _)| base);
        let is_vmm = |at| self.space.mapping_at(at).is_some_and(|(_, mapping)| matches!(mapping.kind, Kind::Vmm { .. }));
        let first = reservation(address);
        if first.is_none() && self.space.mapping_at(address).is_none() {
            let host =
                Span { at: core::ptr::with_exposed_provenance_mut(usize::try_from(address).map_err(|_| INVALID)?), len, arena: false };
            return if side == Side::Any && address != 0 { Ok(vec![host]) } else { Err(INVALID) };
        }
        let mut spans = Vec::new();
        let mut at = address;
        while at < end {
            let (base, mapping) = self.space.mapping_at(at).ok_or(INVALID)?;
            // From one reservation into the next only where the application mapped both: allocations are each for itself.
            let beyond = reservation(at) != first && !(is_vmm(at) && is_vmm(address));
            if beyond || mapping.access.of(device) & right == 0 {
                return Err(INVALID);
            }
            let (skip, len) = (at - base, (mapping.len - (at - base)).min(end - at));
            let (here, arena) = match mapping.place {
                Place::Arena { gpu, offset } => (self.registry.arenas.at(gpu, offset + skip), true),
                Place::Here => (core::ptr::with_exposed_provenance_mut(usize::try_from(at).map_err(|_| INVALID)?), false),
            };
            spans.push(Span { at: here, len, arena });
            at += len;
        }
        Ok(spans)
    }

    fn copy_transfer(&mut self, to: End, from: End, len: u64) -> Result<Transfer, CUresult> {
        let (_, device) = self.working()?;
        let source = self.spans(from, len, Access::READ, device)?;
        let target = self.spans(to, len, Access::WRITE, device)?;
        let number = self.copies.begin(vec![(to.0, len), (from.0, len)]);
        self.count_copy(len);
        Ok(Transfer { number, to: target, from: Source::Spans(source) })
    }

    fn fill_transfer(&mut self, to: u64, pattern: u32, width: u64, len: u64) -> Result<Transfer, CUresult> {
        let (_, device) = self.working()?;
        if !to.is_multiple_of(width) {
            return Err(INVALID);
        }
        let target = self.spans((to, Side::Device), len, Access::WRITE, device)?;
        let number = self.copies.begin(vec![(to, len)]);
        self.count_copy(len);
        Ok(Transfer { number, to: target, from: Source::Fill(pattern, width) })
    }

    fn count_copy(&self, len: u64) {
        let counters = self.registry.counters();
        counters.copies.fetch_add(1, Relaxed);
        counters.copied_bytes.fetch_add(len, Relaxed);
    }
}

impl Transfer {
    /// Moves the bytes and takes the copy off the list. Nobody holds the lock.
    pub(crate) fn finish(&self, context: u64) -> Answer {
        let moved = self.run();
        let mut process = process::lock()?;
        let alive = process.copies.end(self.number);
        moved?;
        if alive { Ok(()) } else { Err(process.break_context(context)) }
    }

    /// Moves the bytes. Nobody holds the lock.
    pub(crate) fn run(&self) -> Answer {
        match &self.from {
            Source::Spans(from) => copy_spans(&self.to, from),
            Source::Fill(pattern, width) => {
                for span in &self.to {
                    span.populate(libc::MADV_POPULATE_WRITE)?;
                    span.fill(*pattern, *width);
                }
                Ok(())
            }
        }
    }
}

impl Span {
    /// Has the pages there before they are touched: a full file system is then an error code and not a signal.
    fn populate(self, advice: core::ffi::c_int) -> Answer {
        if !self.arena || self.len == 0 {
            return Ok(());
        }
        let down = self.at.addr() % 4096;
        let from = self.at.wrapping_sub(down);
        match file::advise(from, (self.len + down as u64).next_multiple_of(4096), advice) {
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            // EINVAL: a kernel before 5.14 without the advice.
            _ => Ok(()),
        }
    }

    fn fill(self, pattern: u32, width: u64) {
        let len = usize::try_from(self.len).unwrap_or(0);
        if width == 1 {
            // SAFETY: the span's bytes are writable (module doc).
            unsafe { self.at.write_bytes(pattern.to_le_bytes()[0], len) };
            return;
        }
        let step = if width == 2 { 2 } else { 4 };
        for at in (0..len).step_by(step) {
            let place = self.at.wrapping_add(at);
            // SAFETY: `at` is a multiple of the width below the length, which is a multiple of the width too: the bytes are in the span.
            unsafe { core::ptr::copy_nonoverlapping(pattern.to_le_bytes().as_ptr(), place, step) };
        }
    }
}

fn copy_spans(to: &[Span], from: &[Span]) -> Answer {
    for span in from {
        span.populate(libc::MADV_POPULATE_READ)?;
    }
    for span in to {
        span.populate(libc::MADV_POPULATE_WRITE)?;
    }
    let (mut sources, mut source, mut used) = (from.iter(), None::<&Span>, 0);
    for target in to {
        let mut done = 0;
        while done < target.len {
            let span = match source {
                Some(span) if used < span.len => span,
                _ => {
                    used = 0;
                    source = sources.next();
                    source.ok_or(INVALID)?
                }
            };
            let len = (span.len - used).min(target.len - done);
            let (read, write) = (span.at.wrapping_add(at(used)), target.at.wrapping_add(at(done)));
            // SAFETY: both ranges lie in their spans, which are readable and writable (module doc); `copy` allows overlap.
            unsafe { core::ptr::copy(read, write, at(len)) };
            (used, done) = (used + len, done + len);
        }
    }
    Ok(())
}

fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

fn now(make: impl FnOnce(&mut Process) -> Result<Transfer, CUresult>, len: usize) -> Answer {
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    if len == 0 {
        return Ok(());
    }
    process = Process::finish_blocking(process, context);
    let transfer = make(&mut process)?;
    drop(process);
    transfer.finish(context)
}

fn later(make: impl FnOnce(&mut Process) -> Result<Transfer, CUresult>, len: usize, stream: Handle<CUstream_st>) -> Answer {
    let mut process = process::lock()?;
    let stream: StreamId = process.stream(stream.id())?;
    if len == 0 {
        return Ok(());
    }
    let transfer = make(&mut process)?;
    Process::submit(process, stream, Work::Transfer(transfer))
}

/// `cuMemcpy`.
pub(crate) fn any(to: u64, from: u64, len: usize) -> Answer {
    now(|process| process.copy_transfer((to, Side::Any), (from, Side::Any), len as u64), len)
}

/// `cuMemcpyAsync`.
pub(crate) fn any_async(to: u64, from: u64, len: usize, stream: Handle<CUstream_st>) -> Answer {
    later(|process| process.copy_transfer((to, Side::Any), (from, Side::Any), len as u64), len, stream)
}

/// `cuMemcpyHtoD_v2`.
pub(crate) fn host_to_device(to: u64, from: In<c_void>, len: usize) -> Answer {
    let from = from.raw().expose_provenance() as u64;
    now(|process| process.copy_transfer((to, Side::Device), (from, Side::Any), len as u64), len)
}

/// `cuMemcpyHtoDAsync_v2`.
pub(crate) fn host_to_device_async(to: u64, from: In<c_void>, len: usize, stream: Handle<CUstream_st>) -> Answer {
    let from = from.raw().expose_provenance() as u64;
    later(|process| process.copy_transfer((to, Side::Device), (from, Side::Any), len as u64), len, stream)
}

/// `cuMemcpyDtoH_v2`.
pub(crate) fn device_to_host(to: Out<c_void>, from: u64, len: usize) -> Answer {
    let to = to.raw().expose_provenance() as u64;
    now(|process| process.copy_transfer((to, Side::Any), (from, Side::Device), len as u64), len)
}

/// `cuMemcpyDtoHAsync_v2`.
pub(crate) fn device_to_host_async(to: Out<c_void>, from: u64, len: usize, stream: Handle<CUstream_st>) -> Answer {
    let to = to.raw().expose_provenance() as u64;
    later(|process| process.copy_transfer((to, Side::Any), (from, Side::Device), len as u64), len, stream)
}

/// `cuMemcpyDtoD_v2`.
pub(crate) fn device_to_device(to: u64, from: u64, len: usize) -> Answer {
    now(|process| process.copy_transfer((to, Side::Device), (from, Side::Device), len as u64), len)
}

/// `cuMemcpyDtoDAsync_v2`.
pub(crate) fn device_to_device_async(to: u64, from: u64, len: usize, stream: Handle<CUstream_st>) -> Answer {
    later(|process| process.copy_transfer((to, Side::Device), (from, Side::Device), len as u64), len, stream)
}

/// `cuMemcpyBatchAsync`: nothing is copied if one entry is wrong.
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) fn batch_async(
    to: List<u64>,
    from: List<u64>,
    sizes: List<usize>,
    count: usize,
    _attributes: List<CUmemcpyAttributes_v1>,
    _indices: List<usize>,
    attribute_count: usize,
    failed: Out<usize>,
    stream: Handle<CUstream_st>,
) -> Answer {
    let id = stream.id();
    let mut process = process::lock()?;
    // The real driver takes no default stream here.
    if id <= 2 || count == 0 || attribute_count == 0 {
        return Err(INVALID);
    }
    let stream = process.stream(id)?;
    let mut transfers = Vec::new();
    for index in 0..count {
        let ends = (to.at(index)?, from.at(index)?, sizes.at(index)? as u64);
        match process.copy_transfer((ends.0, Side::Any), (ends.1, Side::Any), ends.2) {
            Ok(transfer) => transfers.push(transfer),
            Err(code) => {
                for transfer in transfers {
                    process.copies.end(transfer.number);
                }
                failed.set_if_given(index);
                return Err(code);
            }
        }
    }
    for transfer in transfers {
        Process::submit(process, stream, Work::Transfer(transfer))?;
        process = process::lock()?;
    }
    Ok(())
}

/// `cuMemcpyBatchAsync_v2`, which names no failed entry.
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) fn batch_async_v2(
    to: List<u64>,
    from: List<u64>,
    sizes: List<usize>,
    count: usize,
    attributes: List<CUmemcpyAttributes_v1>,
    indices: List<usize>,
    attribute_count: usize,
    stream: Handle<CUstream_st>,
) -> Answer {
    batch_async(to, from, sizes, count, attributes, indices, attribute_count, Out::none(), stream)
}

/// `cuMemsetD8_v2`.
pub(crate) fn set8(to: u64, value: u8, count: usize) -> Answer {
    now(|process| process.fill_transfer(to, u32::from(value), 1, count as u64), count)
}

/// `cuMemsetD8Async`.
pub(crate) fn set8_async(to: u64, value: u8, count: usize, stream: Handle<CUstream_st>) -> Answer {
    later(|process| process.fill_transfer(to, u32::from(value), 1, count as u64), count, stream)
}

/// `cuMemsetD32_v2`.
pub(crate) fn set32(to: u64, value: u32, count: usize) -> Answer {
    now(|process| process.fill_transfer(to, value, 4, count as u64 * 4), count)
}

/// `cuMemsetD32Async`.
pub(crate) fn set32_async(to: u64, value: u32, count: usize, stream: Handle<CUstream_st>) -> Answer {
    later(|process| process.fill_transfer(to, value, 4, count as u64 * 4), count, stream)
}
