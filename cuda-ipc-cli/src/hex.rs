//! Bytes as hex digits.

use core::fmt::Write;

/// Writes two lower-case digits a byte.
pub(crate) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing into a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Reads hex digits of either case, among which white space, colons and one `0x` in front mean nothing.
///
/// Errors: the first character that is none of these, or an odd number of digits.
pub(crate) fn decode(text: &str) -> Result<Vec<u8>, String> {
    let text = text.trim_start();
    let text = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    let mut bytes = Vec::with_capacity(text.len() / 2);
    let mut high = None;
    for c in text.chars().filter(|c| !c.is_whitespace() && *c != ':') {
        let digit = c.to_digit(16).and_then(|digit| u8::try_from(digit).ok()).ok_or_else(|| format!("{c:?} is no hex digit"))?;
        match high.take() {
            None => high = Some(digit),
            Some(high) => bytes.push(high << 4 | digit),
        }
    }
    match high {
        None => Ok(bytes),
        Some(_) => Err(format!("{} hex digits do not make whole bytes", bytes.len() * 2 + 1)),
    }
}

/// A UUID in its usual grouping.
pub(crate) fn uuid(bytes: &[u8; 16]) -> String {
    let hex = encode(bytes);
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| hex.get(range).unwrap_or_default());
    groups.join("-")
}

#[cfg(test)]
mod tests {
    use super::{decode, encode, uuid};

    #[test]
    fn bytes_survive_the_round_trip() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&bytes)), Ok(bytes));
    }

    #[test]
    fn separators_and_prefix_mean_nothing() {
        for text in ["43495043", "0x43495043", "  0X43 49\n50\t43 ", "43:49:50:43", "4349 5043", "434 950 43"] {
            assert_eq!(decode(text), Ok(b"CIPC".to_vec()), "{text}");
        }
        assert_eq!(decode(""), Ok(Vec::new()));
    }

    #[test]
    fn what_is_no_hex_is_refused() {
        for text in ["4", "434", "xy", "43,49", "0x0x43", "43 0x49", "４３", "-43"] {
            assert!(decode(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_uuid_is_grouped() {
        let bytes = core::array::from_fn(|at| u8::try_from(at).expect("16 fit"));
        assert_eq!(uuid(&bytes), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
