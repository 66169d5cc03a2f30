//! prctl(2), `PR_SET_PTRACER`: names the process that Yama lets trace the caller.
//!
//! The crate never calls this by itself: naming any process opens the caller's memory, not only its descriptors, to every process of its user.
//!
//! # Safety
//! prctl takes integers here and touches no memory of ours; access reads a string constant.

use crate::numbers::{PR_SET_PTRACER, PR_SET_PTRACER_ANY};
use crate::{Errno, Error, Step};
use core::ffi::CStr;

/// Who may trace the calling process under Yama's scope 1, besides its ancestors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ptracer {
    /// The process with this number in the caller's PID namespace, and its descendants.
    Pid(u32),
    /// Every process that passes the other checks, so every process of the same user.
    Any,
    /// No further process: takes an earlier setting back.
    Nobody,
}

/// What [`set_ptracer`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PtracerOutcome {
    /// The kernel has stored the setting.
    Set,
    /// The kernel has no Yama, so nothing needed permission.
    NotNeeded,
}

/// Sets the process that Yama lets trace the caller; replaces an earlier setting.
///
/// The setting belongs to the whole process, lasts until it is changed, and is not inherited by fork. It lifts Yama's scope 1 only: not seccomp,
/// ids, dumpable or scopes 2 and 3.
/// Errors: `EINVAL` if Yama is there and knows no process `Pid(n)`, and always for 0 and numbers above `i32::MAX`; `EPERM` from a seccomp filter.
/// Source: PR_SET_PTRACER(2const), `Documentation/admin-guide/LSM/Yama.rst` in the kernel tree.
pub fn set_ptracer(t: Ptracer) -> Result<PtracerOutcome, Error> {
    let tracer: libc::c_ulong = match t {
        // 0 would mean nobody, and on 32-bit targets the largest number would mean anybody.
        Ptracer::Pid(pid) if pid == 0 || pid.cast_signed() < 0 => return Err(Step::SetPtracer.failed(Errno::EINVAL)),
        Ptracer::Pid(pid) => libc::c_ulong::from(pid),
        Ptracer::Any => PR_SET_PTRACER_ANY,
        Ptracer::Nobody => 0,
    };
    let unused: libc::c_ulong = 0;
    // SAFETY: this operation reads integers only, each passed as the unsigned long that prctl takes from its variable arguments.
    let rc = unsafe { libc::prctl(PR_SET_PTRACER, tracer, unused, unused, unused) };
    if rc == 0 {
        return Ok(PtracerOutcome::Set);
    }
    match Errno::last() {
        // Without its parent directory a missing yama says nothing: /proc may not be mounted.
        Errno::EINVAL if exists(c"/proc/sys/kernel") && !exists(c"/proc/sys/kernel/yama") => Ok(PtracerOutcome::NotNeeded),
        errno => Err(Step::SetPtracer.failed(errno)),
    }
}

fn exists(path: &CStr) -> bool {
    // SAFETY: `path` is a NUL-terminated string that outlives the call; access writes nothing.
    let rc = unsafe { libc::access(path.as_ptr(), libc::F_OK) };
    rc == 0 || Errno::last() != Errno::ENOENT
}
