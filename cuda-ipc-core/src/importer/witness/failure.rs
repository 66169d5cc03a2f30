//! Errors of an import as a diagnosis takes them.

use pidfd_sys::{Errno, Step};

use crate::broker::Refusal;
use crate::diagnosis::{BrokerFailure, Call, Failure};
use crate::importer::{BrokerError, ImportErrorKind, PidfdRefusal};

/// The failure, and what the broker did not do if it was asked after it. `None`: nothing but the error itself is to be said.
pub(super) fn of(kind: &ImportErrorKind) -> Option<(Failure, Option<BrokerFailure>)> {
    let alone = |failure| Some((failure, None));
    match *kind {
        ImportErrorKind::Pidfd(error) => alone(of_call(error)),
        ImportErrorKind::OtherPidNamespace { .. } => alone(Failure::OtherPidNamespace),
        ImportErrorKind::NoRoute { pidfd, broker } => Some((of_refusal(pidfd), Some(of_broker(broker)))),
        ImportErrorKind::Broker(BrokerError::Syscall(error)) => alone(Failure::OwnCall(error.errno)),
        ImportErrorKind::Broker(BrokerError::DeadlineOver | BrokerError::Closed | BrokerError::Busy { errno: 0 }) => None,
        ImportErrorKind::Broker(error) => alone(Failure::Broker(of_broker(error))),
        ImportErrorKind::ExporterGone => alone(Failure::Ended),
        ImportErrorKind::NotATable(_) | ImportErrorKind::Table(_) => alone(Failure::NotTheExporter),
        ImportErrorKind::Driver(error) => alone(Failure::Driver(error.code)),
        ImportErrorKind::Syscall(error) => alone(Failure::OwnCall(error.errno)),
        _ => None,
    }
}

const fn of_call(error: pidfd_sys::Error) -> Failure {
    match error.step {
        Step::PidfdOpen => Failure::Call(Call::PidfdOpen, error.errno.0),
        Step::PidfdGetfd => Failure::Call(Call::PidfdGetfd, error.errno.0),
        _ => Failure::OwnCall(error.errno.0),
    }
}

const fn of_refusal(refusal: PidfdRefusal) -> Failure {
    match refusal {
        PidfdRefusal::Call(error) => of_call(error),
        PidfdRefusal::OtherPidNamespace { .. } => Failure::OtherPidNamespace,
    }
}

const fn of_broker(error: BrokerError) -> BrokerFailure {
    match error {
        BrokerError::NoListener { socket_dir, .. } => BrokerFailure::NoListener { socket_dir: socket_dir.is_some() },
        BrokerError::OtherUser { .. } | BrokerError::Refused(Refusal::Uid(_)) => BrokerFailure::OtherUser,
        BrokerError::UnmappedUser { .. } | BrokerError::Refused(Refusal::UnmappedUid(_)) => BrokerFailure::UnmappedUser,
        BrokerError::Refused(Refusal::Resources(errno)) | BrokerError::Busy { errno } if is_out_of_files(errno.cast_signed()) => {
            BrokerFailure::OutOfFiles(errno.cast_signed())
        }
        BrokerError::Syscall(error) if is_out_of_files(error.errno) => BrokerFailure::OutOfFiles(error.errno),
        _ => BrokerFailure::Other,
    }
}

const fn is_out_of_files(errno: i32) -> bool {
    matches!(Errno(errno), Errno::EMFILE | Errno::ENFILE)
}
