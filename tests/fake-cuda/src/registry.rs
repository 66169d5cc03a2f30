//! Joins this process to the fake machine: the state file, the shared lock, and who is alive.
//!
//! A process is alive while its byte of the file `live` is locked. The lock belongs to an open file description that only a mapping keeps open: no
//! fd that an application could close, not inherited by fork (`MADV_DONTFORK`), gone with `exec` and with death of any kind. Dead processes are
//! swept when somebody needs to know ([`Locked::sweep`]): on attaching, when memory runs short, when free memory is asked for.
//! The first process of a directory in which nothing is alive any more starts it afresh.

use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::ffi::CString;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;

use crate::arena::Arenas;
use crate::config::Config;
use crate::file::{self, Lock};
use crate::fork;
use crate::layout::{ARENA_FACTOR, Body, Counters, Header, LAYOUT, MAGIC, MAX_DEVICES, MAX_PROCESSES};

/// This process's place in the fake machine.
pub(crate) struct Registry {
    header: &'static Header,
    /// This process's number in the process table and in holder bits.
    pub(crate) slot: usize,
    /// The arenas of all physical devices.
    pub(crate) arenas: Arenas,
    /// Per physical device, the file whose fds are exported handles, and its (device, inode).
    pub(crate) exports: Vec<(CString, (u64, u64))>,
    live: CString,
    /// Only where closing it would have dropped the liveness lock (a file system that swaps the file behind a mapping).
    _live_file: Option<File>,
}

// SAFETY: the raw parts are a shared mapping that is never unmapped; what is in it is atomics, or guarded by the shared lock.
unsafe impl Send for Registry {}
// SAFETY: as above.
unsafe impl Sync for Registry {}

static REGISTRY: OnceLock<Registry> = OnceLock::new();

/// The registry, once `cuInit` has succeeded.
pub(crate) fn get() -> Option<&'static Registry> {
    REGISTRY.get()
}

/// Makes `registry` the process's own; only `cuInit` calls this, under its lock.
pub(crate) fn set(registry: Registry) -> &'static Registry {
    // SAFETY: the handler is a function of this library, which is never unloaded.
    unsafe { libc::atexit(leave) };
    REGISTRY.get_or_init(|| registry)
}

/// Gives memory back at an orderly exit. Without it the arena would keep the pages until somebody sweeps; calls that come after it find nothing to
/// give back, and do no harm.
extern "C" fn leave() {
    if let Some(registry) = get()
        && !fork::in_child()
    {
        let mut body = registry.lock();
        for gpu in 0..body.devices as usize {
            body.drop_holder_everywhere(gpu, registry.slot);
            body.sweep_orphans(gpu);
        }
    }
}

