//! `cargo xtask gpu`: packs everything that needs a GPU for a machine that has one, and no
//! toolchain: programs, kernels, and a script that runs them and records the results.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::step::Step;
use crate::{folder, needs};

#[derive(Args)]
pub struct GpuArgs {
    /// Folder to create for programs, kernels and run.sh
    #[arg(long, value_name = "DIR")]
    pack: PathBuf,
    /// Trace that run.sh replays instead of a synthetic workload
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

pub fn run(args: &GpuArgs) -> Result<ExitCode> {
    needs::satisfy(&["cxx"])?;
    Step::new("pack", "bash")
        .args([folder::workspace().join("xtask/src/command/gpu/pack.sh").to_string_lossy()])
        .args([args.pack.to_string_lossy()])
        .args(args.trace.iter().map(|trace| trace.to_string_lossy()))
        .run_alone()
}

#[cfg(test)]
mod tests;
