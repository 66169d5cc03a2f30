//! Decides which calls the hook sees, and makes the real call.
//!
//! # Safety
//! The unsafe here is `dlsym` and the call of what it found: the next function of the very name that was called, with the caller's own arguments in the
//! same registers. Hooks are functions of the test program, which is never unloaded.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize};

use crate::entry::Arguments;
use crate::functions::{FUNCTIONS, Failure};

/// One call, as a hook sees it. `tests/src/shim.rs` repeats this.
#[repr(C)]
struct HookedCall {
    /// The function's name.
    name: *const c_char,
    arguments: Arguments,
    /// 0 before the call, 1 after it.
    phase: c_int,
    /// After the call: what it returned.
    result: c_long,
}

/// Answers 0 to let the call through; a positive errno to fail it without making it; a negative one to make it and then report failure. After the call
/// the answer is ignored.
type Hook = extern "C" fn(*const HookedCall) -> c_int;
type Real = unsafe extern "C" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

static REAL: [AtomicPtr<c_void>; FUNCTIONS.len()] = [const { AtomicPtr::new(null_mut()) }; FUNCTIONS.len()];
static SEEN: [AtomicU64; FUNCTIONS.len()] = [const { AtomicU64::new(0) }; FUNCTIONS.len()];
static HOOK: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static THREAD: AtomicUsize = AtomicUsize::new(0);
static INSIDE: AtomicBool = AtomicBool::new(false);
/// File name of the object whose calls are looked at; null for the program itself.
static OBJECT: AtomicPtr<c_char> = AtomicPtr::new(null_mut());
/// Where that object is mapped.
static PROGRAM: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// The program's calls on threads with one name are counted, and some of them fail.
static ARMED: AtomicBool = AtomicBool::new(false);
static PASSED: AtomicU64 = AtomicU64::new(0);
static FAIL_AT: AtomicU64 = AtomicU64::new(0);
static FAIL_BEFORE: AtomicU64 = AtomicU64::new(0);
static FAIL_WITH: AtomicI32 = AtomicI32::new(0);
/// The first function that failed, plus one; 0 before.
static FAILED: AtomicUsize = AtomicUsize::new(0);
/// The threads' name.
const THREADS: &CStr = c"cuda-ipc-broker";

/// Makes the call, by way of the hook if it is hooked.
pub(crate) fn pass(index: usize, arguments: &Arguments, caller: usize) -> c_long {
    SEEN[index].fetch_add(1, Relaxed);
    if ARMED.load(Acquire) && is_counted(index, arguments, caller) && {
        let number = PASSED.fetch_add(1, Relaxed);
        (FAIL_AT.load(Relaxed)..FAIL_BEFORE.load(Relaxed)).contains(&number)
    } {
        let _ = FAILED.compare_exchange(0, index + 1, Relaxed, Relaxed);
        // The kernel has let go of the number or the range whatever it reports.
        if FUNCTIONS[index].name == c"close" || FUNCTIONS[index].name == c"munmap" {
            call(index, arguments);
        }
        return fail(index, FAIL_WITH.load(Relaxed));
    }
    let Some(hook) = hook_for(caller) else { return call(index, arguments) };
    let mut hooked = HookedCall { name: FUNCTIONS[index].name.as_ptr(), arguments: *arguments, phase: 0, result: 0 };
    let ask = |hooked: &HookedCall| {
        INSIDE.store(true, Relaxed);
        let answer = hook(hooked);
        INSIDE.store(false, Relaxed);
        answer
    };
    let answer = ask(&hooked);
    if answer > 0 {
        return fail(index, answer);
    }
    hooked.result = call(index, arguments);
    let errno = errno();
    hooked.phase = 1;
    ask(&hooked);
    if answer < 0 {
        return fail(index, -answer);
    }
    set_errno(errno);
    hooked.result
}

fn is_counted(index: usize, arguments: &Arguments, caller: usize) -> bool {
    let (from, to) = (PROGRAM[0].load(Relaxed), PROGRAM[1].load(Relaxed));
    // Locks of the standard library come and go with the timing.
    let is_lock = FUNCTIONS[index].name == c"syscall" && arguments[0] == libc::SYS_futex;
    // A limit that is there can be read, and an fd that is open has flags.
    let cannot_fail = [c"getrlimit", c"getrlimit64"].contains(&FUNCTIONS[index].name)
        || (FUNCTIONS[index].name.to_bytes().starts_with(b"fcntl") && arguments[1] == c_long::from(libc::F_GETFD));
    if is_lock || cannot_fail || !(from..to).contains(&caller) {
        return false;
    }
    let mut name: [c_char; 16] = [0; 16];
    // SAFETY: writes at most 16 bytes, a C string, to a live local (prctl(2)).
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    name == THREADS
}

fn hook_for(caller: usize) -> Option<Hook> {
    let hook = HOOK.load(Acquire);
    let ours = || {
        let (from, to) = (PROGRAM[0].load(Relaxed), PROGRAM[1].load(Relaxed));
        THREAD.load(Relaxed) == this_thread() && (from..to).contains(&caller) && !INSIDE.load(Relaxed)
    };
    if hook.is_null() || !ours() {
        return None;
    }
    // SAFETY: not null, so a `Hook` that `syscall_shim_set_hook` was given.
    Some(unsafe { core::mem::transmute::<*mut c_void, Hook>(hook) })
}

fn fail(index: usize, errno: c_int) -> c_long {
    if FUNCTIONS[index].failure == Failure::Returned {
        return errno.into();
    }
    set_errno(errno);
    -1
}

