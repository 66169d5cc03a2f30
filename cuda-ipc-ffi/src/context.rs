//! Contexts: what an exporter and a cache of imports share, and the calls that are about all of it.
//!
//! # Safety
//! The unsafe here is what C functions do with their callers' pointers, by way of `boundary.rs`, and their names.

#![allow(unsafe_code)]

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cuda_ipc_cache::Cache;
use cuda_ipc_core::exporter::{Exporter, ExporterOptions};
use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::sys::driver::Cuda;
use pidfd_sys::{Ptracer, PtracerOutcome, set_ptracer};

use crate::boundary::{Bytes, Out, boundary, enter_life, init_struct, read_struct};
use crate::config::{Pointed, Settings, cuda_ipc_config_t};
use crate::export::EXPORTS;
use crate::failure::Failure;
use crate::handle::{Kind, STALE};
use crate::handles::cuda_ipc_context_t;
use crate::log::{CUDA_IPC_LOG_DEBUG, CUDA_IPC_LOG_INFO, CUDA_IPC_LOG_WARN, Log};
use crate::status::{CUDA_IPC_ERR_RANGE, cuda_ipc_status_t};
use crate::table::Table;
use crate::windows;

pub(crate) static CONTEXTS: Table<Context> = Table::new(Kind::Context);

/// See `cuda_ipc_context_t`. Goes when its handle and all that was made with it have gone.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) cuda: Cuda,
    pub(crate) cache: Cache,
    pub(crate) log: Log,
    /// Imports map at once.
    pub(crate) eager: bool,
    exporter_options: ExporterOptions,
    /// Made by the first export: whoever only imports has no table.
    exporter: Mutex<Option<Exporter>>,
    destroyed: AtomicBool,
    pub(crate) no_ipc_exports: AtomicU64,
    pub(crate) failed_imports: AtomicU64,
}

impl Context {
    fn new(settings: Settings) -> Result<Self, Failure> {
        let Settings { log, eager, ptracer, exporter, cache } = settings;
        let cuda = Cuda::open()?;
        if ptracer {
            match set_ptracer(Ptracer::Any) {
                Ok(PtracerOutcome::Set) => log.say(CUDA_IPC_LOG_INFO, format_args!("every process of this user may trace this one now")),
                Ok(PtracerOutcome::NotNeeded) => {}
                Err(error) => log.say(CUDA_IPC_LOG_WARN, format_args!("CUDA_IPC_PTRACER has no effect: {error}")),
            }
        }
        Ok(Self {
            cuda,
            cache: Cache::new(cuda, cache),
            log,
            eager,
            exporter_options: exporter,
            exporter: Mutex::default(),
            destroyed: AtomicBool::new(false),
            no_ipc_exports: AtomicU64::new(0),
            failed_imports: AtomicU64::new(0),
        })
    }

    /// The exporter, if anything was ever exported.
    pub(crate) fn exporter(&self) -> Option<Exporter> {
        self.exporter.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The exporter, made if there is none.
    pub(crate) fn make_exporter(&self) -> Result<Exporter, Failure> {
        // Held while the table is made: some system calls, and no driver call.
        let mut exporter = self.exporter.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(exporter) = &*exporter {
            return Ok(exporter.clone());
        }
        Ok(exporter.insert(Exporter::new(self.cuda, self.exporter_options.clone())?).clone())
    }

    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }
}

/// Makes `config` ready to be filled in: zeroes `size` bytes and stores `size` in its first field. Pass `sizeof(cuda_ipc_config_t)`.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`. Usable from any thread.
///
/// # Safety
/// `config` is null or good for writing `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_config_init(config: *mut cuda_ipc_config_t, size: usize) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        unsafe { init_struct(config, size) }
    })
}

/// Makes a context: opens the CUDA driver and initialises it. It starts no thread and exports nothing yet.
///
/// `config` may be null: everything by the environment and defaults. What it points to is copied, but for `log` and `log_user`. The context in `*context` is the
/// caller's, who ends it with `cuda_ipc_context_destroy`; `*context` is written on success only.
///
/// Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_ARGUMENT` and `CUDA_IPC_ERR_ENVIRONMENT` (the error's text names field or variable),
/// `CUDA_IPC_ERR_NO_DRIVER`, `CUDA_IPC_ERR_DRIVER_INIT`, `CUDA_IPC_ERR_FORKED`, `CUDA_IPC_ERR_SYSTEM`. Usable from any thread.
///
/// # Safety
/// `config` is null or good for reading as many bytes as its first field says, and its pointers are null or good; `context` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_context_create(config: *const cuda_ipc_config_t, context: *mut cuda_ipc_context_t) -> cuda_ipc_status_t {
    boundary!({
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(context, "context") }?;
        // SAFETY: the caller's promise.
        let config = match unsafe { read_struct(config) }? {
            Some(config) => config,
            None => {
                let mut zeros = core::mem::MaybeUninit::<cuda_ipc_config_t>::zeroed();
                // SAFETY: a place for the structure, of its size.
                unsafe { init_struct(zeros.as_mut_ptr(), size_of::<cuda_ipc_config_t>()) }?;
                // SAFETY: zeroed and given its size; any bytes are a value of it.
                unsafe { zeros.assume_init() }
            }
        };
        let pointed = Pointed {
            // SAFETY: the caller's promise.
            socket_dir: unsafe { Bytes::string(config.socket_dir) },
            // SAFETY: the caller's promise.
            allowed_uids: unsafe { Bytes::values(config.allowed_uids, config.allowed_uid_count, "allowed_uids") }?,
        };
        let settings = Settings::new(&config, pointed, |name| std::env::var_os(name))?;
        // First, so that whatever is made from here on belongs to this life of the process.
        enter_life()?;
        let made = Arc::new(Context::new(settings)?);
        made.log.say(CUDA_IPC_LOG_INFO, format_args!("cuda-ipc {} is ready", crate::version::TEXT));
        out.write(cuda_ipc_context_t { id: CONTEXTS.insert(made)? });
        Ok(())
    })
}

