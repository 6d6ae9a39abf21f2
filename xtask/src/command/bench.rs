//! `cargo xtask bench`: runs one benchmark, built for release.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::needs;
use crate::step::Step;

#[derive(Args)]
pub struct BenchArgs {
    /// The benchmark's name, then its own arguments
    #[arg(value_name = "NAME [ARGS]", trailing_var_arg = true, allow_hyphen_values = true)]
    name_and_args: Vec<String>,
}

pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    needs::satisfy(&["cxx"])?;
    Step::cargo("bench", "run --release --package ripieno-bench --")
        .args(&args.name_and_args)
        .run_alone()
}
