//! A command's report on standard output. A reader that has gone away is an error, not a panic.

use core::fmt::Display;
use std::io::Write;

use serde::Serialize;

use crate::failure::Failure;

/// Prints a text, with a line end if it has none.
pub(crate) fn text(report: &impl Display) -> Result<(), Failure> {
    let mut text = report.to_string();
    if !text.ends_with('\n') {
        text.push('\n');
    }
    let mut to = std::io::stdout().lock();
    to.write_all(text.as_bytes()).and_then(|()| to.flush()).map_err(Failure::at("writing the report"))
}

/// Prints an object on one line.
pub(crate) fn json(report: &impl Serialize) -> Result<(), Failure> {
    text(&serde_json::to_string(report).map_err(Failure::at("writing the report"))?)
}
