//! What failed and with which errno; never why, and never what to do about it.

use crate::Errno;
use core::fmt;

/// The call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// pidfd_open(2).
    PidfdOpen,
    /// pidfd_getfd(2).
    PidfdGetfd,
    /// poll(2) on a pidfd.
    PidfdPoll,
    /// prctl(2) with `PR_SET_PTRACER`.
    SetPtracer,
    /// Reading `/proc/PID/stat`.
    ReadStat,
    /// stat(2) of a file in `/proc/PID/ns`.
    ReadNamespace,
    /// Reading `/proc/sys/kernel/random/boot_id`.
    ReadBootId,
}

impl Step {
    /// Returns the text that `Display` prints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PidfdOpen => "pidfd_open",
            Self::PidfdGetfd => "pidfd_getfd",
            Self::PidfdPoll => "poll(pidfd)",
            Self::SetPtracer => "prctl(PR_SET_PTRACER)",
            Self::ReadStat => "read(/proc/PID/stat)",
            Self::ReadNamespace => "stat(/proc/PID/ns)",
            Self::ReadBootId => "read(/proc/sys/kernel/random/boot_id)",
        }
    }

    /// Makes the error of this step.
    pub(crate) const fn failed(self, errno: Errno) -> Error {
        Error { step: self, errno }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A failed call: which one, and the errno it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Error {
    /// The call that failed.
    pub step: Step,
    /// Its errno, unchanged.
    pub errno: Errno,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.errno)
    }
}

impl core::error::Error for Error {}
