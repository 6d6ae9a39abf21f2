//! `cargo xtask peers`: time to first token of vLLM with Ripieno and with others.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::command::engine::{self, NEEDS};
use crate::step::Step;
use crate::{folder, needs};

#[derive(Args)]
pub struct PeersArgs {
    /// Prompts of each kind
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    prompts: u32,
    /// The model's type: bfloat16 or float32 [default: bfloat16 if the CPU has instructions for it]
    #[arg(long, value_name = "TYPE", value_parser = ["bfloat16", "float32"])]
    dtype: Option<String>,
    /// Folder for stores, logs and samples, on the file system to measure; 10 GB
    #[arg(long, value_name = "FOLDER", default_value = "target/peers/run")]
    folder: PathBuf,
    /// Folder for engines.md and engines.svg
    #[arg(long, value_name = "FOLDER", default_value = "target/peers/report")]
    report: PathBuf,
    /// Engines to measure, of those in bench/peers/sides.py [default: all]
    #[arg(value_name = "SIDE")]
    sides: Vec<String>,
}

pub fn run(args: &PeersArgs) -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    engine::install()?;
    let python = engine::place().join("venv/bin/python");
    let program = |name: &str| folder::workspace().join("bench/peers").join(name);
    Step::new("measure", python.to_string_lossy())
        .args([program("measure.py").as_path(), &args.folder].map(|path| path.to_string_lossy()))
        .args([format!("--prompts={}", args.prompts)])
        .args(args.dtype.iter().map(|dtype| format!("--dtype={dtype}")))
        .args(&args.sides)
        .demand()?;
    let raw = args.folder.join("raw.json");
    Step::new("report", python.to_string_lossy())
        .args(
            [program("report.py"), raw, args.report.clone()].map(|path| path.display().to_string()),
        )
        .demand()?;
    println!("{}", args.report.join("engines.md").display());
    Ok(ExitCode::SUCCESS)
}
