//! The importing process: a window with everything mapped, and leases of what is new.

use std::time::Instant;

use cuda_ipc_cache::{Cache, CacheOptions, Window};
use cuda_ipc_core::importer::Deadline;
use cuda_ipc_core::table::GRANULE;
use serde::{Deserialize, Serialize};

use crate::bench::samples::micros;
use crate::demo::importer::{DEADLINE, decode};
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::peer_process::Link;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) rkey: String,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// Lease the chunk after those that were there in the beginning.
    New,
    /// Lease all chunks and this one.
    All,
    /// Lease all of a reservation that is not known.
    Fresh { rkey: String },
    /// Unmap what is dead, and check all chunks once more.
    Settle,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Timed {
    /// Of the lease.
    pub(super) us: f64,
    /// Chunks that it imported.
    pub(super) imported: u64,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { rkey } = link.receive()?;
    limits::raise_open_files();
    let (rkey, key) = decode(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let mut options = CacheOptions::default();
    // What is dead goes when `Settle` says so, not in the middle of something that is timed.
    options.sweep = false;
    let cache = Cache::new(*gpu.cuda(), options);
    let open = |key: &_| cache.window(key, gpu.ordinal(), false, Deadline::after(DEADLINE)).map_err(Failure::at("opening a window"));
    let lease = |window: &Window, address: u64, len: u64| {
        let (deadline, before) = (Deadline::after(DEADLINE), cache.stats().imported_chunks);
        let start = Instant::now();
        let lease = window.lease(address, len, deadline).map_err(Failure::at("taking a lease"))?;
        let us = micros(start.elapsed());
        drop(lease);
        Ok(Timed { us, imported: cache.stats().imported_chunks - before })
    };
    let window = open(&key)?;
    let all = || lease(&window, rkey.base, rkey.len);
    all()?;
    link.send(&())?;
    while let Some(ask) = link.receive_unless_ended()? {
        let timed = match ask {
            Ask::New => lease(&window, rkey.base + rkey.len, GRANULE)?,
            Ask::All => lease(&window, rkey.base, rkey.len + GRANULE)?,
            Ask::Fresh { rkey } => {
                let (rkey, key) = decode(&rkey)?;
                lease(&*open(&key)?, rkey.base, rkey.len)?
            }
            Ask::Settle => {
                cache.trim();
                let Timed { imported: 0, .. } = all()? else {
                    return Err(Failure::new("leasing everything once more", "something was unmapped that lives"));
                };
                link.send(&())?;
                continue;
            }
        };
        link.send(&timed)?;
    }
    Ok(())
}
