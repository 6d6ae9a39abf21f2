//! `cargo xtask gpu`: everything that a GPU is needed for, packed for a machine that has one.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::EXIT_STEP_FAILED;
use crate::gpu::{self, NotBuilt};

#[derive(Args)]
pub struct GpuArgs {
    /// Where to put programs, kernels and run.sh; the folder is made
    #[arg(long, value_name = "DIR")]
    pack: PathBuf,
    /// A trace that run.sh replays, in place of a made workload
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

pub fn run(args: &GpuArgs) -> Result<ExitCode> {
    match gpu::pack(&args.pack, args.trace.as_deref()) {
        Err(error) if error.is::<NotBuilt>() => {
            eprintln!("error: {error}");
            return Ok(ExitCode::from(EXIT_STEP_FAILED));
        }
        packed => {
            let (bytes, folder) = (packed?, args.pack.display());
            println!("{folder}: {:.1} MiB", bytes as f64 / f64::from(1 << 20));
            println!("on the machine with the GPU: ./run.sh, then bring its folder `results` back");
        }
    }
    Ok(ExitCode::SUCCESS)
}