impl Registry {
    pub(crate) fn attach(config: &Config) -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&config.dir)?;
        let dir = config.dir.canonicalize()?;
        let state = file::open_shared(&dir.join("state"))?;
        let attaching = file::open_shared(&dir.join("attach"))?;
        // Held until `attaching` is dropped: one process at a time decides whether this is a fresh start.
        file::wait_lock(&attaching, Lock::Exclusive, 0, 1)?;

        let size = size_of::<Header>() as u64;
        if state.metadata()?.len() != size {
            state.set_len(size)?;
        }
        let address = file::map_shared(&state, size)?;
        let live_path = dir.join("live");
        let live = file::open_shared(&live_path)?;
        live.set_len(MAX_PROCESSES as u64)?;
        // SAFETY: the mapping is as large as `Header`, page aligned and never unmapped, and every bit pattern the file can hold is a valid
        // `Header`: integers, atomics of integers and an opaque C mutex. Fields outside `UnsafeCell` are atomics.
        let header: &'static Header = unsafe { &*address.cast::<Header>() };

        let current = header.magic.load(Acquire) == MAGIC && header.layout.load(Relaxed) == LAYOUT;
        let export_path = |gpu: usize| dir.join(format!("gpu{gpu}.export"));
        let is_exported = |gpu| File::options().write(true).open(export_path(gpu)).is_ok_and(|file| file::is_locked(&file, 0, 0));
        let in_use = file::is_locked(&live, 0, 0) || (0..MAX_DEVICES).any(is_exported);
        if in_use && !current {
            return Err(Error::new(ErrorKind::AddrInUse, "another build of the fake driver uses this directory"));
        }
        if !in_use {
            start_afresh(header, &state, config)?;
        }

        let slot = (0..MAX_PROCESSES).find(|&slot| file::try_lock(&live, Lock::Exclusive, slot as u64, 1).is_ok());
        let slot = slot.ok_or_else(|| Error::new(ErrorKind::QuotaExceeded, "too many processes"))?;
        let live_file = keep_alive(live, &live_path, slot)?;

        let mut exports = Vec::new();
        let mut arena_files = Vec::new();
        let devices = {
            // SAFETY: nobody else attaches; those who are attached only read this field.
            unsafe { (*header.body.get()).devices }
        };
        for gpu in 0..devices as usize {
            let path = export_path(gpu);
            let metadata = file::open_shared(&path)?.metadata()?;
            exports.push((CString::new(path.as_os_str().as_bytes())?, (metadata.dev(), metadata.ino())));
            arena_files.push(file::open_shared(&dir.join(format!("gpu{gpu}.arena")))?);
        }
        // SAFETY: as for `devices`.
        let memory = unsafe { (*header.body.get()).memory };
        let arenas = Arenas::map(&arena_files, memory * ARENA_FACTOR, !in_use)?;
        let live = CString::new(live_path.as_os_str().as_bytes())?;
        let registry = Self { header, slot, arenas, exports, live, _live_file: live_file };
        {
            let mut body = registry.lock();
            body.sweep_process(slot);
            body.processes[slot].used = 1;
            body.processes[slot].pid = std::process::id();
        }
        Ok(registry)
    }

    /// Takes the shared lock.
    pub(crate) fn lock(&self) -> Locked<'_> {
        // SAFETY: the mutex was initialised before `magic` was set and lives as long as the mapping.
        let rc = unsafe { libc::pthread_mutex_lock(self.header.mutex.get()) };
        let mut locked = Locked { registry: self };
        if rc == libc::EOWNERDEAD {
            // The former holder died inside; its half-done change is undone from the chunk entries, which are valid on their own.
            locked.rebuild();
            // SAFETY: we hold the mutex and were told that its state needs this call.
            unsafe { libc::pthread_mutex_consistent(self.header.mutex.get()) };
        }
        locked
    }

    /// This process's counters.
    pub(crate) fn counters(&self) -> &Counters {
        &self.header.counters[self.slot]
    }

    /// Everyone's counters, the dead included until they are swept.
    pub(crate) fn all_counters(&self) -> &[Counters] {
        &self.header.counters
    }

    /// The next generation for a chunk.
    pub(crate) fn next_generation(&self) -> u64 {
        self.header.generation.fetch_add(1, Relaxed) + 1
    }

    /// Driver calls that forked children of anyone made.
    pub(crate) fn calls_after_fork(&self) -> u64 {
        self.header.calls_after_fork.load(Relaxed)
    }

    /// Notes a call in a forked child. The child has no other business with the registry.
    pub(crate) fn count_call_after_fork(&self) {
        self.header.calls_after_fork.fetch_add(1, Relaxed);
        self.counters().calls_after_fork.fetch_add(1, Relaxed);
    }
}

/// The shared body, while this process has the lock.
pub(crate) struct Locked<'a> {
    pub(crate) registry: &'a Registry,
}

