//! A cause that was found, as reports carry it.

use core::fmt;

use cuda_ipc_core::diagnosis::Diagnosis;
use cuda_ipc_core::importer::{ImportError, Witness};
use cuda_ipc_core::key::Key;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// What stands in the way, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    /// The cause's name, which never changes.
    pub(crate) cause: String,
    /// The fact, as a sentence.
    pub(crate) fact: String,
    /// What has to change, and where.
    pub(crate) remedy: String,
    /// Commands or settings that do it; alternatives.
    pub(crate) commands: Vec<String>,
    /// What would open the other way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) other_way: Option<String>,
}

impl From<Diagnosis> for Finding {
    fn from(diagnosis: Diagnosis) -> Self {
        let remedy = diagnosis.remedy();
        Self {
            cause: diagnosis.cause.name().to_owned(),
            fact: diagnosis.to_string(),
            remedy: remedy.text.to_owned(),
            commands: remedy.commands.iter().map(|command| (*command).to_owned()).collect(),
            other_way: diagnosis.other_way().map(str::to_owned),
        }
    }
}

impl Finding {
    /// The cause of a failed import; none where the error itself says all.
    pub(crate) fn of(error: &ImportError, key: &Key) -> Option<Self> {
        Witness::default().explain(error, key).map(Self::from)
    }

    /// One that this program found by itself.
    pub(crate) fn new(cause: &str, fact: impl Into<String>, remedy: &str, commands: &[&str]) -> Self {
        let commands = commands.iter().map(|command| (*command).to_owned()).collect();
        Self { cause: cause.to_owned(), fact: fact.into(), remedy: remedy.to_owned(), commands, other_way: None }
    }

    /// The lines below a failure.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!("cause: {}", self.fact), format!("remedy: {}", self.remedy)];
        lines.extend(self.commands.iter().map(|command| format!("    {command}")));
        lines.extend(self.other_way.clone());
        lines
    }
}

/// Adds what was found to the failure of a step.
pub(crate) fn explained(failure: Failure, error: &ImportError, key: &Key) -> Failure {
    let lines = Finding::of(error, key).map(|finding| finding.lines()).unwrap_or_default();
    lines.into_iter().fold(failure, Failure::note)
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.fact)
    }
}
