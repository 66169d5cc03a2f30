//! Fds of one process life: closed in a forked child, and left alone once somebody else has closed the number under us.
//!
//! A data loader that forks and never execs inherits every fd of its parent: exported chunk fds would pin GPU memory for the child's life, after the parent
//! has freed it. So fds of ours are [`ProcessFd`]s: they stand in plain static memory, where the child handler of `fork.rs` finds and closes them without a
//! lock.
//!
//! An application may also close what is not its own (closefrom, a double close, dup2), and the number then stands for another file, or for another fd
//! of ours. So the registry goes by number, and knows the file and who registered it last: only that one closes the number, and only while the file
//! is the same. Exported fds of one GPU all look like one file; of those an exporter knows only the ones it made itself.
//!
//! # Safety
//! The unsafe here is close and the view of a number as an fd. A number is closed by the one who takes its owner out of the registry, which nobody does
//! twice. Blocks are leaked, so that references to them are good for ever.

#![allow(unsafe_code)]

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use super::fork::{is_current, token};
use super::{SyscallError, failed};

/// Numbers in one block of the registry.
const BLOCK: usize = 512;

/// What is known of a number.
struct Slot {
    /// Who registered it last; 0 if nobody, or if that one has let go.
    owner: AtomicU64,
    /// Device and inode of the file then; an inode of 0 means that nobody has asked.
    device: AtomicU64,
    inode: AtomicU64,
}

/// The slots of the numbers from [`BLOCK`] times its place in the list on. A child can walk the list at any time.
struct Block {
    slots: [Slot; BLOCK],
    next: AtomicPtr<Block>,
}

static REGISTRY: Block = Block::new();
static LAST_OWNER: AtomicU64 = AtomicU64::new(0);

/// An fd of this process life only: CLOEXEC, and closed in a forked child before the child runs on.
#[derive(Debug)]
pub(crate) struct ProcessFd {
    mark: FdMark,
    took_over: bool,
    token: u64,
}

/// What tells whether a number still is the fd that it was. Owns nothing.
#[derive(Clone, Copy)]
pub(crate) struct FdMark {
    number: RawFd,
    owner: u64,
    file: Option<(u64, u64)>,
    slot: &'static Slot,
}

impl core::fmt::Debug for FdMark {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("FdMark").field(&self.number).finish()
    }
}

impl ProcessFd {
    /// Takes `fd` into the registry, to be held for longer.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, SyscallError> {
        // Registered first: a child that is forked meanwhile must not keep it.
        let mut fd = Self::brief(fd, token()?);
        let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
        fd.remember((stat.st_dev, stat.st_ino));
        // The kernel and the tested driver set it themselves; an fd that leaked into an executed program would pin GPU memory for its life.
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        Ok(fd)
    }

    /// Takes an `fd` into the registry that is closed again soon: nobody has the time to take its number away. `token` is the present life's.
    pub(crate) fn brief(fd: OwnedFd, token: u64) -> Self {
        let number = fd.into_raw_fd();
        let slot = slot(number);
        // The kernel has just given this number to us: whoever had it before has it no more.
        let took_over = slot.owner.swap(0, AcqRel) != 0;
        slot.inode.store(0, Relaxed);
        let owner = LAST_OWNER.fetch_add(1, Relaxed) + 1;
        slot.owner.store(owner, Release);
        Self { mark: FdMark { number, owner, file: None, slot }, took_over, token }
    }

    fn remember(&mut self, file: (u64, u64)) {
        self.mark.file = Some(file);
        self.mark.slot.device.store(file.0, Relaxed);
        // Last: with it a child believes both.
        self.mark.slot.inode.store(file.1, Release);
    }

    /// The number.
    pub(crate) fn number(&self) -> u32 {
        self.mark.number.cast_unsigned()
    }

    /// Whether the number stood for another fd of ours until somebody closed it under us. The other one is [`FdMark::is_taken`] now.
    pub(crate) fn took_over(&self) -> bool {
        self.took_over
    }

    /// The mark.
    pub(crate) fn mark(&self) -> FdMark {
        self.mark
    }
}

