//! Streams that copies out of and into windows were submitted to: what has to be complete before anything is unmapped.
//!
//! cuMemUnmap does not wait for running copies, and a copy that loses its memory breaks the whole context. UCX submits a copy and says no more, so each copy
//! leaves its stream here. When something is to be unmapped, an event of ours is recorded on every stream that was used since the last time, and polled.
//!
//! No lock is held while the driver is called.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_ipc_cache::Drain;
use cuda_ipc_core::sys::driver::{Context, Cuda, Event, Stream};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Streams {
    cuda: Cuda,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Streams with copies since the last ticket, and the context they were submitted in.
    used: HashMap<Stream, Context>,
    last_ticket: u64,
    /// Events that are not complete yet, by ticket.
    pending: BTreeMap<u64, Vec<(Context, Event)>>,
    /// How many threads record or ask events just now, which are neither in `used` nor in `pending` then.
    busy: u64,
}

impl Streams {
    pub(crate) fn new(cuda: Cuda) -> Self {
        Self { cuda, inner: Mutex::default() }
    }

    /// A copy has been submitted to `stream` in this thread's context, and its leases have not ended yet.
    pub(crate) fn used(&self, stream: Stream) {
        if let Ok(Some(context)) = self.cuda.current_context() {
            self.lock().used.insert(stream, context);
        }
    }

    /// `stream` is about to be destroyed: what was submitted to it is remembered by an event.
    pub(crate) fn destroyed(&self, stream: Stream) {
        let context = {
            let mut inner = self.lock();
            let Some(context) = inner.used.remove(&stream) else { return };
            inner.busy += 1;
            context
        };
        let event = self.cuda.record_event(context, stream);
        let mut inner = self.lock();
        inner.busy -= 1;
        inner.last_ticket += 1;
        let ticket = inner.last_ticket;
        if let Ok(event) = event {
            inner.pending.entry(ticket).or_default().push((context, event));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drain for Streams {
    fn mark(&self) -> u64 {
        let (ticket, used) = {
            let mut inner = self.lock();
            if inner.used.is_empty() {
                return inner.last_ticket;
            }
            inner.last_ticket += 1;
            inner.busy += 1;
            (inner.last_ticket, core::mem::take(&mut inner.used))
        };
        // A stream whose event cannot be recorded is gone with its context; nothing runs on it.
        let events = used.into_iter().filter_map(|(stream, context)| Some((context, self.cuda.record_event(context, stream).ok()?)));
        let events: Vec<_> = events.collect();
        let mut inner = self.lock();
        inner.pending.entry(ticket).or_default().extend(events);
        inner.busy -= 1;
        ticket
    }

    fn is_complete(&self, ticket: u64) -> bool {
        let asked: Vec<(u64, Vec<(Context, Event)>)> = {
            let mut inner = self.lock();
            if inner.busy != 0 {
                return false;
            }
            inner.busy += 1;
            let later = inner.pending.split_off(&(ticket + 1));
            core::mem::replace(&mut inner.pending, later).into_iter().collect()
        };
        let mut running = Vec::new();
        for (ticket, events) in asked {
            for (context, event) in events {
                if self.cuda.is_event_complete(context, &event) {
                    self.cuda.destroy_event(context, event);
                } else {
                    running.push((ticket, (context, event)));
                }
            }
        }
        let complete = running.is_empty();
        let mut inner = self.lock();
        inner.busy -= 1;
        for (ticket, event) in running {
            inner.pending.entry(ticket).or_default().push(event);
        }
        complete
    }
}
