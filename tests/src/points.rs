//! The points at which an operation touches the outside: every libc call that reaches the kernel and every driver call, in their order. Only the futex
//! calls of the standard library's locks are none: they come and go with the timing.
//!
//! [`Watch::run`] runs an operation under a hook that is asked before each point and told after it. So a test can list the points, fail one,
//! or let something happen elsewhere at just that moment. Libc calls come from the shim, driver calls from [`crate::hooked`]; those of the preload library, and what it
//! lets UCX's module ask the driver, from the fake driver.

use core::cell::{Cell, RefCell};
use core::ffi::c_int;

use crate::driver::Fake;
use crate::shim::{HookedCall, PRIVATE_FUTEX, Shim};
use crate::uct;

/// Who is called at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Callee {
    /// The C library, and by it the kernel.
    Libc,
    /// The CUDA driver.
    Driver,
}

/// One point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Point {
    /// Its number in the operation, from 0 on.
    pub number: usize,
    /// Who is called.
    pub callee: Callee,
    /// The function; for `syscall` the call.
    pub name: &'static str,
    /// Whether the call is still to come. A point is passed before and, unless it was failed, after its call.
    pub before: bool,
}

/// What to do about a point before its call. After it the answer is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Make the call.
    Go,
    /// Fail it with this errno or `CUresult`, without effect.
    Fail(i32),
    /// Make it, and then report this errno. For libc only.
    FailAfter(i32),
}

type Hook<'a> = dyn FnMut(&Point) -> Verdict + 'a;

thread_local! {
    /// The hook of the operation in progress.
    static HOOK: RefCell<Option<Box<Hook<'static>>>> = const { RefCell::new(None) };
    static NEXT: Cell<usize> = const { Cell::new(0) };
}

/// Watches operations on this thread.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    shim: Shim,
    /// Of a watch of the preload library.
    fake: Option<Fake>,
}

impl Watch {
    /// Panics in a process without the shim.
    pub fn new() -> Self {
        Self { shim: Shim::require(), fake: None }
    }

    /// Watches the preload library instead of this program: its calls on this thread, all of which are made while UCX's module calls it ([`crate::uct`]).
    ///
    /// Panics in a process without the shim.
    pub fn of_preload(fake: Fake) -> Self {
        Self { shim: Shim::require(), fake: Some(fake) }
    }

    /// The shim.
    pub const fn shim(&self) -> &Shim {
        &self.shim
    }

    /// Runs `operation` under `hook`. What the hook itself does is not watched.
    pub fn run<T>(&self, hook: impl FnMut(&Point) -> Verdict, operation: impl FnOnce() -> T) -> T {
        struct Unhook(Shim, Option<Fake>);
        impl Drop for Unhook {
            fn drop(&mut self) {
                self.0.set_hook(None);
                self.0.set_object(None);
                if let Some(fake) = self.1 {
                    fake.set_hook(None);
                }
                HOOK.set(None);
            }
        }
        let hook: Box<Hook<'_>> = Box::new(hook);
        // SAFETY: only the lifetime changes. The hook is called on this thread only, and `Unhook` drops it before this function returns or unwinds.
        let hook = unsafe { core::mem::transmute::<Box<Hook<'_>>, Box<Hook<'static>>>(hook) };
        HOOK.set(Some(hook));
        NEXT.set(0);
        let _unhook = Unhook(self.shim, self.fake);
        if let Some(fake) = self.fake {
            self.shim.set_object(Some(uct::PRELOAD));
            fake.set_hook(Some(at_fake_call));
        }
        self.shim.set_hook(Some(at_libc_call));
        operation()
    }

    /// Runs `operation` and lists its points.
    pub fn list<T>(&self, operation: impl FnOnce() -> T) -> (T, Vec<Point>) {
        let mut points = Vec::new();
        let value = self.run(
            |point| {
                if point.before {
                    points.push(*point);
                }
                Verdict::Go
            },
            operation,
        );
        (value, points)
    }
}

impl Default for Watch {
    fn default() -> Self {
        Self::new()
    }
}

extern "C" fn at_libc_call(call: *const HookedCall) -> c_int {
    // SAFETY: the shim passes a call that is valid while the hook runs.
    let call = unsafe { &*call };
    if call.name() == PRIVATE_FUTEX {
        return 0;
    }
    match pass(Callee::Libc, call.name(), call.phase == 0) {
        Verdict::Go => 0,
        Verdict::Fail(errno) => errno,
        Verdict::FailAfter(errno) => -errno,
    }
}

extern "C" fn at_fake_call(name: *const u8, len: usize, before: c_int) -> c_int {
    if !uct::is_calling() {
        return 0;
    }
    // SAFETY: the fake driver, which is never unloaded, passes the bytes of a constant.
    let name: &'static [u8] = unsafe { core::slice::from_raw_parts(name, len) };
    let name = core::str::from_utf8(name).unwrap_or("?");
    match pass(Callee::Driver, name, before != 0) {
        Verdict::Go => 0,
        Verdict::Fail(code) | Verdict::FailAfter(code) => code,
    }
}

/// A driver call is about to be made (or was): the code that it is to answer instead.
pub(crate) fn at_driver_call(name: &'static str, before: bool) -> Option<u32> {
    match pass(Callee::Driver, name, before) {
        Verdict::Go => None,
        Verdict::Fail(code) | Verdict::FailAfter(code) => Some(code.cast_unsigned()),
    }
}

fn pass(callee: Callee, name: &'static str, before: bool) -> Verdict {
    // Taken out while it runs, so that what the hook does is not watched.
    let Some(mut hook) = HOOK.take() else { return Verdict::Go };
    if before {
        NEXT.set(NEXT.get() + 1);
    }
    let verdict = hook(&Point { number: NEXT.get() - 1, callee, name, before });
    HOOK.set(Some(hook));
    verdict
}
