//! Which lane a piece of memory takes: asks the driver what [`crate::dispatch`] wants to know, makes the trials it asks for, and remembers them.

use super::{Exporter, Shared};
use crate::dispatch::{FABRIC, Lane, Memory, POSIX_FD, Place, PoolKind, Trial, Verdict, dispatch};
use crate::reason::Cause;
use crate::sys::driver::{DriverError, PointerFacts};

/// `CUDA_ERROR_NOT_PERMITTED` and `CUDA_ERROR_NOT_SUPPORTED`: what a driver answers that has no such handles.
const REFUSALS: [u32; 2] = [800, 801];

impl Exporter {
    /// What the driver says about `address`, and the lane that an export which begins there would take, or why it would take none.
    ///
    /// Publishes nothing. Errors: the driver did not answer. A whole range may still have a hole, or leave its reservation.
    pub fn probe(&self, address: u64) -> Result<(PointerFacts, Result<Lane, Cause>), DriverError> {
        if !self.shared.is_current() {
            return Ok((PointerFacts::default(), Err(Cause::Forked)));
        }
        let facts = self.shared.cuda.pointer_facts(address)?;
        Ok((facts, self.shared.lane(address, &facts)))
    }
}

impl Shared {
    /// The lane of the memory at `address`, which the driver has described so.
    pub(super) fn lane(&self, address: u64, facts: &PointerFacts) -> Result<Lane, Cause> {
        let mut memory = Memory {
            place: place(facts),
            managed: facts.managed,
            legacy: facts.legacy,
            pool: if facts.pool.is_some() { PoolKind::Made } else { PoolKind::None },
            handle_types: facts.handle_types,
        };
        // Only where it makes a difference: it is one more call.
        if let Some(pool) = facts.pool
            && facts.handle_types & (POSIX_FD | FABRIC) == 0
            && self.cuda.default_pool(facts.device) == Ok(pool)
        {
            memory.pool = PoolKind::Default;
        }
        let means = self.lock().means(facts.device);
        match dispatch(&memory, &means) {
            Verdict::Goes(lane) => Ok(lane),
            Verdict::NoIpc(cause) => Err(cause),
            Verdict::TryFabric => match self.try_fabric(address, facts) {
                // No answer about fabric handles: the caller's own lane for them finds out by itself.
                Trial::Untried => Err(Cause::FabricOnly),
                trial => {
                    let mut means = means;
                    means.fabric = trial;
                    self.lock().remember(facts.device, means);
                    match dispatch(&memory, &means) {
                        Verdict::Goes(lane) => Ok(lane),
                        Verdict::NoIpc(cause) => Err(cause),
                        Verdict::TryFabric => Err(Cause::FabricOnly),
                    }
                }
            },
        }
    }

    /// What a failed export of an fd means for the device's memory: a driver that has none of these handles says so each time, and is not asked again.
    pub(super) fn no_fd(&self, device: i32, error: DriverError) -> Cause {
        if REFUSALS.contains(&error.code) && self.cuda.claims_posix_fds(device) == Ok(false) {
            let mut state = self.lock();
            let mut means = state.means(device);
            means.posix = Trial::Refused(error.code);
            state.remember(device, means);
            return Cause::PosixRefused { code: error.code };
        }
        error.into()
    }

    fn try_fabric(&self, address: u64, facts: &PointerFacts) -> Trial {
        let tried = match facts.pool {
            Some(pool) => self.cuda.try_pool_fabric(pool),
            None => self.cuda.retain(address).and_then(|handle| {
                let tried = self.cuda.try_fabric(handle);
                self.cuda.release(handle).and(tried)
            }),
        };
        match tried {
            Ok(()) => Trial::Works,
            Err(error) if REFUSALS.contains(&error.code) => Trial::Refused(error.code),
            Err(_) => Trial::Untried,
        }
    }
}

const fn place(facts: &PointerFacts) -> Place {
    match facts {
        PointerFacts { buffer_id: 0, range_len: 0, .. } => Place::Unknown,
        PointerFacts { buffer_id: 0, .. } => Place::Room,
        PointerFacts { device_memory: true, .. } => Place::Device,
        _ => Place::Host,
    }
}
