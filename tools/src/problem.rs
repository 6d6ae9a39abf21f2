//! What went wrong, in words for the person at the terminal, and the exit code that goes with it.

use std::fmt;

/// Exit code of bad input: the command line, the trace, or what the machine cannot do.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code of wrong bytes or failed I/O.
pub(crate) const EXIT_FAILED: u8 = 1;
/// Exit code after Ctrl-C, as shells count it (128 + SIGINT).
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// Bad input. Says what was asked and found, and in the hint what to do about it.
///
/// Everything else travels as [`anyhow::Error`] and ends with [`EXIT_FAILED`].
#[derive(Debug)]
pub(crate) struct Problem {
    message: String,
    hint: String,
}

impl Problem {
    /// `hint` may be empty where the message says it all.
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }

    /// What to do about it; may be empty.
    pub(crate) fn hint(&self) -> &str {
        &self.hint
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}

/// Why something of this machine cannot be used, where something else can instead.
#[derive(Debug, Clone)]
pub(crate) struct Unfit {
    why: String,
    /// What would make it usable; may be empty.
    pub(crate) fix: String,
}

/// [`Unfit`] as an error that travels.
pub(crate) fn unfit(why: impl ToString, fix: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Unfit { why: why.to_string(), fix: fix.into() })
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Unfit {}

/// The hint for an error that comes from a resource of this process or machine that is used up.
pub(crate) fn shortage(error: &anyhow::Error) -> Option<&'static str> {
    let code = |cause: &(dyn std::error::Error + 'static)| {
        let of_io = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        of_io.or_else(|| cause.downcast_ref::<rustix::io::Errno>().map(|e| e.raw_os_error()))
    };
    Some(match error.chain().find_map(code)? {
        libc::EMFILE | libc::ENFILE => "allow more open files (ulimit -n), or use fewer --devices",
        libc::ENOMEM => "allow more memory (ulimit -v), or set --capacity or --pool-blocks",
        libc::EAGAIN => "allow more threads (ulimit -u), or use fewer --devices",
        _ => return None,
    })
}

/// An error and its causes in one line. Causes that the message before them quotes already are left
/// out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.contains(&cause) {
            continue;
        }
        if !text.is_empty() {
            text += ": ";
        }
        text += &cause;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_not_said_again() {
        let error = anyhow::anyhow!("no such file").context("opening x: no such file");
        assert_eq!(one_line(&error.context("starting")), "starting: opening x: no such file");
    }
}
