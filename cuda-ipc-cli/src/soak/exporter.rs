//! An exporting process of a soak: makes, changes and frees memory as it is told, and says what is in it.

use cuda_ipc_core::exporter::{Export, Exporter, ExporterOptions};
use serde::{Deserialize, Serialize};

use super::memory::{Change, Kind, Memory, Part};
use super::state::State;
use crate::exporter_process::{PART, let_the_family_in, part_of};
use crate::failure::Failure;
use crate::gpu::Gpu;
use crate::hex;
use crate::limits;
use crate::pattern::Pattern;
use crate::peer_process::Link;
use crate::random::Random;

#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) device: u32,
    pub(super) kinds: Vec<Kind>,
    pub(super) seed: u64,
    /// Whether chunks have fds that importers can fetch; if not, the broker makes each one when it is asked for.
    pub(super) fds: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Ask {
    /// Do something with some memory, and say what there is now.
    Step,
    /// Free all of it, and say what is left.
    Rest,
}

/// What was done to which memory, and how an importer finds it.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Shared {
    pub(super) what: What,
    pub(super) kind: Kind,
    pub(super) rkey: String,
    /// What is in it now, in order of address.
    pub(super) parts: Vec<Part>,
    /// A range that importers were told is gone, and which nothing has taken the place of.
    pub(super) gone: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum What {
    Made,
    Changed(Change),
    Freed,
    /// Nothing: what was there is used again.
    Again,
}

/// Memory in use at most.
const MOST: usize = 6;

struct Item<'g> {
    kind: Kind,
    memory: Box<dyn Memory + 'g>,
    /// Dropped before the memory is.
    export: Option<Export>,
}

pub(crate) fn child(link: &mut Link) -> Result<(), Failure> {
    let Settings { device, kinds, seed, fds } = link.receive()?;
    limits::raise_open_files();
    // The command has no place for a note that says nothing about its figures.
    let _ = let_the_family_in()?;
    let gpu = Gpu::open(device)?;
    let mut options = ExporterOptions::default();
    if !fds {
        options.fd_reserve = u64::MAX;
    }
    let exporter = Exporter::new(*gpu.cuda(), options).map_err(Failure::at("making the export table"))?;
    let mut random = Random::new(seed);
    let mut items: Vec<Item<'_>> = Vec::new();
    link.send(&gpu.facts()?)?;
    while let Some(ask) = link.receive_unless_ended()? {
        match ask {
            Ask::Step => {
                let shared = step(&gpu, &exporter, &kinds, &mut items, &mut random)?;
                link.send(&shared)?;
            }
            Ask::Rest => {
                items.drain(..).for_each(|item| free(&exporter, item, true));
                link.send(&State::take(&gpu, exporter.stats().chunks, 0)?)?;
            }
        }
    }
    Ok(())
}

fn step<'g>(gpu: &'g Gpu, exporter: &Exporter, kinds: &[Kind], items: &mut Vec<Item<'g>>, random: &mut Random) -> Result<Shared, Failure> {
    let at = usize::try_from(random.below(items.len() as u64)).unwrap_or(0);
    let choice = random.below(10);
    if items.is_empty() || (choice == 0 && items.len() < MOST) {
        let kind = usize::try_from(random.below(kinds.len() as u64)).ok().and_then(|at| kinds.get(at).copied());
        let kind = kind.ok_or_else(|| Failure::Usage("no kind of memory is chosen".to_owned()))?;
        let memory = kind.make(gpu, random)?;
        write(gpu, &memory.parts())?;
        items.push(Item { kind, memory, export: None });
        let last = items.len() - 1;
        return share(gpu, exporter, &mut items[last], What::Made, None);
    }
    if choice == 1 {
        let item = items.swap_remove(at);
        let (kind, parts, tells) = (item.kind, item.memory.parts(), item.memory.tells());
        let rkey = rkey(&item);
        let told = random.below(2) == 0;
        free(exporter, item, told);
        let range = parts.first().zip(parts.last()).map(|(first, last)| (first.address, last.address + last.len - first.address));
        // Without a word it takes the exporter's own look around to find it.
        return Ok(Shared { what: What::Freed, kind, rkey, parts: Vec::new(), gone: range.filter(|_| told && tells) });
    }
    let change = match choice {
        2 | 3 => Change::Grow,
        4 => Change::Shrink,
        5 | 6 => Change::Replace,
        _ => return share(gpu, exporter, &mut items[at], What::Again, None),
    };
    let item = &mut items[at];
    let Some(freed) = item.memory.frees(change, random) else { return share(gpu, exporter, item, What::Again, None) };
    let told = random.below(2) == 0;
    if told && !freed.is_empty() {
        exporter.retire(freed.start, freed.end - freed.start);
    }
    let made = item.memory.change(change, freed.clone(), random)?;
    write(gpu, &made)?;
    let gone = (told && made.is_empty()).then(|| (freed.start, freed.end - freed.start));
    share(gpu, exporter, item, What::Changed(change), gone)
}

/// Exports all that is in it now.
fn share(gpu: &Gpu, exporter: &Exporter, item: &mut Item<'_>, what: What, gone: Option<(u64, u64)>) -> Result<Shared, Failure> {
    let parts = item.memory.parts();
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Err(Failure::new("sharing", "there is nothing in it")) };
    let export = exporter.export(first.address, last.address + last.len - first.address).map_err(gpu.at("exporting the range"))?;
    item.export = Some(export);
    Ok(Shared { what, kind: item.kind, rkey: rkey(item), parts, gone })
}

fn rkey(item: &Item<'_>) -> String {
    item.export.as_ref().map(|export| hex::encode(&export.rkey().encode())).unwrap_or_default()
}

fn free(exporter: &Exporter, item: Item<'_>, told: bool) {
    let Item { memory, export, .. } = item;
    if told {
        for part in memory.parts() {
            exporter.retire(part.address, part.len);
        }
        drop(export);
        drop(memory);
    } else {
        drop(memory);
        drop(export);
    }
}

fn write(gpu: &Gpu, parts: &[Part]) -> Result<(), Failure> {
    let mut buffer = vec![0; PART];
    for part in parts {
        let pattern = Pattern::new(part.seed);
        let mut done = 0;
        while done < part.len {
            let bytes = part_of(&mut buffer, part.len - done);
            pattern.fill(part.address + done, bytes);
            gpu.upload(part.address + done, bytes).map_err(gpu.at("writing the pattern"))?;
            done += bytes.len() as u64;
        }
    }
    Ok(())
}
