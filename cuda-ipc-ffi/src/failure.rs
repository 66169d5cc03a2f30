//! A failed call: its status, and the fact behind it as the layers below tell it. Formatted only if somebody asks.

use core::fmt;

use cuda_ipc_cache::{CacheError, CacheErrorKind};
use cuda_ipc_core::importer::{BrokerError, ImportError, ImportErrorKind, PidfdRefusal};
use cuda_ipc_core::key::KeyError;
use cuda_ipc_core::reason::{Cause, NoIpc};
use cuda_ipc_core::rkey::RkeyError;
use cuda_ipc_core::sys::SyscallError;
use cuda_ipc_core::sys::driver::{DriverError, OpenError};
use cuda_ipc_core::table::LookupError;
use pidfd_sys::Errno;

use crate::status::*;

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub(crate) status: cuda_ipc_status_t,
    pub(crate) fact: Fact,
}

/// What is known beyond the status.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fact {
    /// Nothing.
    None,
    /// The parameter, field or variable that it is about.
    About(&'static str),
    Cache(CacheError),
    NoIpc(NoIpc),
    Key(KeyError),
    Rkey(RkeyError),
    Open(OpenError),
    Driver(DriverError),
    System(SyscallError),
}

impl Failure {
    pub(crate) const fn plain(status: cuda_ipc_status_t) -> Self {
        Self { status, fact: Fact::None }
    }

    pub(crate) const fn about(status: cuda_ipc_status_t, what: &'static str) -> Self {
        Self { status, fact: Fact::About(what) }
    }

    /// The system call's errno, if that is what failed; otherwise 0.
    pub(crate) fn errno(&self) -> i32 {
        match self.fact {
            Fact::System(error) => error.errno,
            Fact::NoIpc(NoIpc { cause: Cause::Table { errno, .. }, .. }) => errno,
            Fact::Cache(error) => import_error(&error).map_or(0, |error| errno_of(&error)),
            _ => 0,
        }
    }

