//! Errors in words for the person at the terminal, and their exit codes.

use gio_kernels::cuda::ErrorCode;
use nvme_driver::platform::vfio::VfioError;
use nvme_emu::EmuError;
use objstore::StoreError;
use ripieno_stack::{NotTaken, StackError};

/// Exit code for bad input: the command line, the trace, or something the machine does not support.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code for wrong data or failed I/O.
pub(crate) const EXIT_FAILED: u8 = 1;

/// Exit code when the reader of stdout closed it before the end, as shells report it (128 +
/// SIGPIPE).
pub(crate) const EXIT_UNREAD: u8 = 141;

/// Bad input: a message of what was asked and found, and a hint.
///
/// All other errors are an [`anyhow::Error`] and end with exit code 1.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    message: String,
    hint: String,
}

impl Problem {
    /// `hint` may be empty if the message is enough.
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }

    /// Converts it to the reason why a route is not taken.
    pub(crate) fn unfit(self) -> StackError {
        StackError::Unfit { why: self.message, fix: self.hint }
    }

    /// Replaces the hint.
    pub(crate) fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: hint.into(), ..self }
    }

    /// Returns the hint, which may be empty.
    pub(crate) fn hint(&self) -> &str {
        &self.hint
    }
}

/// Rejects the first of these flags that was given.
pub(crate) fn none_of(flags: &[(&str, bool)], why: &str, hint: &str) -> Result<(), Problem> {
    match flags.iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Problem::new(format!("{flag}: {why}"), hint)),
        None => Ok(()),
    }
}

/// Names the one of `names` that `given` is probably meant for, as the end of a message.
pub(crate) fn nearest<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> String {
    let found = ripieno_stack::nearest(given, names, 0.7);
    found.map_or(String::new(), |it| format!("; is it {it}?"))
}

/// A signal ended a command that has no partial result. Contains the exit code.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: there is no result, and no file was written")]
pub(crate) struct Interrupted(pub(crate) u8);

/// Hint for errors of the GPU.
const INSTEAD: &str = "use --executor host: the same I/O kernel, compiled for the host and run by \
                       threads; ripieno doctor shows what is missing for the GPU";

/// Translates errors of the layers below; bad input becomes a [`Problem`] with a hint.
pub(crate) fn user_error(error: StackError) -> anyhow::Error {
    let problem = match error {
        StackError::Unfit { why, fix } => Problem::new(why, fix),
        StackError::Drive { drive, why, hint } => Problem::new(format!("{drive}: {why}"), hint),
        StackError::Cuda(error) if !error.code().is_some_and(ErrorCode::is_sticky) => {
            Problem::new(format!("--executor cuda: {error}"), INSTEAD)
        }
        error @ StackError::Metrics { .. } => Problem::new(error.to_string(), ""),
        StackError::StoreDir(error) => Problem::new(error.to_string(), ""),
        // The existing data is not what was asked for; the message has the remedy.
        StackError::Store(StoreError::Format(error)) => Problem::new(error.to_string(), ""),
        // The flags are valid, so the medium does not support what they ask for.
        StackError::Emu(EmuError::Config(error)) => {
            let hint = "make a store directory with larger logical blocks (ripieno format --lba \
                        4096), or use media in memory";
            Problem::new(error.to_string(), hint)
        }
        // All VFIO errors but an unresponsive drive are something this machine lacks.
        StackError::Vfio { ref source, .. } if !matches!(source, VfioError::Gone { .. }) => {
            Problem::new(
                error.to_string(),
                "nvme-bind doctor shows what this machine lacks for VFIO",
            )
        }
        StackError::Config { .. }
        | StackError::Store(StoreError::Config { .. } | StoreError::Owned { .. }) => {
            Problem::new(error.to_string(), "")
        }
        StackError::Store(error) => return anyhow::Error::new(error).context("opening the store"),
        error => return error.into(),
    };
    problem.into()
}

/// Converts routes of which none works to a user error: the command line asked for them.
pub(crate) fn no_route(tried: &[NotTaken]) -> Problem {
    let asked = match tried {
        [NotTaken { route, .. }] => format!("--route {route}: the route does not work"),
        _ => "--executor cuda: no route of the data works".to_owned(),
    };
    let why = tried.iter().map(|NotTaken { route, why, .. }| format!("{route}: {why}"));
    let why = why.collect::<Vec<_>>().join("; ");
    let fix = tried.iter().map(|not| &*not.fix).find(|fix| !fix.is_empty());
    Problem::new(format!("{asked}: {why}"), fix.unwrap_or("ripieno doctor shows what does"))
}

/// Returns the hint for an error caused by an exhausted resource of this process or machine. It
/// names only flags that the command has.
pub(crate) fn shortage(error: &anyhow::Error, has: &dyn Fn(&str) -> bool) -> Option<String> {
    let code = |cause: &(dyn std::error::Error + 'static)| {
        let of_io = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        of_io.or_else(|| cause.downcast_ref::<rustix::io::Errno>().map(|e| e.raw_os_error()))
    };
    // Elsewhere, devices are those of a store that is there.
    let devices: &[_] = if has("mdts") { &["devices"] } else { &[] };
    let (limit, flags) = match error.chain().find_map(code)? {
        libc::EMFILE | libc::ENFILE => ("allow more open files (ulimit -n)", devices),
        libc::ENOMEM => ("allow more memory (ulimit -v)", &["capacity", "pool-blocks"][..]),
        libc::EAGAIN => ("allow more threads (ulimit -u)", devices),
        _ => return None,
    };
    let flags =
        flags.iter().filter(|flag| has(flag)).map(|flag| format!(", or a smaller --{flag}"));
    Some(flags.fold(limit.to_owned(), |hint, flag| hint + &flag))
}

/// Formats an error and its causes in one line. Causes that an earlier message already quotes are
/// left out.
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
