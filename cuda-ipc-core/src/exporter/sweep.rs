//! The sweep: finds chunks whose memory has gone without a word, and fds that the application has closed under us.
//!
//! An exported fd pins physical memory, so a chunk must leave the table when its allocator frees it, also where nobody tells. Only the answer "no such
//! memory" or another buffer id means that it is gone; any other answer of the driver changes nothing.

use core::time::Duration;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::Shared;
use super::state::{Published, State};
use crate::sys::thread;

impl Shared {
    /// See [`super::Exporter::sweep`].
    pub(super) fn sweep(&self) -> usize {
        if !self.is_current() {
            return 0;
        }
        let published = self.lock().snapshot();
        let mut gone = 0;
        for chunk in published {
            if !chunk.fd.is_some_and(|fd| fd.is_lost()) && !self.has_gone(&chunk) {
                continue;
            }
            let retired = self.lock().retire_swept(&self.table, chunk.facts.base, chunk.id);
            gone += retired.len();
        }
        gone
    }

    /// Retires the chunks whose fds the application has closed so that the numbers stand for others of ours.
    pub(super) fn retire_taken(&self) {
        let taken = self.lock().retire_taken(&self.table);
        drop(taken);
    }

    fn has_gone(&self, chunk: &Published) -> bool {
        self.cuda.buffer_id(chunk.facts.base).is_ok_and(|id| id != Some(chunk.facts.buffer_id))
    }

    /// Starts the sweeping thread if there is none and the options ask for one. It ends by itself when nothing is published or the exporter is gone.
    pub(super) fn ensure_sweeper(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        let Some(interval) = self.options.sweep_interval else { return };
        if state.sweeper.is_some() {
            return;
        }
        let weak = Arc::downgrade(self);
        let sweeping = thread::spawn("cuda-ipc-sweep", move || {
            let mut pause = interval;
            loop {
                std::thread::park_timeout(pause);
                let Some(shared) = weak.upgrade() else { return };
                {
                    let mut state = shared.lock();
                    if state.stats().chunks == 0 {
                        state.sweeper = None;
                        return;
                    }
                }
                let start = Instant::now();
                shared.sweep();
                // A tenth of one core at most, unless that would keep freed memory for longer than half a second.
                pause = (start.elapsed() * 9).clamp(interval, interval.max(Duration::from_millis(400)));
            }
        });
        // Without a thread (limits) the next export tries again; until then retire and sweep still work.
        state.sweeper = sweeping.ok().map(|handle| handle.thread().clone());
    }
}
