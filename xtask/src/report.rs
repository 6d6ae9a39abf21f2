//! Runs steps in order, and prints a summary.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::deadline::Deadline;
use crate::step::{Outcome, Step, Verdict};
use crate::tally::Tally;
use crate::{RunArgs, folder, needs};

/// Installs the steps' needs, then runs all steps, even after a failure: one run shows all errors.
/// Steps with unavailable needs are skipped.
///
/// # Errors
/// Returns an error if this machine lacks an essential need.
pub fn run_all(steps: Vec<Step>, args: RunArgs) -> Result<ExitCode> {
    let (start, deadline, count) = (Instant::now(), args.deadline(), steps.len());
    let lacking = needs::provide(steps.iter().flat_map(Step::all_needs))?;
    let free = folder::free_bytes()
        .map_or_else(String::new, |free| format!("; {} GiB of the disk are free", free >> 30));
    eprintln!("what the steps need was looked for in {}{free}", clock(start.elapsed()));
    let steps: Vec<Step> = steps.into_iter().map(|step| step.without(&lacking)).collect();
    let done = run_steps(&steps, deadline, args.fail_fast);
    let not_run = count - done.len();
    eprint!("{}", table(&done, not_run, start.elapsed()));
    let total = total(done.iter().map(|(_, outcome)| outcome));
    println!("{total}");
    Ok(total.exit_code())
}

/// A step that runs aside: its outcome, and all that it printed.
type Aside = Receiver<Result<(Outcome, Vec<u8>)>>;

/// Runs steps one after the other, and those that run aside in the same way beside them.
fn run_steps(steps: &[Step], deadline: Deadline, fail_fast: bool) -> Vec<(&Step, Outcome)> {
    let (mut lane, mut asides) = (Vec::new(), Vec::new());
    for step in steps {
        // With `fail_fast` nothing is begun that an earlier step may make useless.
        asides.push((step.is_aside && !fail_fast).then(|| {
            let (tell, told) = channel();
            lane.push((step, tell));
            told
        }));
    }
    thread::scope(|scope| {
        scope.spawn(move || {
            for (step, tell) in lane {
                // Nobody listens after a panic.
                let _ = tell.send(run_aside(step, deadline));
            }
        });
        run_in_order(steps, asides, deadline, fail_fast)
    })
}

/// Runs steps, or waits for those that run aside, and shows them in order.
fn run_in_order(
    steps: &[Step],
    asides: Vec<Option<Aside>>,
    deadline: Deadline,
    fail_fast: bool,
) -> Vec<(&Step, Outcome)> {
    let mut done = Vec::with_capacity(steps.len());
    for (index, (step, aside)) in steps.iter().zip(asides).enumerate() {
        eprintln!("\n==> [{}/{}] {}\n    $ {step}", index + 1, steps.len(), step.name);
        let mut outcome = match aside.map(|aside| aside.recv().expect("it does not panic")) {
            Some(Ok((outcome, output))) => {
                // Nobody reads it: then there is nobody to tell either.
                let _ = io::stdout().write_all(&output);
                outcome
            }
            Some(Err(error)) => Outcome::failed(format!("{error:#}")),
            None => step.run(deadline, &mut io::stdout(), None),
        };
        let failed = match &mut outcome.verdict {
            Verdict::Ok => false,
            Verdict::Failed(why) => {
                why.push_str(&full_disk(folder::free_bytes()));
                eprintln!("==> {} failed: {why}", step.name);
                true
            }
            Verdict::Skipped(why) => {
                eprintln!("==> {} skipped: {why}", step.name);
                false
            }
        };
        done.push((step, outcome));
        if failed && fail_fast {
            break;
        }
    }
    done
}

/// Runs a step, and returns all that it printed.
fn run_aside(step: &Step, deadline: Deadline) -> Result<(Outcome, Vec<u8>)> {
    let file = memfd_create("output of a step", MemfdFlags::CLOEXEC);
    let mut file = File::from(file.context("no memory for the output of a step")?);
    let outcome = step.run(deadline, &mut file.try_clone()?, Some(file.try_clone()?));
    let mut output = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut output)?;
    Ok((outcome, output))
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

/// Returns a hint if a step may have failed because the disk was full.
fn full_disk(free: Option<u64>) -> String {
    const LITTLE_BYTES: u64 = 1 << 30;
    match free {
        Some(free) if free < LITTLE_BYTES => {
            format!(" (only {} MiB are free on the build folder's disk)", free >> 20)
        }
        _ => String::new(),
    }
}

fn table(done: &[(&Step, Outcome)], not_run: usize, took: Duration) -> String {
    let width = done.iter().map(|(step, _)| step.name.len()).max().unwrap_or(0).max(5);
    let row = |step: &str, result: &str, time: &str, cpu: &str, tests: &str| {
        format!("{step:<width$} {result:<8} {time:>6} {cpu:>6}  {tests}").trim_end().to_owned()
    };
    let mut lines = vec![String::new(), row("step", "result", "time", "CPU", "tests")];
    let mut again = Vec::new();
    for (step, outcome) in done {
        let result = match outcome.verdict {
            Verdict::Ok => "ok",
            Verdict::Failed(_) => "FAILED",
            Verdict::Skipped(_) => "skipped",
        };
        let counted = outcome.tally != Tally::default();
        let tests = if counted { outcome.tally.to_string() } else { String::new() };
        lines.push(row(&step.name, result, &clock(outcome.took), &clock(outcome.cpu), &tests));
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
    let cpu = done.iter().map(|(_, outcome)| outcome.cpu).sum();
    lines.push(row("total", "", &clock(took), &clock(cpu), ""));
    if !again.is_empty() {
        lines.push(String::new());
        lines.append(&mut again);
    }
    lines.push("\n".into());
    lines.join("\n")
}

/// Formats minutes and seconds.
fn clock(took: Duration) -> String {
    let seconds = took.as_secs_f64().round() as u64;
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests;
