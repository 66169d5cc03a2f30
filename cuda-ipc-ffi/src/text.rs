//! Text in an array of C's: without an allocation, cut off where it is full, always ended by 0.

use core::fmt;

/// See the module's documentation. `N` counts the 0.
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    /// What `line` says.
    pub(crate) fn of(line: fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; N], len: 0 };
        // A longer line is cut off.
        let _ = fmt::Write::write_fmt(&mut text, line);
        text
    }

    /// With the 0 at its end, and more to the end of the array.
    pub(crate) const fn with_end(&self) -> &[u8; N] {
        &self.bytes
    }

    pub(crate) fn written(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let free = N - 1 - self.len;
        // No letter is cut in half.
        let take = (0..=part.len().min(free)).rev().find(|&at| part.is_char_boundary(at)).unwrap_or(0);
        for (to, from) in self.bytes.iter_mut().skip(self.len).zip(part.bytes().take(take)) {
            *to = from;
        }
        self.len += take;
        if take == part.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::Text;

    #[test]
    fn long_texts_are_cut_between_letters_and_end_with_zero() {
        let long = "é".repeat(300);
        let text = Text::<384>::of(format_args!("{long}"));
        assert_eq!((text.written().len(), text.with_end()[382..].to_vec()), (382, vec![0, 0]));
        let text = Text::<8>::of(format_args!("{}-{}", 12, "abcdefgh"));
        assert_eq!(text.with_end(), b"12-abcd\0");
        assert_eq!(Text::<8>::of(format_args!("1234567")).written(), b"1234567");
    }
}
