//! Tables for people: name, value, and a wrapped note.

use crate::terminal;
use comfy_table::{CellAlignment, Table, presets};

/// Characters per line of a note.
const NOTE_COLUMNS: usize = 74;

/// Returns one row.
pub(crate) fn row(name: &str, value: impl ToString, note: impl ToString) -> [String; 3] {
    [name.to_owned(), value.to_string(), fold(&note.to_string())]
}

/// Formats a table with a header, which may be empty. All columns but the first `left` are
/// right-aligned.
pub(crate) fn grid(header: &[&str], rows: Vec<Vec<String>>, left: usize) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    if !header.is_empty() {
        table.set_header(header);
    }
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// A column of [`columns`]: its name, and the text of a row.
pub(crate) type Column<T> = (&'static str, fn(&T) -> String);

/// Formats a table with a row for each of `things`; see [`grid`].
pub(crate) fn columns<T>(columns: &[Column<T>], things: &[T], left: usize) -> String {
    let header: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let row = |it: &T| columns.iter().map(|(_, of)| of(it)).collect();
    grid(&header, things.iter().map(row).collect(), left)
}

/// Formats a table of figures, whose first `of` columns say what each row is of: a column each, or
/// below each other on a narrow terminal.
pub(crate) fn figures(header: &[&str], rows: Vec<Vec<String>>, of: usize) -> String {
    let wide = grid(header, rows.clone(), 1);
    let width = wide.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    if terminal::columns().is_none_or(|columns| width <= columns) {
        return wide;
    }
    let stack = |row: &Vec<String>| {
        let named = || header.iter().zip(row);
        let title: Vec<String> =
            named().take(of).map(|(name, value)| format!("{name} {value}")).collect();
        let lines = named().skip(of).map(|(name, value)| vec![(*name).to_owned(), value.clone()]);
        format!("{}\n{}", title.join(", "), grid(&[], lines.collect(), 1))
    };
    rows.iter().map(stack).collect::<Vec<_>>().join("\n")
}

/// Formats all rows, with the values right-aligned.
pub(crate) fn table(rows: &[[String; 3]]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED).add_rows(rows);
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Wraps text at [`NOTE_COLUMNS`] characters; longer words stay whole.
pub(crate) fn fold(text: &str) -> String {
    let mut folded = String::new();
    for line in text.lines() {
        let mut column = 0;
        for word in line.split(' ') {
            let width = word.chars().count();
            if column > 0 && column + 1 + width > NOTE_COLUMNS {
                folded.push('\n');
                column = 0;
            } else if column > 0 {
                folded.push(' ');
                column += 1;
            }
            folded.push_str(word);
            column += width;
        }
        folded.push('\n');
    }
    folded.truncate(folded.trim_end().len());
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_notes_are_folded_between_words() {
        let text = "word ".repeat(60);
        let folded = fold(text.trim_end());
        assert!(folded.lines().all(|line| line.len() <= NOTE_COLUMNS), "{folded}");
        assert_eq!(folded.replace('\n', " "), text.trim_end());
        assert_eq!(fold("one line"), "one line");
        assert_eq!(fold("two\nlines"), "two\nlines");
        let long = "x".repeat(200);
        assert_eq!(fold(&format!("a {long} b")), format!("a\n{long}\nb"));
    }
}
