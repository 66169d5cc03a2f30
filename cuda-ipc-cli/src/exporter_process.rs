//! The exporting child: makes memory, fills it, exports a range of it, and keeps all of it until it is no longer needed.

use std::time::Instant;

use clap::ValueEnum;
use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use pidfd_sys::{Ptracer, PtracerOutcome};
use serde::{Deserialize, Serialize};

use crate::bench::samples::micros;
use crate::chunk_sizes;
use crate::failure::Failure;
use crate::gpu::{Buffer, Chunks, Gpu, GpuFacts, Pooled};
use crate::hex;
use crate::limits;
use crate::pattern::Pattern;
use crate::peer_process::Link;

/// How many bytes go between host and device at a time.
pub(crate) const PART: usize = 8 << 20;

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Chunks of cuMemCreate, side by side in one address range
    Vmm,
    /// One allocation of a pool with POSIX_FD handles (cudaMallocAsync)
    Pool,
    /// One allocation of cuMemAlloc (cudaMalloc)
    Malloc,
}

/// What the command wants exported.
#[derive(Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Ordinal of the device.
    pub(crate) device: u32,
    /// What is exported.
    pub(crate) kind: Kind,
    /// Chunk sizes, in order of address; memory of other kinds has their sum.
    pub(crate) sizes: Vec<u64>,
    /// Seed of the pattern that is written; without one the memory is left as it comes.
    pub(crate) seed: Option<u64>,
    /// Whether the range starts and ends inside chunks; else it is all of them. (A legacy handle always stands for all of its allocation.)
    pub(crate) inside_chunks: bool,
    /// Whether it is a failure if the limit of open files leaves chunks without an fd.
    pub(crate) fd_each: bool,
}

/// What the command gets to know.
#[derive(Serialize, Deserialize)]
pub(crate) struct Exported {
    /// The encoded rkey, as hex digits: all that the importer is told.
    pub(crate) rkey: String,
    /// What the export took.
    pub(crate) export_us: f64,
    /// How many chunks the range touches; 1 for memory of other kinds.
    pub(crate) chunks: usize,
    pub(crate) facts: GpuFacts,
    /// What had to be done so that an importer that is no ancestor may fetch fds.
    pub(crate) note: Option<String>,
}

pub(crate) fn run(link: &mut Link) -> Result<(), Failure> {
    let settings: Settings = link.receive()?;
    limits::raise_open_files();
    let note = let_the_family_in()?;
    let gpu = Gpu::open(settings.device)?;
    let memory = Memory::new(&gpu, settings.kind, &settings.sizes)?;
    let (start, all) = memory.range();
    if let Some(seed) = settings.seed {
        fill(&gpu, (start, all), Pattern::new(seed), link)?;
    }
    let (address, len) = if settings.inside_chunks {
        let range = chunk_sizes::inner_range(&settings.sizes);
        (start + range.start, range.end - range.start)
    } else {
        (start, all)
    };
    let exporter = Exporter::new(*gpu.cuda(), ExporterOptions::default()).map_err(Failure::at("making the export table"))?;
    let start = Instant::now();
    let export = exporter.export(address, len).map_err(gpu.at("exporting the range"))?;
    let export_us = micros(start.elapsed());
    let (with_fd, chunks_exported) = (exporter.stats().fds, export.chunks().len());
    if settings.fd_each && with_fd < chunks_exported as u64 {
        let cause = format!("the limit of open files, {}, leaves fds for {with_fd} of {chunks_exported} chunks", limits::open_files());
        return Err(Failure::new("exporting the range", cause).note("raise the hard limit (ulimit -Hn), or ask for fewer chunks"));
    }
    let chunks = chunks_exported.max(1);
    link.send(&Exported { rkey: hex::encode(&export.rkey().encode()), export_us, chunks, facts: gpu.facts()?, note })?;
    link.wait_for_end();
    // In this order: the table lets go of the memory before it is unmapped or freed.
    drop((export, exporter));
    drop(memory);
    Ok(())
}

/// Memory of some kind.
pub(crate) enum Memory<'g> {
    Chunks(Chunks<'g>),
    Pooled(Pooled<'g>),
    Plain(Buffer<'g>),
}

impl<'g> Memory<'g> {
    pub(crate) fn new(gpu: &'g Gpu, kind: Kind, sizes: &[u64]) -> Result<Self, Failure> {
        let total = sizes.iter().sum();
        match kind {
            Kind::Vmm => Chunks::new(gpu, sizes).map(Self::Chunks),
            Kind::Pool => Pooled::new(gpu, total).map(Self::Pooled),
            Kind::Malloc => Buffer::new(gpu, total).map(Self::Plain),
        }
    }

    /// First address and length in bytes.
    pub(crate) const fn range(&self) -> (u64, u64) {
        match self {
            Self::Chunks(chunks) => (chunks.address(), chunks.len()),
            Self::Pooled(pooled) => (pooled.address(), pooled.len()),
            Self::Plain(buffer) => (buffer.address(), buffer.len()),
        }
    }
}

fn fill(gpu: &Gpu, (start, len): (u64, u64), pattern: Pattern, link: &mut Link) -> Result<(), Failure> {
    let mut buffer = vec![0; PART];
    let (mut at, end) = (start, start + len);
    while at < end {
        let part = part_of(&mut buffer, end - at);
        pattern.fill(at, part);
        gpu.upload(at, part).map_err(gpu.at("writing the pattern"))?;
        at += part.len() as u64;
        link.progress("exporter writes the pattern", at - start, len)?;
    }
    Ok(())
}

/// As much of the buffer as is left to do.
pub(crate) fn part_of(buffer: &mut [u8], left: u64) -> &mut [u8] {
    let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
    buffer.split_at_mut(len).0
}

/// Where Yama lets only ancestors fetch fds: names the command, and with it its children, as allowed too.
///
/// The exporter of an application does not do this unasked; here the command is its own user.
pub(crate) fn let_the_family_in() -> Result<Option<String>, Failure> {
    const SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";
    if !std::fs::read_to_string(SCOPE).is_ok_and(|scope| scope.trim() == "1") {
        return Ok(None);
    }
    match pidfd_sys::set_ptracer(Ptracer::Pid(std::os::unix::process::parent_id())) {
        Ok(PtracerOutcome::Set) => Ok(Some(
            "Yama's ptrace_scope is 1 here: the exporter has allowed its importer by PR_SET_PTRACER, which an application has to do by itself".to_owned(),
        )),
        Ok(PtracerOutcome::NotNeeded) => Ok(None),
        Err(error) => Err(Failure::new("allowing the importer to fetch fds", error)),
    }
}
