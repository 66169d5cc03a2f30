//! The exporter's side: makes a reservation of POSIX_FD chunks look to cuda_ipc like one allocation with a fabric handle, which is a key of ours.
//!
//! cuda_ipc asks, in this order: range, buffer id, allowed handle types, retain, export, release. It is answered with the reservation, one synthetic id for it,
//! the FABRIC bit, and the key. cuda_copy asks for the range too, to register it with every memory domain; it must get the driver's own chunk, since a
//! reservation has holes. It is told by asking for the allocation's properties just before.
//!
//! Memory of a POSIX_FD pool is an allocation to cuda_ipc already. It gets the FABRIC bit, an id of this process life, a key for its pool, and its own key where
//! cuda_ipc asks for the pointer's export data.
//!
//! Base and id of a reservation stay together for its life. Id and export are ours only if this thread's last range was the reservation of the same
//! address; a wrong guess costs the lane, never bytes.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cuda_driver_sys::CUresult;
use cuda_ipc_core::exporter::{Exporter, ExporterStats};
use cuda_ipc_core::key::{Key, KeyKind};
use cuda_ipc_core::reason::{Cause, NoIpc};
use cuda_ipc_core::sys::driver::{Cuda, PointerFacts};

use crate::notes::{RangeNote, notes};
use crate::settings::settings;
use crate::{report, ucm};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR` and `CU_MEM_HANDLE_TYPE_FABRIC`.
const POSIX_FD: u64 = 1;
pub(crate) const FABRIC: u64 = 8;
/// How many ranges are remembered to be published again when memory comes back to them.
const MOST_WANTED: usize = 16_384;

/// What memory is towards cuda_ipc, where that is not what the driver says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// All of its reservation.
    Reservation {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// An allocation as the driver says, which is to be a fabric pool's.
    Pooled {
        /// The driver's number of the pool.
        pool: u64,
        /// The driver's buffer id.
        buffer_id: u64,
    },
}

/// The exporter and what it has published for UCX.
pub(crate) struct Exporting {
    cuda: Cuda,
    exporter: OnceLock<Exporter>,
    /// Published runs of chunks, start to end, and the exporter's count of retired chunks that they are good for.
    runs: Mutex<(u64, BTreeMap<u64, u64>)>,
    /// What was published at some time, start to end: what comes there again is published again, because keys of it may be around.
    wanted: Mutex<BTreeMap<u64, u64>>,
}

impl Exporting {
    pub(crate) const fn new(cuda: Cuda) -> Self {
        Self { cuda, exporter: OnceLock::new(), runs: Mutex::new((0, BTreeMap::new())), wanted: Mutex::new(BTreeMap::new()) }
    }

    /// What `address` is towards cuda_ipc.
    pub(crate) fn look(&self, address: u64) -> Option<Seen> {
        let facts = self.facts(address)?;
        if let Some(pool) = facts.pool {
            return Some(Seen::Pooled { pool: pool.number(), buffer_id: facts.buffer_id });
        }
        if facts.mapping_len == 0 || facts.range_len == 0 {
            return None;
        }
        notes(|notes| notes.range.set(Some(RangeNote { address, base: facts.range_start, len: facts.range_len, pool: None })));
        Some(Seen::Reservation { base: facts.range_start, len: facts.range_len })
    }

    /// The synthetic buffer id of the reservation around `address`, if the range was asked for just before.
    pub(crate) fn buffer_id(&self, address: u64) -> Option<u64> {
        let note = notes(|notes| notes.range.get()).filter(|note| note.address == address)?;
        // Without an id of ours there is no key either: UCX would remember the driver's id for what has another one at the next export.
        notes(|notes| notes.range.set(None));
        let nonce = self.exporter()?.nonce().0;
        notes(|notes| notes.range.set(Some(note)));
        // Any mix will do: two reservations of one process must differ, and two lives of a process.
        // An allocation's is the driver's, which another allocation at its address does not have.
        let words = note.pool.map_or([note.base, note.len], |(_, buffer_id)| [buffer_id, 0]);
        let mixed = words.iter().fold(nonce, |mix, word| (mix ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
        Some(mixed | 1 << 63)
    }

    /// The key for the memory around `address`, published from there to the end of its run of chunks.
    pub(crate) fn export(&self, address: u64) -> Result<Option<Key>, NoIpc> {
        let Some(note) = notes(|notes| notes.range.get()).filter(|note| note.base <= address && address - note.base < note.len) else {
            return Ok(None);
        };
        if note.pool.is_some() {
            return Ok(None);
        }
        let Some(exporter) = self.exporter() else { return Ok(None) };
        ucm::wait_until_asked();
        self.publish(exporter, note.base, note.len, address).map(Some)
    }

    /// The keys for a pool and for the allocation of it that this thread has asked the range of, which is published.
    pub(crate) fn export_pooled(&self, pool: u64) -> Result<Option<(Key, Key)>, NoIpc> {
        let Some(note) = notes(|notes| notes.range.get()).filter(|note| note.pool.is_some_and(|(number, _)| number == pool)) else {
            return Ok(None);
        };
        let Some(exporter) = self.exporter() else { return Ok(None) };
        let export = exporter.export(note.base, 1)?;
        // cuda_ipc counts offsets from the base that it was told.
        let same = |key: &Key| matches!(key.kind, KeyKind::PoolAllocation { .. }) && (key.base, key.len) == (note.base, note.len);
        let allocation = export.key().filter(same).ok_or(NoIpc { cause: Cause::KeptChanging, address: note.base })?;
        // As with chunks: published until its memory goes.
        export.keep_published();
        Ok(Some((Key { kind: KeyKind::Pool, base: pool, len: 1, ..allocation }, allocation)))
    }

    /// A key of this reservation is being packed once more. UCX exports a reservation once for all registrations that begin in one chunk, so what has been
    /// mapped behind them since is published now.
    pub(crate) fn packed(&self, key: &Key) {
        // An allocation does not grow.
        let Some(exporter) = self.exporter.get().filter(|_| key.kind == KeyKind::Reservation) else { return };
        let starts = |ranges: &BTreeMap<u64, u64>| ranges.range(key.base..key.base + key.len).map(|(&start, _)| start).collect();
        let mut places: Vec<u64> = starts(&self.known_runs(exporter).1);
        if places.is_empty() {
            places = starts(&lock(&self.wanted));
        }
        for start in places {
            // Nothing there any more is no reason to say anything.
            let _ = self.publish(exporter, key.base, key.len, start);
        }
    }

    /// Memory was mapped in this range.
    pub(crate) fn mapped(&self, address: u64, len: u64) {
        let Some(exporter) = self.exporter.get() else { return };
        let end = address.saturating_add(len);
        let is_wanted = lock(&self.wanted).range(..end).next_back().is_some_and(|(_, &wanted)| address < wanted);
        if is_wanted && let Ok(export) = exporter.export(address, len) {
            export.keep_published();
            self.remember(exporter, address, end);
        }
    }

    /// The nonce of this process's keys, if it has exported anything.
    pub(crate) fn nonce(&self) -> Option<u64> {
        self.exporter.get().map(|exporter| exporter.nonce().0)
    }

    /// What was exported, if anything.
    pub(crate) fn stats(&self) -> Option<ExporterStats> {
        self.exporter.get().map(Exporter::stats)
    }

    /// The memory in this range is about to be unmapped.
    pub(crate) fn retire(&self, address: u64, len: u64) {
        let Some(exporter) = self.exporter.get() else { return };
        let mut runs = lock(&self.runs);
        let retired = exporter.retire(address, len) as u64;
        // Only this range has changed; where anything else was retired meanwhile, the counts differ and all runs are looked at anew.
        runs.0 += retired;
        remove_range(&mut runs.1, address, address.saturating_add(len));
    }

    fn publish(&self, exporter: &Exporter, base: u64, len: u64, address: u64) -> Result<Key, NoIpc> {
        let end = base + len;
        let known = self.known_end(exporter, address);
        // Counted exports are never given back: a chunk stays published until its memory goes, since UCX does not say when a key dies.
        let first = exporter.export(address, 1)?;
        // Looked at just before: anything but chunks has come there meanwhile.
        let reservation = |key: &Key| matches!(key.kind, KeyKind::Reservation);
        let key = first.key().filter(reservation).ok_or(NoIpc { cause: Cause::KeptChanging, address })?;
        first.keep_published();
        let mut at = known.unwrap_or(address);
        while at < end {
            let Some(facts) = self.shareable(at).filter(|facts| facts.range_start == base) else { break };
            exporter.export(at, 1)?.keep_published();
            at = facts.mapping_base + facts.mapping_len;
        }
        self.remember(exporter, address, at);
        Ok(key)
    }

    /// End of the published run around `address`, as far as it is known.
    fn known_end(&self, exporter: &Exporter, address: u64) -> Option<u64> {
        self.known_runs(exporter).1.range(..=address).next_back().map(|(_, &end)| end).filter(|&end| address < end)
    }

    /// The published runs: none, if chunks were retired by anybody but us since they were published.
    fn known_runs(&self, exporter: &Exporter) -> MutexGuard<'_, (u64, BTreeMap<u64, u64>)> {
        let mut runs = lock(&self.runs);
        let retired = exporter.stats().retired;
        if runs.0 != retired {
            *runs = (retired, BTreeMap::new());
        }
        runs
    }

    fn remember(&self, exporter: &Exporter, from: u64, to: u64) {
        let mut wanted = lock(&self.wanted);
        add_range(&mut wanted, from, to);
        // Addresses that never come again must not fill memory. Those of new reservations grow, so the lowest ones are about the oldest.
        if wanted.len() > MOST_WANTED {
            wanted.pop_first();
        }
        drop(wanted);
        let mut runs = lock(&self.runs);
        if runs.0 == exporter.stats().retired {
            add_range(&mut runs.1, from, to);
        }
    }

    /// The exporter, made at the first use. Where that fails the next use tries again: what is short now need not be so for the life of the process.
    fn exporter(&self) -> Option<&Exporter> {
        if let Some(exporter) = self.exporter.get() {
            return Some(exporter);
        }
        let made = Exporter::new(self.cuda, settings().exporter.clone())
            .inspect_err(|error| report::warn(report::Cause::NoTable, &format_args!("no export table: {error}")))
            .ok()?;
        // Where another thread has made one meanwhile, this one goes unused.
        Some(self.exporter.get_or_init(|| made))
    }

    /// The driver's word on `address`, if it is VMM memory with a POSIX fd and without a usable fabric handle.
    fn shareable(&self, address: u64) -> Option<PointerFacts> {
        self.facts(address).filter(|facts| facts.pool.is_none() && facts.mapping_len != 0 && facts.range_len != 0)
    }

    /// As [`Exporting::shareable`], also for memory of pools.
    fn facts(&self, address: u64) -> Option<PointerFacts> {
        let facts = self.cuda.pointer_facts(address);
        if let Err(error) = &facts
            && error.code != CUresult::CUDA_ERROR_DEINITIALIZED.0
        {
            // A foreign address is no error. At the end of the process there is nothing to lose.
            report::warn(report::Cause::NotExported, &format_args!("the lane is lost: what {address:#x} is cannot be told: {error}"));
        }
        let facts = facts.ok()?;
        let ours = facts.handle_types & POSIX_FD != 0 && facts.handle_types & FABRIC == 0 && !facts.legacy && !facts.managed;
        ours.then_some(facts)
    }
}

/// Adds `[from, to)` to ranges that neither overlap nor touch, by start, and keeps them so.
fn add_range(ranges: &mut BTreeMap<u64, u64>, from: u64, to: u64) {
    let start = ranges.range(..=from).next_back().filter(|(_, end)| **end >= from).map_or(from, |(&start, _)| start);
    let swallowed: Vec<u64> = ranges.range(start..=to).map(|(&start, _)| start).collect();
    let end = swallowed.iter().filter_map(|start| ranges.remove(start)).max().map_or(to, |end| end.max(to));
    ranges.insert(start, end);
}

/// Takes `[from, to)` out of such ranges.
fn remove_range(ranges: &mut BTreeMap<u64, u64>, from: u64, to: u64) {
    let touched: Vec<(u64, u64)> = ranges.range(..to).rev().map(|(&start, &end)| (start, end)).take_while(|&(_, end)| from < end).collect();
    for (start, end) in touched {
        ranges.remove(&start);
        if start < from {
            ranges.insert(start, from);
        }
        if to < end {
            ranges.insert(to, end);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
