//! Why a command did not succeed, as its user reads it.

use core::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// A command's failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// The arguments make no sense together.
    Usage(String),
    /// A step did not work.
    Step {
        /// What was being done.
        step: String,
        /// What came in the way, with the errno or CUresult, pid and address that the layers below report.
        cause: String,
        /// What more is known, a line each.
        notes: Vec<String>,
    },
}

impl Failure {
    /// The step that failed and why.
    pub(crate) fn new(step: impl Into<String>, cause: impl Display) -> Self {
        Self::Step { step: step.into(), cause: cause.to_string(), notes: Vec::new() }
    }

    /// Makes the failure of a step from its cause; for `map_err`.
    pub(crate) fn at<E: Display>(step: &str) -> impl Fn(E) -> Self + '_ {
        move |cause| Self::new(step, cause)
    }

    /// What was being done and what came in the way, without what more is known.
    pub(crate) fn first_line(&self) -> String {
        match self {
            Self::Usage(what) => what.clone(),
            Self::Step { step, cause, .. } => format!("{step}: {cause}"),
        }
    }

    /// Adds a line to what is known.
    pub(crate) fn note(mut self, line: impl Into<String>) -> Self {
        if let Self::Step { notes, .. } = &mut self {
            notes.push(line.into());
        }
        self
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(what) => f.write_str(what),
            Self::Step { step, cause, notes } => {
                write!(f, "{step}: {cause}")?;
                notes.iter().try_for_each(|line| write!(f, "\n  {line}"))
            }
        }
    }
}
