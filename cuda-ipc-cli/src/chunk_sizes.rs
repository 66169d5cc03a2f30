//! Which chunks a range is made of, and which part of it is shared.

use core::ops::Range;

use cuda_ipc_core::table::GRANULE;

use crate::size;

/// PyTorch's expandable segments: 2 MiB chunks for small blocks, 20 MiB chunks for large ones.
const SMALL: u64 = GRANULE;
const LARGE: u64 = 10 * GRANULE;

/// Sizes of `count` chunks: small and large in turn.
pub(crate) fn mixed(count: u32) -> Vec<u64> {
    (0..count).map(|at| if at % 2 == 0 { SMALL } else { LARGE }).collect()
}

/// Sizes of `count` chunks, at least `total` bytes together: small ones in turn with larger ones that share the rest.
///
/// Errors: `total` is too little for that many chunks.
pub(crate) fn with_total(count: u32, total: u64) -> Result<Vec<u64>, String> {
    let granules = total.div_ceil(GRANULE);
    if granules < u64::from(count) {
        let least = size::human(u64::from(count) * GRANULE);
        return Err(format!(
            "{} is too little for {count} chunks: each has at least {}, together {least}",
            size::human(total),
            size::human(GRANULE)
        ));
    }
    // The larger ones stand at odd places; a single chunk is the larger one.
    let larger = u64::from(count / 2).max(1);
    let shared = granules - (u64::from(count) - larger);
    let (each, more) = (shared / larger, shared % larger);
    let mut next = 0;
    let sizes = (0..count).map(|at| {
        if count > 1 && at % 2 == 0 {
            return SMALL;
        }
        next += 1;
        (each + u64::from(next <= more)) * GRANULE
    });
    Ok(sizes.collect())
}

/// The part of chunks of these sizes that is shared, as offsets: it starts inside the first and ends inside the last (of one chunk: inside that).
pub(crate) fn inner_range(sizes: &[u64]) -> Range<u64> {
    // No multiple of a page on either side, so that neither end falls together with anything the driver knows.
    const FRONT: u64 = 4096 + 256;
    const BACK: u64 = 4096 + 512;
    FRONT..sizes.iter().sum::<u64>().saturating_sub(BACK)
}

#[cfg(test)]
mod tests {
    use super::{GRANULE, LARGE, SMALL, inner_range, mixed, with_total};

    #[test]
    fn sizes_alternate() {
        assert_eq!(mixed(1), [SMALL]);
        assert_eq!(mixed(5), [SMALL, LARGE, SMALL, LARGE, SMALL]);
    }

    #[test]
    fn a_total_is_met_with_the_number_of_chunks_asked_for() {
        for count in 1..60 {
            for granules in u64::from(count)..200 {
                let sizes = with_total(count, granules * GRANULE - 1).expect("enough");
                assert_eq!(sizes.len(), count as usize);
                assert_eq!(sizes.iter().sum::<u64>(), granules * GRANULE, "{count} chunks");
                assert!(sizes.iter().all(|size| *size >= GRANULE && size.is_multiple_of(GRANULE)));
            }
        }
    }

    #[test]
    fn too_small_a_total_is_refused() {
        assert!(with_total(26, 25 * GRANULE).is_err());
        assert!(with_total(1, 0).is_err());
    }

    #[test]
    fn the_range_begins_and_ends_inside_chunks() {
        for count in [1, 2, 26] {
            let sizes = mixed(count);
            let (range, total) = (inner_range(&sizes), sizes.iter().sum::<u64>());
            assert!(range.start > 0 && range.start < sizes[0]);
            assert!(range.end < total && range.end > total - sizes[sizes.len() - 1]);
        }
    }
}
