//! What a person or a script reads: results on stdout, messages on stderr.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::sync::OnceLock;

use anyhow::Context as _;

/// Set once something was written to stdout: a second JSON object must not follow.
static HAS_PRINTED: OnceLock<()> = OnceLock::new();

/// Writes a result to stdout. Where its reader has gone away, it has seen enough: that is no error,
/// and the exit code is the one of a reader that stays.
///
/// # Errors
/// When stdout cannot be written to. The [`io::Error`] can be taken from it.
pub(crate) fn print(result: impl Display) -> anyhow::Result<()> {
    set_printed();
    let mut out = io::stdout().lock();
    match writeln!(out, "{result}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

/// From now on a result, or a part of one, is on stdout.
pub(crate) fn set_printed() {
    HAS_PRINTED.get_or_init(|| ());
}

/// Returns whether it is.
pub(crate) fn has_printed() -> bool {
    HAS_PRINTED.get().is_some()
}

/// Writes a message to stderr. Where that fails there is no one left to tell.
pub(crate) fn say(message: impl Display) {
    let _ = writeln!(io::stderr(), "{message}");
}
