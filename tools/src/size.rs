//! Sizes in bytes as people write and read them.

pub(crate) use ripieno_stack::Size;

const UNITS: [(&str, u64); 13] = [
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("T", 1 << 40),
    ("B", 1),
];

/// Reads `64MiB`, `1GB`, `4K` (K, M, G and T alone are powers of 1024) or plain bytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let upper = text.trim().to_ascii_uppercase();
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((upper.strip_suffix(name)?, *unit)))
        .unwrap_or((upper.as_str(), 1));
    let digits = digits.trim_end();
    let wrong = || {
        "expected a whole number and a unit, such as 64MiB, 2GiB, 500GB or 4096 (bytes)".to_owned()
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(unit).ok_or_else(|| "more than 16 EiB".to_owned())
}

/// Shows a count with a separator every three digits: `288,500`.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64MiB", 64 << 20),
            ("64 mib", 64 << 20),
            ("2G", 2 << 30),
            ("500GB", 500_000_000_000),
            ("7b", 7),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "1.5GiB", "-1", "12 parsecs", "99999999999999999999", "17000000TiB"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counts_are_shown() {
        assert_eq!(grouped(288_500), "288,500");
        assert_eq!(grouped(1_000_000), "1,000,000");
        assert_eq!(grouped(12), "12");
    }
}
