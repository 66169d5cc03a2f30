//! The device uuid in a key: UCX remembers for good whether keys of {uuid, handle type} could be opened, for all peers at once. A uuid that is mixed with the
//! exporter's nonce makes it remember per peer process; and it keeps UCX from taking two containers' process 1 for the same process.
//!
//! cuDeviceGetUuid does not say what it is asked for. When `mkey_pack` asks, the output is a field of the key it packs, and our 64 bytes stand a known distance
//! in front of it.
//!
//! # Safety
//! The unsafe here is reading the bytes in front of the output, and changing the output. The bytes are read directly only if they are in the same page as the
//! output, which is mapped; otherwise by process_vm_readv(2), which fails instead of faulting.

#![allow(unsafe_code)]

use core::ffi::c_void;

use cuda_driver_sys::CUuuid;
use cuda_ipc_core::key::{KEY_LEN, Key, Nonce};

/// Distances from our payload to the uuid in UCX's packed key: 1.18.0 and 1.22, 1.19 to 1.21, 1.18.1.
const DISTANCES: [usize; 3] = [168, 172, 176];
const PAGE: usize = 4096;

/// If a key of this process stands in front of `out`, mixes `nonce` into the uuid there and returns the key.
pub(crate) fn mix_in_key(out: *mut CUuuid, nonce: u64) -> Option<Key> {
    let ours = |distance| {
        let bytes = read_before(out.cast::<u8>(), distance)?;
        Key::decode(&bytes).ok().filter(|key| key.nonce == Nonce(nonce))
    };
    let key = DISTANCES.into_iter().find_map(ours);
    if key.is_some() {
        for (at, byte) in nonce.to_le_bytes().into_iter().enumerate() {
            // SAFETY: the output is 16 bytes that the driver has just written.
            let target = unsafe { out.cast::<u8>().add(8 + at) };
            // SAFETY: as above.
            unsafe { *target ^= byte };
        }
    }
    key
}

/// The 64 bytes that begin `distance` bytes before `out`.
fn read_before(out: *const u8, distance: usize) -> Option<[u8; KEY_LEN]> {
    let start = out.wrapping_sub(distance);
    let mut bytes = [0; KEY_LEN];
    if start as usize / PAGE == out as usize / PAGE {
        // SAFETY: in the page of the output, which the driver has just written to.
        return Some(unsafe { start.cast::<[u8; KEY_LEN]>().read_unaligned() });
    }
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast::<c_void>(), iov_len: KEY_LEN };
    let remote = libc::iovec { iov_base: start.cast_mut().cast::<c_void>(), iov_len: KEY_LEN };
    // SAFETY: getpid has no preconditions.
    let pid = unsafe { libc::getpid() };
    // SAFETY: the local range is ours; the remote one is checked by the kernel.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    (read == KEY_LEN as isize).then_some(bytes)
}
