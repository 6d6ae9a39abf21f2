//! One command of a run: its display, execution and verdict.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::child::{SaidNo, quoted};
use crate::deadline::Deadline;
use crate::needs::Lacking;
use crate::tally::Tally;

/// A command line, and its conditions to pass.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub name: String,
    program: String,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    /// If set, the output is libtest's and is counted: the minimum number of passed tests.
    tests_at_least: Option<u64>,
    skip: Option<String>,
    /// Needs of the whole step, got before a run's first step.
    pub needs: Vec<&'static str>,
    /// Needs of a part of the step, each with the variable that disables the part: `NAME=1`.
    part_needs: Vec<(&'static str, &'static str)>,
    /// Disabled parts, each with the reason.
    pub skipped_parts: Vec<String>,
    /// True for a step that runs beside the others.
    pub is_aside: bool,
}

/// Result of a step.
#[derive(Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    pub tally: Tally,
    pub took: Duration,
    /// CPU time of the step's processes, on all cores.
    pub cpu: Duration,
}

/// Verdict on a step.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Failed(String),
    Skipped(String),
}

impl Outcome {
    /// Returns the outcome of a step that could not be run.
    pub fn failed(why: String) -> Self {
        Self {
            verdict: Verdict::Failed(why),
            tally: Tally::default(),
            took: Duration::ZERO,
            cpu: Duration::ZERO,
        }
    }
}

impl Step {
    /// Returns a step of `cargo` with `args`, split at spaces.
    pub fn cargo(name: impl Into<String>, args: &str) -> Self {
        Self::new(name, "cargo").args(args.split_whitespace()).needs(&["crates"])
    }

    /// Returns a step of `cargo xtask` with `args`: a process of its own, so that a deadline ends
    /// all that it has started.
    pub fn xtask(args: &str, needs: &[&'static str]) -> Self {
        let name = args.split(' ').next().unwrap_or(args);
        Self::cargo(name, &format!("xtask {args}")).needs(needs)
    }

    /// Returns true for a command of this program.
    pub fn is_xtask(&self) -> bool {
        self.args.first().is_some_and(|word| word == "xtask")
    }

    pub fn new(name: impl Into<String>, program: impl Into<String>) -> Self {
        Self { name: name.into(), program: program.into(), ..Self::default() }
    }

    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    pub fn env(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.env.push((key, value.into()));
        self
    }

    pub fn needs(mut self, needs: &[&'static str]) -> Self {
        self.needs.extend(needs);
        self
    }

    /// Adds a need of only a part of the step, and the variable that disables the part. Its
    /// disabled tests are reported as ignored, and so counted.
    pub fn part_needs(mut self, need: &'static str, off: &'static str) -> Self {
        self.part_needs.push((need, off));
        self
    }

    /// Counts the tests, and fails the step if fewer passed.
    pub fn tests_at_least(mut self, passed: u64) -> Self {
        self.tests_at_least = Some(passed);
        self
    }

    /// Runs the step beside the others of a run, with its output in its place.
    pub fn aside(mut self) -> Self {
        self.is_aside = true;
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
        if let Some(why) = self.needs.iter().find_map(|need| lacking.get(need)) {
            return self.skipped(why);
        }
        for (need, off) in std::mem::take(&mut self.part_needs) {
            if let Some(why) = lacking.get(need) {
                self.skipped_parts.push(why.clone());
                self = self.env(off, "1");
            }
        }
        self
    }

    /// Returns all needs of the step and its parts.
    pub fn all_needs(&self) -> impl Iterator<Item = &'static str> {
        self.needs.iter().copied().chain(self.part_needs.iter().map(|(need, _)| *need))
    }

    /// Runs the step as part of a run; counted output is copied to `out`. Errors go to `errors`, or
    /// else to those of this process.
    pub fn run(&self, deadline: Deadline, out: &mut impl Write, errors: Option<File>) -> Outcome {
        let start = Instant::now();
        let (mut tally, mut cpu) = (Tally::default(), Duration::ZERO);
        let verdict = match &self.skip {
            Some(why) => {
                tally.skipped = 1;
                Verdict::Skipped(why.clone())
            }
            None => match self.execute(deadline, out, errors, &mut tally, &mut cpu) {
                Ok(verdict) => verdict,
                Err(error) => Verdict::Failed(format!("{error:#}")),
            },
        };
        Outcome { verdict, tally, took: start.elapsed(), cpu }
    }

    /// Runs only this step, without a table, and returns its exit code.
    pub fn run_alone(&self) -> Result<ExitCode> {
        eprintln!("    $ {self}");
        let status = self.command().status().with_context(|| format!("cannot run `{self}`"))?;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
    }

    /// Runs only this step, without a table.
    ///
    /// # Errors
    /// Fails with [`SaidNo`] if the program does not succeed.
    pub fn demand(&self) -> Result<()> {
        ensure!(self.run_alone()? == ExitCode::SUCCESS, SaidNo(self.to_string()));
        Ok(())
    }

    /// The command itself, to run it in another way.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(key, value)| (key, value)));
        command
    }

    fn execute(
        &self,
        deadline: Deadline,
        out: &mut impl Write,
        errors: Option<File>,
        tally: &mut Tally,
        cpu: &mut Duration,
    ) -> Result<Verdict> {
        let mut command = self.command();
        command.stdin(Stdio::null());
        if let Some(errors) = errors {
            command.stdout(errors.try_clone()?).stderr(errors);
        }
        if self.tests_at_least.is_some() {
            command.stdout(Stdio::piped());
        }
        if deadline.is_set() {
            // Only with a deadline: a separate group does not receive Ctrl-C from a terminal.
            command.process_group(0);
        }
        let mut child = command.spawn().with_context(|| format!("cannot run `{self}`"))?;
        let watch = deadline.watch(child.id());
        let counted = child.stdout.take().map(|output| copy_and_count(output, out)).transpose();
        *cpu = cpu_at_end(&child);
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

/// Waits for the end of a child, and returns the CPU time of it and of its own children.
fn cpu_at_end(child: &Child) -> Duration {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // It is not reaped, so that its times are still there.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let _ = pid.map(|pid| waitid(WaitId::Pid(pid), options));
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The program's name, which may contain spaces, ends with the only closing parenthesis.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    // utime, stime, cutime and cstime, proc_pid_stat(5).
    let ticks: u64 = fields.skip(11).take(4).flat_map(str::parse::<u64>).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Copies a child's output line by line, and counts its tests.
fn copy_and_count(output: impl Read, out: &mut impl Write) -> io::Result<Tally> {
    let (mut output, mut line, mut tally) = (BufReader::new(output), Vec::new(), Tally::default());
    while output.read_until(b'\n', &mut line)? > 0 {
        // Bytes instead of text: a test may print anything.
        out.write_all(&line)?;
        tally += Tally::of_line(&String::from_utf8_lossy(&line));
        line.clear();
    }
    out.flush()?;
    Ok(tally)
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

#[cfg(test)]
mod tests;
