//! `cargo xtask abi`: the Rust half of the headers that host code and kernels share.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::EXIT_STEP_FAILED;
use crate::abi;
use crate::needs::{self, Need};
use crate::step::Step;

#[derive(Args)]
pub struct AbiArgs {
    /// Change nothing: fail if what is committed is not what the headers give
    #[arg(long)]
    check: bool,
}

const NEEDS: &[Need] = &[Need::Bindgen];

/// The step of `cargo xtask ci`.
pub fn step() -> Step {
    Step::cargo("abi", "xtask abi --check").needs(NEEDS)
}

pub fn run(args: &AbiArgs) -> Result<ExitCode> {
    needs::satisfy(NEEDS.iter().copied())?;
    let (stale, count) = abi::run(args.check)?;
    for path in &stale {
        eprintln!("error: {path} is not what its header gives; run `cargo xtask abi`");
    }
    println!("{} of {count} bindings as committed", count - stale.len());
    Ok(if stale.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_STEP_FAILED) })
}
