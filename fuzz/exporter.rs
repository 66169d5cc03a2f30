//! An honest exporter process for the target of C calls: forked, with real chunks of the fake driver, exported by the C ABI.
//!
//! # Safety
//! The unsafe here is fork in a process of one thread, whose child never returns, a death signal for that child, and its calls of the C ABI with pointers to
//! live locals.

use std::io::{Read, Write};

use cuda_ipc::context::cuda_ipc_context_create;
use cuda_ipc::export::{cuda_ipc_export, cuda_ipc_export_rkey};
use cuda_ipc::handles::{cuda_ipc_context_t, cuda_ipc_export_t};
use cuda_ipc_core::rkey::{Payload, Rkey};
use cuda_ipc_tests::driver::Cuda;
use cuda_ipc_tests::memory::Memory;

/// Length of a chunk in bytes.
pub(crate) const CHUNK: u64 = 2 << 20;
/// Length of an rkey in bytes.
pub(crate) const RKEY_LEN: usize = cuda_ipc_core::rkey::RKEY_LEN;

/// What the process shares, as long as this one lives.
pub(crate) struct Shared {
    pub(crate) rkey: [u8; RKEY_LEN],
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) peer: u64,
}

impl Shared {
    /// Forks it. Only for a process of one thread that has not used the driver.
    pub(crate) fn start() -> Self {
        let (mut told, mut teller) = std::io::pipe().expect("a pipe");
        // SAFETY: one thread, and the child never returns.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            // SAFETY: numbers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let _ = teller.write_all(&export());
            loop {
                std::thread::park();
            }
        }
        drop(teller);
        let mut rkey = [0; RKEY_LEN];
        told.read_exact(&mut rkey).expect("the exporter has made its key");
        let decoded = Rkey::decode(&rkey).expect("an rkey");
        let Payload::Posix(key) = decoded.payload else { panic!("{decoded:?}") };
        Self { rkey, base: decoded.base, len: decoded.len, peer: key.nonce.0 }
    }
}

/// In the child: three chunks in a reservation, exported for good.
fn export() -> [u8; RKEY_LEN] {
    let cuda = Cuda::start();
    cuda.enter_primary(0);
    let mut memory = Memory::reserve(cuda, 16 * CHUNK, 0).expect("a reservation");
    for chunk in 0..3 {
        memory.map(chunk * CHUNK, CHUNK, chunk).expect("a chunk");
    }
    let (mut context, mut shared) = (cuda_ipc_context_t { id: 0 }, cuda_ipc_export_t { id: 0 });
    let (mut rkey, mut len) = ([0_u8; RKEY_LEN], 0);
    // SAFETY: no configuration, and a live local.
    assert_eq!(unsafe { cuda_ipc_context_create(std::ptr::null(), &raw mut context) }, 0);
    // SAFETY: a live local.
    assert_eq!(unsafe { cuda_ipc_export(context, memory.base(), 3 * CHUNK, &raw mut shared) }, 0);
    // SAFETY: live locals, of that length.
    assert_eq!(unsafe { cuda_ipc_export_rkey(shared, rkey.as_mut_ptr().cast(), RKEY_LEN, &raw mut len) }, 0);
    std::mem::forget(memory);
    rkey
}