impl FdMark {
    /// Whether another fd of ours has the number.
    pub(crate) fn is_taken(&self) -> bool {
        self.slot.owner.load(Acquire) != self.owner
    }

    /// Whether the number stands for something else, or nothing, as far as can be seen.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_taken() || !is_same_file(self.number, self.file)
    }
}

impl AsFd for ProcessFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: in the process life that made it the number stays open until drop. In a child the number is closed or foreign, and every owner of a
        // ProcessFd checks `is_current` before it uses one; a call with a closed number fails with EBADF.
        unsafe { BorrowedFd::borrow_raw(self.mark.number) }
    }
}

impl Drop for ProcessFd {
    fn drop(&mut self) {
        let FdMark { number, owner, file, slot } = self.mark;
        if !is_current(self.token) {
            return;
        }
        let let_go = || slot.owner.compare_exchange(owner, 0, AcqRel, Relaxed).is_ok();
        let close = || {
            // SAFETY: the registry says that this life owns the number, and nobody but its owner closes it.
            unsafe { libc::close(number) };
        };
        match file {
            // Closed first, then let go of: a child that is forked in between closes its copy, or finds another file there and leaves it.
            Some(_) => {
                if !self.mark.is_lost() {
                    close();
                }
                let_go();
            }
            // The other way round: a child could not tell whose file it finds.
            None => {
                if let_go() {
                    close();
                }
            }
        }
    }
}

/// Closes what is registered: for a child, which has copies of its parent's numbers. Makes no call that signal-safety(7) does not allow.
pub(super) fn close_inherited() {
    let (mut block, mut first) = (Some(&REGISTRY), 0);
    while let Some(current) = block {
        for (number, slot) in (first..).zip(&current.slots) {
            let inode = slot.inode.load(Acquire);
            let file = (inode != 0).then(|| (slot.device.load(Relaxed), inode));
            if slot.owner.swap(0, AcqRel) != 0 && is_same_file(number, file) {
                // SAFETY: the child's copy of a number that the parent owned; the child's objects for it are of another token and never close it.
                unsafe { libc::close(number) };
            }
        }
        first += RawFd::try_from(BLOCK).unwrap_or(RawFd::MAX);
        block = current.next();
    }
}

/// Whether `number` is open and, where `file` is known, of that file. Only an answer can say that it is not.
fn is_same_file(number: RawFd, file: Option<(u64, u64)>) -> bool {
    let Some(file) = file else { return true };
    // SAFETY: only used for one fstat, which answers EBADF where the number is not open.
    match rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) }) {
        Ok(stat) => (stat.st_dev, stat.st_ino) == file,
        Err(errno) => errno != rustix::io::Errno::BADF,
    }
}

fn slot(number: RawFd) -> &'static Slot {
    let number = usize::try_from(number).unwrap_or(0);
    let mut block = &REGISTRY;
    for _ in 0..number / BLOCK {
        block = block.next().unwrap_or_else(|| block.append());
    }
    #[allow(clippy::indexing_slicing, reason = "a remainder of the length")]
    let slot = &block.slots[number % BLOCK];
    slot
}

impl Slot {
    const fn new() -> Self {
        Self { owner: AtomicU64::new(0), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }
}

impl Block {
    const fn new() -> Self {
        Self { slots: [const { Slot::new() }; BLOCK], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Block> {
        let next = self.next.load(Acquire);
        // SAFETY: null or a leaked block.
        (!next.is_null()).then(|| unsafe { &*next })
    }

    /// The block after this last one, made here or by somebody faster.
    fn append(&self) -> &'static Block {
        let fresh = Box::into_raw(Box::new(Self::new()));
        match self.next.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
            // SAFETY: just leaked.
            Ok(_) => unsafe { &*fresh },
            Err(theirs) => {
                // SAFETY: ours was not published.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: not null, so a leaked block.
                unsafe { &*theirs }
            }
        }
    }
}
