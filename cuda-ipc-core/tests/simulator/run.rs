//! What can happen in the exporter, and one run of an import while it happens.

use cuda_ipc_core::table::GRANULE;

use crate::exporter::{BASE, Step, World, boot};
use crate::importer::{Importer, Manner, Name};
use crate::kernel::recycle;

/// Something that happens to the chunk with a number (in order of address), or to the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// The owner frees it and says so.
    Retire(usize),
    /// It is freed, and its slot and number are used for another chunk.
    ReuseForChunk(usize),
    /// It is freed, and its number is used for a file.
    ReuseForFile(usize),
    /// Its memory is replaced, with notice.
    Replace(usize),
    /// It is freed without a word; a sweep finds out.
    FreeSilently(usize),
    /// It is replaced without a word; the next export finds out.
    ReplaceSilently(usize),
    /// It and its neighbour make room for one chunk.
    Merge(usize),
    /// A chunk comes into the first hole, or behind the last.
    Grow,
    /// The program calls exec; the new one does the same as the old one did.
    Exec,
    /// The process exits.
    Exit,
    /// The process exits, and a new one with the same pid does the same.
    Restart,
    /// The application closes our fds, and exports memory of its own by the same numbers.
    CloseFrom,
    /// Wrong: the fd is closed while the chunk is live, and the number is used for another chunk.
    CloseBeforeDeath(usize),
}

/// All that an honest exporter and its application do, for `chunks` chunks.
pub(crate) fn honest(chunks: usize) -> Vec<Event> {
    let each: [fn(usize) -> Event; 7] = [
        Event::Retire,
        Event::ReuseForChunk,
        Event::ReuseForFile,
        Event::Replace,
        Event::FreeSilently,
        Event::ReplaceSilently,
        Event::Merge,
    ];
    let of_process = [Event::Grow, Event::Exec, Event::Exit, Event::Restart, Event::CloseFrom];
    (0..chunks).flat_map(|chunk| each.map(|event| event(chunk))).chain(of_process).collect()
}

/// The steps of an event, as things are now.
pub(crate) fn steps(event: Event, world: &World) -> Vec<Step> {
    let mapped = world.mapped();
    let chunk = |number: usize| mapped.get(number).copied().unwrap_or((BASE, 1));
    let spare = world.end() + GRANULE;
    let die = |base| [Step::MarkDead(base), Step::CloseRetired, Step::Unmap(base)];
    match event {
        Event::Retire(number) => die(chunk(number).0).into(),
        Event::ReuseForChunk(number) => [&die(chunk(number).0)[..], &[Step::Map(spare, 2), Step::Export(spare)]].concat(),
        Event::ReuseForFile(number) => {
            let [dead, close, unmap] = die(chunk(number).0);
            vec![dead, close, Step::OpenFile, unmap]
        }
        Event::Replace(number) => {
            let (base, granules) = chunk(number);
            [&die(base)[..], &[Step::Map(base, granules), Step::Export(base)]].concat()
        }
        Event::FreeSilently(number) => vec![Step::Unmap(chunk(number).0), Step::Sweep, Step::CloseRetired],
        Event::ReplaceSilently(number) => {
            let (base, granules) = chunk(number);
            vec![Step::Unmap(base), Step::Map(base, granules), Step::Export(base)]
        }
        Event::Merge(number) => {
            let ((left, granules), (right, more)) = (chunk(number), chunk(number + 1));
            let dead = [Step::MarkDead(left), Step::MarkDead(right), Step::CloseRetired, Step::Unmap(left), Step::Unmap(right)];
            [&dead[..], &[Step::Map(left, granules + more), Step::Export(left)]].concat()
        }
        Event::Grow => vec![Step::Map(world.hole(), 1), Step::Export(world.hole())],
        Event::Exec => [vec![Step::Exec], boot(&granules(&mapped))].concat(),
        Event::Exit => vec![Step::Exit],
        Event::Restart => [vec![Step::Exit, Step::ReusePid], boot(&granules(&mapped))].concat(),
        Event::CloseFrom => vec![Step::CloseFrom, Step::OpenMemory, Step::OpenMemory, Step::OpenMemory, Step::Sweep, Step::CloseRetired],
        Event::CloseBeforeDeath(number) => {
            let base = chunk(number).0;
            vec![Step::CloseLive(base), Step::Map(spare, 2), Step::Export(spare), Step::MarkDead(base), Step::Unmap(base)]
        }
    }
}

fn granules(mapped: &[(u64, u64)]) -> Vec<u64> {
    mapped.iter().map(|(_, granules)| *granules).collect()
}

/// How a run ended.
pub(crate) struct Report {
    pub(crate) outcome: Result<(), Name>,
    pub(crate) errors: Vec<String>,
    pub(crate) foreign: Vec<String>,
    /// Steps of the importer.
    pub(crate) positions: usize,
}

/// An import of all chunks; before each of the importer's steps `interfere` may do something to the exporter.
pub(crate) fn run(chunks: &[u64], manner: Manner, mut interfere: impl FnMut(usize, &mut World)) -> Report {
    let mut world = World::new(chunks, 8);
    let len = world.end() - BASE;
    let mut importer = Importer::new(world.key().expect("a table"), (BASE, len), manner);
    let mut positions = 0;
    let outcome = loop {
        interfere(positions, &mut world);
        positions += 1;
        if let Some(outcome) = importer.step(&mut world) {
            break outcome;
        }
        assert!(positions < 1000, "the importer ends");
    };
    importer.verify(&mut world, &outcome);
    while world.tasks() != 0 {
        world.step(0);
        if outcome.is_ok() {
            importer.verify_epoch(&mut world);
        }
    }
    recycle(world.tables);
    Report { outcome, errors: world.errors, foreign: world.foreign, positions }
}
