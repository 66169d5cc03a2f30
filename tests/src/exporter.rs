//! An exporter in a process of its own, at a test's command: [`serve`] is the process, [`Remote`] the test's end of the conversation.
//!
//! One line asks, one line answers; what can be asked is in `exporter/server.rs`. [`RemoteMemory`] remembers what a test has put where, so that an importer
//! can verify every byte.

mod server;

use std::collections::BTreeMap;
use std::process::Command;

use cuda_ipc_core::rkey::Rkey;
use nix::sys::signal::Signal;

use crate::driver::{Cuda, Inside, Peer};
use crate::pattern;

pub use server::{serve, without_broker};

/// The role of a process that serves.
pub const ROLE: &str = "exporter";

/// A process that serves. Killed when dropped.
#[derive(Debug)]
pub struct Remote {
    peer: Peer,
    /// Its pid.
    pub pid: u32,
}

impl Remote {
    /// Starts one. The test's body must call [`serve`] in the role [`ROLE`].
    pub fn start(me: &Inside) -> Self {
        Self::start_with(me, |_| {})
    }

    /// As [`Remote::start`], after `change` has had its way with the command.
    pub fn start_with(me: &Inside, change: impl FnOnce(&mut Command)) -> Self {
        let mut peer = me.spawn_with(ROLE, change).expect("an exporter process");
        assert_eq!(peer.listen(), "ready");
        let pid = peer.pid();
        Self { peer, pid }
    }

    /// Asks for something that may fail.
    pub fn try_ask(&mut self, request: &str) -> Result<String, String> {
        self.peer.tell(request);
        let answer = self.peer.listen();
        // A word is trimmed on its way.
        match answer.split_once(' ').unwrap_or((&answer, "")) {
            ("ok", rest) => Ok(rest.to_owned()),
            ("err", rest) => Err(rest.to_owned()),
            _ => panic!("the exporter process answered {answer:?} to {request:?}"),
        }
    }

    /// Asks for something that must not fail.
    #[track_caller]
    pub fn ask(&mut self, request: &str) -> String {
        self.try_ask(request).unwrap_or_else(|error| panic!("{request}: {error}"))
    }

    /// Asks for a number.
    #[track_caller]
    pub fn number(&mut self, request: &str) -> u64 {
        let answer = self.ask(request);
        answer.parse().unwrap_or_else(|_| panic!("{request}: {answer}"))
    }

    /// Makes a reservation of `len` bytes with chunks of these lengths and seeds from its start on.
    #[track_caller]
    pub fn memory(&mut self, len: u64, chunks: &[(u64, u64)]) -> RemoteMemory {
        self.memory_at(len, 0, chunks)
    }

    /// As [`Remote::memory`], at an address.
    #[track_caller]
    pub fn memory_at(&mut self, len: u64, wish: u64, chunks: &[(u64, u64)]) -> RemoteMemory {
        self.reserve(len, wish, false, chunks)
    }

    /// As [`Remote::memory_at`], with chunks that are only marked.
    #[track_caller]
    pub fn marked_memory_at(&mut self, len: u64, wish: u64, chunks: &[(u64, u64)]) -> RemoteMemory {
        self.reserve(len, wish, true, chunks)
    }

    #[track_caller]
    fn reserve(&mut self, len: u64, wish: u64, marked: bool, chunks: &[(u64, u64)]) -> RemoteMemory {
        let answer = self.ask(&format!("reserve {len} {wish}"));
        let (index, base) = answer.split_once(' ').expect("index and base");
        let mut memory = RemoteMemory {
            index: index.parse().expect("an index"),
            base: base.parse().expect("an address"),
            len,
            chunks: BTreeMap::new(),
            marked,
        };
        let mut offset = 0;
        for &(len, seed) in chunks {
            memory.map(self, offset, len, seed);
            offset += len;
        }
        memory
    }

    /// Exports a part of `memory`: the export's number and the rkey.
    pub fn try_export(&mut self, memory: &RemoteMemory, offset: u64, len: u64) -> Result<(u64, Rkey), String> {
        let answer = self.try_ask(&format!("export {} {offset} {len}", memory.index))?;
        let (number, rkey) = answer.split_once(' ').expect("number and rkey");
        Ok((number.parse().expect("a number"), from_hex(rkey)))
    }

    /// As [`Remote::try_export`], of what must be exportable.
    #[track_caller]
    pub fn export(&mut self, memory: &RemoteMemory, offset: u64, len: u64) -> (u64, Rkey) {
        self.try_export(memory, offset, len).unwrap_or_else(|error| panic!("export of {len} bytes at {offset:#x}: {error}"))
    }

    /// Exports `[address, address + len)` of whatever memory: the export's number and the rkey, or the cause of the refusal.
    pub fn try_export_at(&mut self, address: u64, len: u64) -> Result<(u64, Rkey), String> {
        let answer = self.try_ask(&format!("export_at {address} {len}"))?;
        let (number, rkey) = answer.split_once(' ').expect("number and rkey");
        Ok((number.parse().expect("a number"), from_hex(rkey)))
    }

