//! An exporter in a storm: its chunks come, go and change, told and untold, until it is killed or all is over.

use core::time::Duration;

use cuda_ipc_core::exporter::{Export, Exporter, ExporterOptions};
use cuda_ipc_core::sys::driver;
use cuda_ipc_tests::driver::{Cuda, Fake, Inside};
use cuda_ipc_tests::memory::{Memory, POSIX_FD, STABLE};
use cuda_ipc_tests::pattern::{self, GRANULE};
use cuda_ipc_tests::random::Random;
use cuda_ipc_tests::snapshot::Snapshot;

use crate::board::{self, Board, GRANULES, Notice};

pub(crate) const ROLE: &str = "exporter";

/// What stands at the start of each granule, as little-endian words: this, the exporter's life, the granule's place, its generation. The pattern follows.
pub(crate) const MAGIC: u64 = 0x6d72_6f74_735f_7069;
/// Bytes of that.
pub(crate) const HEADER: usize = 32;
/// Memory is laid out in groups of three granules: two chunks, of one and of two, or one of three.
const GROUP: usize = 3;

/// The pattern's seed for the granules of one chunk.
pub(crate) fn seed(life: u64, generation: u64) -> u64 {
    life << 32 ^ generation
}

struct Storm {
    cuda: Cuda,
    life: u64,
    memory: Memory,
    notice: [u64; GRANULES],
    generation: u64,
}

pub(crate) fn run(me: &Inside) {
    let (number, life) = (board::number(board::NUMBER), board::number(board::LIFE));
    let board = Board::new();
    let cuda = Cuda::start();
    cuda.enter_primary(0);
    let core = driver::Cuda::open().unwrap();
    cuda_ipc_core::sys::ProcessLife::current().unwrap();
    let fake = Fake::find().unwrap();
    let before = Snapshot::take(&fake);
    let mut random = Random::new(life);

    let mut options = ExporterOptions::default();
    options.socket_dir = Some(board.sockets());
    options.sweep_interval = Some(Duration::from_millis(20));
    if number % 2 == 1 {
        options.fd_reserve = 1 << 40;
    }
    let exporter = Exporter::new(core, options).unwrap();
    board.add_nonce(exporter.nonce().0);
    // The same addresses in each life.
    let memory = Memory::reserve(cuda, GRANULES as u64 * GRANULE, STABLE + (number << 32)).unwrap();
    let mut storm = Storm { cuda, life, memory, notice: [0; GRANULES], generation: 0 };
    (0..GRANULES / GROUP).for_each(|group| storm.make(group, &mut random));
    let mut export: Option<Export> = None;
    while !board.is_over() {
        if export.is_some() {
            let group = usize::try_from(random.below((GRANULES / GROUP) as u64)).unwrap();
            match random.below(8) {
                // Nothing is exported for a moment: the broker ends, too.
                0 => drop(export.take()),
                told @ 1.. => {
                    if told < 5 {
                        exporter.retire(storm.address(group * GROUP), GROUP as u64 * GRANULE);
                    }
                    storm.free(group);
                    storm.make(group, &mut random);
                }
            }
            std::thread::sleep(Duration::from_micros(random.below(4000)));
        }
        let next = exporter.export(storm.memory.base(), GRANULES as u64 * GRANULE).unwrap();
        board.put(number, &Notice { life, rkey: next.rkey(), generations: storm.notice });
        export = Some(next);
        std::thread::sleep(Duration::from_micros(random.below(4000)));
    }
    drop((export, exporter, storm));
    before.assert_settles(&fake, "an exporter's storm");
    me.tell("over");
}

impl Storm {
    fn address(&self, granule: usize) -> u64 {
        self.memory.base() + granule as u64 * GRANULE
    }

    /// Fills a group with one chunk or with two.
    fn make(&mut self, group: usize, random: &mut Random) {
        let first = group * GROUP;
        let sizes: &[usize] = if random.below(3) == 0 { &[3] } else { &[1, 2] };
        let mut granule = first;
        for &size in sizes {
            self.generation += 1;
            let len = size as u64 * GRANULE;
            self.memory.map_types(granule as u64 * GRANULE, len, POSIX_FD).unwrap();
            for at in granule..granule + size {
                let words = [MAGIC, self.life, at as u64, self.generation];
                let mut bytes = pattern::granule(seed(self.life, self.generation), at as u64).to_vec();
                for (word, place) in words.iter().zip(bytes.as_chunks_mut::<8>().0) {
                    *place = word.to_le_bytes();
                }
                self.cuda.write(self.address(at), &bytes).unwrap();
                self.notice[at] = self.generation;
            }
            granule += size;
        }
    }

    fn free(&mut self, group: usize) {
        for granule in group * GROUP..(group + 1) * GROUP {
            let offset = granule as u64 * GRANULE;
            if self.memory.len_at(offset).is_some() {
                self.memory.unmap(offset).unwrap();
            }
        }
    }
}
