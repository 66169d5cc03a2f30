//! The exporting process: an application that changes its memory, and an exporter that follows. Everything happens in small steps.

use std::collections::{BTreeMap, HashMap, VecDeque};

use cuda_ipc_core::export::Walk;
use cuda_ipc_core::key::{HostId, Key, KeyKind, Nonce};
use cuda_ipc_core::table::{ChunkId, GRANULE, Writer};

use crate::bookkeeper::{Exporter, WalkRun};
use crate::kernel::{LAYOUT, Mapping, Object, Physical, Process, Words, new_words};

/// First address of the reservation; a border between leaves lies inside it.
pub(crate) const BASE: u64 = 10 * GRANULE;
/// Its length.
pub(crate) const LEN: u64 = 20 * GRANULE;

/// One step of a task. What one step does, nobody sees half done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Mark the chunk at this address dead and count the epoch.
    MarkDead(u64),
    /// Close the fds of chunks that this task has marked dead.
    CloseRetired,
    /// Close the fd of a chunk that is still live: what no exporter may do.
    CloseLive(u64),
    Unmap(u64),
    /// Map new memory at this address, of this many granules, unless something is there.
    Map(u64, u64),
    /// Export everything that is mapped back to back around this address. One step for each of the walk's actions.
    Export(u64),
    OpenFile,
    /// Find chunks whose memory or fd has gone, and mark them dead.
    Sweep,
    /// Replace the program: same pid, same life, and all fds closed.
    Exec,
    /// A program starts in the process and makes a table.
    Start,
    Exit,
    /// A new process gets the old one's pid.
    ReusePid,
    /// The application closes every fd it did not open itself, ours with them.
    CloseFrom,
    /// The application exports some memory of its own.
    OpenMemory,
}

/// A thread of the exporting process at work.
#[derive(Default)]
pub(crate) struct Task {
    steps: VecDeque<Step>,
    pub(crate) walk: Option<WalkRun>,
    closing: Vec<(u32, Physical)>,
}

/// The exporting process and its truth.
pub(crate) struct World {
    pub(crate) process: Process,
    pub(crate) memory: BTreeMap<u64, Mapping>,
    pub(crate) exporter: Option<Exporter>,
    pub(crate) tasks: Vec<Task>,
    /// What each life of each slot was published for.
    pub(crate) truth: HashMap<(Nonce, ChunkId), Physical>,
    /// What each buffer id stands for.
    pub(crate) memory_of: HashMap<u64, Physical>,
    numbers: u64,
    /// How many fds the exporter may hold.
    pub(crate) budget: usize,
    /// All table files so far.
    pub(crate) tables: Vec<Words>,
    /// What must never happen, and has.
    pub(crate) errors: Vec<String>,
    /// Foreign fds that reached the importer's driver.
    pub(crate) foreign: Vec<String>,
}

impl World {
    /// A process with a table and chunks of these numbers of granules, exported.
    pub(crate) fn new(chunks: &[u64], budget: usize) -> Self {
        let mut world = World {
            process: Process { life: 1, alive: true, ..Process::default() },
            memory: BTreeMap::new(),
            exporter: None,
            tasks: Vec::new(),
            truth: HashMap::new(),
            memory_of: HashMap::new(),
            numbers: 0,
            budget,
            tables: Vec::new(),
            errors: Vec::new(),
            foreign: Vec::new(),
        };
        world.start(boot(chunks));
        world.finish();
        world
    }

    /// The key of the reservation; `None` while there is no table.
    pub(crate) fn key(&self) -> Option<Key> {
        let exporter = self.exporter.as_ref()?;
        Some(Key {
            kind: KeyKind::Reservation,
            pid: 4242,
            table_fd: exporter.table_fd,
            nonce: exporter.nonce,
            pid_namespace: 1,
            host: HostId(1),
            base: BASE,
            len: LEN,
        })
    }

    /// Chunks that are mapped now, as address and granules.
    pub(crate) fn mapped(&self) -> Vec<(u64, u64)> {
        self.memory.iter().map(|(base, mapping)| (*base, mapping.len / GRANULE)).collect()
    }

    /// First address after all chunks.
    pub(crate) fn end(&self) -> u64 {
        self.memory.iter().next_back().map_or(BASE, |(base, mapping)| base + mapping.len)
    }

    /// First address in the reservation where nothing is mapped.
    pub(crate) fn hole(&self) -> u64 {
        self.memory.iter().fold(BASE, |at, (base, mapping)| if *base == at { at + mapping.len } else { at })
    }

