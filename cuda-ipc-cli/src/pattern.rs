//! What the exporter writes and the importer expects: bytes that depend on the address they stand at, so that a chunk mapped at the wrong place, a chunk of
//! an earlier run or one that was never written cannot pass.

use core::fmt;

/// A pattern over all addresses of a process. Two seeds give patterns that have nothing in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    seed: u64,
}

/// A byte that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Where, as the exporter counts addresses.
    pub(crate) address: u64,
    /// What should stand there.
    pub(crate) expected: u8,
    /// What does.
    pub(crate) found: u8,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the byte at {:#x} is {:#04x}, written was {:#04x}", self.address, self.found, self.expected)
    }
}

impl Pattern {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The word at `address`, a multiple of 8: the output function of SplitMix64 over address and seed, which is one to one.
    const fn word(self, address: u64) -> u64 {
        let mut word = address.wrapping_add(self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    const fn byte(self, address: u64) -> u8 {
        self.word(address & !7).to_le_bytes()[(address & 7) as usize]
    }

    /// Writes the pattern of `[address, address + bytes.len())`.
    pub(crate) fn fill(self, address: u64, bytes: &mut [u8]) {
        let (head, body) = bytes.split_at_mut(head_len(address, bytes.len()));
        let (words, tail) = body.as_chunks_mut::<8>();
        let mut at = address;
        for byte in head {
            *byte = self.byte(at);
            at += 1;
        }
        for word in words {
            *word = self.word(at).to_le_bytes();
            at += 8;
        }
        for byte in tail {
            *byte = self.byte(at);
            at += 1;
        }
    }

    /// Compares every byte of `[address, address + bytes.len())` and returns the first that differs.
    pub(crate) fn first_difference(self, address: u64, bytes: &[u8]) -> Option<Difference> {
        let (head, body) = bytes.split_at(head_len(address, bytes.len()));
        let (words, tail) = body.as_chunks::<8>();
        let (words_at, tail_at) = (address + head.len() as u64, address + (head.len() + words.len() * 8) as u64);
        self.difference_in(address, head)
            .or_else(|| {
                let mut at = words_at;
                for word in words {
                    if u64::from_le_bytes(*word) != self.word(at) {
                        return self.difference_in(at, word);
                    }
                    at += 8;
                }
                None
            })
            .or_else(|| self.difference_in(tail_at, tail))
    }

    fn difference_in(self, address: u64, bytes: &[u8]) -> Option<Difference> {
        (address..).zip(bytes).find_map(|(address, &found)| {
            let expected = self.byte(address);
            (found != expected).then_some(Difference { address, expected, found })
        })
    }
}

/// Bytes before the first word boundary.
#[allow(clippy::cast_possible_truncation, reason = "below 8")]
fn head_len(address: u64, len: usize) -> usize {
    (address.wrapping_neg() & 7).min(len as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::{Difference, Pattern};

    const PATTERN: Pattern = Pattern::new(42);

    fn filled(address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        PATTERN.fill(address, &mut bytes);
        bytes
    }

    #[test]
    fn any_cut_of_a_range_gives_the_same_bytes() {
        let whole = filled(0x7000, 64);
        for start in 0..24 {
            for len in 0..40 {
                let address = 0x7000 + start as u64;
                assert_eq!(filled(address, len), whole[start..start + len], "{start}+{len}");
                assert_eq!(PATTERN.first_difference(address, &whole[start..start + len]), None);
            }
        }
    }

    #[test]
    fn every_single_wrong_byte_is_found() {
        for address in [0x7000, 0x7003] {
            let right = filled(address, 41);
            for at in 0..right.len() {
                let mut wrong = right.clone();
                wrong[at] ^= 0x10;
                let expected = Difference { address: address + at as u64, expected: right[at], found: wrong[at] };
                assert_eq!(PATTERN.first_difference(address, &wrong), Some(expected));
            }
        }
    }

    #[test]
    fn address_and_seed_both_count() {
        let here = filled(0x20_0000, 4096);
        assert!(PATTERN.first_difference(0x40_0000, &here).is_some(), "another chunk's bytes pass");
        assert!(Pattern::new(43).first_difference(0x20_0000, &here).is_some(), "another run's bytes pass");
        assert!(PATTERN.first_difference(0x20_0000, &[0; 4096]).is_some(), "fresh memory passes");
    }
}