fn call(index: usize, [a, b, c, d, e, f, g]: &Arguments) -> c_long {
    let mut real = REAL[index].load(Relaxed);
    if real.is_null() {
        // SAFETY: a C string; RTLD_NEXT is what comes after this library in the search order.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, FUNCTIONS[index].name.as_ptr()) };
        if real.is_null() {
            return fail(index, libc::ENOSYS);
        }
        REAL[index].store(real, Relaxed);
    }
    // SAFETY: see the module's chapter.
    let real = unsafe { core::mem::transmute::<*mut c_void, Real>(real) };
    // SAFETY: as above.
    unsafe { real(*a, *b, *c, *d, *e, *f, *g) }
}

fn errno() -> c_int {
    let place = errno_place();
    // SAFETY: the place of this thread's errno, valid for the life of the thread.
    unsafe { *place }
}

fn set_errno(errno: c_int) {
    let place = errno_place();
    // SAFETY: as above; no other thread has this place.
    unsafe { *place = errno };
}

fn errno_place() -> *mut c_int {
    // SAFETY: no precondition.
    unsafe { libc::__errno_location() }
}

#[allow(clippy::cast_possible_truncation, reason = "an address of this process")]
fn this_thread() -> usize {
    // SAFETY: no precondition. The type is an integer here.
    unsafe { libc::pthread_self() as usize }
}

/// Version of this interface.
#[unsafe(no_mangle)]
extern "C" fn syscall_shim_version() -> c_int {
    1
}

/// Whose calls are looked at from the next hook on: the loaded object with this file name, or the program itself for null.
///
/// # Safety
/// `name` is null, or a C string that is never freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall_shim_set_object(name: *const c_char) {
    OBJECT.store(name.cast_mut(), Release);
}

/// Sets the hook of the calling thread; null takes it away, whoever has set it. 0, or -1 where the object whose calls are looked at is not found.
#[unsafe(no_mangle)]
extern "C" fn syscall_shim_set_hook(hook: Option<Hook>) -> c_int {
    HOOK.store(null_mut(), Release);
    let Some(hook) = hook else { return 0 };
    // SAFETY: the callback has the signature that dl_iterate_phdr wants and keeps nothing.
    if unsafe { libc::dl_iterate_phdr(Some(remember_program), null_mut()) } != 1 {
        return -1;
    }
    THREAD.store(this_thread(), Relaxed);
    HOOK.store(hook as *mut c_void, Release);
    0
}

/// Counts the calls that the program makes on the broker's thread from now on, and fails those with numbers from `at` on and below `before` with
/// this errno. 0, or -1 where the program cannot be told from its libraries.
#[unsafe(no_mangle)]
extern "C" fn syscall_shim_arm(at: u64, before: u64, errno: c_int) -> c_int {
    // SAFETY: the callback has the signature that dl_iterate_phdr wants and keeps nothing.
    if unsafe { libc::dl_iterate_phdr(Some(remember_program), null_mut()) } != 1 {
        return -1;
    }
    PASSED.store(0, Relaxed);
    FAILED.store(0, Relaxed);
    FAIL_AT.store(at, Relaxed);
    FAIL_BEFORE.store(before, Relaxed);
    FAIL_WITH.store(errno, Relaxed);
    ARMED.store(true, Release);
    0
}

/// Ends that: how many calls there were, and the name of the first that failed, or null.
///
/// # Safety
/// `failed` is valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall_shim_disarm(failed: *mut *const c_char) -> u64 {
    ARMED.store(false, Release);
    let name = FAILED.load(Relaxed).checked_sub(1).map_or(core::ptr::null(), |index| FUNCTIONS[index].name.as_ptr());
    // SAFETY: valid by the caller's word.
    unsafe { *failed = name };
    PASSED.load(Relaxed)
}

/// Calls of the function with this name so far, hooked or not; all functions' for null.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall_shim_calls(name: *const c_char) -> u64 {
    // SAFETY: not null, so a C string by the caller's word; it is not kept.
    let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) });
    let counts = FUNCTIONS.iter().zip(&SEEN);
    counts.filter(|(function, _)| name.is_none_or(|name| function.name == name)).map(|(_, seen)| seen.load(Relaxed)).sum()
}

/// Notes where the object is mapped whose calls are looked at, the first one if that is the program itself, and ends the iteration.
#[allow(clippy::cast_possible_truncation, reason = "addresses of this process")]
unsafe extern "C" fn remember_program(info: *mut libc::dl_phdr_info, _size: usize, _data: *mut c_void) -> c_int {
    // SAFETY: dl_iterate_phdr passes a valid structure for the time of the call.
    let info = unsafe { &*info };
    let wanted = OBJECT.load(Acquire);
    if !wanted.is_null() {
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: not null, so a C string that is never freed, as `syscall_shim_set_object` was told.
        let wanted = unsafe { CStr::from_ptr(wanted) }.to_bytes();
        // SAFETY: not null, so a C string for the time of the call.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
        if path.rsplit(|&byte| byte == b'/').next() != Some(wanted) {
            return 0;
        }
    }
    // SAFETY: the headers of a loaded object, as many as it says.
    let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let base = info.dlpi_addr as usize;
    let (from, to) = loaded.fold((usize::MAX, 0), |(from, to), header| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        (from.min(start), to.max(start + header.p_memsz as usize))
    });
    PROGRAM[0].store(from, Relaxed);
    PROGRAM[1].store(to, Relaxed);
    1
}
