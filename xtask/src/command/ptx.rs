//! `cargo xtask ptx`: compiles the kernels for GPUs, and inspects them.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Args;

use crate::needs;
use crate::ptx::{self, Report};
use crate::tally::Tally;

#[derive(Args)]
pub struct PtxArgs {
    /// Change nothing: fail if the committed files differ from what the sources give
    #[arg(long)]
    check: bool,
}

pub const NEEDS: &[&str] = &["gxx", "nvcc"];

pub fn run(args: &PtxArgs) -> Result<ExitCode> {
    let start = Instant::now();
    needs::satisfy(NEEDS)?;
    let (reports, mut tally) = (ptx::run(args.check)?, Tally::default());
    for report in &reports {
        print!("\n{}", report.table());
        tally += report.tally();
    }
    println!("\n{}", tally.line(start.elapsed()));
    let failures = reports.iter().flat_map(Report::failures);
    failures.for_each(|line| eprintln!("error: {line}"));
    Ok(tally.exit_code())
}
