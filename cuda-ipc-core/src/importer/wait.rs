//! Sleeping until a peer retires something: what a sweeper does between two passes.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::Arc;

use rustix::thread::futex;
use rustix::time::{ClockId, Timespec};

use super::Peer;

/// Wakes a sleeper of this process for another reason than a death.
#[derive(Debug, Default)]
pub struct Bell(AtomicU32);

impl Bell {
    /// A bell that has not rung.
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Wakes the sleeper, or keeps one that has looked at [`Bell::rings`] before from falling asleep.
    pub fn ring(&self) {
        self.0.fetch_add(1, Ordering::Release);
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, u32::MAX >> 1);
    }

    /// How often it has rung.
    pub fn rings(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// Futexes that one call can wait for, less the bell.
const MOST: usize = 127;
/// How often words are looked at that no call waits for: those of peers past [`MOST`], or all on a kernel before 5.16.
const POLL: Duration = Duration::from_millis(10);

/// Sleeps until one of `peers` has an epoch other than the one given with it, or `bell` has rung past `rings`, or `timeout` is over.
///
/// May return early; the caller looks at the epochs either way. Source: futex_waitv(2); works on the read-only mapping of a sealed table.
pub fn wait_for_deaths(peers: &[(Arc<Peer>, u64)], bell: &Bell, rings: u32, timeout: Duration) {
    let entry = |word: &AtomicU32, value: u32, flags| {
        let mut wait = futex::Wait::new();
        wait.val = value.into();
        wait.uaddr = core::ptr::from_ref(word).cast_mut().cast::<core::ffi::c_void>().into();
        wait.flags = futex::WaitFlags::SIZE_U32 | flags;
        wait
    };
    let mut waits = vec![entry(&bell.0, rings, futex::WaitFlags::PRIVATE)];
    for (peer, seen) in peers.iter().take(MOST) {
        let (word, value) = peer.epoch_word(*seen);
        waits.push(entry(word, value, futex::WaitFlags::empty()));
    }
    let timeout = if peers.len() > MOST { timeout.min(POLL) } else { timeout };
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    let until = now.checked_add(Timespec { tv_sec: timeout.as_secs().cast_signed(), tv_nsec: timeout.subsec_nanos().into() });
    if let Err(rustix::io::Errno::NOSYS) = futex::waitv(&waits, futex::WaitvFlags::empty(), until.as_ref(), futex::ClockId::Monotonic) {
        std::thread::sleep(timeout.min(POLL));
    }
}
