//! Status codes: what a call answers. Numbers are never used again for anything else, and belong to ranges:
//!
//! | range | about |
//! |---|---|
//! | 0 | success |
//! | -1 | nothing is wrong, but it could not be done in the time given |
//! | -2 to -99 | how the function was called |
//! | -100 to -199 | reaching an exporter, and what is there |
//! | -200 to -299 | why memory of this process cannot be shared |
//! | -300 to -399 | the CUDA driver and the system |
//!
//! Numbers given up so far: none.
//!
//! # Safety
//! The unsafe here is the names of two functions without pointers: no other library has names with this prefix.

#![allow(unsafe_code)]

use core::ffi::CStr;

/// What a function answers: `CUDA_IPC_OK`, or a negative number. New versions may answer numbers that this header does not have.
#[allow(non_camel_case_types, reason = "its name in C")]
pub type cuda_ipc_status_t = i32;

/// It is done.
pub const CUDA_IPC_OK: cuda_ipc_status_t = 0;
/// Not done in the time given, or not without waiting where the time was 0. Nothing is wrong; the same call may succeed later.
pub const CUDA_IPC_WOULD_BLOCK: cuda_ipc_status_t = -1;

/// A pointer that must not be null is.
pub const CUDA_IPC_ERR_NULL: cuda_ipc_status_t = -2;
/// A structure's size is none that this library knows, or fields that it does not know are not 0.
pub const CUDA_IPC_ERR_STRUCT_SIZE: cuda_ipc_status_t = -3;
/// A handle that this library has never given out, or of another kind.
pub const CUDA_IPC_ERR_HANDLE: cuda_ipc_status_t = -4;
/// A handle that has been released, ended or destroyed.
pub const CUDA_IPC_ERR_STALE_HANDLE: cuda_ipc_status_t = -5;
/// A value that the parameter or field does not take.
pub const CUDA_IPC_ERR_ARGUMENT: cuda_ipc_status_t = -6;
/// An empty range, one that wraps around, or one outside what the handle is for.
pub const CUDA_IPC_ERR_RANGE: cuda_ipc_status_t = -7;
/// The caller's buffer is too small; the length that it needs was stored where the function takes one.
pub const CUDA_IPC_ERR_BUFFER: cuda_ipc_status_t = -8;
/// The process is a fork of one that used the library. Nothing here works in it: the CUDA driver does not either.
pub const CUDA_IPC_ERR_FORKED: cuda_ipc_status_t = -9;
/// A defect of the library. It was stopped at the function that was called.
pub const CUDA_IPC_ERR_INTERNAL: cuda_ipc_status_t = -10;
/// More handles of a kind at a time than the library can number.
pub const CUDA_IPC_ERR_TOO_MANY_HANDLES: cuda_ipc_status_t = -11;
/// An environment variable of the library's has a value that it does not take. The error's text names it.
pub const CUDA_IPC_ERR_ENVIRONMENT: cuda_ipc_status_t = -12;

