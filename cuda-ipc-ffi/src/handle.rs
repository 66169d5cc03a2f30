//! Handles: what C holds instead of pointers.
//!
//! A handle is a number: {kind, place, generation}. The place says where the object is, the generation changes each time the place is given to another
//! object. So a handle that was released, made up, or of another kind is told from a good one, and a mistake of the caller's is an error and not a wild
//! pointer. 37 bits of generation come around after months of nothing else.

use crate::failure::Failure;
use crate::status::{CUDA_IPC_ERR_HANDLE, cuda_ipc_status_t};

const PLACE_BITS: u32 = 24;
const GENERATION_BITS: u32 = 37;
/// Places of each kind.
pub(crate) const PLACES: u32 = 1 << PLACE_BITS;
const GENERATIONS: u64 = 1 << GENERATION_BITS;

/// What a handle is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum Kind {
    Context = 1,
    Export = 2,
    Window = 3,
    Lease = 4,
}

/// A decoded handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Id {
    pub(crate) place: u32,
    pub(crate) generation: u64,
}

impl Id {
    pub(crate) const fn encode(self, kind: Kind) -> u64 {
        (kind as u64) << (PLACE_BITS + GENERATION_BITS) | (self.place as u64) << GENERATION_BITS | self.generation
    }

    /// Errors: `CUDA_IPC_ERR_HANDLE` for 0 and for another kind.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to 24 bits")]
    pub(crate) fn decode(handle: u64, kind: Kind) -> Result<Self, Failure> {
        if handle >> (PLACE_BITS + GENERATION_BITS) != kind as u64 {
            return Err(UNKNOWN);
        }
        Ok(Self { place: (handle >> GENERATION_BITS) as u32 & (PLACES - 1), generation: handle & (GENERATIONS - 1) })
    }
}

pub(crate) const UNKNOWN: Failure = Failure::plain(CUDA_IPC_ERR_HANDLE);

/// The status of a handle whose place is there, but holds something else.
pub(crate) const STALE: cuda_ipc_status_t = crate::status::CUDA_IPC_ERR_STALE_HANDLE;

#[cfg(test)]
mod tests {
    use super::{GENERATIONS, Id, Kind, PLACES};
    use crate::words::next_generation;

    #[test]
    fn handles_come_back_as_they_were() {
        for place in [0, 1, PLACES - 1] {
            for generation in [1, 2, GENERATIONS - 1] {
                let id = Id { place, generation };
                let handle = id.encode(Kind::Window);
                assert_eq!(Id::decode(handle, Kind::Window).ok(), Some(id));
                assert!(Id::decode(handle, Kind::Lease).is_err());
            }
        }
        assert!(Id::decode(0, Kind::Context).is_err());
        assert!(Id::decode(u64::MAX, Kind::Lease).is_err());
    }

    #[test]
    fn no_generation_is_zero() {
        assert_eq!(next_generation(GENERATIONS - 1), 1);
        assert_eq!(next_generation(0), 1);
    }
}
