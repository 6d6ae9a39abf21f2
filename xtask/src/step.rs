//! One command of a run: its display, execution and verdict.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fmt, thread};

use anyhow::{Context, Result};

use crate::deadline::Deadline;
use crate::needs::{Lacking, Need};
use crate::parts::{self, Part};
use crate::tally::Tally;

/// A command line, and its conditions to pass.
#[derive(Clone, Debug)]
pub struct Step {
    pub name: String,
    program: String,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    /// If set, the output is libtest's and is counted: the minimum number of passed tests.
    tests_at_least: Option<u64>,
    skip: Option<String>,
    /// Needs of the whole step, satisfied before a run's first step.
    pub needs: Vec<Need>,
    /// Needs of a part of the step, each with the variable that disables the part: `NAME=1`.
    part_needs: Vec<(Need, &'static str)>,
    /// Disabled parts, each with the reason.
    pub skipped_parts: Vec<String>,
}

/// Result of a step.
#[derive(Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    pub tally: Tally,
    pub took: Duration,
    /// Parts of the step, if its output names them.
    pub parts: Vec<Part>,
}

/// A program reported an error in its input, printed above, as opposed to a problem of the machine.
#[derive(Debug)]
pub struct SaidNo(pub String);

impl fmt::Display for SaidNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed; its output is above", self.0)
    }
}

impl std::error::Error for SaidNo {}

/// Verdict on a step.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Failed(String),
    Skipped(String),
}

impl Step {
    /// Returns a step of `cargo` with `args`, split at spaces.
    pub fn cargo(name: impl Into<String>, args: &str) -> Self {
        Self::new(name, "cargo").args(args.split_whitespace()).needs(&[Need::Crates])
    }

    pub fn new(name: impl Into<String>, program: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            tests_at_least: None,
            skip: None,
            needs: Vec::new(),
            part_needs: Vec::new(),
            skipped_parts: Vec::new(),
        }
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

    /// Adds a need of only a part of the step, and the variable that disables the part. Its
    /// disabled tests are reported as ignored, and so counted.
    pub fn part_needs(mut self, need: Need, off: &'static str) -> Self {
        self.part_needs.push((need, off));
        self
    }

    /// Counts the tests, and fails the step if fewer passed.
    pub fn tests_at_least(mut self, passed: u64) -> Self {
        self.tests_at_least = Some(passed);
        self
    }

    /// Keeps the step in the table, with the reason for skipping it.
    pub fn skipped(mut self, why: impl Into<String>) -> Self {
        self.skip = Some(why.into());
        self.needs.clear();
        self
    }

    /// Skips the step, or its parts, whose needs are in `lacking`.
    pub fn without(mut self, lacking: &Lacking) -> Self {
        if let Some(why) = self.needs.iter().find_map(|need| lacking.why(*need)) {
            return self.skipped(why);
        }
        for (need, off) in std::mem::take(&mut self.part_needs) {
            if let Some(why) = lacking.why(need) {
                self.skipped_parts.push(why.to_owned());
                self = self.env(off, "1");
            }
        }
        self
    }

    /// Returns all needs of the step and its parts.
    pub fn all_needs(&self) -> impl Iterator<Item = Need> {
        self.needs.iter().copied().chain(self.part_needs.iter().map(|(need, _)| *need))
    }

    /// Runs the step as part of a run; counted output is copied to `out`.
    pub fn run(&self, deadline: Deadline, out: &mut impl Write) -> Outcome {
        let start = Instant::now();
        let mut heard = Heard::default();
        let verdict = match &self.skip {
            Some(why) => {
                heard.tally.skipped = 1;
                Verdict::Skipped(why.clone())
            }
            None => match self.execute(deadline, out, &mut heard) {
                Ok(verdict) => verdict,
                Err(error) => Verdict::Failed(format!("{error:#}")),
            },
        };
        let Heard { tally, parts } = heard;
        Outcome { verdict, tally, took: start.elapsed(), parts }
    }

    /// Runs only this step, without a table, and returns its exit code.
    pub fn run_alone(&self) -> Result<ExitCode> {
        eprintln!("    $ {self}");
        let status = self.command().status().with_context(|| format!("cannot run `{self}`"))?;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
    }

