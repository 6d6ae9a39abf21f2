//! Sizes in bytes in human-readable form.

use std::ops::RangeInclusive;

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

/// Parses `64MiB`, `1.5GB`, `4k` (K, M, G and T alone are powers of 1024) or plain bytes. Fractions
/// of a byte are dropped.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let upper = text.trim().to_ascii_uppercase();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((upper.strip_suffix(name)?, *unit)))
        .unwrap_or((upper.as_str(), 1));
    let (whole, part) = number.trim_end().split_once('.').unwrap_or((number.trim_end(), "0"));
    let [whole, part] = [whole, part].map(digits);
    let (Some(whole), Some(part)) = (whole, part.filter(|part| unit > 1 || part == "0")) else {
        return Err(
            "expected a number and a unit, such as 64MiB, 1.5GiB, 500GB or 4096 (bytes)".to_owned()
        );
    };
    // Further decimal places are less than a byte.
    let places = &part[..part.len().min(15)];
    let numbers = whole.parse::<u128>().ok().zip(places.parse::<u128>().ok());
    let bytes = numbers.and_then(|(whole, part)| {
        let part = part * u128::from(unit) / 10_u128.pow(places.len() as u32);
        whole.checked_mul(unit.into())?.checked_add(part)
    });
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).ok_or_else(|| "more than 16 EiB".to_owned())
}

/// Returns the digits without the underscores between them.
fn digits(text: &str) -> Option<String> {
    let all = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    let is_number = all && !text.is_empty() && !text.starts_with('_') && !text.ends_with('_');
    is_number.then(|| text.replace('_', ""))
}

/// Same as [`parse`], but rejects zero.
pub(crate) fn above_zero(text: &str) -> Result<u64, String> {
    let bytes = parse(text)?;
    if bytes > 0 { Ok(bytes) } else { Err("expected more than 0 bytes".to_owned()) }
}

/// Parses a whole number in a range, such as 4000 or `4_000`.
pub(crate) fn count<T: TryFrom<u64> + Clone + Send + Sync + 'static>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = digits(text).and_then(|digits| digits.parse().ok());
        let found = number.filter(|number| range.contains(number));
        found.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            let (first, last) = (range.start(), range.end());
            if *last < u64::from(u32::MAX) {
                return format!("expected a whole number from {first} to {last}");
            }
            format!(
                "expected a whole number without a unit, {first} or more, such as 4000 or 4_000"
            )
        })
    }
}

/// Formats a count with a separator every three digits: `288,500`.
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
mod tests;
