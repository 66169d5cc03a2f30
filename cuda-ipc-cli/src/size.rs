//! Sizes as people write and read them. Units are powers of 1024.

/// Parses `2097152`, `512M`, `2 GiB`.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(format!("`{text}` is no size: write bytes, or K, M, G, T for powers of 1024, such as 512M")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{text}` is no size: it begins with no number that fits 64 bits"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is more than 64 bits can say"))
}

/// Writes a size with the unit in which it has at least one and at most four digits before the point.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = UNITS.iter().find(|(shift, _)| bytes >> shift != 0) else { return format!("{bytes} B") };
    let (whole, rest) = (bytes >> shift, bytes & ((1 << shift) - 1));
    if rest == 0 { format!("{whole} {unit}") } else { format!("{whole}.{:02} {unit}", (u128::from(rest) * 100) >> shift) }
}

/// A size in both ways: rounded for the eye, and to the byte.
pub(crate) fn exact(bytes: u64) -> String {
    match bytes {
        1 => "1 byte".to_owned(),
        ..1024 => format!("{bytes} bytes"),
        _ => format!("{} ({bytes} bytes)", human(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::{exact, human, parse};

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in
            [("0", 0), ("2097152", 2 << 20), ("512M", 512 << 20), (" 2 GiB ", 2 << 30), ("3k", 3072), ("1T", 1 << 40), ("7B", 7)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "M", "-1", "1.5G", "12MB", "0x10", "1 2", "18446744073709551616", "16777216T"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (2 << 20, "2 MiB"), (3 << 29, "1.50 GiB"), (u64::MAX, "16777215.99 TiB")] {
            assert_eq!(human(bytes), text);
        }
        assert_eq!([1, 1023, 2048].map(exact), ["1 byte", "1023 bytes", "2 KiB (2048 bytes)"]);
    }
}
