//! Import by the exporter's broker, against import by pidfd.

use std::sync::Arc;
use std::time::Instant;

use cuda_ipc_core::importer::Route;
use serde::{Deserialize, Serialize};

use super::import::{connect_by, import_from};
use super::samples::{Comparison, Spread, compare, micros};
use super::{Measured, Pairs, Tables, start_exporter, table};
use crate::Role;
use crate::demo::importer::decode;
use crate::exporter_process::Kind;
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::limits;
use crate::peer_process::{Link, PeerProcess};
use crate::progress::Progress;
use crate::size;

#[derive(Serialize, Deserialize)]
struct Settings {
    rkey: String,
    reps: u32,
}

/// What was found for one number of chunks. Times are microseconds.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    chunks: usize,
    bytes: u64,
    /// The floor is the import by pidfd.
    import: Comparison,
    /// Reaching a peer that is not known, by its broker and by pidfd.
    connect: Spread,
    connect_pidfd: Spread,
}

pub(super) fn measure(pairs: &Pairs, sizes: Vec<u64>, progress: &mut Progress) -> Measured<Row> {
    let (exporter, exported) = start_exporter(&pairs.common, Kind::Vmm, sizes, progress)?;
    let settings = Settings { rkey: exported.rkey, reps: pairs.reps };
    let mut importer = PeerProcess::start(Role::BenchBrokerImporter, &settings, pairs.common.silence())?;
    let row = importer.receive(progress)?;
    progress.finish();
    importer.finish()?;
    exporter.finish()?;
    Ok((row, exported.facts))
}

pub(super) fn tables(rows: &[Row]) -> Tables {
    let mut imports = table(&[
        "chunks",
        "size",
        "by pidfd us: min / median / max",
        "by the broker us: min / median / max",
        "ratio of medians",
        "median of pair ratios",
    ]);
    let mut connects = table(&["chunks", "connect by pidfd us: min / median / max", "connect to the broker us: min / median / max"]);
    for Row { chunks, bytes, import, connect, connect_pidfd } in rows {
        imports.add_row([
            chunks.to_string(),
            size::human(*bytes),
            import.floor.to_string(),
            import.ours.to_string(),
            format!("{:.3}", import.ratio_of_medians),
            format!("{:.3}", import.median_of_pair_ratios),
        ]);
        connects.add_row([chunks.to_string(), connect_pidfd.to_string(), connect.to_string()]);
    }
    vec![("Import from a known peer by its broker, against import by pidfd", imports), ("Reaching a peer that is not known", connects)]
}

/// The importing process.
pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { rkey, reps } = link.receive()?;
    limits::raise_open_files();
    let (rkey, key) = decode(&rkey)?;
    let gpu = Gpu::with_uuid(rkey.device)?;
    let connects = |route| {
        let times = (0..reps.max(100)).map(|_| {
            let start = Instant::now();
            let peer = connect_by(&gpu, &key, route)?;
            let elapsed = micros(start.elapsed());
            drop(peer);
            Ok(elapsed)
        });
        times.collect::<Result<Vec<f64>, Failure>>().map(|times| Spread::of(&times))
    };
    let (connect_pidfd, connect) = (connects(Route::Pidfd)?, connects(Route::Broker)?);
    let known = |route| connect_by(&gpu, &key, route).map(Arc::new);
    let (fetched, asked) = (known(Route::Pidfd)?, known(Route::Broker)?);
    let chunks = fetched.lookup(rkey.base, rkey.len).map_err(gpu.at("looking the chunks up"))?.len();
    let import = |peer| import_from(&gpu, peer, &rkey, &key);
    let import = compare(reps, link, &format!("import of {chunks} chunks by the broker"), || import(&fetched), || import(&asked))?;
    link.send(&Row { chunks, bytes: rkey.len, import, connect, connect_pidfd })?;
    link.wait_for_end();
    Ok(())
}
