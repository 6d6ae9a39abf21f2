//! Test counts from libtest's output.

use std::fmt;
use std::ops::AddAssign;
use std::process::ExitCode;
use std::time::Duration;

use crate::EXIT_STEP_FAILED;

/// Numbers of tests, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

/// Prefix of a skipped test's name in the output.
const SKIPPED: &str = "SKIPPED ";

impl Tally {
    /// Counts the tests in a line of output. libtest ends each binary, and crate's doc tests, with
    /// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; ...`.
    ///
    /// A test that cannot run here passes, and prints `SKIPPED` and the reason.
    pub fn of_line(line: &str) -> Self {
        let skipped = line.contains(SKIPPED).into();
        let mut tally = Self { skipped, ..Self::default() };
        let Some((_, counts)) =
            line.trim().strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return tally;
        };
        for count in counts.split("; ") {
            let Some((number, outcome)) = count.split_once(' ') else { continue };
            let Ok(number) = number.parse() else { continue };
            match outcome {
                "passed" => tally.passed = number,
                "failed" => tally.failed = number,
                "ignored" => tally.skipped = number,
                _ => {}
            }
        }
        tally
    }

    /// Counts a test.
    pub fn count(&mut self, is_passed: bool) {
        *(if is_passed { &mut self.passed } else { &mut self.failed }) += 1;
    }

    /// Returns the exit code of a command with these tests.
    pub fn exit_code(self) -> ExitCode {
        if self.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS }
    }

    /// Formats such a line, for a command that does not use libtest.
    pub fn line(self, took: Duration) -> String {
        let Self { passed, failed, skipped } = self;
        let word = if failed > 0 { "FAILED" } else { "ok" };
        let seconds = took.as_secs_f64();
        format!(
            "test result: {word}. {passed} passed; {failed} failed; {skipped} ignored; \
             finished in {seconds:.1}s"
        )
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
