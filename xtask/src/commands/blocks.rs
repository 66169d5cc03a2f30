//! The blocks of a Markdown document that stand apart as code, and what the document says they are.
//!
//! A block is a command block unless a comment in front of it says otherwise; `CONTRIBUTING.md` lists these comments for authors. So nothing is left
//! out because a program took it for something else.

/// What keeps a command from being run here. Others have to be thought about, and added.
pub(super) const NEEDS: [&str; 5] = ["a GPU", "a UCX tree", "PyPI", "a long time", "a container engine"];

/// A code block of a document.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// 1-based number of its first line.
    pub(crate) line: usize,
    /// Without the indentation, with a line end after each line.
    pub(crate) text: String,
    pub(crate) kind: Kind,
}

/// What the document says a block is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Commands that are run: nothing stands in front.
    Run,
    /// Commands that cannot be run here: `<!-- needs: WHAT -->`, one of [`NEEDS`].
    Needs(String),
    /// Commands of a new user's session, which is run as a whole by its name: `<!-- trial: NAME -->`.
    Trial(String),
    /// A line or more of a file, by its path from the root: `<!-- shows: code of PATH -->`.
    CodeOf(String),
    /// No commands: `<!-- shows: output -->` or `<!-- shows: a picture -->`, or a fence of another language.
    Shows,
}

/// All blocks of a document. Errors: line and what is wrong there.
pub(crate) fn blocks(document: &str) -> Result<Vec<Block>, (usize, String)> {
    let mut blocks = Vec::new();
    let mut marker: Option<(usize, Kind)> = None;
    // Whether an indented line would begin a block: it cannot interrupt a paragraph or a list.
    let mut may_begin = true;
    let mut lines = document.lines().zip(1..).peekable();
    while let Some((line, number)) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let mut text = String::new();
            loop {
                match lines.next() {
                    Some(("```", _)) => break,
                    Some((line, _)) => text += &format!("{line}\n"),
                    None => return Err((number, "the block does not end".to_owned())),
                }
            }
            let by_language = if matches!(language, "" | "sh") { Kind::Run } else { Kind::Shows };
            blocks.push(Block { line: number, text, kind: marker.take().map_or(by_language, |(_, kind)| kind) });
            may_begin = true;
        } else if let (true, Some(first)) = (may_begin, line.strip_prefix("    ").filter(|line| !line.trim().is_empty())) {
            let mut text = format!("{first}\n");
            while let Some((line, _)) = lines.next_if(|(line, _)| line.starts_with("    ") || line.trim().is_empty()) {
                text += &format!("{}\n", line.get(4..).unwrap_or_default());
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
            blocks.push(Block { line: number, text, kind: marker.take().map_or(Kind::Run, |(_, kind)| kind) });
            may_begin = true;
        } else if let Some(comment) = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->")) {
            unused(marker.as_ref())?;
            marker = kind(comment).map_err(|why| (number, why))?.map(|kind| (number, kind));
            may_begin = true;
        } else if line.trim().is_empty() {
            may_begin = true;
        } else {
            unused(marker.as_ref())?;
            may_begin = false;
        }
    }
    unused(marker.as_ref())?;
    Ok(blocks)
}

fn unused(marker: Option<&(usize, Kind)>) -> Result<(), (usize, String)> {
    marker.map_or(Ok(()), |(line, _)| Err((*line, "no block follows this comment".to_owned())))
}

/// What a comment says of the block behind it; `None` if it is about something else.
fn kind(comment: &str) -> Result<Option<Kind>, String> {
    let Some((word, rest)) = comment.split_once(": ") else { return Ok(None) };
    match (word, rest) {
        ("needs", what) if NEEDS.contains(&what) => Ok(Some(Kind::Needs(what.to_owned()))),
        ("needs", what) => Err(format!("`{what}` is none of: {}", NEEDS.join(", "))),
        ("trial", name) => Ok(Some(Kind::Trial(name.to_owned()))),
        ("shows", "output" | "a picture") => Ok(Some(Kind::Shows)),
        ("shows", what) => match what.strip_prefix("code of ") {
            Some(path) => Ok(Some(Kind::CodeOf(path.to_owned()))),
            None => Err(format!("`{what}` is none of: output, a picture, code of PATH")),
        },
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::{Block, Kind, blocks};

    #[test]
    fn blocks_are_found_with_what_is_said_of_them() {
        let document = "# Title\n\ntext:\n\n    cargo a\n\n    cargo b\n\n<!-- shows: output -->\n\n    RESULT x\nmore\n    no block, a paragraph\n\n\
            <!-- needs: a GPU -->\n```sh\ncuda-ipc bench\n```\n\n```mermaid\nx\n```\n<!-- a remark -->\n<!-- trial: pip -->\n\n    pip\n\n\
            <!-- shows: code of a/b.rs -->\n\n    let x = 1;\n";
        let block = |line, text: &str, kind| Block { line, text: text.to_owned(), kind };
        assert_eq!(
            blocks(document).expect("well formed"),
            [
                block(5, "cargo a\n\ncargo b\n", Kind::Run),
                block(11, "RESULT x\n", Kind::Shows),
                block(16, "cuda-ipc bench\n", Kind::Needs("a GPU".to_owned())),
                block(20, "x\n", Kind::Shows),
                block(26, "pip\n", Kind::Trial("pip".to_owned())),
                block(30, "let x = 1;\n", Kind::CodeOf("a/b.rs".to_owned())),
            ]
        );
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        for (document, line) in [
            ("\n<!-- needs: luck -->\n\n    x\n", 2),
            ("<!-- shows: things -->\n\n    x\n", 1),
            ("<!-- shows: output -->\ntext\n\n    x\n", 1),
            ("a\n<!-- shows: output -->\n", 2),
            ("<!-- shows: output -->\n<!-- needs: a GPU -->\n\n    x\n", 1),
            ("```\nx\n", 1),
        ] {
            assert_eq!(blocks(document).map_err(|(line, _)| line), Err(line), "{document}");
        }
    }
}
