//! Byte sizes in human-readable form.

use std::fmt;

/// Formats bytes with three digits and a binary unit: `714 MiB`.
#[derive(Debug, Clone, Copy)]
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
mod tests {
    use super::*;

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
    }
}
