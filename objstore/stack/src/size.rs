//! Byte sizes in human-readable form.

use std::{fmt, str::FromStr};

const UNITS: [(&str, u64); 17] = [
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
    ("KI", 1 << 10),
    ("MI", 1 << 20),
    ("GI", 1 << 30),
    ("TI", 1 << 40),
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

/// A number of bytes, shown with three digits and a binary unit: `714 MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

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

/// Parses `64MiB`, `64Mi`, `1.5GB`, `4k` (K, M, G and T alone are powers of 1024) or plain bytes.
/// Fractions of a byte are dropped.
impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.trim().to_ascii_uppercase();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((upper.strip_suffix(name)?, *unit)))
            .unwrap_or((upper.as_str(), 1));
        let (whole, part) = number.trim_end().split_once('.').unwrap_or((number.trim_end(), "0"));
        let [whole, part] = [whole, part].map(digits);
        let (Some(whole), Some(part)) = (whole, part.filter(|part| unit > 1 || part == "0")) else {
            return Err(
                "expected a number and a unit, such as 64MiB, 1.5GiB, 500GB or 4096 (bytes)"
                    .to_owned(),
            );
        };
        // Further decimal places are less than a byte.
        let places = &part[..part.len().min(15)];
        let numbers = whole.parse::<u128>().ok().zip(places.parse::<u128>().ok());
        let bytes = numbers.and_then(|(whole, part)| {
            let part = part * u128::from(unit) / 10_u128.pow(places.len() as u32);
            whole.checked_mul(unit.into())?.checked_add(part)
        });
        bytes
            .and_then(|bytes| u64::try_from(bytes).ok())
            .map(Self)
            .ok_or_else(|| "more than 16 EiB".to_owned())
    }
}

/// Returns the digits without the underscores between them.
fn digits(text: &str) -> Option<String> {
    let all = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    let is_number = all && !text.is_empty() && !text.starts_with('_') && !text.ends_with('_');
    is_number.then(|| text.replace('_', ""))
}

/// Formats without trailing zeroes: `64`, not `64.0`.
fn shown(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests;
