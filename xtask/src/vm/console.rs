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
        match word {
            "ok" => {
                self.tally.passed += 1;
                Some(Heard::Ok)
            }
            "FAILED" => {
                self.tally.failed += 1;
                Some(Heard::Failed(why.to_owned()))
            }
            "skipped" => {
                self.tally.skipped += 1;
                Some(Heard::Skipped(why.to_owned()))
            }
            _ => None,
        }
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
mod tests {
    use super::*;

    fn read(lines: &[&str]) -> Console {
        let mut console = Console::default();
        for line in lines {
            console.line(line);
        }
        console
    }

    #[test]
    fn a_whole_run_is_counted() {
        let mut console = read(&["noise", "\u{1b}vm: suite a has 3 tests\r", "vm: running b"]);
        assert_eq!(console.line("vm: test b ... ok\r\n"), Some(("b".into(), Heard::Ok)));
        let failed = console.line("vm: test c ... FAILED: 1: 2");
        assert_eq!(failed, Some(("c".into(), Heard::Failed("1: 2".into()))));
        console.line("vm: test d ... skipped: why");
        console.line("vm: suite a ended");
        assert_eq!(console.finish(), (Tally { passed: 1, failed: 1, skipped: 1 }, None));
    }

    #[test]
    fn a_run_that_stops_in_the_middle_has_failed() {
        let console = read(&["vm: suite a has 4 tests", "vm: test b ... ok", "vm: running c"]);
        let (tally, wrong) = console.finish();
        assert_eq!((tally.passed, tally.failed), (1, 3));
        assert_eq!(wrong.unwrap(), "the machine stopped in c");
    }

    #[test]
    fn silence_and_a_panic_are_failures() {
        assert_eq!(read(&[]).finish().0.failed, 1);
        let panicked = read(&[
            "vm: suite a has 1 tests",
            "vm: test b ... ok",
            "vm: suite a ended",
            "[ 1.0] Kernel panic - not syncing: Attempted to kill init!",
        ]);
        assert_eq!(panicked.finish().0, Tally { passed: 1, failed: 1, skipped: 0 });
    }

    #[test]
    fn what_a_program_prints_is_not_taken_for_a_result() {
        let mut console = Console::default();
        assert_eq!(console.line("say vm: test b ... ok"), None);
        assert_eq!(console.line("test b ... ok"), None);
        assert_eq!(console.finish().0.passed, 0);
    }
}
