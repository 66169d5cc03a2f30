//! The importing side: the cache, the leases held, and what must be true after every step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cuda_ipc_cache::{Cache, CacheErrorKind, CacheStats, Lease, LeaseParts, Window};
use cuda_ipc_core::importer::ImportErrorKind;
use cuda_ipc_tests::driver::FakeCounters;
use cuda_ipc_tests::pattern;

use super::exporters::{Exporters, Space};
use super::steps::{SPACES, Settings, Step};
use crate::support::*;

type Checked<T = ()> = Result<T, String>;

/// A chunk that a lease covers, as it was when the lease was taken. Its seed names it among all chunks that ever were.
#[derive(Clone, Copy, Debug)]
struct Covered {
    offset: u64,
    len: u64,
    seed: u64,
}

struct Held {
    window: Arc<Window>,
    space: usize,
    parts: LeaseParts,
    /// Offset in the reservation of the leased address.
    offset: u64,
    chunks: Vec<Covered>,
}

pub(super) struct Importer<'w> {
    world: &'w World,
    cache: Option<Cache>,
    settings: Settings,
    windows: BTreeMap<(usize, bool), Arc<Window>>,
    held: Vec<Held>,
    /// Chunks leased, all told.
    leased: u64,
    fault: bool,
    /// After the last step. An import and a trim have to keep the limits; other steps may leave what was there.
    then: CacheStats,
    /// What the process had before: something, where a case has failed and the runner looks for a smaller one.
    before: FakeCounters,
}

impl<'w> Importer<'w> {
    pub(super) fn new(world: &'w World, settings: Settings) -> Self {
        let cache = world.cache(|options| {
            options.sweep = false;
            options.keep_idle = settings.keep_idle;
            options.max_mapped_bytes = settings.max_mapped * CHUNK;
            options.max_windows = settings.max_windows;
        });
        Self {
            world,
            cache: Some(cache),
            settings,
            windows: BTreeMap::new(),
            held: Vec::new(),
            leased: 0,
            fault: false,
            then: CacheStats::default(),
            before: world.counters(),
        }
    }

    fn cache(&self) -> &Cache {
        self.cache.as_ref().expect("until the end")
    }

    pub(super) fn act(&mut self, exporters: &mut Exporters<'_>, step: &Step) -> Checked {
        match *step {
            Step::Map { space, granule, granules } => exporters.map(space, granule, granules),
            Step::Free { pick, how } => drop(exporters.free(pick, how)),
            Step::Replace { pick, granules, how } => {
                if let Some((space, granule)) = exporters.free(pick, how) {
                    exporters.map(space, granule, granules);
                }
            }
            Step::Lease { space, granule, granules, skew, writable } => {
                // Ranges that begin and end inside chunks, too.
                let (offset, len) = (granule * CHUNK + skew * 4097, granules * CHUNK - skew * 8191);
                self.lease(exporters, space, offset, len, writable)?;
            }
            Step::End { pick } => {
                if !self.held.is_empty() {
                    let held = self.held.remove(pick % self.held.len());
                    self.check_bytes(&held)?;
                    drop(Lease::from_parts(&held.window, held.parts));
                }
            }
            Step::Trim => self.trim(exporters)?,
            Step::Purge { peer } => {
                self.forget_peer(peer);
                if let Some(key) = exporters.spaces[peer * SPACES].key.or(exporters.spaces[peer * SPACES + 1].key) {
                    self.cache().purge_peer(key.nonce);
                }
            }
            Step::Kill { peer } => {
                exporters.kill(peer);
                self.forget_peer(peer);
            }
            Step::Forget { space } => self.windows.retain(|&(of, _), _| of != space),
            Step::Device { space } => self.add_device(exporters, space)?,
            Step::Fault { rule } => {
                self.world.importer.fake.add_fault(rule);
                self.fault = true;
            }
        }
        if self.fault && matches!(step, Step::Lease { .. } | Step::End { .. } | Step::Trim) {
            self.world.importer.fake.clear_faults();
            self.fault = false;
            // What the driver has refused is done now.
            self.cache().trim();
        }
        if self.fault {
            return Ok(());
        }
        let stats = self.cache().stats();
        let enforced = matches!(step, Step::Trim) || stats.imported_chunks != self.then.imported_chunks;
        let (bytes, windows) = if enforced { (0, 0) } else { (self.then.bytes, self.then.windows) };
        self.check_limits(bytes, windows)?;
        self.then = stats;
        self.check(exporters)
    }

