//! `cargo xtask ptx`: the kernels for GPUs, compiled anew and looked into.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Args;

use crate::EXIT_STEP_FAILED;
use crate::ptx::{self, NotCompiled};
use crate::step::Step;
use crate::tally::Tally;

#[derive(Args)]
pub struct PtxArgs {
    /// Change nothing: fail if what is committed is not what the sources give
    #[arg(long)]
    check: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// The step of `cargo xtask ci`. A process of its own, so that its deadline can end nvcc, too.
pub fn step() -> Step {
    Step::cargo("ptx", "xtask ptx --check").tests_at_least(1)
}

pub fn run(args: &PtxArgs) -> Result<ExitCode> {
    let start = Instant::now();
    let report = match ptx::run(args.check) {
        Err(error) if error.is::<NotCompiled>() => {
            eprintln!("error: {error}");
            return Ok(ExitCode::from(EXIT_STEP_FAILED));
        }
        report => report?,
    };
    let tally = report.tally();
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("\n{}\n", report.table());
        println!("{}", result(tally, start.elapsed().as_secs_f64()));
    }
    report.failures().iter().for_each(|line| eprintln!("error: {line}"));
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS })
}

/// In libtest's words, which the steps of a longer run are counted by.
fn result(tally: Tally, seconds: f64) -> String {
    let Tally { passed, failed, skipped } = tally;
    let word = if failed > 0 { "FAILED" } else { "ok" };
    format!(
        "test result: {word}. {passed} passed; {failed} failed; {skipped} ignored; \
         finished in {seconds:.1}s"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_run_can_count_what_this_one_prints() {
        let tally = Tally { passed: 52, failed: 1, skipped: 0 };
        assert_eq!(Tally::of_line(&result(tally, 4.5)), tally);
    }
}