    /// The `CUresult` of the driver call, if that is what failed; otherwise 0.
    pub(crate) fn cuda_result(&self) -> u32 {
        match self.fact {
            Fact::Driver(error) | Fact::Open(OpenError::Init(error)) => error.code,
            Fact::NoIpc(NoIpc {
                cause: Cause::Driver { code, .. } | Cause::FabricRefused { code } | Cause::PosixRefused { code }, ..
            }) => code,
            Fact::Cache(CacheError { kind: CacheErrorKind::Driver(error), .. }) => error.code,
            Fact::Cache(error) => match import_error(&error).map(|error| error.kind) {
                Some(ImportErrorKind::Driver(error)) => error.code,
                Some(ImportErrorKind::Broker(BrokerError::Export { code })) => code,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// The exporter's pid in its own PID namespace; 0 if it is about none.
    pub(crate) fn pid(&self) -> u32 {
        if let Fact::Cache(error) = self.fact { error.pid } else { 0 }
    }

    /// The address that it is about; 0 if it is about none.
    pub(crate) fn address(&self) -> u64 {
        match self.fact {
            Fact::Cache(error) => import_error(&error).map_or(error.address, |error| error.address),
            Fact::NoIpc(reason) => reason.address,
            _ => 0,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = text(self.status).to_str().unwrap_or_default();
        match &self.fact {
            Fact::None => f.write_str(status),
            Fact::About(what) => write!(f, "{what}: {status}"),
            Fact::Cache(error) => error.fmt(f),
            Fact::NoIpc(reason) => reason.fmt(f),
            Fact::Key(error) => error.fmt(f),
            Fact::Rkey(error) => error.fmt(f),
            Fact::Open(error) => error.fmt(f),
            Fact::Driver(error) => error.fmt(f),
            Fact::System(error) => error.fmt(f),
        }
    }
}

fn import_error(error: &CacheError) -> Option<ImportError> {
    match error.kind {
        CacheErrorKind::Import(error) | CacheErrorKind::Refused(error) => Some(error),
        _ => None,
    }
}

fn errno_of(error: &ImportError) -> i32 {
    match error.kind {
        ImportErrorKind::Pidfd(error) => error.errno.0,
        ImportErrorKind::Syscall(error) | ImportErrorKind::Broker(BrokerError::Syscall(error)) => error.errno,
        ImportErrorKind::NoRoute { pidfd: PidfdRefusal::Call(error), .. } => error.errno.0,
        _ => 0,
    }
}

fn of_errno(errno: i32) -> cuda_ipc_status_t {
    match Errno(errno) {
        Errno::EMFILE | Errno::ENFILE => CUDA_IPC_ERR_TOO_MANY_FILES,
        Errno::ENOMEM => CUDA_IPC_ERR_NO_MEMORY,
        _ => CUDA_IPC_ERR_SYSTEM,
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        let status = match error.kind {
            CacheErrorKind::OutsideWindow => CUDA_IPC_ERR_RANGE,
            CacheErrorKind::NoChunk => CUDA_IPC_ERR_NO_CHUNK,
            CacheErrorKind::Busy | CacheErrorKind::DeadlineOver => CUDA_IPC_WOULD_BLOCK,
            CacheErrorKind::KeptChanging => CUDA_IPC_ERR_KEPT_CHANGING,
            CacheErrorKind::TooManyLeases => CUDA_IPC_ERR_TOO_MANY_LEASES,
            CacheErrorKind::Import(error) => of_import(&error),
            CacheErrorKind::Refused(_) => CUDA_IPC_ERR_REFUSED_BEFORE,
            CacheErrorKind::AddressSpace { .. } => CUDA_IPC_ERR_ADDRESS_SPACE,
            CacheErrorKind::Driver(_) => CUDA_IPC_ERR_DRIVER,
            CacheErrorKind::Device(_) => CUDA_IPC_ERR_ARGUMENT,
            CacheErrorKind::NoIpc => CUDA_IPC_ERR_NO_IPC,
            CacheErrorKind::Closed => CUDA_IPC_ERR_WINDOW_CLOSED,
            CacheErrorKind::Forked => CUDA_IPC_ERR_FORKED,
            _ => CUDA_IPC_ERR_IMPORT,
        };
        Self { status, fact: Fact::Cache(error) }
    }
}

fn of_import(error: &ImportError) -> cuda_ipc_status_t {
    match error.kind {
        ImportErrorKind::OtherHost => CUDA_IPC_ERR_OTHER_HOST,
        ImportErrorKind::OtherPidNamespace { .. } => CUDA_IPC_ERR_OTHER_PID_NAMESPACE,
        ImportErrorKind::KeyKind => CUDA_IPC_ERR_HANDLE_TYPE,
        ImportErrorKind::OutsideReservation => CUDA_IPC_ERR_RANGE,
        ImportErrorKind::Pidfd(refused) => match refused.errno {
            Errno::EPERM | Errno::EACCES => CUDA_IPC_ERR_PERMISSION,
            Errno::ENOSYS => CUDA_IPC_ERR_NO_PIDFD,
            // Nobody has the number, or the fd of the table: it is not the process that made the key.
            Errno::ESRCH | Errno::EBADF => CUDA_IPC_ERR_OTHER_PROCESS,
            errno => of_errno(errno.0),
        },
        ImportErrorKind::ExporterGone => CUDA_IPC_ERR_EXPORTER_GONE,
        ImportErrorKind::NotATable(_) | ImportErrorKind::Table(_) => CUDA_IPC_ERR_OTHER_PROCESS,
        ImportErrorKind::Lookup(LookupError::NoChunk(_)) => CUDA_IPC_ERR_NO_CHUNK,
        ImportErrorKind::Lookup(LookupError::Unsettled) | ImportErrorKind::Retired => CUDA_IPC_ERR_KEPT_CHANGING,
        ImportErrorKind::Lookup(_) => CUDA_IPC_ERR_TABLE,
        ImportErrorKind::NoFd => CUDA_IPC_ERR_BROKER,
        ImportErrorKind::Broker(BrokerError::DeadlineOver)
        | ImportErrorKind::NoRoute { broker: BrokerError::DeadlineOver, .. }
        | ImportErrorKind::DeadlineOver => CUDA_IPC_WOULD_BLOCK,
        ImportErrorKind::Broker(BrokerError::Syscall(error)) => of_errno(error.errno),
        ImportErrorKind::Broker(broker) | ImportErrorKind::NoRoute { broker, .. } if broker.retryable() => CUDA_IPC_ERR_BROKER_BUSY,
        ImportErrorKind::Broker(_) => CUDA_IPC_ERR_BROKER,
        ImportErrorKind::NoRoute { .. } => CUDA_IPC_ERR_NO_ROUTE,
        ImportErrorKind::Driver(_) => CUDA_IPC_ERR_DRIVER,
        ImportErrorKind::DeviceNotVisible { .. } => CUDA_IPC_ERR_DEVICE_NOT_VISIBLE,
        ImportErrorKind::TooShort { .. } => CUDA_IPC_ERR_TOO_SHORT,
        ImportErrorKind::NoPeerAccess { .. } => CUDA_IPC_ERR_NO_PEER_ACCESS,
        ImportErrorKind::Forked => CUDA_IPC_ERR_FORKED,
        ImportErrorKind::Syscall(error) => of_errno(error.errno),
        _ => CUDA_IPC_ERR_IMPORT,
    }
}

impl From<NoIpc> for Failure {
    fn from(reason: NoIpc) -> Self {
        let status = match reason.cause {
            Cause::EmptyRange => CUDA_IPC_ERR_RANGE,
            Cause::NotDeviceMemory => CUDA_IPC_REASON_NOT_DEVICE_MEMORY,
            Cause::HostMemory => CUDA_IPC_REASON_HOST_MEMORY,
            Cause::FabricRefused { .. } => CUDA_IPC_REASON_FABRIC_REFUSED,
            Cause::PosixRefused { .. } => CUDA_IPC_REASON_POSIX_REFUSED,
            Cause::DefaultPool => CUDA_IPC_REASON_DEFAULT_POOL,
            Cause::LeavesAllocation { .. } => CUDA_IPC_REASON_LEAVES_ALLOCATION,
            Cause::Managed => CUDA_IPC_REASON_MANAGED,
            Cause::Legacy => CUDA_IPC_REASON_LEGACY,
            Cause::NoHandleType => CUDA_IPC_REASON_NO_HANDLE_TYPE,
            Cause::FabricOnly => CUDA_IPC_REASON_FABRIC_ONLY,
            Cause::PoolWithoutHandle => CUDA_IPC_REASON_POOL_WITHOUT_HANDLE,
            Cause::PosixPool => CUDA_IPC_REASON_POSIX_POOL,
            Cause::Hole => CUDA_IPC_REASON_HOLE,
            Cause::LeavesReservation { .. } => CUDA_IPC_REASON_LEAVES_RESERVATION,
            Cause::SeveralDevices => CUDA_IPC_REASON_SEVERAL_DEVICES,
            Cause::Unaligned { .. } => CUDA_IPC_REASON_UNALIGNED,
            Cause::KeptChanging => CUDA_IPC_REASON_KEPT_CHANGING,
            Cause::TableFull => CUDA_IPC_REASON_TABLE_FULL,
            Cause::TooManyFiles { .. } => CUDA_IPC_REASON_TOO_MANY_FILES,
            Cause::Table { .. } => CUDA_IPC_REASON_NO_TABLE,
            Cause::Driver { .. } => CUDA_IPC_REASON_DRIVER,
            Cause::Forked => CUDA_IPC_ERR_FORKED,
            _ => CUDA_IPC_REASON_OTHER,
        };
        Self { status, fact: Fact::NoIpc(reason) }
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        let status = match error {
            KeyError::Version(_) => CUDA_IPC_ERR_KEY_VERSION,
            KeyError::Kind(_) => CUDA_IPC_ERR_HANDLE_TYPE,
            _ => CUDA_IPC_ERR_KEY,
        };
        Self { status, fact: Fact::Key(error) }
    }
}

impl From<RkeyError> for Failure {
    fn from(error: RkeyError) -> Self {
        let status = match error {
            RkeyError::Version(_) => CUDA_IPC_ERR_KEY_VERSION,
            RkeyError::HandleType(_) => CUDA_IPC_ERR_HANDLE_TYPE,
            RkeyError::Key(error) => Self::from(error).status,
            _ => CUDA_IPC_ERR_KEY,
        };
        Self { status, fact: Fact::Rkey(error) }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        let status = if matches!(error, OpenError::Init(_)) { CUDA_IPC_ERR_DRIVER_INIT } else { CUDA_IPC_ERR_NO_DRIVER };
        Self { status, fact: Fact::Open(error) }
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self { status: CUDA_IPC_ERR_DRIVER, fact: Fact::Driver(error) }
    }
}

impl From<SyscallError> for Failure {
    fn from(error: SyscallError) -> Self {
        Self { status: of_errno(error.errno), fact: Fact::System(error) }
    }
}
