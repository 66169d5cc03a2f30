//! Contexts: one primary per device, more by `cuCtxCreate`, and each thread's stack of current ones.
//!
//! A context is a number. The number of a device's primary context never changes; its id (`cuCtxGetId`) does with every new life. Work that touched
//! memory which was not there any more breaks a context: from then on everything fails in it but virtual memory management and pointer attributes.

use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;
use std::collections::{BTreeMap, BTreeSet};

use cuda_driver_sys::{CUcontext, CUctx_st, CUresult};

use crate::abi::{Answer, Handle, INVALID, Out, handle};
use crate::process::{self, Process};
use crate::space::Kind;

/// A live context.
pub(crate) struct Context {
    pub(crate) device: usize,
    /// Unique over the life of the process.
    id: u64,
    /// Retains of a primary context; 1 for others.
    users: u64,
    primary: bool,
}

/// All contexts of the process.
pub(crate) struct Contexts {
    live: BTreeMap<u64, Context>,
    /// Numbers of broken ones, for ever: a primary context comes back as it went.
    broken: BTreeSet<u64>,
    next: u64,
    next_id: u64,
}

const FIRST: u64 = 0xc0de_0000_0000;
const STEP: u64 = 0x100;

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        Self { live: BTreeMap::new(), broken: BTreeSet::new(), next: primary(devices), next_id: 1 }
    }

    fn add(&mut self, number: u64, device: usize, primary: bool) {
        let id = self.next_id;
        self.next_id += 1;
        self.live.insert(number, Context { device, id, users: 1, primary });
    }

    /// Whether the number was ever a context.
    fn was(&self, number: u64) -> bool {
        (primary(0)..self.next).contains(&number)
    }

    fn get(&self, number: u64) -> Result<&Context, CUresult> {
        let gone = if self.was(number) { CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED } else { CUresult::CUDA_ERROR_INVALID_CONTEXT };
        self.live.get(&number).ok_or(gone)
    }
}

/// The number of a device's primary context.
fn primary(device: usize) -> u64 {
    FIRST + device as u64 * STEP
}

/// Contexts a thread has pushed, without a destructor: threads end when they like.
struct Stack {
    depth: Cell<usize>,
    contexts: [Cell<u64>; 64],
}

thread_local! {
    static STACK: Stack = const { Stack { depth: Cell::new(0), contexts: [const { Cell::new(0) }; 64] } };
}

fn top() -> u64 {
    STACK.with(|stack| stack.depth.get().checked_sub(1).map_or(0, |at| stack.contexts[at].get()))
}

fn push_number(number: u64) -> Answer {
    STACK.with(|stack| {
        let depth = stack.depth.get();
        stack.contexts.get(depth).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?.set(number);
        stack.depth.set(depth + 1);
        Ok(())
    })
}

fn pop_number() -> Result<u64, CUresult> {
    let number = top();
    STACK.with(|stack| {
        let depth = stack.depth.get().checked_sub(1).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        stack.depth.set(depth);
        Ok(number)
    })
}

impl Process {
    /// Number and device of the calling thread's current context.
    pub(crate) fn current(&self) -> Result<(u64, usize), CUresult> {
        let number = top();
        if number == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        self.contexts.get(number).map(|context| (number, context.device))
    }

    /// As [`Process::current`], for what a broken context refuses.
    pub(crate) fn working(&self) -> Result<(u64, usize), CUresult> {
        let current = self.current()?;
        self.check_context(current.0)?;
        Ok(current)
    }

    /// The code with which the context refuses, once its work has touched memory that was gone.
    pub(crate) fn check_context(&self, number: u64) -> Answer {
        if self.contexts.broken.contains(&number) { Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) } else { Ok(()) }
    }

    /// Makes it so.
    pub(crate) fn break_context(&mut self, number: u64) -> CUresult {
        self.contexts.broken.insert(number);
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
    }

    fn destroy_context(&mut self, number: u64) {
        let belongs = |kind: Kind| match kind {
            Kind::Plain { context, .. } | Kind::Managed { context } | Kind::HostAlloc { context } | Kind::HostRegistered { context } => {
                context == number
            }
            _ => false,
        };
        for base in self.space.bases_of(belongs) {
            self.free_allocation(base);
        }
        self.contexts.live.remove(&number);
    }
}

/// `cuDevicePrimaryCtxRetain`.
pub(crate) fn primary_retain(out: Out<CUcontext>, device: i32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let device = process.device(device)?;
    let number = primary(device);
    process.check_context(number)?;
    match process.contexts.live.get_mut(&number) {
        Some(context) => context.users += 1,
        None => process.contexts.add(number, device, true),
    }
    process.registry.counters().primary_retains.fetch_add(1, Relaxed);
    out.set(handle(number))
}

