//! Changes the text of a file by its hooks, and back. A place that is not there exactly once, or not as expected, is an error.

use core::ops::Range;

use super::hooks::{Action, Hook};

/// Why a hook has no place: what is to be told to the user, without file and release.
#[derive(Debug)]
pub(super) struct Misfit {
    scope: Option<String>,
    anchor: String,
    what: String,
}

impl Misfit {
    fn new(hook: &Hook, what: impl Into<String>) -> Self {
        Self { scope: hook.scope.clone(), anchor: hook.anchor().to_owned(), what: what.into() }
    }
}

impl std::fmt::Display for Misfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(scope) = &self.scope {
            write!(f, "in {scope}: ")?;
        }
        write!(f, "`{}`: {}", self.anchor, self.what)
    }
}

/// The text with the hooks in it.
pub(super) fn apply(text: &str, hooks: &[Hook]) -> Result<String, Misfit> {
    let mut lines: Vec<String> = text.split_inclusive('\n').map(str::to_owned).collect();
    for hook in hooks {
        let range = scope(&lines, hook)?;
        match &hook.action {
            Action::Insert { after, anchor, lines: added } => {
                let place = one(hook, range.filter(|&line| blanks(&lines[line]) == blanks(anchor)))?;
                let place = place + usize::from(*after);
                lines.splice(place..place, added.iter().map(|line| format!("{line}\n")));
            }
            Action::Replace { from, to } => {
                let place = one(hook, range.filter(|&line| lines[line].contains(from.as_str())))?;
                if lines[place].contains(to.as_str()) {
                    return Err(Misfit::new(hook, "is replaced already"));
                }
                lines[place] = lines[place].replacen(from, to, 1);
            }
        }
    }
    Ok(lines.concat())
}

/// The text without the hooks that are in it.
pub(super) fn undo(text: &str, hooks: &[Hook]) -> Result<String, Misfit> {
    let mut lines: Vec<String> = text.split_inclusive('\n').map(str::to_owned).collect();
    for hook in hooks.iter().rev() {
        let range = scope(&lines, hook)?;
        match &hook.action {
            Action::Insert { after, anchor, lines: added } => {
                let anchor = one(hook, range.filter(|&line| blanks(&lines[line]) == blanks(anchor)))?;
                let start = if *after { Some(anchor + 1) } else { anchor.checked_sub(added.len()) };
                let place = start.map(|start| start..start + added.len());
                let is_ours = |place: &Range<usize>| {
                    lines.get(place.clone()).is_some_and(|found| found.iter().map(|line| line.trim_end_matches('\n')).eq(added))
                };
                let place = place.filter(is_ours).ok_or_else(|| Misfit::new(hook, "what belongs there is not there, or was changed"))?;
                lines.drain(place);
            }
            Action::Replace { from, to } => {
                let place = one(hook, range.filter(|&line| lines[line].contains(to.as_str())))?;
                lines[place] = lines[place].replacen(to, from, 1);
            }
        }
    }
    Ok(lines.concat())
}

/// Whether a text has any line or word of the hooks.
pub(super) fn has_traces(text: &str, hooks: &[Hook]) -> bool {
    hooks.iter().any(|hook| match &hook.action {
        Action::Insert { lines, .. } => lines.iter().any(|line| line.contains("lane") && text.contains(line.as_str())),
        Action::Replace { to, .. } => text.contains(to.as_str()),
    })
}

/// The only one of the lines.
fn one(hook: &Hook, mut lines: impl Iterator<Item = usize>) -> Result<usize, Misfit> {
    match (lines.next(), lines.next()) {
        (Some(line), None) => Ok(line),
        (None, _) => Err(Misfit::new(hook, "is not there")),
        (Some(first), Some(second)) => Err(Misfit::new(hook, format!("is there more than once: lines {} and {}", first + 1, second + 1))),
    }
}

/// The lines of a hook's function or table, without its head; or all of them.
///
/// UCX writes the name at the beginning of a line or behind the type, and the body from a brace of its own line (or at the end of a table's head) to one
/// at the beginning of a line.
fn scope(lines: &[String], hook: &Hook) -> Result<Range<usize>, Misfit> {
    let Some(name) = &hook.scope else { return Ok(0..lines.len()) };
    let heads = lines.iter().enumerate().filter(|(_, line)| is_head(line, name)).map(|(number, _)| number);
    let mut bodies = heads.filter_map(|head| body(lines, head));
    match (bodies.next(), bodies.next()) {
        (Some(body), None) => Ok(body),
        (None, _) => Err(Misfit::new(hook, format!("there is no {name} in the file"))),
        (Some(_), Some(_)) => Err(Misfit::new(hook, format!("there are several {name} in the file"))),
    }
}

/// Whether a line may begin a definition of the name.
fn is_head(line: &str, name: &str) -> bool {
    let is_word = |found: usize| {
        let part_of_word = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let before = found.checked_sub(1).and_then(|before| line.as_bytes().get(before).copied());
        !part_of_word(before) && !part_of_word(line.as_bytes().get(found + name.len()).copied())
    };
    line.starts_with(|first: char| first.is_ascii_alphabetic()) && line.match_indices(name).any(|(found, _)| is_word(found))
}

/// The body of what begins at `head`; none if that is a declaration.
fn body(lines: &[String], head: usize) -> Option<Range<usize>> {
    let opens = |line: &str| line == "{" || line.ends_with("= {");
    let start = (head..lines.len()).find(|&line| opens(lines[line].trim_end()) || lines[line].trim_end().ends_with(';'))?;
    if !opens(lines[start].trim_end()) {
        return None;
    }
    let end = (start..lines.len()).find(|&line| lines[line].starts_with('}'))?;
    Some(start + 1..end)
}

/// A line with its blanks evened out.
fn blanks(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}
