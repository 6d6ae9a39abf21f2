//! Runs steps in order, and prints a summary.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::parts::Part;
use crate::step::{Outcome, Step, Verdict};
use crate::tally::Tally;
use crate::{EXIT_STEP_FAILED, RunArgs, needs};

/// Duration above which a test program is listed.
const SLOW: Duration = Duration::from_secs(2);
/// Maximum number of listed programs.
const SHOWN: usize = 10;

/// Installs the steps' needs, then runs all steps, even after a failure: one run shows all errors.
/// Steps with unavailable needs are skipped.
///
/// # Errors
/// Returns an error if this machine lacks an essential need.
pub fn run_all(steps: Vec<Step>, args: RunArgs) -> Result<ExitCode> {
    let (start, deadline, count) = (Instant::now(), args.deadline(), steps.len());
    let lacking = needs::provide(steps.iter().flat_map(Step::all_needs))?;
    eprintln!("what the steps need was looked for in {}", clock(start.elapsed()));
    let mut done = Vec::with_capacity(count);
    for (index, step) in steps.into_iter().map(|step| step.without(&lacking)).enumerate() {
        eprintln!("\n==> [{}/{count}] {}\n    $ {step}", index + 1, step.name);
        let outcome = step.run(deadline, &mut io::stdout());
        let failed = match &outcome.verdict {
            Verdict::Ok => false,
            Verdict::Failed(why) => {
                eprintln!("==> {} failed: {why}", step.name);
                true
            }
            Verdict::Skipped(why) => {
                eprintln!("==> {} skipped: {why}", step.name);
                false
            }
        };
        done.push((step, outcome));
        if failed && args.fail_fast {
            break;
        }
    }
    let not_run = count - done.len();
    eprint!("{}", table(&done, not_run, start.elapsed()));
    let total = total(done.iter().map(|(_, outcome)| outcome));
    println!("{total}");
    Ok(if total.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS })
}

/// Returns the sum over all steps. A step that failed without a failed test (a lint, a crash, a
/// build) counts as one failure, so that the total of a failed run never says `0 failed`.
fn total<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> Tally {
    let mut total = Tally::default();
    for outcome in outcomes {
        total += outcome.tally;
        if matches!(outcome.verdict, Verdict::Failed(_)) && outcome.tally.failed == 0 {
            total.failed += 1;
        }
    }
    total
}

fn table(done: &[(Step, Outcome)], not_run: usize, took: Duration) -> String {
    let width = done.iter().map(|(step, _)| step.name.len()).max().unwrap_or(0).max(5);
    let row = |step: &str, result: &str, time: &str, tests: &str| {
        format!("{step:<width$} {result:<8} {time:>6}  {tests}").trim_end().to_owned()
    };
    let mut lines = vec![String::new(), row("step", "result", "time", "tests")];
    let mut again = Vec::new();
    for (step, outcome) in done {
        let result = match outcome.verdict {
            Verdict::Ok => "ok",
            Verdict::Failed(_) => "FAILED",
            Verdict::Skipped(_) => "skipped",
        };
        let counted = outcome.tally != Tally::default();
        let tests = if counted { outcome.tally.to_string() } else { String::new() };
        lines.push(row(&step.name, result, &clock(outcome.took), &tests));
        match &outcome.verdict {
            Verdict::Ok => {}
            Verdict::Failed(why) => again.push(format!("{}: {why}\n    $ {step}", step.name)),
            Verdict::Skipped(why) => again.push(format!("{}: skipped: {why}", step.name)),
        }
        let parts = step.skipped_parts.iter();
        again.extend(parts.map(|why| format!("{}: skipped in part: {why}", step.name)));
    }
    if not_run > 0 {
        again.push(format!("{not_run} more not run (--fail-fast)"));
    }
    lines.push(row("total", "", &clock(took), ""));
    lines.extend(slowest(done));
    if !again.is_empty() {
        lines.push(String::new());
        lines.append(&mut again);
    }
    lines.push("\n".into());
    lines.join("\n")
}

