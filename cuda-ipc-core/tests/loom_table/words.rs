//! Words of a modelled table: which of them the model checker decides about, and with which fences.

use core::marker::PhantomData;
use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};

use cuda_ipc_core::table::Word;
use loom::sync::atomic::AtomicU64;

/// Which fences a model has.
pub(crate) trait Fences: 'static {
    const ACQUIRE: bool = true;
    const RELEASE: bool = true;
    const SEQ_CST: bool = true;
}

pub(crate) struct All;
impl Fences for All {}

pub(crate) struct WithoutAcquire;
impl Fences for WithoutAcquire {
    const ACQUIRE: bool = false;
}

pub(crate) struct WithoutRelease;
impl Fences for WithoutRelease {
    const RELEASE: bool = false;
}

/// The fence of `retire` is stronger than that of `publish` and always comes before it, so each alone keeps entries whole.
pub(crate) struct WithoutWriterFences;
impl Fences for WithoutWriterFences {
    const RELEASE: bool = false;
    const SEQ_CST: bool = false;
}

pub(crate) struct WithoutSeqCst;
impl Fences for WithoutSeqCst {
    const SEQ_CST: bool = false;
}

/// A word of a modelled table.
pub(crate) struct Cell<F> {
    /// What the readers' loads go to: the model checker decides what they return. `None` for words that are constant while threads run, or that these
    /// readers do not look at; they would only make the model grow.
    modelled: Option<AtomicU64>,
    /// What was stored last. The writer's own loads go here: the only writer of a word always reads what it wrote. This is not for speed. The model
    /// checker remembers one access of a word; a load by the writer would hide the reader's load before it, and with it all interleavings in which the
    /// writer's next store comes first.
    latest: core::sync::atomic::AtomicU64,
    fences: PhantomData<F>,
}

loom::thread_local! {
    pub(crate) static IS_WRITER: core::cell::Cell<bool> = core::cell::Cell::new(false);
}

impl<F: Fences> Cell<F> {
    pub(crate) fn new(at: usize) -> Self {
        // Epoch and births; state, fd and kind, address, length, buffer id of each entry; the leaf.
        let modelled = matches!(at, 8 | 16 | 32..=36 | 48..=52 | 65..);
        Self { modelled: modelled.then(|| AtomicU64::new(0)), latest: core::sync::atomic::AtomicU64::new(0), fences: PhantomData }
    }
}

impl<F: Fences> Word for Cell<F> {
    fn load(&self, order: Ordering) -> u64 {
        match &self.modelled {
            Some(word) if !IS_WRITER.with(core::cell::Cell::get) => word.load(order),
            _ => self.latest.load(Relaxed),
        }
    }

    fn store(&self, value: u64, order: Ordering) {
        self.latest.store(value, Relaxed);
        if let Some(word) = &self.modelled {
            word.store(value, order);
        }
    }

    fn fence(order: Ordering) {
        let kept = match order {
            Acquire => F::ACQUIRE,
            Release => F::RELEASE,
            SeqCst => F::SEQ_CST,
            other => unreachable!("{other:?} is not used"),
        };
        if kept {
            loom::sync::atomic::fence(order);
        }
    }
}