/// The exporter has said that this memory cannot be shared: take another way to it.
pub const CUDA_IPC_ERR_NO_IPC: cuda_ipc_status_t = -100;
/// The bytes are no rkey or payload of this library, or damaged.
pub const CUDA_IPC_ERR_KEY: cuda_ipc_status_t = -101;
/// Made by a version of the library that this one does not understand.
pub const CUDA_IPC_ERR_KEY_VERSION: cuda_ipc_status_t = -102;
/// A handle type, or a kind of key, that this version cannot import.
pub const CUDA_IPC_ERR_HANDLE_TYPE: cuda_ipc_status_t = -103;
/// The key was made on another machine, or before a reboot.
pub const CUDA_IPC_ERR_OTHER_HOST: cuda_ipc_status_t = -104;
/// The exporter is in another PID namespace, and there is no other way to it.
pub const CUDA_IPC_ERR_OTHER_PID_NAMESPACE: cuda_ipc_status_t = -105;
/// The exporter has exited.
pub const CUDA_IPC_ERR_EXPORTER_GONE: cuda_ipc_status_t = -106;
/// The kernel does not let this process reach the exporter (ptrace rules, seccomp, users).
pub const CUDA_IPC_ERR_PERMISSION: cuda_ipc_status_t = -107;
/// The kernel has no pidfd_open or pidfd_getfd.
pub const CUDA_IPC_ERR_NO_PIDFD: cuda_ipc_status_t = -108;
/// The exporter's broker could not be reached, or gave nothing.
pub const CUDA_IPC_ERR_BROKER: cuda_ipc_status_t = -109;
/// The exporter's broker gave nothing, but may do so later.
pub const CUDA_IPC_ERR_BROKER_BUSY: cuda_ipc_status_t = -110;
/// The exporter can be reached neither by pidfd nor by its broker.
pub const CUDA_IPC_ERR_NO_ROUTE: cuda_ipc_status_t = -111;
/// The process with the exporter's number is another one now, or has replaced itself.
pub const CUDA_IPC_ERR_OTHER_PROCESS: cuda_ipc_status_t = -112;
/// The exporter's table makes no sense.
pub const CUDA_IPC_ERR_TABLE: cuda_ipc_status_t = -113;
/// The exporter could not be reached a moment ago and is not asked again yet.
pub const CUDA_IPC_ERR_REFUSED_BEFORE: cuda_ipc_status_t = -114;
/// No live memory at an address of the range: it was freed, or never exported.
pub const CUDA_IPC_ERR_NO_CHUNK: cuda_ipc_status_t = -115;
/// The exporter frees and replaces its memory faster than it can be imported.
pub const CUDA_IPC_ERR_KEPT_CHANGING: cuda_ipc_status_t = -116;
/// Too many leases on one chunk.
pub const CUDA_IPC_ERR_TOO_MANY_LEASES: cuda_ipc_status_t = -117;
/// No address space left for a window within the limits.
pub const CUDA_IPC_ERR_ADDRESS_SPACE: cuda_ipc_status_t = -118;
/// The exporter has exited or was purged; a new key may open a new window.
pub const CUDA_IPC_ERR_WINDOW_CLOSED: cuda_ipc_status_t = -119;
/// The import failed for a reason that has no number yet; the error's text names it.
pub const CUDA_IPC_ERR_IMPORT: cuda_ipc_status_t = -120;

/// The GPU that holds the memory is not visible to this process.
pub const CUDA_IPC_ERR_DEVICE_NOT_VISIBLE: cuda_ipc_status_t = -121;
/// What the driver mapped is shorter than what the exporter says.
pub const CUDA_IPC_ERR_TOO_SHORT: cuda_ipc_status_t = -122;
/// The device that asks cannot reach memory of the one that holds it.
pub const CUDA_IPC_ERR_NO_PEER_ACCESS: cuda_ipc_status_t = -123;

/// Not memory that the CUDA driver knows.
pub const CUDA_IPC_REASON_NOT_DEVICE_MEMORY: cuda_ipc_status_t = -200;
/// Managed memory has no handle.
pub const CUDA_IPC_REASON_MANAGED: cuda_ipc_status_t = -201;
/// Memory of cuMemAlloc in the middle of other memory: its legacy handle carries it alone.
pub const CUDA_IPC_REASON_LEGACY: cuda_ipc_status_t = -202;
/// The allocator asked for no handle type.
pub const CUDA_IPC_REASON_NO_HANDLE_TYPE: cuda_ipc_status_t = -203;
/// The allocator asked for a fabric handle only.
pub const CUDA_IPC_REASON_FABRIC_ONLY: cuda_ipc_status_t = -204;
/// A pool that was created without the POSIX_FD handle type.
pub const CUDA_IPC_REASON_POOL_WITHOUT_HANDLE: cuda_ipc_status_t = -205;
/// Memory of a POSIX_FD pool in the middle of other memory: the pool's handle carries it alone.
pub const CUDA_IPC_REASON_POSIX_POOL: cuda_ipc_status_t = -206;
/// The range has a hole.
pub const CUDA_IPC_REASON_HOLE: cuda_ipc_status_t = -207;
/// The range leaves the reservation in which it begins.
pub const CUDA_IPC_REASON_LEAVES_RESERVATION: cuda_ipc_status_t = -208;
/// The range lies on more than one GPU.
pub const CUDA_IPC_REASON_SEVERAL_DEVICES: cuda_ipc_status_t = -209;
/// A chunk that is not a whole number of 2 MiB granules.
pub const CUDA_IPC_REASON_UNALIGNED: cuda_ipc_status_t = -210;
/// It was freed or replaced during the export, again and again.
pub const CUDA_IPC_REASON_KEPT_CHANGING: cuda_ipc_status_t = -211;
/// The export table is full.
pub const CUDA_IPC_REASON_TABLE_FULL: cuda_ipc_status_t = -212;
/// The process has no file descriptor left.
pub const CUDA_IPC_REASON_TOO_MANY_FILES: cuda_ipc_status_t = -213;
/// The export table could not be made.
pub const CUDA_IPC_REASON_NO_TABLE: cuda_ipc_status_t = -214;
/// A driver call failed.
pub const CUDA_IPC_REASON_DRIVER: cuda_ipc_status_t = -215;
/// A reason that has no number yet; the error's text names it.
pub const CUDA_IPC_REASON_OTHER: cuda_ipc_status_t = -216;

