//! What may happen.

use proptest::prelude::*;

/// Granules of a reservation.
pub(super) const GRANULES: u64 = 8;
/// Exporting processes at a time.
pub(super) const PEERS: usize = 2;
/// Reservations of each.
pub(super) const SPACES: usize = 2;

/// Settings of a cache. Its thread is off, so that what happens when is the sequence's to say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) keep_idle: bool,
    /// In granules.
    pub(super) max_mapped: u64,
    pub(super) max_windows: u64,
}

/// How a chunk's end becomes known.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    Retire,
    Release,
    Sweep,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A chunk is made, where there is room for it, and exported.
    Map {
        space: usize,
        granule: u64,
        granules: u64,
    },
    /// One of the chunks there are, counted round, ends.
    Free {
        pick: usize,
        how: How,
    },
    /// So does this one, and another begins at its address.
    Replace {
        pick: usize,
        granules: u64,
        how: How,
    },
    /// A lease is taken, with all that are held given as held.
    Lease {
        space: usize,
        granule: u64,
        granules: u64,
        skew: u64,
        writable: bool,
    },
    /// One of the leases held, counted round, ends.
    End {
        pick: usize,
    },
    Trim,
    Purge {
        peer: usize,
    },
    /// An exporter is killed, and another one comes.
    Kill {
        peer: usize,
    },
    /// The importer forgets its windows of a space.
    Forget {
        space: usize,
    },
    /// A second device is to have access.
    Device {
        space: usize,
    },
    /// The next lease, end or trim meets a driver that fails like this.
    Fault {
        rule: &'static str,
    },
}

/// Faults that one step meets.
const RULES: &[&str] =
    &["cuMemMap#1=2", "cuMemImportFromShareableHandle#2=999", "cuMemSetAccess#1=2", "cuMemUnmap#*=999", "cuMemAddressReserve#*=2"];

fn how() -> impl Strategy<Value = How> {
    prop_oneof![Just(How::Retire), Just(How::Release), Just(How::Sweep)]
}

fn step() -> impl Strategy<Value = Step> {
    let space = || 0..PEERS * SPACES;
    let pick = || 0_usize..64;
    prop_oneof![
        8 => (space(), 0..GRANULES, 1_u64..5).prop_map(|(space, granule, granules)| Step::Map { space, granule, granules }),
        3 => (pick(), how()).prop_map(|(pick, how)| Step::Free { pick, how }),
        4 => (pick(), 1_u64..5, how()).prop_map(|(pick, granules, how)| Step::Replace { pick, granules, how }),
        14 => (space(), 0..GRANULES, 1_u64..6, 0_u64..3, proptest::bool::weighted(0.2))
            .prop_map(|(space, granule, granules, skew, writable)| Step::Lease { space, granule, granules, skew, writable }),
        8 => pick().prop_map(|pick| Step::End { pick }),
        2 => Just(Step::Trim),
        1 => (0..PEERS).prop_map(|peer| Step::Purge { peer }),
        1 => (0..PEERS).prop_map(|peer| Step::Kill { peer }),
        1 => space().prop_map(|space| Step::Forget { space }),
        1 => space().prop_map(|space| Step::Device { space }),
        2 => proptest::sample::select(RULES).prop_map(|rule| Step::Fault { rule }),
    ]
}

/// A cache's settings and what happens to it.
pub(super) fn sequence() -> impl Strategy<Value = (Settings, Vec<Step>)> {
    let settings =
        (proptest::bool::weighted(0.75), prop_oneof![2 => 2_u64..12, 1 => Just(1000)], prop_oneof![2 => 1_u64..5, 1 => Just(1000)])
            .prop_map(|(keep_idle, max_mapped, max_windows)| Settings { keep_idle, max_mapped, max_windows });
    (settings, proptest::collection::vec(step(), 1..60))
}
