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
    print(if is_json { serde_json::to_string(result)? } else { text(result) })
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