/// Host memory that the driver knows.
pub const CUDA_IPC_REASON_HOST_MEMORY: cuda_ipc_status_t = -217;
/// The allocator asked for a fabric handle only, and the driver refuses these.
pub const CUDA_IPC_REASON_FABRIC_REFUSED: cuda_ipc_status_t = -218;
/// The driver exports no POSIX file descriptors on this device.
pub const CUDA_IPC_REASON_POSIX_REFUSED: cuda_ipc_status_t = -219;
/// Memory of the device's default pool, which has no handle type.
pub const CUDA_IPC_REASON_DEFAULT_POOL: cuda_ipc_status_t = -220;
/// The range leaves the allocation in which it begins.
pub const CUDA_IPC_REASON_LEAVES_ALLOCATION: cuda_ipc_status_t = -221;

/// There is no CUDA driver, or one that lacks a function that the library needs.
pub const CUDA_IPC_ERR_NO_DRIVER: cuda_ipc_status_t = -300;
/// The driver does not initialise: no device, or a kernel module of another version.
pub const CUDA_IPC_ERR_DRIVER_INIT: cuda_ipc_status_t = -301;
/// A driver call failed; the error says which, and its CUresult.
pub const CUDA_IPC_ERR_DRIVER: cuda_ipc_status_t = -302;
/// A system call failed; the error says which, and its errno.
pub const CUDA_IPC_ERR_SYSTEM: cuda_ipc_status_t = -303;
/// A table of open files is full: the process's, or the system's.
pub const CUDA_IPC_ERR_TOO_MANY_FILES: cuda_ipc_status_t = -304;
/// The system has no memory left.
pub const CUDA_IPC_ERR_NO_MEMORY: cuda_ipc_status_t = -305;

