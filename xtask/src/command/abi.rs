//! `cargo xtask abi`: generates the Rust half of the headers shared by host code and kernels.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::EXIT_STEP_FAILED;
use crate::abi;
use crate::needs;
use crate::step::Step;

#[derive(Args)]
pub struct AbiArgs {
    /// Change nothing: fail if the committed files differ from what the headers give
    #[arg(long)]
    check: bool,
}

const NEEDS: &[&str] = &["bindgen"];

/// Returns the step of `cargo xtask ci`.
pub fn step() -> Step {
    Step::cargo("abi", "xtask abi --check").needs(NEEDS)
}

pub fn run(args: &AbiArgs) -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let (stale, count) = abi::run(args.check)?;
    for path in &stale {
        eprintln!("error: {path} is not what its header gives; run `cargo xtask abi`");
    }
    println!("{} of {count} bindings as committed", count - stale.len());
    Ok(if stale.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_STEP_FAILED) })
}
