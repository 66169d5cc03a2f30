//! A hostile exporter process for the targets: forked, with real chunks of the fake driver, and a table that this process writes as if it were the other one.
//!
//! # Safety
//! The unsafe here is fork in a process of one thread, whose child never returns, and a death signal for that child.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_ipc_core::key::Key;
use cuda_ipc_tests::driver::Cuda;
use cuda_ipc_tests::memory::Memory;
use cuda_ipc_tests::raw_table::{RawEntry, RawTable};

/// Length of a chunk in bytes.
pub(crate) const CHUNK: u64 = 2 << 20;
/// Chunks in the reservation, back to back.
const CHUNKS: u32 = 3;
/// Entries of the table that edits reach.
const ENTRIES: usize = 6;
/// Live, first generation.
const LIVE: u64 = 5;

/// The process, as long as this one lives, and its table.
pub(crate) struct Hostile {
    table: RawTable,
    fds: Vec<u32>,
    pub(crate) key: Key,
}

/// One word of the table is given another value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edit {
    at: u8,
    value: u64,
}

impl Edit {
    /// Byte 1 says where, bytes 2 to 7 what.
    pub(crate) fn read(bytes: &[u8; 8]) -> Self {
        let &[_, at, kind, a, b, c, d, e] = bytes;
        let small = u64::from(u32::from_le_bytes([a, b, c, d]));
        // Values as they stand in tables: small ones, granules, ones near an honest address, those of one bit or all.
        let value = match kind % 6 {
            0 => small,
            1 => small << 21,
            2 => u64::MAX - small,
            3 => 1 << (a % 64),
            4 => HONEST + (u64::from(a) << 21) + u64::from(b),
            _ => small | u64::from(e) << 56,
        };
        Self { at, value }
    }

    pub(crate) fn apply(self, hostile: &Hostile) {
        hostile.table.put(hostile.place(self.at), self.value);
    }
}

/// Where the honest reservation is, in every run: one that address space randomisation leaves free.
const HONEST: u64 = cuda_ipc_tests::memory::STABLE;

impl Hostile {
    /// Forks it. Only for a process of one thread that has not used the driver.
    pub(crate) fn start() -> Self {
        let table = RawTable::new(1).expect("a memory file");
        let (mut told, mut teller) = std::io::pipe().expect("a pipe");
        // SAFETY: one thread, and the child never returns.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            // SAFETY: numbers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let text: Vec<String> = Self::make_chunks().iter().map(u32::to_string).collect();
            let _ = writeln!(teller, "{}", text.join(" "));
            loop {
                std::thread::park();
            }
        }
        drop(teller);
        let mut text = Vec::new();
        let mut byte = [0];
        while told.read(&mut byte).expect("what the child tells") == 1 && byte != *b"\n" {
            text.push(byte[0]);
        }
        let text = String::from_utf8(text).expect("numbers");
        let fds: Vec<u32> = text.split(' ').map(|number| number.parse().expect("a number")).collect();
        assert_eq!(fds.len(), CHUNKS as usize + 1, "the hostile process has made its chunks");
        let key = Key { pid: u32::try_from(pid).expect("a pid"), ..table.key(HONEST, 16 * CHUNK) };
        let hostile = Self { table, fds, key };
        hostile.restore();
        hostile
    }

    /// In the child: chunks with fds, and another fd that is none of a chunk.
    fn make_chunks() -> Vec<u32> {
        let cuda = Cuda::start();
        cuda.enter_primary(0);
        let mut memory = Memory::reserve(cuda, 16 * CHUNK, HONEST).expect("a reservation");
        assert_eq!(memory.base(), HONEST);
        let mut fds = Vec::new();
        for chunk in 0..u64::from(CHUNKS) {
            memory.mark(chunk * CHUNK, CHUNK, chunk).expect("a chunk");
            let handle = cuda.mem_retain(HONEST + chunk * CHUNK).expect("a handle");
            fds.push(cuda.mem_export_fd(handle).expect("an fd").cast_unsigned());
        }
        core::mem::forget(memory);
        fds.push(0);
        fds
    }

    /// The word that an edit's place means: of the header, of the first entries, and of the index for the reservation.
    fn place(&self, at: u8) -> usize {
        let at = usize::from(at);
        let (root, leaf) = RawTable::index_words(HONEST);
        match at {
            0..32 => at,
            32.. if at < 32 + 16 * ENTRIES => RawTable::entry_start(0) + (at - 32),
            _ if at.is_multiple_of(4) => root,
            _ => leaf + at % 5,
        }
    }

    /// Makes the table honest again.
    pub(crate) fn restore(&self) {
        self.table.honest_header();
        for slot in 0..u32::try_from(ENTRIES).expect("few") {
            for word in 0..16 {
                self.table.put(RawTable::entry_start(slot) + word, 0);
            }
        }
        let (root, leaf) = RawTable::index_words(HONEST);
        (0..5).for_each(|at| self.table.put(leaf + at, 0));
        self.table.put(root, 0);
        for chunk in 0..CHUNKS {
            let address = HONEST + u64::from(chunk) * CHUNK;
            let entry = RawEntry { state: LIVE, fd: self.fds[chunk as usize], kind: 1, address, len: CHUNK };
            self.table.entry(chunk, &entry);
            self.table.index(address, chunk);
        }
    }

    /// Runs `body` while another thread makes these edits and takes them back, over and over.
    pub(crate) fn while_changing<T>(&self, edits: &[Edit], body: impl FnOnce() -> T) -> T {
        if edits.is_empty() {
            return body();
        }
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    for edit in edits {
                        let place = self.place(edit.at);
                        let honest = self.table.get(place);
                        self.table.put(place, edit.value);
                        std::thread::yield_now();
                        self.table.put(place, honest);
                    }
                }
            });
            let value = body();
            over.store(true, Ordering::Release);
            value
        })
    }
}
