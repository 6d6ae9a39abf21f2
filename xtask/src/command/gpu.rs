//! `cargo xtask gpu`: packs everything that needs a GPU for a machine that has one.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::gpu;

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
    let bytes = gpu::pack(&args.pack, args.trace.as_deref())?;
    println!("{}: {:.1} MiB", args.pack.display(), bytes as f64 / f64::from(1 << 20));
    println!("on the machine with the GPU: ./run.sh, then bring results/results.tgz back");
    Ok(ExitCode::SUCCESS)
}