/// Returns the slowest parts, each with its step.
fn slowest(done: &[(Step, Outcome)]) -> Vec<String> {
    let of_step = |(step, outcome): &'_ (Step, Outcome)| {
        let line = |part: &Part| (part.took, format!("{}: {}", step.name, part.name));
        outcome.parts.iter().filter(|part| part.took >= SLOW).map(line).collect::<Vec<_>>()
    };
    let mut parts: Vec<(Duration, String)> = done.iter().flat_map(of_step).collect();
    parts.sort_by(|a, b| b.cmp(a));
    parts.truncate(SHOWN);
    let heading = (!parts.is_empty()).then(|| "\nslowest test programs".to_owned());
    let lines = parts.into_iter().map(|(took, name)| format!("{:>6}  {name}", clock(took)));
    heading.into_iter().chain(lines).collect()
}

/// Formats minutes and seconds.
fn clock(took: Duration) -> String {
    let seconds = took.as_secs_f64().round() as u64;
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::needs::{Lacking, Need};

    fn outcome(verdict: Verdict, tally: Tally) -> Outcome {
        Outcome { verdict, tally, took: Duration::from_secs(61), parts: Vec::new() }
    }

    #[test]
    fn a_failure_without_a_failed_test_still_counts() {
        let tests = Tally { passed: 9, failed: 0, skipped: 1 };
        let all = [
            outcome(Verdict::Ok, tests),
            outcome(Verdict::Failed("exit status: 101".into()), Tally::default()),
        ];
        assert_eq!(total(all.iter()).to_string(), "9 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn failed_tests_count_once() {
        let tests = Tally { passed: 9, failed: 2, skipped: 0 };
        let all = [outcome(Verdict::Failed("exit status: 101".into()), tests)];
        assert_eq!(total(all.iter()).to_string(), "9 passed, 2 failed");
    }

    #[test]
    fn the_table_names_what_failed_and_how_to_run_it_again() {
        let step = Step::cargo("clippy", "clippy --workspace");
        let failed = outcome(Verdict::Failed("exit status: 101".into()), Tally::default());
        let table = table(&[(step, failed)], 2, Duration::from_secs(125));
        for part in ["FAILED", "1:01", "2:05", "$ cargo clippy --workspace", "2 more not run"] {
            assert!(table.contains(part), "{part:?} is missing in:\n{table}");
        }
    }
    #[test]
    fn the_table_names_what_was_skipped_and_what_was_slow() {
        let lacking = Lacking::only(Need::Qemu, "no QEMU");
        let tests = Step::cargo("tests", "test").part_needs(Need::Qemu, "OFF").without(&lacking);
        let mut ran = outcome(Verdict::Ok, Tally { passed: 9, failed: 0, skipped: 2 });
        ran.parts = [("fast", 1), ("slow", 65), ("slower", 121)]
            .map(|(name, seconds)| Part { name: name.into(), took: Duration::from_secs(seconds) })
            .to_vec();
        let vm = Step::cargo("vm", "xtask vm").needs(&[Need::Qemu]).without(&lacking);
        let one = Tally { passed: 0, failed: 0, skipped: 1 };
        let skipped = outcome(Verdict::Skipped("no QEMU".into()), one);
        let all = [(tests, ran), (vm, skipped)];
        let table = table(&all, 0, Duration::from_secs(125));
        for part in [
            "tests: skipped in part: no QEMU",
            "vm: skipped: no QEMU",
            "\nslowest test programs\n  2:01  tests: slower\n  1:05  tests: slow\n",
        ] {
            assert!(table.contains(part), "{part:?} is missing in:\n{table}");
        }
        assert!(!table.contains("fast"), "{table}");
        assert!(!super::table(&all[1..], 0, Duration::ZERO).contains("slowest"));
        let total = total(all.iter().map(|(_, outcome)| outcome));
        assert_eq!(total.to_string(), "9 passed, 0 failed, 3 skipped");
    }
}
