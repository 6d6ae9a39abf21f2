//! Runs of other programs.

use std::ffi::OsStr;
use std::fmt;
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};

/// A program reported an error in its input, printed above, as opposed to a problem of the machine.
#[derive(Debug)]
pub struct SaidNo(pub String);

impl fmt::Display for SaidNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed; its output is above", self.0)
    }
}

impl std::error::Error for SaidNo {}

/// Quotes a word for a POSIX shell.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Formats a command line of plain words.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// Prints a command, and runs it.
///
/// # Errors
/// Fails if the program cannot be run or does not succeed; its output is on the terminal.
pub fn run(command: &mut Command) -> Result<()> {
    let line = shown(command);
    eprintln!("    $ {line}");
    let status = command.status().with_context(|| format!("cannot run `{line}`"))?;
    ensure!(status.success(), "`{line}` failed ({status}); its output is above");
    Ok(())
}

/// Runs a command, and returns what it printed on stdout, as text.
///
/// # Errors
/// Fails if the program cannot be run or does not succeed, with what it printed on stderr.
pub fn text(command: &mut Command) -> Result<String> {
    let line = shown(command);
    let output = command.output().with_context(|| format!("cannot run `{line}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed ({}):\n{}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Prints a command, runs it, and returns what it printed.
///
/// # Errors
/// Fails if the program cannot be run, and with [`SaidNo`] if it does not succeed.
pub fn compile(command: &mut Command) -> Result<Output> {
    let line = shown(command);
    eprintln!("    $ {line}");
    let output = command.output().with_context(|| format!("cannot run `{line}`"))?;
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!(SaidNo(line));
    }
    Ok(output)
}
