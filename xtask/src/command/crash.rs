//! `cargo xtask crash`: cuts the power at random points, and checks the result.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::needs;
use crate::step::Step;

#[derive(Args)]
pub struct CrashArgs {
    /// Arguments of the harness: --seeds A..B, --lies, --planted, --json (see --help)
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub fn run(args: &CrashArgs) -> Result<ExitCode> {
    needs::satisfy(&["cxx"])?;
    harness("crash").args(&args.args).run_alone()
}

/// Returns the steps of CI: over 15,000 power cuts, and every planted bug.
pub fn steps() -> [Step; 2] {
    let part = |name, args: &str| harness(name).args(args.split(' ')).needs(&["cxx"]);
    [part("crash", "--seeds 0..1500"), part("planted bugs", "--planted --seeds 0..1500")]
}

fn harness(name: &'static str) -> Step {
    const RUN: &str = "run --release --package ripieno-crash --features planted-bugs --";
    Step::cargo(name, RUN)
}
