//! An importer in a storm: leases what notices promise and compares what it finds, until it is killed or all is over.

use core::time::Duration;

use cuda_ipc_cache::{Cache, CacheError, CacheErrorKind, CacheOptions};
use cuda_ipc_core::importer::{Deadline, ImportErrorKind};
use cuda_ipc_tests::driver::Inside;
use cuda_ipc_tests::importer::{self as harness, key};
use cuda_ipc_tests::pattern::{self, GRANULE};
use cuda_ipc_tests::random::Random;
use cuda_ipc_tests::snapshot::{Snapshot, wait_until};

use crate::EACH;
use crate::board::{self, Board, GRANULES, Notice};
use crate::exporter::{HEADER, MAGIC, seed};

pub(crate) const ROLE: &str = "importer";
/// Leases of one cache.
const ROUNDS: u64 = 150;

pub(crate) fn run(me: &Inside) {
    let denied = board::number(board::NUMBER) % 2 == 1;
    let board = Board::new();
    let importer = harness::Importer::start();
    cuda_ipc_core::sys::ProcessLife::current().unwrap();
    let before = Snapshot::take(&importer.fake);
    let mut random = Random::new(board::number(board::LIFE));
    while !board.is_over() {
        let mut options = CacheOptions::default();
        options.keep_idle = random.below(4) != 0;
        options.max_mapped_bytes = [1 << 40, 20 * GRANULE, 4 * GRANULE][usize::try_from(random.below(3)).unwrap()];
        options.first_backoff = Duration::from_millis(2);
        options.last_backoff = Duration::from_millis(20);
        let cache = Cache::new(importer.core, options);
        for _ in 0..ROUNDS {
            let Some(notice) = board.get(random.below(EACH as u64)) else { continue };
            match use_it(&importer, &cache, &notice, &mut random) {
                Ok(()) => board.tally(if denied { "leases of the broker" } else { "leases of pidfd" }),
                Err(error) => board.tally(&format!("refused, {}", name(&error))),
            }
            if board.is_over() {
                break;
            }
        }
        drop(cache);
        before.assert_settles(&importer.fake, "the end of a cache in the storm");
        board.tally("caches closed");
    }
    me.tell("over");
}

/// Leases a part of what a notice promises, and looks at it.
fn use_it(importer: &harness::Importer, cache: &Cache, notice: &Notice, random: &mut Random) -> Result<(), CacheError> {
    let first = usize::try_from(random.below(GRANULES as u64)).unwrap();
    let count = 1 + usize::try_from(random.below((GRANULES - first) as u64)).unwrap();
    let deadline = Deadline::after(Duration::from_secs(20));
    let window = cache.window(&key(&notice.rkey), 0, false, deadline)?;
    let lease = window.lease(notice.rkey.base + first as u64 * GRANULE, count as u64 * GRANULE, deadline)?;
    // All of it is compared now and then, else the beginning of each granule.
    let len = if random.below(8) == 0 { usize::try_from(GRANULE).unwrap() } else { 4096 };
    let mut found = vec![0; len];
    for at in 0..count {
        let granule = first + at;
        importer.cuda.read(&mut found, lease.address() + at as u64 * GRANULE).unwrap();
        let word = |number: usize| u64::from_le_bytes(found[8 * number..8 * number + 8].try_into().unwrap());
        let (magic, life, place, generation) = (word(0), word(1), word(2), word(3));
        let told = notice.generations[granule];
        assert_eq!((magic, life, place), (MAGIC, notice.life, granule as u64), "bytes of somebody else, {notice:?}");
        assert!(generation >= told, "granule {granule} is of generation {generation}, and {told} was there before the lease");
        let expected = &pattern::granule(seed(life, generation), granule as u64)[HEADER..len];
        assert!(found[HEADER..] == *expected, "wrong bytes in granule {granule} of life {life}, generation {generation}");
    }
    Ok(())
}

/// The fact that an error names; panics if it is not one that a storm explains.
fn name(error: &CacheError) -> String {
    match error.kind {
        CacheErrorKind::NoChunk => "no chunk".to_owned(),
        CacheErrorKind::KeptChanging => "kept changing".to_owned(),
        CacheErrorKind::Closed => "closed".to_owned(),
        CacheErrorKind::Import(_) | CacheErrorKind::Refused(_) => {
            let import = error.import().unwrap();
            assert_eq!(import.stuck_bytes, 0, "{error}");
            match import.kind {
                ImportErrorKind::Driver(_) | ImportErrorKind::DeadlineOver | ImportErrorKind::Table(_) | ImportErrorKind::NotATable(_) => {
                    // Only a life that is over explains these: somebody else may have its pid, and nobody answers for it.
                    assert!(wait_until(Duration::from_secs(5), || is_gone(error.pid)), "{error}");
                    "life over".to_owned()
                }
                ImportErrorKind::Lookup(_) => "no chunk".to_owned(),
                ImportErrorKind::Retired => "retired".to_owned(),
                ImportErrorKind::ExporterGone => "exporter gone".to_owned(),
                ImportErrorKind::Pidfd(_) => "pidfd".to_owned(),
                ImportErrorKind::Broker(_) | ImportErrorKind::NoRoute { .. } => "broker".to_owned(),
                _ => panic!("{error}"),
            }
        }
        _ => panic!("{error}"),
    }
}

/// Whether no process of this pid lives, or not any more.
fn is_gone(pid: u32) -> bool {
    pidfd_sys::process_stat(pid).map_or(true, |stat| stat.state == b'Z')
}
