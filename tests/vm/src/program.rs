//! Other programs, and this one in another role.

use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{faults, serve};

/// First argument of a process that plays a role in a test.
pub const ROLE: &str = "role";

/// Result of a program.
#[derive(Debug)]
pub struct Ran {
    pub line: String,
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Returns itself if the exit code is 0.
    pub fn success(self) -> Result<Self> {
        self.with_code(0)
    }

    /// Returns itself if the exit code is `code`.
    pub fn with_code(self, code: i32) -> Result<Self> {
        ensure!(
            self.code == Some(code),
            "`{}` ended with {:?}, not {code}: {} {}",
            self.line,
            self.code,
            self.out.trim(),
            self.err.trim()
        );
        Ok(self)
    }

    /// Parses its output as JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.out)
            .with_context(|| format!("`{}` answers `{}`", self.line, self.out))
    }
}

/// Runs a program to completion.
pub fn run(program: &str, arguments: &[&str]) -> Result<Ran> {
    let line = format!("{program} {}", arguments.join(" "));
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run `{line}`"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Ran {
        line,
        code: output.status.code(),
        out: text(&output.stdout),
        err: text(&output.stderr),
    })
}

/// Starts a program and discards its output.
pub fn start(program: &str, arguments: &[&str]) -> Result<Child> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().with_context(|| format!("cannot run {program} {}", arguments.join(" ")))
}

/// Starts a program that shares our output.
pub fn start_talking(program: &str, arguments: &[&str]) -> Result<Child> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command.spawn().with_context(|| format!("cannot run {program} {}", arguments.join(" ")))
}

/// Runs a role that a test has started this program in.
pub fn play(words: &[&str]) -> Result<ExitCode> {
    match *words {
        ["hold", bdf] => faults::hold(bdf)?,
        ["hammer", bdf] => faults::hammer(bdf)?,
        ["read-one", bdf] => faults::read_one(bdf)?,
        ["serve-client"] => serve::client()?,
        _ => bail!("no part {words:?}"),
    }
    Ok(ExitCode::SUCCESS)
}
