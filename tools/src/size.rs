//! Sizes in bytes in human-readable form.

use std::ops::RangeInclusive;

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
