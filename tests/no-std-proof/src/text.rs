//! Formats into a fixed buffer, as a caller without an allocator would.

use core::fmt::{self, Display, Write};

/// The first 256 bytes of a text.
pub(crate) struct Text {
    bytes: [u8; 256],
    len: usize,
}

impl Text {
    pub(crate) fn of(value: impl Display) -> Self {
        let mut text = Self { bytes: [0; 256], len: 0 };
        // A text that is too long is cut, which no check minds.
        let _ = write!(text, "{value}");
        text
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn contains(&self, part: &str) -> bool {
        self.bytes[..self.len].windows(part.len()).any(|window| window == part.as_bytes())
    }
}

impl Write for Text {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + part.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(part.as_bytes());
        self.len += part.len();
        Ok(())
    }
}
