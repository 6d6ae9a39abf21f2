//! Tables for people, as wide as the terminal permits: a grid, or, where that is wider, several
//! with a part of the columns each, or each row as lines of names and values. Words, which may be
//! identifiers, stay whole.

use std::ops::Range;

use crate::terminal::{self, fold_at, width};
use comfy_table::{CellAlignment, Table, presets};

/// Maximum characters per line of a note.
const NOTE_COLUMNS: usize = 74;
/// Fewer characters per line are too few for a note beside its value.
const NOTE_COLUMNS_MIN: usize = 24;
/// Indentation of lines below the line that they belong to.
const INDENT: &str = "  ";

/// Returns one row of [`table`].
pub(crate) fn row(name: &str, value: impl ToString, note: impl ToString) -> [String; 3] {
    [name.to_owned(), value.to_string(), note.to_string()]
}

/// Formats a table with a header, which may be empty. All columns but the first `left` are
/// right-aligned.
pub(crate) fn grid(header: &[&str], rows: Vec<Vec<String>>, left: usize) -> String {
    fitted(header, rows, left..usize::MAX, left.max(1))
}

/// A column of [`columns`]: its name, and the text of a row.
pub(crate) type Column<T> = (&'static str, fn(&T) -> String);

/// Formats a table with a row for each of `things`; see [`grid`].
pub(crate) fn columns<T>(columns: &[Column<T>], things: &[T], left: usize) -> String {
    let header: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let row = |it: &T| columns.iter().map(|(_, of)| of(it)).collect();
    grid(&header, things.iter().map(row).collect(), left)
}

/// Formats a table whose first `of` columns say what each row is of, with these columns
/// right-aligned.
pub(crate) fn fitted(
    header: &[&str],
    rows: Vec<Vec<String>>,
    right: Range<usize>,
    of: usize,
) -> String {
    fit(header, rows, right, of, terminal::columns())
}

fn fit(
    header: &[&str],
    rows: Vec<Vec<String>>,
    right: Range<usize>,
    of: usize,
    columns: Option<usize>,
) -> String {
    let wide = drawn(header, &rows, &right);
    match columns {
        Some(columns) if width(&wide) > columns => split(header, &rows, &right, of, columns)
            .unwrap_or_else(|| stacked(header, &rows, of, columns)),
        _ => wide,
    }
}

fn drawn(header: &[impl ToString], rows: &[Vec<String>], right: &Range<usize>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    if !header.is_empty() {
        table.set_header(header.iter().map(ToString::to_string));
    }
    table.add_rows(rows);
    for column in table.column_iter_mut().take(right.end).skip(right.start) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Formats grids with folded heads, each with as many columns as fit beside the first `of`. Returns
/// `None` where one alone does not fit, without heads, and for so few rows that none are compared.
fn split(
    header: &[&str],
    rows: &[Vec<String>],
    right: &Range<usize>,
    of: usize,
    columns: usize,
) -> Option<String> {
    if rows.len() < 3 || rows.iter().any(|row| row.len() != header.len()) {
        return None;
    }
    let mut rows = rows.to_vec();
    if of == 1 {
        rows.iter_mut().for_each(|row| row[0] = fold_at(&row[0], columns * 2 / 5));
    }
    let cells = |at: usize| rows.iter().map(|row| width(&row[at])).max().unwrap_or(0);
    let words = |head: &str| head.split(' ').map(width).max().unwrap_or(0);
    let heads = header.iter().enumerate();
    let heads: Vec<_> = heads.map(|(at, it)| fold_at(it, cells(at).max(words(it)))).collect();
    // With a space on both sides, and a bar.
    let room = |at: usize| cells(at).max(width(&heads[at])) + 3;
    let all = columns.checked_sub((0..of).map(room).sum::<usize>() + 1)?;
    let (mut groups, mut left) = (Vec::<Vec<usize>>::new(), 0);
    for at in of..header.len() {
        if room(at) > left {
            groups.push((0..of).collect());
            left = all;
        }
        left = left.checked_sub(room(at))?;
        groups.last_mut()?.push(at);
    }
    let grid = |group: &Vec<usize>| {
        let of = |row: &[String]| group.iter().map(|at| row[*at].clone()).collect::<Vec<_>>();
        let right = group.partition_point(|at| *at < right.start)
            ..group.partition_point(|at| *at < right.end);
        drawn(&of(&heads), &rows.iter().map(|row| of(row)).collect::<Vec<_>>(), &right)
    };
    Some(groups.iter().map(grid).collect::<Vec<_>>().join("\n"))
}

/// Formats each row as a line that says what it is of, and a line for each other value.
fn stacked(header: &[&str], rows: &[Vec<String>], of: usize, columns: usize) -> String {
    let name = |at: usize| header.get(at).copied().unwrap_or_default();
    let names = (of..header.len()).map(|at| width(name(at))).max().unwrap_or(0);
    let mut text = String::new();
    for row in rows {
        let is_named = |at: usize| at > 0 && !name(at).is_empty();
        let title = row.iter().enumerate().take(of).filter(|(_, value)| !value.is_empty());
        let title = title.map(|(at, value)| match is_named(at) {
            true => format!("{} {value}", name(at)),
            false => value.clone(),
        });
        text += &below("", &title.collect::<Vec<_>>().join(", "), columns);
        for (at, value) in row.iter().enumerate().skip(of).filter(|(_, value)| !value.is_empty()) {
            let label = format!("{INDENT}{:names$}{INDENT}", name(at));
            let label = if header.is_empty() { INDENT } else { &label };
            text += &below(label, value, columns);
        }
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns `text` folded beside a label, or below it where it does not fit.
fn below(label: &str, text: &str, columns: usize) -> String {
    let beside = columns.saturating_sub(width(label));
    let folded = fold_at(text, beside);
    if width(&folded) <= beside {
        return format!("{label}{}\n", folded.replace('\n', &format!("\n{:1$}", "", width(label))));
    }
    let indent = format!("{INDENT}{INDENT}");
    let folded = fold_at(text, columns.saturating_sub(indent.len()));
    format!("{}\n{indent}{}\n", label.trim_end(), folded.replace('\n', &format!("\n{indent}")))
}

/// Formats rows of [`row`], with the values right-aligned.
pub(crate) fn table(rows: &[[String; 3]]) -> String {
    with_notes(rows, terminal::columns())
}

fn with_notes(rows: &[[String; 3]], columns: Option<usize>) -> String {
    let most = |at: usize| rows.iter().map(|row| width(&row[at])).max().unwrap_or(0);
    // Bars, and a space on both sides of a cell.
    let frame = 4 + 3 * 2;
    let room = columns.map_or(NOTE_COLUMNS, |all| all.saturating_sub(most(0) + most(1) + frame));
    let room = room.min(NOTE_COLUMNS);
    let cells = |[name, value, note]: &[String; 3]| -> Vec<String> {
        vec![name.clone(), value.clone(), fold_at(note, room)]
    };
    let folded: Vec<_> = rows.iter().map(cells).collect();
    let Some(columns) = columns else { return fit(&[], folded, 1..2, 1, None) };
    let is_wide = folded.iter().any(|row| width(&row[2]) > room);
    if room >= NOTE_COLUMNS_MIN && !is_wide {
        return fit(&[], folded, 1..2, 1, None);
    }
    let lines = rows.iter().map(|[name, value, note]| {
        let note = if note.is_empty() { String::new() } else { below(INDENT, note, columns) };
        below(&format!("{name:0$}{INDENT}", most(0)), value, columns) + &note
    });
    lines.collect::<String>().trim_end().to_owned()
}

/// Wraps text that is indented by so many columns at [`NOTE_COLUMNS`] characters, or where the
/// terminal ends if that is before; longer words stay whole.
pub(crate) fn fold(text: &str, indent: usize) -> String {
    let room = terminal::columns().map_or(NOTE_COLUMNS, |columns| columns.saturating_sub(indent));
    fold_at(text, room.min(NOTE_COLUMNS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_notes_are_folded_between_words() {
        let text = "word ".repeat(60);
        let folded = fold_at(text.trim_end(), NOTE_COLUMNS);
        assert!(folded.lines().all(|line| line.len() <= NOTE_COLUMNS), "{folded}");
        assert_eq!(folded.replace('\n', " "), text.trim_end());
        assert_eq!(fold_at("one line", NOTE_COLUMNS), "one line");
        assert_eq!(fold_at("two\nlines", NOTE_COLUMNS), "two\nlines");
        let long = "x".repeat(200);
        assert_eq!(fold_at(&format!("a {long} b"), NOTE_COLUMNS), format!("a\n{long}\nb"));
    }

    #[test]
    fn notes_are_beside_their_values_or_below() {
        let rows = [
            row("hits", "677 of 930", "72.8 % of trace blocks; an unlimited cache: 677"),
            row("path", "/a/directory/of/some/length", ""),
        ];
        for columns in [60, 80, 200] {
            let text = with_notes(&rows, Some(columns));
            assert!(width(&text) <= columns, "{text}");
            assert_eq!(text.contains('│'), columns >= 80, "{text}");
            let words: Vec<&str> = text.split_whitespace().collect();
            assert!(words.contains(&"/a/directory/of/some/length"), "{text}");
            assert!(words.contains(&"unlimited"), "{text}");
        }
        assert_eq!(with_notes(&rows, None), with_notes(&rows, Some(200)));
        let lines = with_notes(&rows, Some(42));
        let wanted = "\
hits  677 of 930
  72.8 % of trace blocks; an unlimited
  cache: 677
path  /a/directory/of/some/length";
        assert_eq!(lines, wanted);
    }

    #[test]
    fn a_grid_that_is_too_wide_is_split_or_stacked() {
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        let header = ["policy", "depth", "TTFT, p99", "note"];
        let rows = vec![row(["s3fifo", "8", "1.2 s", "two words"]), row(["lru", "16", "", "one"])];
        let text = fit(&header, rows.clone(), 1..4, 2, Some(30));
        let wanted = "\
s3fifo, depth 8
  TTFT, p99  1.2 s
  note       two words
lru, depth 16
  note       one";
        assert_eq!(text, wanted);
        assert!(fit(&header, rows.clone(), 1..4, 2, Some(80)).contains('│'));
        let all = [rows.clone(), rows.clone()].concat();
        let wanted = "\
┌────────┬───────┬───────┐
│ policy ┆ depth ┆ TTFT, │
│        ┆       ┆   p99 │
╞════════╪═══════╪═══════╡
│ s3fifo ┆     8 ┆ 1.2 s │
│ lru    ┆    16 ┆       │
│ s3fifo ┆     8 ┆ 1.2 s │
│ lru    ┆    16 ┆       │
└────────┴───────┴───────┘
┌────────┬───────┬───────────┐
│ policy ┆ depth ┆      note │
╞════════╪═══════╪═══════════╡
│ s3fifo ┆     8 ┆ two words │
│ lru    ┆    16 ┆       one │
│ s3fifo ┆     8 ┆ two words │
│ lru    ┆    16 ┆       one │
└────────┴───────┴───────────┘";
        assert_eq!(fit(&header, all.clone(), 1..4, 2, Some(30)), wanted);
        assert!(fit(&header, all, 1..4, 2, Some(20)).starts_with("s3fifo, depth 8\n"));
        assert_eq!(
            fit(&header, rows.clone(), 1..4, 2, Some(80)),
            fit(&header, rows, 1..4, 2, None)
        );
    }
}
