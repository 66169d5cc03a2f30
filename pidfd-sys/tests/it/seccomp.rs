//! A seccomp filter that answers one system call with an errno, written by hand.
//!
//! # Safety
//! The filter program is a local array that the kernel copies during the call.

use crate::child::Link;
use crate::sys::{check, prctl};
use pidfd_sys::{Errno, Error};

/// Load a 32-bit word of `struct seccomp_data` (word 0 is the call's number).
const LOAD: u16 = 0x20;
/// Jump if equal to the constant.
const JUMP_IF_EQUAL: u16 = 0x15;
/// Return the constant.
const RETURN: u16 = 0x06;

/// Makes call `number` fail with `errno` in this thread, for good, and lets all others pass.
///
/// Source: seccomp(2).
pub(crate) fn refuse(number: libc::c_long, errno: i32) -> Result<(), Errno> {
    let number = u32::try_from(number).map_err(|_| Errno::EINVAL)?;
    let mut filter = [
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: number },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | errno.cast_unsigned() },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    let (mode, unused): (libc::c_ulong, libc::c_ulong) = (libc::SECCOMP_MODE_FILTER.into(), 0);
    // SAFETY: `program` names four initialised instructions; both live until the call returns and are only read.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, unused, unused) }.into())?;
    Ok(())
}

/// Runs `call` in a child where call `number` is answered with `errno`.
///
/// None, after printing why, where the kernel takes no filters.
pub(crate) fn with_refusal(number: libc::c_long, errno: i32, call: impl FnOnce() -> Result<i32, Error>) -> Option<Result<i32, Error>> {
    let child = crate::child::Child::start(|link: &Link| match refuse(number, errno) {
        Ok(()) => {
            link.send(0);
            link.send_result(call());
        }
        Err(errno) => link.send(errno.0),
    });
    match child.receive() {
        0 => Some(child.result()),
        refused => {
            crate::sys::skip(&format!("no seccomp filter here: {}", Errno(refused)));
            None
        }
    }
}
