//! What a person or a script reads: results on stdout, messages on stderr.

use std::fmt::Display;
use std::io::Write as _;

use anyhow::Context as _;

/// Writes a result to stdout.
///
/// # Errors
/// When stdout cannot be written to. The [`std::io::Error`] can be taken from it.
pub(crate) fn print(result: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{result}").and_then(|()| out.flush()).context("cannot write to stdout")
}

/// Writes a message to stderr. Where that fails there is no one left to tell.
pub(crate) fn say(message: impl Display) {
    let _ = writeln!(std::io::stderr(), "{message}");
}