    /// Limits hold, but for what is in use, and for what was there already.
    fn check_limits(&self, bytes: u64, windows: u64) -> Checked {
        let (stats, in_use) = (self.cache().stats(), self.in_use());
        let windows_in_use: BTreeSet<_> = in_use.keys().map(|&(_, window)| window).collect();
        let max_bytes = bytes.max(self.settings.max_mapped * CHUNK).max(in_use.values().sum());
        // One more: a window that was asked for, and whose import failed.
        let max_windows = windows.max(self.settings.max_windows).max(windows_in_use.len() as u64 + 1);
        if stats.bytes <= max_bytes && stats.windows <= max_windows {
            Ok(())
        } else {
            Err(format!("beyond {max_bytes} bytes or {max_windows} windows: {stats:?}"))
        }
    }

    fn forget_peer(&mut self, peer: usize) {
        self.windows.retain(|&(space, _), _| space / SPACES != peer);
    }

    fn window(&mut self, at: usize, space: &Space, device: i32, writable: bool) -> Checked<Option<Arc<Window>>> {
        let Some(key) = space.key else { return Ok(None) };
        let window = match self.windows.get(&(at, writable)) {
            Some(window) if device == 0 => window.clone(),
            _ => self.cache().window(&key, device, writable, soon()).map_err(|error| format!("no window: {error}"))?,
        };
        if let Some(known) = self.windows.insert((at, writable), window.clone())
            && !Arc::ptr_eq(&known, &window)
        {
            return Err("two windows of one reservation".to_owned());
        }
        Ok(Some(window))
    }

    fn add_device(&mut self, exporters: &Exporters<'_>, at: usize) -> Checked {
        self.window(at, &exporters.spaces[at], 0, false)?;
        let Some(window) = self.window(at, &exporters.spaces[at], 1, false)? else { return Ok(()) };
        let cuda = &self.world.importer.cuda;
        for held in self.held.iter().filter(|held| Arc::ptr_eq(&held.window, &window)) {
            if cuda.mem_get_access(held.parts.address, 1) != Ok(1) {
                return Err("the second device has no access".to_owned());
            }
        }
        Ok(())
    }

    fn lease(&mut self, exporters: &Exporters<'_>, at: usize, offset: u64, len: u64, writable: bool) -> Checked {
        let space = &exporters.spaces[at];
        if offset + len > space.memory.len {
            return Ok(());
        }
        let Some(window) = self.window(at, space, 0, writable)? else { return Ok(()) };
        let expected = expect(space, offset, len);
        let blocked = expected.as_ref().is_ok_and(|chunks| self.is_blocked(&window, chunks));
        let (leases, imports) = (self.cache().stats().chunk_leases, self.world.counters().imports_made);

        let holding: Vec<Lease<'_>> = self.held.iter().map(|held| Lease::from_parts(&held.window, held.parts)).collect();
        let all: Vec<&Lease<'_>> = holding.iter().collect();
        let answer = window.lease_holding(space.memory.base + offset, len, soon(), &all).map(Lease::into_parts);
        for lease in holding {
            let _still_held = lease.into_parts();
        }

        match (answer, expected) {
            (Ok(_), Err(hole)) => return Err(format!("a lease over the hole at {hole:#x}")),
            (Ok(_), Ok(_)) if blocked => return Err("a lease of what is blocked by a lease".to_owned()),
            (Ok(parts), Ok(chunks)) => {
                self.leased += chunks.len() as u64;
                let held = Held { window: window.clone(), space: at, parts, offset, chunks };
                self.check_bytes(&held)?;
                self.held.push(held);
                // Again, at once: a hit.
                let again = window.try_lease(space.memory.base + offset, len).ok_or("no hit right after a lease")?;
                self.leased += u64::from(again.chunks());
                if again.address() != parts.address {
                    return Err("another address".to_owned());
                }
            }
            (Err(error), expected) => {
                let right = match (error.kind, expected) {
                    (CacheErrorKind::NoChunk, Err(hole)) => error.address == space.memory.base + hole,
                    (CacheErrorKind::Busy, Ok(_)) => blocked,
                    (CacheErrorKind::Driver(_), _) => self.fault,
                    (CacheErrorKind::Import(import), _) => self.fault && matches!(import.kind, ImportErrorKind::Driver(_)),
                    _ => false,
                };
                if !right {
                    return Err(format!("{error}; blocked: {blocked}, a hole at {:?}", expect(space, offset, len).err()));
                }
                let unchanged = self.cache().stats().chunk_leases == leases;
                if !unchanged || self.world.counters().imports_made != imports && !self.fault {
                    return Err("a lease that was refused has left something".to_owned());
                }
            }
        }
        Ok(())
    }

    /// Whether a chunk that is not there any more is leased where one of these belongs.
    fn is_blocked(&self, window: &Arc<Window>, chunks: &[Covered]) -> bool {
        self.held.iter().filter(|held| Arc::ptr_eq(&held.window, window)).flat_map(|held| &held.chunks).any(|old| {
            chunks.iter().any(|new| new.seed != old.seed && new.offset < old.offset + old.len && old.offset < new.offset + new.len)
        })
    }