/// A code, whether the same call may succeed later without anybody changing a setting, and what it says.
struct Row(cuda_ipc_status_t, bool, &'static CStr);

const TABLE: &[Row] = &[
    Row(CUDA_IPC_OK, false, c"success"),
    Row(CUDA_IPC_WOULD_BLOCK, true, c"not done in the time given"),
    Row(CUDA_IPC_ERR_NULL, false, c"a pointer is null"),
    Row(CUDA_IPC_ERR_STRUCT_SIZE, false, c"a structure of a size that the library does not know"),
    Row(CUDA_IPC_ERR_HANDLE, false, c"not a handle of this kind"),
    Row(CUDA_IPC_ERR_STALE_HANDLE, false, c"a handle that was released"),
    Row(CUDA_IPC_ERR_ARGUMENT, false, c"a value that is not taken"),
    Row(CUDA_IPC_ERR_RANGE, false, c"an empty range, or one outside"),
    Row(CUDA_IPC_ERR_BUFFER, false, c"the buffer is too small"),
    Row(CUDA_IPC_ERR_FORKED, false, c"a forked child cannot use its parent's library"),
    Row(CUDA_IPC_ERR_INTERNAL, false, c"a defect of the library"),
    Row(CUDA_IPC_ERR_TOO_MANY_HANDLES, true, c"too many handles"),
    Row(CUDA_IPC_ERR_ENVIRONMENT, false, c"an environment variable has a value that is not taken"),
    Row(CUDA_IPC_ERR_NO_IPC, false, c"the exporter says that this memory cannot be shared"),
    Row(CUDA_IPC_ERR_KEY, false, c"not a key"),
    Row(CUDA_IPC_ERR_KEY_VERSION, false, c"a key of another version"),
    Row(CUDA_IPC_ERR_HANDLE_TYPE, false, c"a handle type that cannot be imported"),
    Row(CUDA_IPC_ERR_OTHER_HOST, false, c"made on another machine or before a reboot"),
    Row(CUDA_IPC_ERR_OTHER_PID_NAMESPACE, false, c"the exporter is in another PID namespace"),
    Row(CUDA_IPC_ERR_EXPORTER_GONE, false, c"the exporter has exited"),
    Row(CUDA_IPC_ERR_PERMISSION, false, c"the kernel refuses access to the exporter"),
    Row(CUDA_IPC_ERR_NO_PIDFD, false, c"the kernel has no pidfd_getfd"),
    Row(CUDA_IPC_ERR_BROKER, false, c"the exporter's broker gave nothing"),
    Row(CUDA_IPC_ERR_BROKER_BUSY, true, c"the exporter's broker gave nothing yet"),
    Row(CUDA_IPC_ERR_NO_ROUTE, false, c"neither pidfd nor broker reach the exporter"),
    Row(CUDA_IPC_ERR_OTHER_PROCESS, false, c"the exporter's number is another process's"),
    Row(CUDA_IPC_ERR_TABLE, false, c"the exporter's table makes no sense"),
    Row(CUDA_IPC_ERR_REFUSED_BEFORE, true, c"refused before, and not asked again yet"),
    Row(CUDA_IPC_ERR_NO_CHUNK, false, c"no live memory there"),
    Row(CUDA_IPC_ERR_KEPT_CHANGING, true, c"it kept changing"),
    Row(CUDA_IPC_ERR_TOO_MANY_LEASES, true, c"too many leases on one chunk"),
    Row(CUDA_IPC_ERR_ADDRESS_SPACE, true, c"no address space for a window"),
    Row(CUDA_IPC_ERR_WINDOW_CLOSED, false, c"the window was closed"),
    Row(CUDA_IPC_ERR_IMPORT, false, c"the import failed"),
    Row(CUDA_IPC_ERR_DEVICE_NOT_VISIBLE, false, c"the GPU is not visible to this process"),
    Row(CUDA_IPC_ERR_TOO_SHORT, false, c"what was mapped is shorter than the exporter says"),
    Row(CUDA_IPC_ERR_NO_PEER_ACCESS, false, c"the device cannot reach memory of that one"),
    Row(CUDA_IPC_REASON_NOT_DEVICE_MEMORY, false, c"not memory of the CUDA driver"),
    Row(CUDA_IPC_REASON_MANAGED, false, c"managed memory"),
    Row(CUDA_IPC_REASON_LEGACY, false, c"cuMemAlloc memory"),
    Row(CUDA_IPC_REASON_NO_HANDLE_TYPE, false, c"the allocator asked for no handle type"),
    Row(CUDA_IPC_REASON_FABRIC_ONLY, false, c"the allocator asked for a fabric handle only"),
    Row(CUDA_IPC_REASON_POOL_WITHOUT_HANDLE, false, c"a pool without the POSIX_FD handle type"),
    Row(CUDA_IPC_REASON_POSIX_POOL, false, c"memory of a POSIX_FD pool"),
    Row(CUDA_IPC_REASON_HOLE, false, c"the range has a hole"),
    Row(CUDA_IPC_REASON_LEAVES_RESERVATION, false, c"the range leaves its reservation"),
    Row(CUDA_IPC_REASON_SEVERAL_DEVICES, false, c"the range lies on several GPUs"),
    Row(CUDA_IPC_REASON_UNALIGNED, false, c"a chunk is not a whole number of granules"),
    Row(CUDA_IPC_REASON_KEPT_CHANGING, true, c"freed or replaced during the export"),
    Row(CUDA_IPC_REASON_TABLE_FULL, true, c"the export table is full"),
    Row(CUDA_IPC_REASON_TOO_MANY_FILES, true, c"the process is out of file descriptors"),
    Row(CUDA_IPC_REASON_NO_TABLE, false, c"no export table"),
    Row(CUDA_IPC_REASON_DRIVER, false, c"a driver call failed"),
    Row(CUDA_IPC_REASON_OTHER, false, c"cannot be shared"),
    Row(CUDA_IPC_REASON_HOST_MEMORY, false, c"host memory"),
    Row(CUDA_IPC_REASON_FABRIC_REFUSED, false, c"a fabric handle only, which the driver refuses"),
    Row(CUDA_IPC_REASON_POSIX_REFUSED, false, c"the driver exports no POSIX file descriptors"),
    Row(CUDA_IPC_REASON_DEFAULT_POOL, false, c"memory of the default pool"),
    Row(CUDA_IPC_REASON_LEAVES_ALLOCATION, false, c"the range leaves its allocation"),
    Row(CUDA_IPC_ERR_NO_DRIVER, false, c"no CUDA driver"),
    Row(CUDA_IPC_ERR_DRIVER_INIT, false, c"the CUDA driver does not initialise"),
    Row(CUDA_IPC_ERR_DRIVER, false, c"a driver call failed"),
    Row(CUDA_IPC_ERR_SYSTEM, false, c"a system call failed"),
    Row(CUDA_IPC_ERR_TOO_MANY_FILES, true, c"too many open files"),
    Row(CUDA_IPC_ERR_NO_MEMORY, true, c"out of memory"),
];

fn row(status: cuda_ipc_status_t) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.0 == status)
}