    /// The command itself, to run it in another way.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(key, value)| (key, value)));
        command
    }

    /// Returns true if it is a run of `cargo test`.
    fn names_parts(&self) -> bool {
        self.program == "cargo" && self.args.first().is_some_and(|arg| arg == "test")
    }

    fn execute(
        &self,
        deadline: Deadline,
        out: &mut impl Write,
        heard: &mut Heard,
    ) -> Result<Verdict> {
        let mut command = self.command();
        command.stdin(Stdio::null());
        if self.tests_at_least.is_some() {
            command.stdout(Stdio::piped());
        }
        if self.names_parts() {
            command.stderr(Stdio::piped());
            if io::stderr().is_terminal() && env::var_os("CARGO_TERM_COLOR").is_none() {
                command.env("CARGO_TERM_COLOR", "always");
            }
        }
        if deadline.is_set() {
            // Only with a deadline: a separate group does not receive Ctrl-C from a terminal.
            command.process_group(0);
        }
        let mut child = command.spawn().with_context(|| format!("cannot run `{self}`"))?;
        let watch = deadline.watch(child.id());
        let names = child.stderr.take().map(|errors| thread::spawn(|| copy_and_name(errors)));
        let counted = child.stdout.take().map(|output| copy_and_count(output, out)).transpose();
        let status = child.wait();
        let timed_out = watch.finish();
        let names = names.map(|names| names.join().unwrap_or_default()).unwrap_or_default();
        let (tally, took) = counted?.unwrap_or_default();
        *heard = Heard { tally, parts: parts::pair(names, took) };
        let status = status?;
        if timed_out {
            return Ok(Verdict::Failed("stopped: the run's deadline passed".into()));
        }
        if !status.success() {
            return Ok(Verdict::Failed(status.to_string()));
        }
        Ok(match self.tests_at_least {
            Some(least) if heard.tally.passed < least => Verdict::Failed(format!(
                "{} tests passed where at least {least} must exist",
                heard.tally.passed
            )),
            _ => Verdict::Ok,
        })
    }
}

/// Information from a step's output.
#[derive(Debug, Default)]
struct Heard {
    tally: Tally,
    parts: Vec<Part>,
}

/// Copies a child's output line by line. Returns the test counts and each program's duration.
fn copy_and_count(output: impl Read, out: &mut impl Write) -> io::Result<(Tally, Vec<Duration>)> {
    let (mut tally, mut took) = (Tally::default(), Vec::new());
    copy(output, out, |line| {
        tally += Tally::of_line(line);
        took.extend(parts::took(line));
    })?;
    Ok((tally, took))
}

/// Copies a child's stderr line by line. Returns the names of its test programs.
fn copy_and_name(errors: impl Read) -> Vec<String> {
    let mut names = Vec::new();
    // An error on stderr cannot be reported.
    let _ = copy(errors, &mut io::stderr(), |line| names.extend(parts::name(line)));
    names
}

fn copy(from: impl Read, to: &mut impl Write, mut hear: impl FnMut(&str)) -> io::Result<()> {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    while from.read_until(b'\n', &mut line)? > 0 {
        // Bytes instead of text: a test may print anything.
        to.write_all(&line)?;
        hear(&String::from_utf8_lossy(&line));
        line.clear();
    }
    to.flush()
}

/// Formats the command line as in a shell.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in &self.env {
            write!(f, "{key}={} ", quoted(value))?;
        }
        f.write_str(&quoted(&self.program))?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Step {
        Step::new("a step", "sh").args(["-c", script])
    }

    fn run(step: &Step) -> Outcome {
        // Not to stdout: an outer run of these tests would count the made-up results below.
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
        let (tally, took) = copy_and_count(two.as_bytes(), &mut copy).unwrap();
        assert!(took.is_empty());
        assert_eq!(copy, two.as_bytes());
        assert_eq!(tally, Tally { passed: 5, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_skipped_step_does_not_run() {
        let outcome = run(&shell("exit 1").skipped("why"));
        assert_eq!(outcome.verdict, Verdict::Skipped("why".into()));
        assert_eq!(outcome.tally.skipped, 1);
    }

    #[test]
    fn a_step_without_what_it_needs_is_skipped_with_the_reason() {
        let step = || shell("exit 1").needs(&[Need::Cxx, Need::Vllm]);
        let lacking = Lacking::only(Need::Vllm, "no network");
        let outcome = run(&step().without(&lacking));
        assert_eq!(outcome.verdict, Verdict::Skipped("no network".into()));
        let other = Lacking::only(Need::Qemu, "no network");
        assert!(matches!(run(&step().without(&other)).verdict, Verdict::Failed(_)));
    }

    #[test]
    fn a_step_without_what_a_part_needs_runs_without_that_part() {
        let step = shell("exit ${OFF:-7}").part_needs(Need::Qemu, "OFF");
        assert_eq!(step.all_needs().collect::<Vec<_>>(), [Need::Qemu]);
        let without = step.clone().without(&Lacking::only(Need::Qemu, "no network"));
        assert!(matches!(run(&without).verdict, Verdict::Failed(why) if why.contains('1')));
        assert_eq!(without.skipped_parts, ["no network"]);
        let with = step.without(&Lacking::default());
        assert!(matches!(run(&with).verdict, Verdict::Failed(why) if why.contains('7')));
        assert!(with.skipped_parts.is_empty());
    }
}
