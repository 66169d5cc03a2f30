//! The exporting process: a reservation that grows by one chunk and shrinks again, and fresh reservations of one chunk.

use cuda_ipc_core::exporter::{Export, Exporter, ExporterOptions};
use cuda_ipc_core::table::GRANULE;
use serde::{Deserialize, Serialize};

use crate::exporter_process::let_the_family_in;
use crate::failure::Failure;
use crate::gpu::{Chunks, Gpu, GpuFacts};
use crate::hex;
use crate::limits;
use crate::peer_process::Link;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
    pub(super) chunks: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Exported {
    pub(super) rkey: String,
    pub(super) facts: GpuFacts,
}

/// What to do; the answer is an rkey, or `()` to `Undo`.
#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// Map and export one chunk more.
    Grow,
    /// Make and export a reservation of one chunk.
    Fresh,
    /// Take back what was made last.
    Undo,
}

/// What was made last. In the order in which it has to go: the export before the memory.
enum Made<'g> {
    Nothing,
    More(Export),
    Fresh(Export, Chunks<'g>),
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, chunks } = link.receive()?;
    limits::raise_open_files();
    // Said by the other benches; here it would stand beside no figure.
    let _ = let_the_family_in()?;
    let gpu = Gpu::open(device)?;
    let mut memory = Chunks::with_room(&gpu, &vec![GRANULE; chunks as usize], GRANULE)?;
    let exporter = Exporter::new(*gpu.cuda(), ExporterOptions::default()).map_err(Failure::at("making the export table"))?;
    let export = |address: u64, len: u64| exporter.export(address, len).map_err(gpu.at("exporting"));
    let rkey = |export: &Export| hex::encode(&export.rkey().encode());
    let (base, len) = (memory.address(), u64::from(chunks) * GRANULE);
    let all = export(base, len)?;
    link.send(&Exported { rkey: rkey(&all), facts: gpu.facts()? })?;

    let mut made = Made::Nothing;
    while let Some(ask) = link.receive_unless_ended()? {
        match ask {
            Ask::Grow => {
                memory.push(GRANULE)?;
                let more = export(base + len, GRANULE)?;
                link.send(&rkey(&more))?;
                made = Made::More(more);
            }
            Ask::Fresh => {
                let chunk = Chunks::new(&gpu, &[GRANULE])?;
                let fresh = export(chunk.address(), GRANULE)?;
                link.send(&rkey(&fresh))?;
                made = Made::Fresh(fresh, chunk);
            }
            Ask::Undo => {
                match core::mem::replace(&mut made, Made::Nothing) {
                    Made::Nothing => {}
                    Made::More(more) => {
                        drop(more);
                        memory.pop(GRANULE)?;
                    }
                    Made::Fresh(fresh, chunk) => {
                        drop(fresh);
                        drop(chunk);
                    }
                }
                link.send(&())?;
            }
        }
    }
    drop((made, all, exporter));
    Ok(())
}
