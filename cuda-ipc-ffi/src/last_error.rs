//! The last failed call of each thread, kept for whoever wants to know more than a status.
//!
//! # Safety
//! The unsafe here is what its C function says to its caller's pointer, by way of `boundary.rs`.

#![allow(unsafe_code)]

use core::cell::Cell;
use core::ffi::c_char;

use crate::boundary::write_struct;
use crate::failure::Failure;
use crate::status::{CUDA_IPC_OK, cuda_ipc_status_t, is_retryable};
use crate::text::Text;

/// Bytes of the text of an error, with the 0 at its end.
pub const CUDA_IPC_ERROR_TEXT_LEN: usize = 384;

/// What is known of a failed call. Set `size` before it is passed.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_error_t {
    /// sizeof of this structure.
    pub size: usize,
    /// What the call answered.
    pub status: cuda_ipc_status_t,
    /// 1 if the same call may succeed later without anybody changing a setting.
    pub retryable: i32,
    /// The errno of the system call that failed; 0 if none did.
    pub system_errno: i32,
    /// The CUresult of the driver call that failed; 0 if none did.
    pub cuda_result: u32,
    /// Pid of the exporter that it is about, in the exporter's PID namespace; 0 if it is about none.
    pub pid: u32,
    /// 0.
    pub reserved: u32,
    /// The address that it is about, in the process that owns the memory; 0 if it is about none.
    pub address: u64,
    /// One line of English that ends with 0: the step, what failed, where.
    pub text: [c_char; CUDA_IPC_ERROR_TEXT_LEN],
}

thread_local! {
    // Without a destructor: a thread may end at any time, also after the library.
    static LAST: Cell<Option<Failure>> = const { Cell::new(None) };
}

/// Remembers a failure and returns its status.
#[cold]
pub(crate) fn set(failure: Failure) -> cuda_ipc_status_t {
    LAST.with(|last| last.set(Some(failure)));
    failure.status
}

/// Says more about the last call on this thread that did not answer `CUDA_IPC_OK`. Calls that succeed change nothing here; a thread without a failed call
/// gets `CUDA_IPC_OK` as its `status`.
///
/// Errors, none of which is remembered: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`. Each thread has its own; usable in a forked child.
///
/// # Safety
/// `error` is null or points to a structure of the size that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_ipc_last_error(error: *mut cuda_ipc_error_t) -> cuda_ipc_status_t {
    let describe = || {
        let failure = LAST.with(Cell::get).unwrap_or(Failure::plain(CUDA_IPC_OK));
        let text = Text::<CUDA_IPC_ERROR_TEXT_LEN>::of(format_args!("{failure}"));
        Ok(cuda_ipc_error_t {
            size: size_of::<cuda_ipc_error_t>(),
            status: failure.status,
            retryable: i32::from(is_retryable(failure.status)),
            system_errno: failure.errno(),
            cuda_result: failure.cuda_result(),
            pid: failure.pid(),
            reserved: 0,
            address: failure.address(),
            text: text.with_end().map(|byte| byte.cast_signed() as c_char),
        })
    };
    let answer = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        unsafe { write_struct(error, describe) }
    }));
    match answer {
        Ok(Ok(())) => CUDA_IPC_OK,
        Ok(Err(failure)) => failure.status,
        Err(payload) => {
            core::mem::forget(payload);
            crate::status::CUDA_IPC_ERR_INTERNAL
        }
    }
}
