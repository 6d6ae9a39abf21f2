//! Tables and text for people.

use comfy_table::presets::NOTHING;
use comfy_table::{Attribute, Cell, ContentArrangement, Table};

/// Enables escape sequences; a value and not a global, so that tests see the output of files.
#[derive(Debug, Clone, Copy)]
pub struct Paint(pub bool);

impl Paint {
    pub(crate) fn bold(self, text: &str, colour: u8) -> String {
        if self.0 { format!("\x1b[1;{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(crate) fn dim(self, text: &str) -> String {
        if self.0 { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A terminal narrower than this does not know its width: a serial line reports 0.
const TERMINAL_COLUMNS_MIN: u16 = 60;
/// Maximum columns of running text.
const COLUMNS_MAX: usize = 100;

pub(crate) fn table(header: &[&str], paint: Paint) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    if paint.0 {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    // Output to a pipe is never wrapped, for scripts.
    if paint.0 && table.width().is_some_and(|columns| columns >= TERMINAL_COLUMNS_MIN) {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(header.iter().map(|text| Cell::new(text).add_attribute(Attribute::Bold)));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

pub(crate) fn text(table: &Table) -> String {
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n")
}

pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// Formats in decimal units, as for drives: 1.92 TB.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB")];
    let unit = units.into_iter().find(|&(unit, _)| bytes >= unit);
    let Some((unit, name)) = unit else { return format!("{bytes} B") };
    let hundredths = bytes / (unit / 100);
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    if rest == 0 { format!("{whole} {name}") } else { format!("{whole}.{rest:02} {name}") }
}

/// Formats in binary units, as for address windows: 128 GiB.
pub(crate) fn binary_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|&(shift, _)| bytes >> shift > 0);
    unit.map_or_else(|| format!("{bytes} B"), |(shift, name)| format!("{} {name}", bytes >> shift))
}

/// Wraps text at 100 columns, or where the terminal ends if that is before, with the first line
/// indented by 6 and the others by `indent`.
pub(crate) fn wrapped(text: &str, indent: usize) -> Vec<String> {
    let terminal = Table::new().width().filter(|columns| *columns >= TERMINAL_COLUMNS_MIN);
    wrapped_at(text, indent, terminal.map_or(COLUMNS_MAX, |it| COLUMNS_MAX.min(it.into())))
}

fn wrapped_at(text: &str, indent: usize, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = " ".repeat(6);
    let mut is_fresh = true;
    for word in text.split(' ') {
        if !is_fresh && line.chars().count() + 1 + word.chars().count() > columns {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            is_fresh = true;
        }
        if !is_fresh {
            line.push(' ');
        }
        line.push_str(word);
        is_fresh = false;
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_the_units_of_their_trade() {
        assert_eq!(size(1_920_383_410_176), "1.92 TB");
        assert_eq!(size(2_000_000_000_000), "2 TB");
        assert_eq!(size(12), "12 B");
        assert_eq!(binary_size(128 << 30), "128 GiB");
        assert_eq!(binary_size(0), "0 B");
    }

    #[test]
    fn long_lines_are_wrapped_below_themselves() {
        let lines = wrapped_at(&"word ".repeat(40), 17, 80);
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= 80), "{lines:#?}");
        assert!(lines[1].starts_with(&" ".repeat(17)) && !lines[1].starts_with(&" ".repeat(18)));
    }
}
