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
    Step::cargo("crash", "run --release --package ripieno-crash --").args(&args.args).run_alone()
}

/// Returns the step of CI: over 15,000 power cuts, and the planted bugs that they must catch. The
/// bugs' tests run without any bug first, which is the harness as it is.
pub fn step() -> Step {
    Step::cargo("crash", "xtask mutants --area crash").needs(&["cxx"]).tests_at_least(1)
}
