//! Output for people and scripts: results on stdout, messages on stderr.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::sync::OnceLock;

use anyhow::Context as _;
use serde::Serialize;

/// Set once something was written to stdout: a second JSON object must not follow.
static HAS_PRINTED: OnceLock<()> = OnceLock::new();

/// Writes a result to stdout. A reader that closed stdout has seen enough: that is no error, and
/// does not change the exit code.
///
/// # Errors
/// Returns an error if stdout cannot be written to. It can be downcast to [`io::Error`].
pub(crate) fn print(result: impl Display) -> anyhow::Result<()> {
    set_printed();
    let mut out = io::stdout().lock();
    match writeln!(out, "{result}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

/// Writes a result to stdout, as one JSON object or as text.
pub(crate) fn report<T: Serialize>(
    result: &T,
    is_json: bool,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    if is_json { print(serde_json::to_string(result)?) } else { print_text(&text(result)) }
}

/// Writes a result for people to stdout. Lines of running text that are longer than the terminal
/// are folded, as far as their words permit.
pub(crate) fn print_text(text: &str) -> anyhow::Result<()> {
    match columns() {
        Some(columns) => print(folded(text, columns)),
        None => print(text),
    }
}

fn folded(text: &str, columns: usize) -> String {
    let fold = |line: &str| {
        if width(line) <= columns || line.contains(['│', '┆', '─']) {
            return line.to_owned();
        }
        let words = line.trim_start();
        let indent = " ".repeat(line.len() - words.len());
        let more = format!("\n{indent}  ");
        let room = columns.saturating_sub(indent.len() + 2);
        format!("{indent}{}", fold_at(words, room).replace('\n', &more))
    };
    text.lines().map(fold).collect::<Vec<_>>().join("\n")
}

/// Records that a result, or a part of one, is on stdout.
pub(crate) fn set_printed() {
    HAS_PRINTED.get_or_init(|| ());
}

/// Returns true if something was written to stdout.
pub(crate) fn has_printed() -> bool {
    HAS_PRINTED.get().is_some()
}

/// Writes a message to stderr. A failure cannot be reported and is ignored.
pub(crate) fn say(message: impl Display) {
    let _ = writeln!(io::stderr(), "{message}");
}

/// Returns the columns of stdout, if it is a terminal.
pub(crate) fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// Wraps text at so many columns; longer words stay whole.
pub(crate) fn fold_at(text: &str, columns: usize) -> String {
    let mut folded = String::new();
    for line in text.lines() {
        let mut column = 0;
        for word in line.split(' ') {
            let width = word.chars().count();
            if column > 0 && column + 1 + width > columns {
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

/// Returns the characters of the longest line.
pub(crate) fn width(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_text_is_folded_and_a_table_is_not() {
        let text = format!("{}\n  {}\nshort", "│ cell ".repeat(9), "word ".repeat(9).trim_end());
        let found = folded(&text, 30);
        let wanted =
            [&"│ cell ".repeat(9), "  word word word word word", "    word word word word"];
        assert_eq!(found.lines().collect::<Vec<_>>(), [&wanted[..], &["short"]].concat());
        assert_eq!(folded("a\n\nb\n", 30), "a\n\nb");
    }
}
