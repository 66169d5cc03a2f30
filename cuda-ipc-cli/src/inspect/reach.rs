//! Whether the exporter's table can be opened, and what stands in it for a reservation.

use core::fmt;
use core::time::Duration;

use cuda_ipc_core::importer::{Deadline, Peer};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_core::table::{ChunkKind, GRANULE, LookupError};
use serde::Serialize;

use super::{Lines, address};
use crate::finding::Finding;
use crate::size;

/// The outcome of trying.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Reach {
    Reached {
        reached: bool,
        table: Contents,
    },
    Refused {
        reached: bool,
        error: String,
        retryable: bool,
        other_route_may_work: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        finding: Option<Finding>,
    },
}

/// What the table says.
#[derive(Serialize)]
pub(super) struct Contents {
    /// Publications in the table's life.
    published: u64,
    /// Retirements.
    retired: u64,
    /// Live chunks of the reservation, or the pool allocation.
    chunks: u64,
    bytes: u64,
    /// Chunks for which the exporter holds an fd.
    with_fd: u64,
    without_fd: u64,
    /// Runs of chunks without a hole between them.
    runs: Vec<Run>,
    /// Where reading stopped before the reservation's end, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped: Option<String>,
}

#[derive(Serialize)]
struct Run {
    base: String,
    end: String,
    len: u64,
    chunks: u64,
    #[serde(skip)]
    next: u64,
}

/// Look-ups for one report. A reservation can be larger than what is worth reading: PyTorch's is as large as the GPU's memory, a broken key's has any size.
const LOOKUPS: u64 = 1 << 21;
/// Runs that the text lists.
const RUNS_SHOWN: usize = 16;

impl Reach {
    pub(super) fn of(key: &Key) -> Self {
        let deadline = Deadline::after(Duration::from_secs(5));
        match Peer::connect(key, deadline) {
            Ok(peer) => Self::Reached { reached: true, table: Contents::read(&peer, key, deadline) },
            Err(error) => Self::Refused {
                reached: false,
                error: error.to_string(),
                retryable: error.retryable(),
                other_route_may_work: error.other_route_may_work(),
                finding: Finding::of(&error, key),
            },
        }
    }

    pub(super) fn write(&self, lines: &mut Lines<'_, '_>) -> fmt::Result {
        let table = match self {
            Self::Reached { table, .. } => table,
            Self::Refused { error, finding, .. } => {
                lines.line("reached now", format_args!("no: {error}"))?;
                return finding.iter().flat_map(Finding::lines).try_for_each(|line| lines.line("", line));
            }
        };
        lines.line("reached now", "yes: the table is open, and its nonce is the key's")?;
        lines.line("table", format_args!("{} chunks published since its beginning, {} retired", table.published, table.retired))?;
        lines.line("live chunks", format_args!("{} here, {}", table.chunks, size::exact(table.bytes)))?;
        lines.line("fds", format_args!("{} chunks with an fd in the exporter, {} without", table.with_fd, table.without_fd))?;
        for run in table.runs.iter().take(RUNS_SHOWN) {
            lines.line("", format_args!("{} to {}, {}, {} chunks", run.base, run.end, size::human(run.len), run.chunks))?;
        }
        if let Some(more) = table.runs.len().checked_sub(RUNS_SHOWN).filter(|more| *more > 0) {
            lines.line("", format_args!("and {more} more runs of chunks"))?;
        }
        match &table.stopped {
            Some(stopped) => lines.line("", stopped),
            None => Ok(()),
        }
    }
}

impl Contents {
    fn read(peer: &Peer, key: &Key, deadline: Deadline) -> Self {
        let mut contents =
            Self { published: 0, retired: 0, chunks: 0, bytes: 0, with_fd: 0, without_fd: 0, runs: Vec::new(), stopped: None };
        // Only a forked child has none.
        let Some(table) = peer.table() else { return contents };
        (contents.published, contents.retired) = (table.births(), table.epoch());
        if let KeyKind::PoolAllocation { slot } = key.kind {
            match table.chunk_in(slot) {
                Ok(Some((_, chunk))) => {
                    // Its fd is its pool's.
                    let pool =
                        if let ChunkKind::PoolAllocation { pool, .. } = chunk.kind { table.chunk_in(pool).ok().flatten() } else { None };
                    contents.count(chunk.address, chunk.len, pool.is_some_and(|(_, pool)| pool.fd.is_some()));
                }
                Ok(None) => {}
                Err(error) => contents.stopped = Some(error.to_string()),
            }
            return contents;
        }
        let (mut cursor, end) = (key.base, key.base + key.len);
        for _ in 0..LOOKUPS {
            if cursor >= end {
                return contents;
            }
            cursor = match table.chunk_at(cursor) {
                Ok((_, chunk)) => {
                    contents.count(chunk.address, chunk.len, chunk.fd.is_some());
                    chunk.end()
                }
                Err(LookupError::NoChunk(_)) => (cursor / GRANULE + 1) * GRANULE,
                Err(error) => {
                    contents.stopped = Some(format!("stopped at {cursor:#x}: {error}"));
                    return contents;
                }
            };
            if deadline.is_over() {
                break;
            }
        }
        if cursor < end {
            contents.stopped = Some(format!("stopped at {cursor:#x}: the reservation is too large to be read to its end"));
        }
        contents
    }

    fn count(&mut self, base: u64, len: u64, has_fd: bool) {
        self.chunks += 1;
        self.bytes += len;
        *(if has_fd { &mut self.with_fd } else { &mut self.without_fd }) += 1;
        let end = base.saturating_add(len);
        match self.runs.last_mut() {
            Some(run) if run.next == base => {
                run.len += len;
                run.chunks += 1;
                run.next = end;
                run.end = address(end);
            }
            _ => self.runs.push(Run { base: address(base), end: address(end), len, chunks: 1, next: end }),
        }
    }
}