    /// A few bytes of each granule of a lease are what they were when it was taken.
    fn check_bytes(&self, held: &Held) -> Checked {
        let cuda = &self.world.importer.cuda;
        for chunk in &held.chunks {
            for granule in (chunk.offset..chunk.offset + chunk.len).step_by(usize::try_from(CHUNK).expect("small")) {
                let from = (granule + 777).max(held.offset);
                // The granule's own place here, whatever part of it is leased: chunks are mapped whole.
                let local = held.parts.address.wrapping_add(from.wrapping_sub(held.offset));
                pattern::check(cuda, local, from - chunk.offset, 512, chunk.seed).map_err(|error| format!("a lease's bytes: {error}"))?;
            }
        }
        Ok(())
    }

    fn trim(&mut self, exporters: &Exporters<'_>) -> Checked {
        self.cache().trim();
        if self.fault {
            return Ok(());
        }
        let stats = self.cache().stats();
        let live: BTreeSet<u64> = exporters.spaces.iter().flat_map(|space| space.memory.chunks.values().map(|&(_, seed)| seed)).collect();
        let dead_in_use = self.in_use().keys().filter(|&&(seed, _)| !live.contains(&seed)).count() as u64;
        // Windows of purged peers hold chunks that live and wait all the same.
        if stats.waiting_unmaps < dead_in_use || stats.chunks - stats.waiting_unmaps > 2 * live.len() as u64 {
            return Err(format!("{dead_in_use} dead chunks are in use, {} live: {stats:?}", live.len()));
        }
        Ok(())
    }

    /// Chunks that leases keep, by seed and window, and their lengths.
    fn in_use(&self) -> BTreeMap<(u64, *const Window), u64> {
        let chunks = self.held.iter().flat_map(|held| held.chunks.iter().map(|chunk| ((chunk.seed, Arc::as_ptr(&held.window)), chunk.len)));
        chunks.collect()
    }

    /// What must be true after every step.
    fn check(&self, exporters: &Exporters<'_>) -> Checked {
        let (stats, counters, before) = (self.cache().stats(), self.world.counters(), self.before);
        let check = |what: &str, left: u64, right: u64| {
            if left == right { Ok(()) } else { Err(format!("{what}: {left} and {right}; {stats:?}")) }
        };
        check("mappings", counters.mappings - before.mappings, stats.chunks)?;
        check("mapped bytes", counters.mapped_bytes - before.mapped_bytes, stats.bytes)?;
        check("reservations", counters.reservations - before.reservations, stats.windows)?;
        check("reserved bytes", counters.reserved_bytes - before.reserved_bytes, stats.address_space)?;
        check("handles", counters.handles, before.handles)?;
        let unmapped = stats.unmapped_dead + stats.unmapped_replaced + stats.unmapped_limit + stats.unmapped_purged;
        check("imported", stats.imported_chunks, unmapped + stats.chunks)?;
        check("leases", stats.chunk_leases, self.leased)?;
        self.held.iter().try_for_each(|held| self.check_bytes(held))?;

        let in_use = self.in_use();
        if !self.settings.keep_idle {
            check("chunks in use where nothing idle is kept", in_use.len() as u64, stats.chunks)?;
        }
        let gone = |held: &Held| exporters.spaces[held.space].memory.chunks.is_empty();
        // Every lease is of a chunk that is mapped; one whose chunk is gone for good as well.
        check("chunks mapped and in use", stats.chunks.min(in_use.len() as u64), in_use.len() as u64)
            .map_err(|error| format!("{error}; {} of them gone", self.held.iter().filter(|held| gone(held)).count()))
    }

    /// Ends all leases, then the cache: nothing is left.
    pub(super) fn finish(mut self) -> Checked {
        self.held.iter().try_for_each(|held| self.check_bytes(held))?;
        self.clear();
        let (after, before) = (self.world.counters(), self.before);
        if (after.mappings, after.reservations, after.handles) == (before.mappings, before.reservations, before.handles) {
            Ok(())
        } else {
            Err(format!("something is left: {after:?}"))
        }
    }

    fn clear(&mut self) {
        self.world.importer.fake.clear_faults();
        for held in self.held.drain(..) {
            drop(Lease::from_parts(&held.window, held.parts));
        }
        self.windows.clear();
        self.cache = None;
    }
}

impl Drop for Importer<'_> {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The chunks over a range of a space, or the offset of the first hole.
fn expect(space: &Space, offset: u64, len: u64) -> Result<Vec<Covered>, u64> {
    let (mut at, mut chunks) = (offset, Vec::new());
    while at < offset + len {
        match space.memory.chunks.range(..=at).next_back() {
            Some((&start, &(len, seed))) if at < start + len => {
                chunks.push(Covered { offset: start, len, seed });
                at = start + len;
            }
            _ => return Err(at),
        }
    }
    Ok(chunks)
}
