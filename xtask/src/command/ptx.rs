//! `cargo xtask ptx`: compiles the kernels for GPUs, and inspects them.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Args;

use crate::EXIT_STEP_FAILED;
use crate::needs;
use crate::ptx;
use crate::step::Step;

#[derive(Args)]
pub struct PtxArgs {
    /// Change nothing: fail if the committed files differ from what the sources give
    #[arg(long)]
    check: bool,
}

const NEEDS: &[&str] = &["gxx", "nvcc"];

/// Returns the step of `cargo xtask ci`. A separate process, so that its deadline also ends nvcc.
pub fn step() -> Step {
    Step::cargo("ptx", "xtask ptx --check").needs(NEEDS).tests_at_least(1)
}

pub fn run(args: &PtxArgs) -> Result<ExitCode> {
    let start = Instant::now();
    needs::satisfy(NEEDS)?;
    let report = ptx::run(args.check)?;
    let tally = report.tally();
    print!("\n{}\n", report.table());
    println!("{}", tally.line(start.elapsed()));
    report.failures().iter().for_each(|line| eprintln!("error: {line}"));
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS })
}
