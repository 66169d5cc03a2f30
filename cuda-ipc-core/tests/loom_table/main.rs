//! The table's protocol on a model checker's atomics, where a load may return any value that the memory orders allow.
//!
//! Run: `RUSTFLAGS="--cfg loom" cargo test --release -p cuda-ipc-core --no-default-features --test loom_table`
//!
//! The exporter's fd table is modelled with relaxed atomics, weaker than any kernel. So what is proved here leans on the table's own fences alone; and there
//! are models without them that must fail.
#![cfg(loom)]

mod words;

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use cuda_ipc_core::key::Nonce;
use cuda_ipc_core::table::{Chunk, ChunkId, ChunkKind, GRANULE, Layout, LookupError, Reader, Writer};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use words::{All, Cell, Fences, IS_WRITER, WithoutAcquire, WithoutRelease, WithoutSeqCst, WithoutWriterFences};

const LAYOUT: Layout = Layout { entries: 2, root: 1, leaves: 1, leaf_len: 4 };
const WORDS: usize = 32 + 2 * 16 + 1 + 4;
const NONCE: Nonce = Nonce(9);

/// A table, the exporter's fd table (number to object), and a flag by which the exporter can tell something.
struct Shared<F> {
    words: Vec<Cell<F>>,
    fds: [AtomicU64; 2],
    flag: AtomicU64,
}

fn chunk(fd: u32, granule: u64, buffer_id: u64) -> Chunk {
    Chunk { kind: ChunkKind::Vmm, fd: Some(fd), address: granule * GRANULE, len: GRANULE, buffer_id, device: [0; 16] }
}

/// The chunk whose memory is object 10, by fd 0; the others are what comes after it.
fn first() -> Chunk {
    chunk(0, 1, 10)
}

const FOREIGN: u64 = 99;

impl<F: Fences> Shared<F> {
    /// A table with the first chunk in slot 0.
    fn new() -> (Arc<Self>, ChunkId) {
        let shared =
            Shared { words: (0..WORDS).map(Cell::new).collect(), fds: [AtomicU64::new(10), AtomicU64::new(0)], flag: AtomicU64::new(0) };
        let mut writer = Writer::create(&shared.words, LAYOUT, NONCE).expect("long enough");
        let id = writer.publish(0, &first()).expect("room");
        (Arc::new(shared), id)
    }

    /// Runs the exporter's side in a thread of its own.
    fn spawn(this: &Arc<Self>, exporter: impl FnOnce(&Self) + 'static) -> thread::JoinHandle<()> {
        let shared = Arc::clone(this);
        thread::spawn(move || {
            IS_WRITER.with(|is_writer| is_writer.set(true));
            exporter(&shared);
        })
    }

    fn writer(&self) -> Writer<'_, Cell<F>> {
        Writer::resume(&self.words, LAYOUT).expect("long enough")
    }

    fn reader(&self) -> Reader<'_, Cell<F>> {
        Reader::resume(&self.words, LAYOUT).expect("long enough")
    }

    fn set_fd(&self, number: usize, object: u64) {
        self.fds[number].store(object, Relaxed);
    }

    /// What stands behind a number: anything that was ever there and that no order forbids.
    fn getfd(&self, chunk: &Chunk) -> u64 {
        self.fds[chunk.fd.expect("all have one") as usize].load(Relaxed)
    }

    fn retire(&self, id: ChunkId) {
        assert!(self.writer().retire(id));
    }

    fn publish(&self, slot: u32, chunk: &Chunk) -> ChunkId {
        self.writer().publish(slot, chunk).expect("room")
    }
}

/// Runs a model in all interleavings with at most this many preemptions (2 or 3 find nearly all bugs of two threads; `None` is no limit).
fn explore(preemption_bound: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemption_bound;
    builder.check(model);
}

/// The exporter gives slot 0 to another chunk at `granule`, with its own fd, while the old number is used by a foreign file.
fn reuse<F: Fences>(shared: &Shared<F>, id: ChunkId, granule: u64) {
    shared.retire(id);
    shared.set_fd(0, FOREIGN);
    shared.set_fd(1, 11);
    shared.publish(0, &chunk(1, granule, 11));
}

/// Looks a chunk up, fetches, re-checks. The entry is one or the other, never a mixture; and what passes the re-check is the right object.
fn fetch_during_reuse<F: Fences>() {
    let (shared, id) = Shared::<F>::new();
    let exporter = Shared::spawn(&shared, move |shared| reuse(shared, id, 1));
    let reader = shared.reader();
    if let Ok((found, seen)) = reader.chunk_at(GRANULE) {
        let expected = if found.generation == 1 { first() } else { chunk(1, 1, 11) };
        assert_eq!(seen, expected, "the entry of generation {} is torn", found.generation);
        let object = shared.getfd(&seen);
        if reader.is_live(found) {
            assert_eq!(object, seen.buffer_id, "a foreign object passed the re-check");
        }
    }
    exporter.join().expect("the exporter");
}

/// The reader reads an entry that is given to another chunk and back to the first, whose fields then stand there again.
fn entry_during_two_reuses<F: Fences>() {
    let (shared, id) = Shared::<F>::new();
    let exporter = Shared::spawn(&shared, move |shared| {
        shared.retire(id);
        let second = shared.publish(0, &chunk(1, 2, 11));
        shared.retire(second);
        shared.publish(0, &chunk(2, 1, 12));
    });
    match shared.reader().chunk_in(0) {
        Ok(Some((found, seen))) => {
            let lives = [first(), chunk(1, 2, 11), chunk(2, 1, 12)];
            assert_eq!(
                Some(&seen),
                lives.get(usize::try_from(found.generation).expect("at most 3") - 1),
                "the entry of generation {} is torn",
                found.generation
            );
        }
        Ok(None) => {}
        Err(error) => panic!("{error}"),
    }
    exporter.join().expect("the exporter");
}

