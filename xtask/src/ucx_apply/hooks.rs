//! Reads the table of hooks, `ucx/hooks.txt`, which says itself how it is written.

use crate::workspace::Failure;

/// One place of UCX and what happens there.
#[derive(Clone, Debug)]
pub(super) struct Hook {
    /// Path in the tree.
    pub(super) file: String,
    /// Function or table; none for the whole file.
    pub(super) scope: Option<String>,
    /// None for all of them.
    releases: Option<Vec<String>>,
    pub(super) action: Action,
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    /// Lines that go before or after the line that is the anchor.
    Insert { after: bool, anchor: String, lines: Vec<String> },
    /// Text that becomes another, inside a line.
    Replace { from: String, to: String },
}

impl Hook {
    pub(super) fn is_for(&self, release: &str) -> bool {
        self.releases.as_ref().is_none_or(|releases| releases.iter().any(|name| name == release))
    }

    /// What has to stand in the scope, exactly once.
    pub(super) fn anchor(&self) -> &str {
        match &self.action {
            Action::Insert { anchor, .. } => anchor,
            Action::Replace { from, .. } => from,
        }
    }
}

/// The table's hooks, in its order.
pub(super) fn parse(text: &str) -> Result<Vec<Hook>, Failure> {
    let mut hooks: Vec<Hook> = Vec::new();
    let mut file = None;
    let mut scope = None;
    let mut releases = None;
    for (number, line) in text.lines().enumerate() {
        let wrong = |what: &str| Failure::task(format!("hooks.txt:{}: {what}", number + 1));
        if let Some(added) = line.strip_prefix('|') {
            match hooks.last_mut().map(|hook| &mut hook.action) {
                Some(Action::Insert { lines, .. }) => lines.push(added.to_owned()),
                _ => return Err(wrong("text that belongs to nothing")),
            }
            continue;
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (word, rest) = line.split_once(' ').ok_or_else(|| wrong("a word alone"))?;
        let action = match word {
            "file" => {
                (file, scope) = (Some(rest.to_owned()), None);
                continue;
            }
            "in" => {
                scope = (rest != "-").then(|| rest.to_owned());
                continue;
            }
            "for" => {
                releases = Some(rest.split(' ').map(str::to_owned).collect());
                continue;
            }
            "before" | "after" => Action::Insert { after: word == "after", anchor: rest.to_owned(), lines: Vec::new() },
            "replace" => {
                let (from, to) = rest.split_once(" => ").ok_or_else(|| wrong("no `=>`"))?;
                Action::Replace { from: from.to_owned(), to: to.to_owned() }
            }
            other => return Err(wrong(&format!("no `{other}` is known"))),
        };
        let file = file.clone().ok_or_else(|| wrong("no file yet"))?;
        hooks.push(Hook { file, scope: scope.clone(), releases: releases.take(), action });
    }
    Ok(hooks)
}
