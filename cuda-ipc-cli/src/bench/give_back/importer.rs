//! The importing process: leases everything once, and then does nothing. What is freed its cache's own thread has to find.

use core::time::Duration;
use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheOptions};
use cuda_ipc_core::importer::Deadline;
use serde::{Deserialize, Serialize};

use crate::bench::samples::micros;
use crate::demo::importer::{DEADLINE, decode};
use crate::failure::Failure;
use crate::gpu::{Chunks, Gpu};
use crate::limits;
use crate::peer_process::Link;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
    pub(super) chunks: u64,
    pub(super) chunk: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// Lease all of it, and end the lease.
    Lease { rkey: String },
    /// Say what was unmapped since the last time, and what unmapping costs.
    Settle,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Leased {
    pub(super) chunks: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Settled {
    pub(super) unmapped_dead: u64,
    pub(super) unmapped_purged: u64,
    /// Still mapped.
    pub(super) mapped_bytes: u64,
    /// Unmapping as much memory of this process's own, chunk by chunk, none of which anybody else holds.
    pub(super) local_unmap_us: f64,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, chunks, chunk } = link.receive()?;
    limits::raise_open_files();
    let gpu = Gpu::open(device)?;
    let sizes: Vec<u64> = (0..chunks).map(|_| chunk).collect();
    let unmap_local = || Chunks::new(&gpu, &sizes)?.free(chunk).map(micros);
    unmap_local()?;
    let cache = Cache::new(*gpu.cuda(), CacheOptions::default());
    let mut before = cache.stats();
    link.send(&())?;
    while let Some(ask) = link.receive_unless_ended()? {
        match ask {
            Ask::Lease { rkey } => {
                let (rkey, key) = decode(&rkey)?;
                let deadline = Deadline::after(DEADLINE);
                let window = cache.window(&key, gpu.ordinal(), false, deadline).map_err(Failure::at("opening the window"))?;
                let lease = window.lease(rkey.base, rkey.len, deadline).map_err(Failure::at("leasing all of it"))?;
                link.send(&Leased { chunks: lease.chunks().into() })?;
            }
            Ask::Settle => {
                settle(&cache);
                let stats = cache.stats();
                link.send(&Settled {
                    unmapped_dead: stats.unmapped_dead - before.unmapped_dead,
                    unmapped_purged: stats.unmapped_purged - before.unmapped_purged,
                    mapped_bytes: stats.bytes,
                    local_unmap_us: if stats.bytes == 0 { unmap_local()? } else { 0.0 },
                })?;
                before = stats;
            }
        }
    }
    Ok(())
}

/// Waits, for a moment, until nothing is mapped: the counts follow the driver's calls.
fn settle(cache: &Cache) {
    let start = Instant::now();
    while cache.stats().bytes != 0 && start.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