/// What a status says, in English.
pub(crate) fn text(status: cuda_ipc_status_t) -> &'static CStr {
    row(status).map_or(c"unknown status", |row| row.2)
}

/// Whether the same call may succeed later without anybody changing a setting.
pub(crate) fn is_retryable(status: cuda_ipc_status_t) -> bool {
    row(status).is_some_and(|row| row.1)
}

/// What a status says, in English, such as "the exporter has exited".
///
/// Never null; "unknown status" for a number that this version does not have. The text is the library's and stays. Usable from any thread, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_status_string(status: cuda_ipc_status_t) -> *const core::ffi::c_char {
    text(status).as_ptr()
}

/// 1 if the same call may succeed later without anybody changing a setting, otherwise 0. Usable from any thread, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_ipc_status_is_retryable(status: cuda_ipc_status_t) -> i32 {
    i32::from(is_retryable(status))
}

#[cfg(test)]
mod tests {
    use super::TABLE;
    use std::collections::BTreeMap;

    /// The constants of this file, by name.
    fn constants() -> BTreeMap<&'static str, i32> {
        let lines = include_str!("status.rs").lines().filter_map(|line| line.strip_prefix("pub const "));
        lines
            .map(|line| {
                let (name, rest) = line.split_once(": cuda_ipc_status_t = ").expect("a status");
                (name, rest.trim_end_matches(';').parse().expect("a number"))
            })
            .collect()
    }

    #[test]
    fn every_code_has_one_number_in_its_range_and_one_text() {
        let constants = constants();
        assert_eq!(constants.len(), TABLE.len());
        let mut texts: Vec<i32> = TABLE.iter().map(|row| row.0).collect();
        let mut numbers: Vec<i32> = constants.values().copied().collect();
        texts.sort_unstable();
        numbers.sort_unstable();
        assert_eq!(texts, numbers);
        numbers.dedup();
        assert_eq!(numbers.len(), constants.len(), "a number stands for two things");
        for (name, number) in constants {
            let fits = match name {
                "CUDA_IPC_OK" => number == 0,
                "CUDA_IPC_WOULD_BLOCK" => number == -1,
                _ if name.starts_with("CUDA_IPC_REASON_") => (-299..=-200).contains(&number),
                _ => (-199..=-2).contains(&number) || (-399..=-300).contains(&number),
            };
            assert!(fits, "{name} = {number}");
        }
    }
}
