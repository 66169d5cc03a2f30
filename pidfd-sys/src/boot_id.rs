//! `/proc/sys/kernel/random/boot_id`: 16 bytes that all processes of one running kernel share.

use crate::procfs::read_small;
use crate::{Errno, Error, Step};

const PATH: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the identifier of the running kernel's boot, the bytes in the order of its text.
///
/// Equal on two sides means one kernel, unless a container runtime puts a file of its own over it.
/// Errors: those of open and read; `EBADMSG` if the text is not a UUID.
/// Source: random(4).
pub fn boot_id() -> Result<[u8; 16], Error> {
    let mut buffer = [0; 64];
    let text = read_small(PATH, &mut buffer, Step::ReadBootId)?;
    parse(text).ok_or(Step::ReadBootId.failed(Errno::EBADMSG))
}

/// Parses `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, with or without a final newline.
fn parse(text: &[u8]) -> Option<[u8; 16]> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let mut id = [0; 16];
    let mut bytes = id.iter_mut();
    for (group, len) in text.split(|byte| *byte == b'-').zip([8, 4, 4, 4, 12]) {
        let (pairs, odd) = group.as_chunks::<2>();
        if group.len() != len || !odd.is_empty() {
            return None;
        }
        for [high, low] in pairs {
            *bytes.next()? = digit(*high)? << 4 | digit(*low)?;
        }
    }
    (text.len() == 36 && bytes.next().is_none()).then_some(id)
}

fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn a_uuid_is_read_in_text_order() {
        let want = [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10];
        assert_eq!(parse(b"01234567-89ab-cdef-fedc-ba9876543210\n"), Some(want));
        assert_eq!(parse(b"01234567-89AB-CDEF-FEDC-BA9876543210"), Some(want));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            &b""[..],
            b"\n",
            b"01234567-89ab-cdef-fedc-ba987654321",
            b"01234567-89ab-cdef-fedc-ba9876543210-",
            b"01234567-89ab-cdef-fedc-ba98765432100",
            b"0123456-789ab-cdef-fedc-ba9876543210",
            b"01234567-89ab-cdef-fedc-ba987654321g",
            b"0123456789abcdeffedcba9876543210",
            b"01234567-89ab-cdef-fedc-ba9876543210\n\n",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
