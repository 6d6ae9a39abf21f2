//! Output of the guest's program on the console, line by line:
//!
//! ```text
//!   vm: suite NAME has N tests
//!   vm: running TEST
//!   vm: test TEST ... ok
//!   vm: test TEST ... FAILED: why
//!   vm: test TEST ... skipped: why
//!   vm: suite NAME ended
//! ```
//!
//! All other output is the guest's own. A suite has passed only if it ended and every announced
//! test was reported: a machine that stops in the middle is a failure.

use crate::tally::Tally;

const MARK: &str = "vm: ";

/// Result of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    Ok,
    Failed(String),
    Skipped(String),
}

/// State of the console of one boot.
#[derive(Debug, Default)]
pub struct Console {
    tally: Tally,
    announced: Option<u64>,
    running: Option<String>,
    ended: bool,
    panicked: bool,
}

impl Console {
    /// Processes one line. Returns the test that it reports, if any.
    pub fn line(&mut self, line: &str) -> Option<(String, Heard)> {
        let line = line.trim_matches(|c: char| c.is_control() || c == ' ');
        self.panicked |= line.contains("Kernel panic - not syncing");
        let said = line.strip_prefix(MARK)?;
        if let Some(test) = said.strip_prefix("running ") {
            self.running = Some(test.to_owned());
        } else if let Some(rest) = said.strip_prefix("suite ") {
            self.suite(rest);
        } else if let Some((test, how)) =
            said.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "))
        {
            let heard = self.count(how)?;
            self.running = None;
            return Some((test.to_owned(), heard));
        }
        None
    }

    fn suite(&mut self, rest: &str) {
        let words: Vec<&str> = rest.split(' ').collect();
        match words[..] {
            [_, "has", number, "tests"] => self.announced = number.parse().ok(),
            [_, "ended"] => self.ended = true,
            _ => {}
        }
    }

    fn count(&mut self, how: &str) -> Option<Heard> {
        let (word, why) = how.split_once(": ").unwrap_or((how, ""));
        let (count, heard) = match word {
            "ok" => (&mut self.tally.passed, Heard::Ok),
            "FAILED" => (&mut self.tally.failed, Heard::Failed(why.to_owned())),
            "skipped" => (&mut self.tally.skipped, Heard::Skipped(why.to_owned())),
            _ => return None,
        };
        *count += 1;
        Some(heard)
    }

    /// Returns the tests so far, and the error of the run as a whole, if any. Announced but
    /// unreported tests count as failed.
    pub fn finish(&self) -> (Tally, Option<String>) {
        let mut tally = self.tally;
        let heard = tally.passed + tally.failed + tally.skipped;
        let missing = self.announced.map_or(1, |announced| announced.saturating_sub(heard));
        let wrong = if self.panicked {
            Some("the guest's kernel panicked".to_owned())
        } else if self.announced.is_none() {
            Some("the guest's tests never started".to_owned())
        } else if let Some(test) = &self.running {
            Some(format!("the machine stopped in {test}"))
        } else if !self.ended || missing > 0 {
            Some(format!("the machine stopped before {missing} more tests"))
        } else {
            None
        };
        if wrong.is_some() {
            tally.failed += missing.max(u64::from(tally.failed == 0));
        }
        (tally, wrong)
    }
}

#[cfg(test)]
mod tests;
