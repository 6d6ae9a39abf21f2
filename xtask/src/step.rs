//! One command of a run: how it is shown, run and judged.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::deadline::Deadline;
use crate::need::Need;
use crate::tally::Tally;

/// A command line, and what it takes to pass.
#[derive(Clone, Debug)]
pub struct Step {
    pub name: String,
    program: String,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    /// Some if the output is libtest's, to be counted: how many tests must have passed.
    tests_at_least: Option<u64>,
    skip: Option<&'static str>,
    /// Satisfied before the first step of a run.
    pub needs: Vec<Need>,
}

/// What came of a step.
#[derive(Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    pub tally: Tally,
    pub took: Duration,
}

/// A program that a command runs said no, and why is above: a failure of what it was given, and not
/// of the machine.
#[derive(Debug)]
pub struct SaidNo(pub String);

impl fmt::Display for SaidNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed; its output is above", self.0)
    }
}

impl std::error::Error for SaidNo {}

/// How a step ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Failed(String),
    Skipped(&'static str),
}

impl Step {
    /// `cargo` with `args`, split at spaces.
    pub fn cargo(name: impl Into<String>, args: &str) -> Self {
        Self::new(name, "cargo").args(args.split_whitespace())
    }

    pub fn new(name: impl Into<String>, program: impl Into<String>) -> Self {
        let (args, env, needs) = (Vec::new(), Vec::new(), Vec::new());
        let (name, program) = (name.into(), program.into());
        Self { name, program, args, env, tests_at_least: None, skip: None, needs }
    }

    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    pub fn env(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.env.push((key, value.into()));
        self
    }

    pub fn needs(mut self, needs: &[Need]) -> Self {
        self.needs.extend(needs);
        self
    }

    /// Counts the tests, and fails the step if fewer passed.
    pub fn tests_at_least(mut self, passed: u64) -> Self {
        self.tests_at_least = Some(passed);
        self
    }

    /// Keeps the step in the table, with the reason why it does not run.
    pub fn skipped(mut self, why: &'static str) -> Self {
        self.skip = Some(why);
        self.needs.clear();
        self
    }

    /// Runs the step as part of a run; output that is counted is copied to `out`.
    pub fn run(&self, deadline: Deadline, out: &mut impl Write) -> Outcome {
        let start = Instant::now();
        let mut tally = Tally::default();
        let verdict = match self.skip {
            Some(why) => {
                tally.skipped = 1;
                Verdict::Skipped(why)
            }
            None => match self.execute(deadline, out, &mut tally) {
                Ok(verdict) => verdict,
                Err(error) => Verdict::Failed(format!("{error:#}")),
            },
        };
        Outcome { verdict, tally, took: start.elapsed() }
    }

    /// Runs the step as the only one, with no table around it, and ends with its exit code.
    pub fn run_alone(&self) -> Result<ExitCode> {
        eprintln!("    $ {self}");
        let status = self.command().status().with_context(|| format!("cannot run `{self}`"))?;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(key, value)| (key, value)));
        command
    }

    fn execute(
        &self,
        deadline: Deadline,
        out: &mut impl Write,
        tally: &mut Tally,
    ) -> Result<Verdict> {
        let mut command = self.command();
        command.stdin(Stdio::null());
        if self.tests_at_least.is_some() {
            command.stdout(Stdio::piped());
        }
        if deadline.is_set() {
            // Only then: in a group of its own it would not hear Ctrl-C at a terminal.
            command.process_group(0);
        }
        let mut child = command.spawn().with_context(|| format!("cannot run `{self}`"))?;
        let watch = deadline.watch(child.id());
        let counted = child.stdout.take().map(|output| copy_and_count(output, out)).transpose();
        let status = child.wait();
        let timed_out = watch.finish();
        *tally = counted?.unwrap_or_default();
        let status = status?;
        if timed_out {
            return Ok(Verdict::Failed("stopped: the run's deadline passed".into()));
        }
        if !status.success() {
            return Ok(Verdict::Failed(status.to_string()));
        }
        Ok(match self.tests_at_least {
            Some(least) if tally.passed < least => Verdict::Failed(format!(
                "{} tests passed where at least {least} must exist",
                tally.passed
            )),
            _ => Verdict::Ok,
        })
    }
}

/// Copies a child's output, line by line, and counts the tests in it.
fn copy_and_count(output: impl Read, out: &mut impl Write) -> io::Result<Tally> {
    let (mut output, mut tally, mut line) = (BufReader::new(output), Tally::default(), Vec::new());
    while output.read_until(b'\n', &mut line)? > 0 {
        // Bytes, not text: a test may print anything.
        out.write_all(&line)?;
        tally += Tally::of_line(&String::from_utf8_lossy(&line));
        line.clear();
    }
    out.flush()?;
    Ok(tally)
}

/// The command line as one would type it.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in &self.env {
            write!(f, "{key}={} ", quoted(value))?;
        }
        f.write_str(&quoted(&self.program))?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

/// A word as a POSIX shell reads it back.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A command line of plain words.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Step {
        Step::new("a step", "sh").args(["-c", script])
    }

    fn run(step: &Step) -> Outcome {
        // Not to stdout: a run of these very tests would count the made-up results below.
        step.run(Deadline::new(None, false), &mut io::sink())
    }

    #[test]
    fn a_command_line_is_shown_so_that_it_can_be_pasted() {
        let step = Step::cargo("docs", "doc --no-deps").env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(step.to_string(), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn the_exit_code_decides() {
        assert_eq!(run(&shell("exit 0")).verdict, Verdict::Ok);
        assert!(matches!(run(&shell("exit 7")).verdict, Verdict::Failed(why) if why.contains('7')));
        let missing = Step::new("a step", "no-such-program-anywhere");
        assert!(matches!(run(&missing).verdict, Verdict::Failed(_)));
    }

    #[test]
    fn a_step_that_ran_no_test_has_failed() {
        let none = shell("echo 'test result: ok. 0 passed; 0 failed; 2 ignored; 0 measured'");
        let outcome = run(&none.tests_at_least(1));
        assert!(matches!(outcome.verdict, Verdict::Failed(_)));
        assert_eq!(outcome.tally.skipped, 2);
        let one = shell("echo 'test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured'");
        assert_eq!(run(&one.tests_at_least(1)).verdict, Verdict::Ok);
    }

    #[test]
    fn binaries_add_up() {
        let two = "test result: ok. 2 passed; 0 failed; 0 ignored\n\
                   noise \u{fffd}\n\
                   test result: FAILED. 3 passed; 1 failed; 0 ignored";
        let mut copy = Vec::new();
        let tally = copy_and_count(two.as_bytes(), &mut copy).unwrap();
        assert_eq!(copy, two.as_bytes());
        assert_eq!(tally, Tally { passed: 5, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_skipped_step_does_not_run() {
        assert_eq!(run(&shell("exit 1").skipped("why")).verdict, Verdict::Skipped("why"));
    }
}