/// `cuDevicePrimaryCtxRelease`.
pub(crate) fn primary_release(device: i32) -> Answer {
    let mut process = process::lock()?;
    let number = primary(process.device(device)?);
    let context = process.contexts.live.get_mut(&number).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    context.users -= 1;
    let unused = context.users == 0;
    process.registry.counters().primary_retains.fetch_sub(1, Relaxed);
    if unused {
        process.destroy_context(number);
    }
    Ok(())
}

/// `cuDevicePrimaryCtxReset`.
pub(crate) fn primary_reset(device: i32) -> Answer {
    let mut process = process::lock()?;
    let number = primary(process.device(device)?);
    let users = process.contexts.live.get(&number).map_or(0, |context| context.users);
    process.registry.counters().primary_retains.fetch_sub(users, Relaxed);
    process.destroy_context(number);
    Ok(())
}

/// `cuDevicePrimaryCtxGetState`.
pub(crate) fn primary_state(device: i32, flags: Out<u32>, active: Out<i32>) -> Answer {
    let process = process::lock()?;
    let number = primary(process.device(device)?);
    flags.set(0)?;
    active.set(i32::from(process.contexts.live.contains_key(&number)))
}

/// `cuDevicePrimaryCtxSetFlags`.
pub(crate) fn primary_set_flags(device: i32, _flags: u32) -> Answer {
    process::lock()?.device(device).map(|_| ())
}

/// `cuCtxCreate_v2`.
pub(crate) fn create(out: Out<CUcontext>, _flags: u32, device: i32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let device = process.device(device)?;
    let number = process.contexts.next;
    push_number(number)?;
    process.contexts.next += STEP;
    process.contexts.add(number, device, false);
    out.set(handle(number))
}

/// `cuCtxDestroy_v2`.
pub(crate) fn destroy(context: Handle<CUctx_st>) -> Answer {
    let mut process = process::lock()?;
    let number = context.id();
    if process.contexts.get(number)?.primary {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    process.destroy_context(number);
    if top() == number {
        pop_number()?;
    }
    Ok(())
}

/// `cuCtxPushCurrent_v2`.
pub(crate) fn push(context: Handle<CUctx_st>) -> Answer {
    let number = context.id();
    process::lock()?.contexts.get(number)?;
    push_number(number)
}

/// `cuCtxPopCurrent_v2`.
pub(crate) fn pop(out: Out<CUcontext>) -> Answer {
    out.set_if_given(handle(pop_number()?));
    Ok(())
}

/// `cuCtxSetCurrent`: replaces the top of the stack; null pops it.
pub(crate) fn set_current(context: Handle<CUctx_st>) -> Answer {
    let number = context.id();
    if number != 0 {
        process::lock()?.contexts.get(number)?;
    }
    if top() != 0 {
        pop_number()?;
    }
    if number == 0 { Ok(()) } else { push_number(number) }
}

/// `cuCtxGetCurrent`.
pub(crate) fn current(out: Out<CUcontext>) -> Answer {
    out.set(handle(top()))
}

/// `cuCtxGetDevice`.
pub(crate) fn device(out: Out<i32>) -> Answer {
    let (_, device) = process::lock()?.current()?;
    out.set(i32::try_from(device).unwrap_or(-1))
}

/// `cuCtxGetId`; null means the current context.
pub(crate) fn id(context: Handle<CUctx_st>, out: Out<u64>) -> Answer {
    let number = match context.id() {
        0 => top(),
        number => number,
    };
    out.set(process::lock()?.contexts.get(number)?.id)
}

/// `cuCtxGetFlags`.
pub(crate) fn flags(out: Out<u32>) -> Answer {
    process::lock()?.current()?;
    out.set(0)
}

/// `cuCtxGetApiVersion`.
pub(crate) fn api_version(context: Handle<CUctx_st>, out: Out<u32>) -> Answer {
    process::lock()?.contexts.get(context.id())?;
    out.set(3020)
}

/// `cuCtxEnablePeerAccess`: all devices of the fake reach each other.
pub(crate) fn enable_peer(context: Handle<CUctx_st>, flags: u32) -> Answer {
    let process = process::lock()?;
    let (_, device) = process.current()?;
    let peer = process.contexts.get(context.id())?.device;
    match (flags, peer == device) {
        (0, false) => Ok(()),
        (0, true) => Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED),
        _ => Err(INVALID),
    }
}

/// `cuCtxGetStreamPriorityRange`.
pub(crate) fn priority_range(least: Out<i32>, greatest: Out<i32>) -> Answer {
    process::lock()?.current()?;
    least.set_if_given(0);
    greatest.set_if_given(-5);
    Ok(())
}
