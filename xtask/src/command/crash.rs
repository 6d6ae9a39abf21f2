//! `cargo xtask crash`: cuts the power at random points, and checks the result.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::needs;
use crate::step::Step;

#[derive(Args)]
pub struct CrashArgs {
    /// Arguments of the harness: --seeds A..B, --lies, --first, --json (see --help)
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub fn run(args: &CrashArgs) -> Result<ExitCode> {
    needs::satisfy(&["cxx"])?;
    harness("crash").args(&args.args).run_alone()
}

/// Returns the steps of CI: over 15,000 power cuts, and the planted bugs that they must catch.
pub fn steps() -> [Step; 2] {
    let planted = Step::cargo("planted bugs", "xtask mutants --area crash").tests_at_least(1);
    [harness("crash").args(["--seeds", "0..1500"]), planted].map(|step| step.needs(&["cxx"]))
}

fn harness(name: &'static str) -> Step {
    Step::cargo(name, "run --release --package ripieno-crash --")
}
