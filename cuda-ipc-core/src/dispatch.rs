//! Dispatch: which lane carries a piece of memory to another process of this machine, or the reason why none does.
//!
//! A pure function of what the driver says about the memory and of what is known about the device. The order is fixed: the legacy handle, which every
//! importer can open; POSIX fds, of chunks or of the pool; nothing. Memory that offers POSIX_FD and FABRIC goes by the fd: on one machine it always works.
//! Memory that offers FABRIC alone is left to the caller, whose transport may have a lane for it. Whether fabric handles work at all only a trial tells
//! (the device's attribute says yes on machines where every use is refused), so one is asked for once, and remembered by the caller of this.

use crate::reason::Cause;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const POSIX_FD: u64 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub const FABRIC: u64 = 8;

/// What the driver says about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// What is there.
    pub place: Place,
    /// Whether it is managed memory.
    pub managed: bool,
    /// Whether `cuIpcGetMemHandle` works on it.
    pub legacy: bool,
    /// The pool it was allocated from.
    pub pool: PoolKind,
    /// Bit mask of the handle types that its allocator asked for.
    pub handle_types: u64,
}

/// What is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Nothing that the driver knows: pageable host memory, or memory that was freed.
    Unknown,
    /// Room of a reservation in which nothing is mapped.
    Room,
    /// Host memory that the driver knows.
    Host,
    /// Memory of a device.
    Device,
}

/// Which pool memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// None.
    None,
    /// The device's default pool, which never has a handle type.
    Default,
    /// One that somebody has made.
    Made,
}

/// Whether a handle type works on a device, as a trial has told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trial {
    /// Nobody has tried yet.
    #[default]
    Untried,
    /// It works.
    Works,
    /// The driver refuses it, with this `CUresult`.
    Refused(u32),
}

/// What is known about the device and the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Means {
    /// Whether POSIX fds can be exported. Only a refusal counts: what was not tried yet is tried by the export itself.
    pub posix: Trial,
    /// Whether fabric handles can be exported.
    pub fabric: Trial,
    /// Whether the budget of fds has room for one more.
    pub fds_left: bool,
}

impl Default for Means {
    fn default() -> Self {
        Self { posix: Trial::Untried, fabric: Trial::Untried, fds_left: true }
    }
}

/// Where importers get the fd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FdFrom {
    /// The exporter holds it, for everybody to fetch.
    Held,
    /// The exporter makes one for each importer that asks its broker.
    OnDemand,
}

/// What carries the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A legacy IPC handle.
    Legacy,
    /// An fd for each physical chunk.
    Chunks(FdFrom),
    /// An fd of the pool, and export data of the pointer.
    Pool(FdFrom),
}

/// The answer of [`dispatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes by this lane.
    Goes(Lane),
    /// Export a fabric handle of it, remember on its device how that went ([`Means::fabric`]), and ask again.
    TryFabric,
    /// It goes by none.
    NoIpc(Cause),
}

/// Decides; see the module's documentation.
pub const fn dispatch(memory: &Memory, means: &Means) -> Verdict {
    if memory.managed {
        return Verdict::NoIpc(Cause::Managed);
    }
    match memory.place {
        Place::Unknown => return Verdict::NoIpc(Cause::NotDeviceMemory),
        Place::Room => return Verdict::NoIpc(Cause::Hole),
        Place::Host => return Verdict::NoIpc(Cause::HostMemory),
        Place::Device => {}
    }
    let pooled = !matches!(memory.pool, PoolKind::None);
    // A pool's pointer is never taken for legacy, whatever a driver says: its handle would be refused.
    if memory.legacy && !pooled {
        return Verdict::Goes(Lane::Legacy);
    }
    let offers_fabric = memory.handle_types & FABRIC != 0;
    if memory.handle_types & POSIX_FD != 0 {
        match means.posix {
            Trial::Untried | Trial::Works => {
                let from = fd_from(means.fds_left);
                return Verdict::Goes(if pooled { Lane::Pool(from) } else { Lane::Chunks(from) });
            }
            Trial::Refused(code) if !offers_fabric => return Verdict::NoIpc(Cause::PosixRefused { code }),
            Trial::Refused(_) => {}
        }
    }
    if offers_fabric {
        return match means.fabric {
            Trial::Untried => Verdict::TryFabric,
            Trial::Works => Verdict::NoIpc(Cause::FabricOnly),
            Trial::Refused(code) => Verdict::NoIpc(Cause::FabricRefused { code }),
        };
    }
    Verdict::NoIpc(match memory.pool {
        PoolKind::None => Cause::NoHandleType,
        PoolKind::Default => Cause::DefaultPool,
        PoolKind::Made => Cause::PoolWithoutHandle,
    })
}

/// Where importers get an fd, by the room that the budget has.
pub const fn fd_from(fds_left: bool) -> FdFrom {
    if fds_left { FdFrom::Held } else { FdFrom::OnDemand }
}
