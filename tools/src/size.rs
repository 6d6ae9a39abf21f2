//! Sizes in bytes as people write and read them.

use std::fmt;

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

/// Shows bytes with three digits and a binary unit: `714 MiB`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut name = 0;
        // Not 1024: 1023.7 would be shown as 1024.
        while value >= 999.5 && name + 1 < NAMES.len() {
            value /= 1024.0;
            name += 1;
        }
        let digits = if value < 9.995 {
            2
        } else if value < 99.95 {
            1
        } else {
            0
        };
        f.pad(&format!("{} {}", shown(value, digits), NAMES[name]))
    }
}

/// Without the zeroes that say nothing: `64`, not `64.0`.
fn shown(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
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
    fn sizes_are_shown() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (64 << 20, "64 MiB"),
            (748_707_840, "714 MiB"),
            (1023 << 20, "1 GiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(grouped(288_500), "288,500");
        assert_eq!(grouped(1_000_000), "1,000,000");
        assert_eq!(grouped(12), "12");
    }
}
