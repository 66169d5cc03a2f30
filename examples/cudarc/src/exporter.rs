//! The exporting side.

use std::io::Write as _;
use std::process::{Command, Stdio};

use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::sys::driver::Cuda;
use cudarc::driver::CudaContext;

use crate::memory::Chunks;
use crate::{IMPORTER, Outcome, pattern};

const CHUNKS: usize = 5;
const CHUNK: usize = 2 << 20;

pub(crate) fn run() -> Outcome {
    let context = CudaContext::new(0)?;
    let memory = Chunks::allocate(&context, CHUNKS, CHUNK)?;
    let bytes: Vec<u8> = (0..memory.len()).map(pattern).collect();
    memory.as_slice(|stream, slice| stream.memcpy_htod(&bytes, slice))?;
    context.synchronize()?;

    // One exporter for a process; it works on whatever context is there.
    let exporter = Exporter::new(Cuda::open()?, ExporterOptions::default())?;
    let len = u64::try_from(memory.len())?;
    let export = exporter.export(memory.address(), len)?;

    let mut importer = Command::new(std::env::current_exe()?).arg(IMPORTER).stdin(Stdio::piped()).spawn()?;
    importer.stdin.take().ok_or("the importer has no standard input")?.write_all(&export.rkey().encode())?;
    let status = importer.wait()?;

    // Before the memory goes, importers are told so.
    exporter.retire(memory.address(), len);
    drop(export);
    drop(memory);
    if status.success() { Ok(()) } else { Err(format!("the importer ended with {status}").into()) }
}