    /// Whether this life of a slot is published now.
    pub(crate) fn is_published(&self, nonce: Nonce, id: ChunkId) -> bool {
        let exporter = self.exporter.iter().filter(|exporter| exporter.nonce == nonce);
        exporter.flat_map(|exporter| exporter.records.values()).any(|record| record.id == id)
    }

    /// Adds a task; its steps run when [`World::step`] is called.
    pub(crate) fn start(&mut self, steps: impl IntoIterator<Item = Step>) {
        self.tasks.push(Task { steps: steps.into_iter().collect(), ..Task::default() });
    }

    /// How many tasks are at work.
    pub(crate) fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Runs all tasks to their ends and returns how many steps that took.
    pub(crate) fn finish(&mut self) -> usize {
        let mut steps = 0;
        while !self.tasks.is_empty() {
            self.step(0);
            steps += 1;
            assert!(steps < 10_000, "the exporter ends");
        }
        steps
    }

    /// One step of the first task, if there is one.
    pub(crate) fn step_first(&mut self) {
        if !self.tasks.is_empty() {
            self.step(0);
        }
    }

    /// One step of a task.
    pub(crate) fn step(&mut self, task: usize) {
        let mut task = self.tasks.remove(task);
        if let Some(run) = task.walk.take() {
            task.walk = self.walk(run);
        } else if let Some(step) = task.steps.pop_front() {
            self.act(step, &mut task);
        }
        if task.walk.is_some() || !task.steps.is_empty() {
            self.tasks.push(task);
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn act(&mut self, step: Step, task: &mut Task) {
        match step {
            Step::MarkDead(base) => task.closing.extend(self.mark_dead(base, base + 1)),
            Step::CloseRetired => task.closing.drain(..).for_each(|fd| self.close(fd)),
            Step::CloseLive(base) => {
                let record = self.exporter.as_ref().and_then(|exporter| exporter.records.get(&base).copied());
                record.and_then(|record| record.fd).into_iter().for_each(|fd| self.close(fd));
            }
            Step::Unmap(base) => drop(self.memory.remove(&base)),
            Step::Map(base, granules) => {
                let end = base + granules * GRANULE;
                let free = self.memory.iter().all(|(other, mapping)| other + mapping.len <= base || end <= *other);
                if free && end <= BASE + LEN {
                    let (buffer_id, physical) = (self.number(), Physical(self.number()));
                    self.memory_of.insert(buffer_id, physical);
                    self.memory.insert(base, Mapping { len: granules * GRANULE, buffer_id, physical });
                }
            }
            Step::Export(address) if self.exporter.is_some() => {
                if let Some((base, len)) = self.run_around(address) {
                    let walk = Walk::new(base, len);
                    task.walk = Some(WalkRun { walk, handle: None, fd: None, cancelled: Vec::new(), counted: Vec::new() });
                }
            }
            Step::Export(_) => {}
            Step::OpenFile => drop(self.process.alive.then(|| self.process.install(Object::File))),
            Step::Sweep => task.closing.extend(self.sweep()),
            Step::Exec | Step::Exit | Step::ReusePid => {
                // The other threads are gone with the program.
                self.tasks.clear();
                self.memory.clear();
                self.exporter = None;
                match step {
                    Step::Exec => self.process.fds.clear(),
                    Step::Exit => self.process.exit(),
                    _ => self.process = Process { life: self.process.life + 1, alive: true, ..Process::default() },
                }
            }
            Step::Start => {
                let (words, nonce) = (new_words(), Nonce(self.number()));
                self.tables.push(words);
                assert!(Writer::create(words, LAYOUT, nonce).is_some());
                let table_fd = self.process.install(Object::Table(words));
                self.exporter = Some(Exporter { words, nonce, table_fd, records: BTreeMap::new(), free_slots: Vec::new(), next_slot: 0 });
            }
            Step::CloseFrom => self.process.fds.clear(),
            Step::OpenMemory => {
                let physical = Physical(self.number());
                self.process.install(Object::Memory(physical));
            }
        }
    }

    /// What is mapped back to back around an address.
    fn run_around(&self, address: u64) -> Option<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (base, mapping) in &self.memory {
            match runs.last_mut() {
                Some((first, len)) if *first + *len == *base => *len += mapping.len,
                _ => runs.push((*base, mapping.len)),
            }
        }
        runs.into_iter().find(|(base, len)| *base <= address && address < base + len)
    }
}

/// The steps of a program that starts, maps chunks of these numbers of granules and exports them.
pub(crate) fn boot(chunks: &[u64]) -> Vec<Step> {
    let mut at = BASE;
    let maps = chunks.iter().map(|granules| {
        let map = Step::Map(at, *granules);
        at += granules * GRANULE;
        map
    });
    [Step::Start].into_iter().chain(maps).chain([Step::Export(BASE)]).collect()
}