/// Ends a context: its exports are released, so that importers see their chunks die; its windows are released and unmapped when idle; handles of both are
/// stale. Leases that have not ended keep their memory mapped, and are to be ended as before. Calls of other threads that use it end as usual.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_context_destroy(context: cuda_ipc_context_t) -> cuda_ipc_status_t {
    boundary!({
        let context = CONTEXTS.remove(context.id)?;
        context.destroyed.store(true, Ordering::Release);
        // After the mark: whoever adds an export or a window looks at it under the locks that these take.
        drop(EXPORTS.remove_all(|export| Arc::ptr_eq(export.context(), &context)));
        windows::close_all_of(&context);
        // Leases may keep the context for longer; its memory is not exported any more all the same.
        let exporter = context.exporter.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(exporter);
        context.log.say(CUDA_IPC_LOG_INFO, format_args!("the context is destroyed"));
        Ok(())
    })
}

/// Withdraws every exported chunk that touches `[address, address + length)`, right before the caller frees or unmaps that memory: when this returns, importers
/// know that it is gone, and nothing of the library's keeps it. Keys and exports stay good for what is in their range later.
///
/// `address` and `length` are bytes of this process. `*chunks`, if `chunks` is not null, is how many were withdrawn. Makes no driver call, so it may be called from
/// a hook inside the driver.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_RANGE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `chunks` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_retire(context: cuda_ipc_context_t, address: u64, length: u64, chunks: *mut u64) -> cuda_ipc_status_t {
    boundary!({
        let context = CONTEXTS.get(context.id)?;
        if length == 0 || address.checked_add(length).is_none() {
            return Err(Failure::about(CUDA_IPC_ERR_RANGE, "length"));
        }
        let retired = context.exporter().map_or(0, |exporter| exporter.retire(address, length));
        // SAFETY: the caller's promise.
        if let Some(out) = unsafe { Out::optional(chunks) } {
            out.write(retired as u64);
        }
        Ok(())
    })
}

/// Withdraws every exported chunk whose memory has been freed without a word, or whose file descriptor the application has closed. The library's thread does so by
/// itself unless `exporter_sweep_ms` is `CUDA_IPC_NEVER`. `*chunks`, if `chunks` is not null, is how many were withdrawn.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `chunks` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_sweep(context: cuda_ipc_context_t, chunks: *mut u64) -> cuda_ipc_status_t {
    boundary!({
        let swept = CONTEXTS.get(context.id)?.exporter().map_or(0, |exporter| exporter.sweep());
        // SAFETY: the caller's promise.
        if let Some(out) = unsafe { Out::optional(chunks) } {
            out.write(swept as u64);
        }
        Ok(())
    })
}

/// Unmaps what exporters have freed, what exporters that have exited have left, and what is beyond the limits, unless it is leased. The library's thread does so
/// by itself unless `importer_sweeps` is off. `*bytes`, if `bytes` is not null, is how many bytes of the dead were unmapped.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `bytes` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_trim(context: cuda_ipc_context_t, bytes: *mut u64) -> cuda_ipc_status_t {
    boundary!({
        let context = CONTEXTS.get(context.id)?;
        windows::clear();
        let unmapped = context.cache.trim();
        // SAFETY: the caller's promise.
        if let Some(out) = unsafe { Out::optional(bytes) } {
            out.write(unmapped);
        }
        Ok(())
    })
}

/// Forgets an exporter: unmaps what is idle of it, lets no more be imported through the windows there are, and unmaps the rest as its leases end. `peer` is what
/// `cuda_ipc_window_info` says; a peer that is not known is none to forget, and no error. `*bytes`, if `bytes` is not null, is how many bytes were unmapped now.
/// Importing a key of the same exporter later makes new windows.
///
/// Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
///
/// # Safety
/// `bytes` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_purge_peer(context: cuda_ipc_context_t, peer: u64, bytes: *mut u64) -> cuda_ipc_status_t {
    boundary!({
        let context = CONTEXTS.get(context.id)?;
        let unmapped = context.cache.purge_peer(Nonce(peer));
        context.log.say(CUDA_IPC_LOG_DEBUG, format_args!("peer {peer:016x} is forgotten: {unmapped} bytes unmapped"));
        // SAFETY: the caller's promise.
        if let Some(out) = unsafe { Out::optional(bytes) } {
            out.write(unmapped);
        }
        Ok(())
    })
}

/// What to answer where a context was destroyed while something was being made with it.
pub(crate) const fn destroyed() -> Failure {
    Failure::plain(STALE)
}
