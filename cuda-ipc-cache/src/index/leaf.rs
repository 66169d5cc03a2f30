//! A leaf of the interval index: some ranges in order of start, never changed once made.

use std::sync::Arc;

/// A range and its value.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) start: u64,
    pub(super) end: u64,
    /// When it was inserted, as a count.
    pub(super) age: u64,
    pub(super) value: Arc<T>,
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        Self { start: self.start, end: self.end, age: self.age, value: self.value.clone() }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Leaf<T> {
    entries: Vec<Entry<T>>,
    /// First addresses, ascending, apart from the rest so that a search touches little memory.
    starts: Vec<u64>,
    /// Largest end of all entries up to and including each.
    reach: Vec<u64>,
}

impl<T> Leaf<T> {
    /// Of entries that are in order of start; at least one.
    pub(super) fn new(entries: Vec<Entry<T>>) -> Self {
        Self {
            starts: entries.iter().map(|entry| entry.start).collect(),
            reach: running_max(entries.iter().map(|entry| entry.end)),
            entries,
        }
    }

    /// This leaf with one more entry, as two if it has more than `full` then.
    pub(super) fn with(&self, entry: Entry<T>, full: usize) -> Vec<Self> {
        let at = self.starts.partition_point(|&start| start <= entry.start);
        let mut entries = self.entries.clone();
        entries.insert(at, entry);
        if entries.len() <= full {
            return vec![Self::new(entries)];
        }
        let upper = entries.split_off(entries.len() / 2);
        vec![Self::new(entries), Self::new(upper)]
    }

    /// The leaf without the entries that `keep` says `false` of; itself if it keeps all, `None` if it keeps none.
    pub(super) fn keep(leaf: &Arc<Self>, mut keep: impl FnMut(&Entry<T>) -> bool) -> Option<Arc<Self>> {
        let kept: Vec<&Entry<T>> = leaf.entries.iter().filter(|entry| keep(entry)).collect();
        match kept.len() {
            0 => None,
            all if all == leaf.entries.len() => Some(leaf.clone()),
            _ => Some(Arc::new(Self::new(kept.into_iter().cloned().collect()))),
        }
    }

    /// The newest of `newest` and of the entries here that cover `[address, end)`.
    #[inline]
    pub(super) fn newest<'l>(&'l self, address: u64, end: u64, mut newest: Option<&'l Entry<T>>) -> Option<&'l Entry<T>> {
        let upto = self.starts.partition_point(|&start| start <= address);
        let candidates = self.entries.get(..upto).unwrap_or_default().iter().zip(&self.reach).rev();
        for (entry, &reach) in candidates {
            if reach < end {
                break;
            }
            if entry.end >= end && newest.is_none_or(|found| found.age < entry.age) {
                newest = Some(entry);
            }
        }
        newest
    }

    /// Where its first range starts.
    pub(super) fn start(&self) -> u64 {
        self.starts.first().copied().unwrap_or(0)
    }

    /// The largest end of its ranges.
    pub(super) fn end(&self) -> u64 {
        self.reach.last().copied().unwrap_or(0)
    }

    /// Whether a range that starts at `start` could be one of these.
    pub(super) fn may_hold(&self, start: u64) -> bool {
        self.start() <= start && self.starts.last().is_some_and(|&last| start <= last)
    }

    pub(super) fn entries(&self) -> &[Entry<T>] {
        &self.entries
    }
}

/// For each of `ends` the largest up to there.
pub(super) fn running_max(ends: impl Iterator<Item = u64>) -> Vec<u64> {
    ends.scan(0, |reach, end| {
        *reach = end.max(*reach);
        Some(*reach)
    })
    .collect()
}