    /// As [`Remote::try_export_at`], of what must be exportable.
    #[track_caller]
    pub fn export_at(&mut self, address: u64, len: u64) -> (u64, Rkey) {
        self.try_export_at(address, len).unwrap_or_else(|error| panic!("export of {len} bytes at {address:#x}: {error}"))
    }

    /// What `stats` of the exporter says.
    pub fn stats(&mut self) -> Stats {
        let answer = self.ask("stats");
        let mut numbers = answer.split(' ').map(|number| number.parse().expect("a number"));
        let mut next = || numbers.next().expect("five numbers");
        Stats { chunks: next(), fds: next(), published: next(), retired: next(), swept: next() }
    }

    /// Names of its threads that are ours.
    pub fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).expect("its threads");
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.map(|name| name.trim_end().to_owned()).filter(|name| name.starts_with("cuda-ipc")).collect()
    }

    /// Ends all exports.
    pub fn release_all(&mut self) {
        self.ask("release_all");
    }

    /// Stops it where it is.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.pid).expect("a pid"));
        nix::sys::signal::kill(pid, signal).expect("a process of ours");
    }

    /// Lets the process become a new one of the same pid, by exec.
    pub fn exec(&mut self) {
        self.peer.tell("exec");
        assert_eq!(self.peer.listen(), "ready");
    }

    /// Lets it end by itself and checks that it ended well.
    pub fn finish(self) {
        self.peer.finish();
    }

    /// Kills it and waits until it is gone.
    pub fn kill(self) {
        self.peer.kill().expect("the end of an exporter");
    }
}

/// Numbers of an exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the fields of ExporterStats")]
pub struct Stats {
    pub chunks: u64,
    pub fds: u64,
    pub published: u64,
    pub retired: u64,
    pub swept: u64,
}

/// A reservation in an exporter process, and what is in it.
#[derive(Clone, Debug)]
pub struct RemoteMemory {
    /// Its number there.
    pub index: u64,
    /// Its first address there.
    pub base: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Length and seed of the chunk at each offset.
    pub chunks: BTreeMap<u64, (u64, u64)>,
    /// Whether new chunks are only marked with their seed's bytes, which [`RemoteMemory::spot_check`] looks at; otherwise they are filled.
    pub marked: bool,
}

impl RemoteMemory {
    /// Makes a chunk there.
    #[track_caller]
    pub fn map(&mut self, remote: &mut Remote, offset: u64, len: u64, seed: u64) {
        let how = if self.marked { "mark" } else { "map" };
        remote.ask(&format!("{how} {} {offset} {len} {seed}", self.index));
        self.chunks.insert(offset, (len, seed));
    }

    /// Unmaps one without a word to the exporter.
    #[track_caller]
    pub fn unmap(&mut self, remote: &mut Remote, offset: u64) {
        remote.ask(&format!("unmap {} {offset}", self.index));
        self.chunks.remove(&offset);
    }

    /// Retires one, unmaps it, and makes another in its place.
    #[track_caller]
    pub fn replace(&mut self, remote: &mut Remote, offset: u64, seed: u64) {
        let (len, _) = self.chunks[&offset];
        remote.ask(&format!("retire {} {offset} {len}", self.index));
        self.unmap(remote, offset);
        self.map(remote, offset, len, seed);
    }

    /// Bytes from the first chunk's start to the last one's end.
    pub fn mapped_len(&self) -> u64 {
        self.chunks.last_key_value().map_or(0, |(&offset, &(len, _))| offset + len)
    }

    /// Compares `len` bytes at `local`, in this process, with what is at `offset` there. The range has no hole.
    pub fn verify(&self, cuda: &Cuda, local: u64, offset: u64, len: u64) -> Result<(), String> {
        self.verify_parts(offset, len, |at, start, part, seed| pattern::check(cuda, local + (at - offset), at - start, part, seed))
    }

    /// As [`RemoteMemory::verify`], but only the first 4 KiB of each granule: enough to tell which one it is.
    pub fn spot_check(&self, cuda: &Cuda, local: u64, offset: u64, len: u64) -> Result<(), String> {
        self.verify_parts(offset, len, |at, start, part, seed| {
            let firsts = (at..at + part).step_by(2 << 20);
            firsts
                .into_iter()
                .try_for_each(|first| pattern::check(cuda, local + (first - offset), first - start, 4096.min(at + part - first), seed))
        })
    }

    /// Calls `check` with offset, start of the chunk, length and seed for each part of the range that lies in one chunk.
    fn verify_parts(&self, offset: u64, len: u64, check: impl Fn(u64, u64, u64, u64) -> Result<(), String>) -> Result<(), String> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let (&start, &(chunk, seed)) = self.chunks.range(..=at).next_back().ok_or("no chunk")?;
            let part = (start + chunk).min(end).checked_sub(at).filter(|&part| part > 0).ok_or("a hole")?;
            check(at, start, part, seed).map_err(|error| format!("chunk at offset {start:#x}: {error}"))?;
            at += part;
        }
        Ok(())
    }
}

fn from_hex(text: &str) -> Rkey {
    let bytes: Vec<u8> = (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex")).collect();
    Rkey::decode(&bytes).expect("an rkey")
}
