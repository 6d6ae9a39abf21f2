//! Sizes in bytes and times in human-readable form.

use std::ops::RangeInclusive;
use std::time::Duration;

use indicatif::HumanCount;
pub(crate) use ripieno_stack::Size;

/// Parses a [`Size`] as plain bytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    Ok(text.parse::<Size>()?.0)
}

/// Same as [`parse`], but rejects zero.
pub(crate) fn above_zero(text: &str) -> Result<u64, String> {
    let bytes = parse(text)?;
    if bytes > 0 { Ok(bytes) } else { Err("expected more than 0 bytes".to_owned()) }
}

/// Same as [`parse`], for memory that holds KV cache: none, or at least a MiB. A number without a
/// unit is bytes, and meant for GiB.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    match parse(text)? {
        bytes @ 1..1_048_576 => {
            Err(format!("{}; expected 0, or 1MiB or more, such as 64GiB", Size(bytes)))
        }
        bytes => Ok(bytes),
    }
}

/// Parses a time with a unit, such as `80us`, `1.5ms`, `30s`, `10m`, `1h` and `7d`, or in seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    const UNITS: [(&str, f64); 7] = [
        ("us", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("min", 60.0),
        ("m", 60.0),
        ("h", 3600.0),
        ("d", 86_400.0),
    ];
    let of = |(name, unit): &(&str, f64)| Some((text.strip_suffix(name)?, *unit));
    let (number, unit) = UNITS.iter().find_map(of).unwrap_or((text, 1.0));
    let number: Option<f64> = number.trim_end().parse().ok();
    let time = number.and_then(|number| Duration::try_from_secs_f64(number * unit).ok());
    time.ok_or_else(|| format!("{text:?} is no time; write it as 30s, 80us, 1.5ms, 10m or 1h"))
}

/// Parses a whole number in a range, such as 4000 or `4_000`.
pub(crate) fn count<T: TryFrom<u64> + Clone + Send + Sync + 'static>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
        let number = is_plain.then(|| parse(text).ok()).flatten();
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
    HumanCount(count).to_string()
}

#[cfg(test)]
mod tests;
