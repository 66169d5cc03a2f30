//! The importing side.

use std::io::Read as _;
use std::time::Duration;

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_core::sys::driver::Cuda;
use cudarc::driver::CudaContext;

use crate::memory::borrowed;
use crate::{Outcome, pattern};

pub(crate) fn run() -> Outcome {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes)?;
    let rkey = Rkey::decode(&bytes)?;

    let context = CudaContext::new(0)?;
    let cache = Cache::new(Cuda::open()?, CacheOptions::default());
    let deadline = Deadline::after(Duration::from_secs(10));
    let opened = cache.open(&rkey, context.cu_device(), false, deadline)?;
    let lease = opened.lease(rkey.base, rkey.len, deadline)?;
    let found = borrowed(&context.default_stream(), lease.address(), usize::try_from(rkey.len)?, |stream, slice| stream.clone_dtoh(slice))?;
    context.synchronize()?;
    // The copy is complete, so the lease may end.
    drop(lease);

    if let Some(wrong) = found.iter().enumerate().position(|(offset, byte)| *byte != pattern(offset)) {
        return Err(format!("wrong byte at {wrong}").into());
    }
    println!("verified {} bytes of another process by cudarc", found.len());
    Ok(())
}
