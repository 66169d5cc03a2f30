//! The third process: neither exports nor imports, and sees how much memory of the GPU is free.

use core::time::Duration;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::now;
use crate::bench::samples::micros;
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::peer_process::Link;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(1);
/// When memory is given up that does not come back.
const TOO_LONG: Duration = Duration::from_secs(30);

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// How much is free.
    Read,
    /// Begin to look, say so, and say when so much was free.
    Watch { free: u64 },
}

#[derive(Serialize, Deserialize)]
pub(super) struct Back {
    /// When the look had ended that found it, by CLOCK_MONOTONIC. `None`: it never was.
    pub(super) at: Option<i64>,
    pub(super) looks: u64,
    /// The longest time from one look to the next: what the figure is accurate to.
    pub(super) longest_pause_us: f64,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device } = link.receive()?;
    let gpu = Gpu::open(device)?;
    let free = || gpu.memory().map(|(free, _)| free).map_err(gpu.at("asking for the free memory"));
    free()?;
    link.send(&())?;
    while let Some(ask) = link.receive_unless_ended()? {
        match ask {
            Ask::Read => link.send(&free()?)?,
            Ask::Watch { free: wanted } => {
                link.send(&())?;
                let back = watch(link, free, wanted)?;
                link.send(&back)?;
            }
        }
    }
    Ok(())
}

fn watch(link: &mut Link, free: impl Fn() -> Result<u64, Failure>, wanted: u64) -> Result<Back, Failure> {
    let start = Instant::now();
    let (mut looks, mut longest, mut last) = (0, Duration::ZERO, start);
    loop {
        let found = free()?;
        // After the answer: the memory may have come back while the driver was asked.
        let at = now();
        looks += 1;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        let back = found >= wanted;
        if back || start.elapsed() > TOO_LONG {
            return Ok(Back { at: back.then_some(at), looks, longest_pause_us: micros(longest) });
        }
        link.progress("waiting for the memory back", looks, looks + 1)?;
        std::thread::sleep(PAUSE);
    }
}