#[test]
fn refetch_is_safe_with_all_fences() {
    explore(Some(3), fetch_during_reuse::<All>);
}

#[test]
#[should_panic(expected = "a foreign object passed the re-check")]
fn refetch_fails_without_acquire_fences() {
    explore(Some(3), fetch_during_reuse::<WithoutAcquire>);
}

#[test]
#[should_panic(expected = "a foreign object passed the re-check")]
fn refetch_fails_without_sequentially_consistent_fence() {
    explore(Some(3), fetch_during_reuse::<WithoutSeqCst>);
}

#[test]
fn an_entry_is_never_torn() {
    explore(Some(2), entry_during_two_reuses::<All>);
}

#[test]
fn an_entry_is_whole_with_one_of_the_writer_fences() {
    explore(Some(2), entry_during_two_reuses::<WithoutRelease>);
    explore(Some(2), entry_during_two_reuses::<WithoutSeqCst>);
}

#[test]
#[should_panic(expected = "is torn")]
fn an_entry_is_torn_without_writer_fences() {
    explore(Some(2), entry_during_two_reuses::<WithoutWriterFences>);
}

#[test]
#[should_panic(expected = "is torn")]
fn an_entry_is_torn_without_acquire_fences() {
    explore(Some(2), entry_during_two_reuses::<WithoutAcquire>);
}

/// A slot moves to another address: the old address leads to the old chunk or to none, and an honest exporter is never called inconsistent.
#[test]
fn a_slot_that_moves_is_found_at_one_place() {
    explore(Some(3), || {
        let (shared, id) = Shared::<All>::new();
        let exporter = Shared::spawn(&shared, move |shared| reuse(shared, id, 2));
        match shared.reader().chunk_at(GRANULE) {
            Ok(found) => assert_eq!(found, (id, first())),
            Err(error) => assert_eq!(error, LookupError::NoChunk(GRANULE)),
        }
        exporter.join().expect("the exporter");
    });
}

/// What stays is found at every moment, whatever its neighbour does.
#[test]
fn a_neighbour_is_not_disturbed() {
    explore(Some(3), || {
        let (shared, id) = Shared::<All>::new();
        let neighbour = chunk(2, 2, 12);
        let stays = shared.publish(1, &neighbour);
        let exporter = Shared::spawn(&shared, move |shared| reuse(shared, id, 1));
        assert_eq!(shared.reader().chunk_at(2 * GRANULE), Ok((stays, neighbour)));
        exporter.join().expect("the exporter");
    });
}

/// A chunk is replaced at its address by one in another slot. Who has been told so finds the new one, and nothing else.
#[test]
fn who_is_told_of_a_birth_finds_it() {
    explore(Some(3), || {
        let (shared, id) = Shared::<All>::new();
        let new = chunk(1, 1, 11);
        let exporter = Shared::spawn(&shared, move |shared| {
            shared.retire(id);
            shared.publish(1, &new);
            shared.flag.store(1, Release);
        });
        let told = shared.flag.load(Acquire) == 1;
        let found = shared.reader().chunk_at(GRANULE);
        let second = Ok((ChunkId { slot: 1, generation: 1 }, new));
        assert!(found == second || !told && (found == Ok((id, first())) || found == Err(LookupError::NoChunk(GRANULE))), "{found:?}");
        exporter.join().expect("the exporter");
    });
}

/// The lease's rule: an epoch loaded before a check stands for it. When `retire` has returned and the importer knows, the epoch it loads is another.
fn epoch_after_retirement(epoch_first: bool) {
    let (shared, id) = Shared::<All>::new();
    let exporter = Shared::spawn(&shared, move |shared| {
        shared.retire(id);
        shared.flag.store(1, Release);
    });
    let reader = shared.reader();
    let before = reader.epoch();
    let live = reader.is_live(id);
    let checked_epoch = if epoch_first { before } else { reader.epoch() };
    if live && shared.flag.load(Acquire) == 1 {
        assert_ne!(reader.epoch(), checked_epoch, "a hit on a dead chunk");
    }
    exporter.join().expect("the exporter");
}

#[test]
fn an_epoch_loaded_before_the_check_tells_of_every_later_death() {
    explore(None, || epoch_after_retirement(true));
}

#[test]
#[should_panic(expected = "a hit on a dead chunk")]
fn an_epoch_loaded_after_the_check_hides_a_death() {
    explore(None, || epoch_after_retirement(false));
}

/// The same with the whole look-up of a new chunk between the epoch and its later comparison.
#[test]
fn an_epoch_loaded_before_the_look_up_tells_of_every_later_death() {
    explore(Some(3), || {
        let (shared, id) = Shared::<All>::new();
        let exporter = Shared::spawn(&shared, move |shared| {
            shared.retire(id);
            shared.flag.store(1, Release);
        });
        let reader = shared.reader();
        let epoch = reader.epoch();
        let found = reader.chunk_at(GRANULE);
        if found.is_ok() && shared.flag.load(Acquire) == 1 {
            assert_ne!(reader.epoch(), epoch, "a hit on a dead chunk");
        }
        // The other way round: an epoch that counts the death already lets nobody find the dead.
        if epoch == 1 {
            assert_eq!(found, Err(LookupError::NoChunk(GRANULE)));
        }
        exporter.join().expect("the exporter");
    });
}