impl Locked<'_> {
    /// Takes everything from processes that died, and frees exported chunks that nothing refers to any more.
    pub(crate) fn sweep(&mut self) {
        // Without an fd to spare nothing can be asked; what is dead then stays until the next time.
        if let Ok(live) = file::open_again(&self.registry.live) {
            for slot in 0..MAX_PROCESSES {
                if slot != self.registry.slot && self.processes[slot].used != 0 && !file::is_locked(&live, slot as u64, 1) {
                    self.sweep_process(slot);
                }
            }
        }
        for gpu in 0..self.devices as usize {
            self.sweep_orphans(gpu);
        }
    }

    fn sweep_process(&mut self, slot: usize) {
        for gpu in 0..self.devices as usize {
            self.drop_holder_everywhere(gpu, slot);
        }
        self.processes[slot].used = 0;
        self.registry.header.counters[slot].clear();
    }
}

impl Deref for Locked<'_> {
    type Target = Body;

    fn deref(&self) -> &Body {
        // SAFETY: we hold the mutex, so no other thread or process has a reference to the body.
        unsafe { &*self.registry.header.body.get() }
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Body {
        // SAFETY: as in `deref`, and `self` is borrowed mutably, so this process has no second reference either.
        unsafe { &mut *self.registry.header.body.get() }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread locked the mutex when it made `self`.
        unsafe { libc::pthread_mutex_unlock(self.registry.header.mutex.get()) };
    }
}

impl Counters {
    fn clear(&self) {
        for per_gpu in [&self.handles, &self.mappings, &self.mapped_bytes] {
            per_gpu.iter().for_each(|counter| counter.store(0, Relaxed));
        }
        let single = [&self.reservations, &self.reserved_bytes, &self.exports_made, &self.imports_made, &self.driver_calls];
        let more = [&self.calls_after_fork, &self.copies, &self.copied_bytes, &self.copies_into_dead_mappings, &self.internal_errors];
        let others = [&self.pools, &self.primary_retains];
        single.into_iter().chain(more).chain(others).for_each(|counter| counter.store(0, Relaxed));
    }
}

fn start_afresh(header: &Header, state: &File, config: &Config) -> Result<()> {
    header.magic.store(0, Relaxed);
    header.counters.iter().for_each(Counters::clear);
    // Everything behind the first page; the generation counter and the count of calls after fork go on.
    let first = core::mem::offset_of!(Header, body) as u64;
    file::punch(state, first, size_of::<Body>() as u64)?;
    init_mutex(header)?;
    // SAFETY: nobody is attached (no byte of `live` is locked) and we hold the attach lock.
    let body = unsafe { &mut *header.body.get() };
    body.memory = config.memory;
    body.devices = u32::try_from(config.devices).unwrap_or(1);
    header.layout.store(LAYOUT, Relaxed);
    header.magic.store(MAGIC, Release);
    Ok(())
}

fn init_mutex(header: &Header) -> Result<()> {
    // SAFETY: an attribute object is opaque C data that `pthread_mutexattr_init` fills.
    let mut attributes: libc::pthread_mutexattr_t = unsafe { core::mem::zeroed() };
    let attributes = &raw mut attributes;
    // SAFETY: a live attribute object.
    let mut rc = unsafe { libc::pthread_mutexattr_init(attributes) };
    // SAFETY: initialised just now.
    rc |= unsafe { libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED) };
    // SAFETY: initialised just now.
    rc |= unsafe { libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST) };
    // SAFETY: nobody uses the mutex: nobody is attached.
    rc |= unsafe { libc::pthread_mutex_init(header.mutex.get(), attributes) };
    if rc == 0 { Ok(()) } else { Err(Error::from_raw_os_error(rc)) }
}

/// Leaves the lock on byte `slot` to a mapping of `live` and closes the fd; gives it back where that would drop the lock.
fn keep_alive(live: File, path: &Path, slot: usize) -> Result<Option<File>> {
    let address = file::map_shared(&live, MAX_PROCESSES as u64)?;
    file::advise(address, 4096, libc::MADV_DONTFORK)?;
    drop(live);
    let probe = file::open_shared(path)?;
    if file::is_locked(&probe, slot as u64, 1) {
        return Ok(None);
    }
    file::try_lock(&probe, Lock::Exclusive, slot as u64, 1)?;
    Ok(Some(probe))
}
