//! Processes, fd numbers, memory and tables, as the kernel and the driver have them.

use core::cell::RefCell;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::collections::BTreeMap;

use cuda_ipc_core::table::Layout;

/// Identity of physical memory. No process sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct Physical(pub(crate) u64);

/// 32 granules of address space in two leaves.
pub(crate) const LAYOUT: Layout = Layout { entries: 12, root: 2, leaves: 2, leaf_len: 16 };

/// The words of a table's memory file. They outlive the process that wrote them, as an importer's mapping of the file does.
pub(crate) type Words = &'static [AtomicU64];

thread_local! {
    static POOL: RefCell<Vec<Words>> = const { RefCell::new(Vec::new()) };
}

/// A zeroed table file; from the pool, so that many runs need little memory.
pub(crate) fn new_words() -> Words {
    let words = POOL.with_borrow_mut(Vec::pop).unwrap_or_else(|| (0..LAYOUT.words()).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak());
    words.iter().for_each(|word| word.store(0, Relaxed));
    words
}

/// Gives table files back after a run, when nobody reads them any more.
pub(crate) fn recycle(words: impl IntoIterator<Item = Words>) {
    POOL.with_borrow_mut(|pool| pool.extend(words));
}

/// What stands behind an fd number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Object {
    /// Exported memory.
    Memory(Physical),
    /// A table file.
    Table(Words),
    /// Some file of the application.
    File,
}

/// The exporting process. A life is what a pidfd names: it survives exec, and ends with the process.
#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) life: u64,
    pub(crate) alive: bool,
    pub(crate) fds: BTreeMap<u32, Object>,
}

impl Process {
    /// A new fd, by the lowest free number.
    pub(crate) fn install(&mut self, object: Object) -> u32 {
        let number = (3..).find(|number| !self.fds.contains_key(number)).expect("numbers are many");
        self.fds.insert(number, object);
        number
    }

    pub(crate) fn exit(&mut self) {
        self.fds.clear();
        self.alive = false;
    }

    /// pidfd_getfd(2) on a pidfd of this life.
    pub(crate) fn getfd(&self, life: u64, number: u32) -> Result<Object, &'static str> {
        if !self.alive || self.life != life {
            return Err("the process is gone");
        }
        self.fds.get(&number).copied().ok_or("no such fd")
    }
}

/// A piece of memory that is mapped in the exporter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    pub(crate) len: u64,
    pub(crate) buffer_id: u64,
    pub(crate) physical: Physical,
}
