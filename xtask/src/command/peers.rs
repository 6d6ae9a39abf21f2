//! `cargo xtask peers`: time to first token of vLLM with Ripieno and with others.

use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context, Result};
use clap::Args;

use super::engine::{NEEDS, install};
use crate::pypi::{self, Packages};
use crate::step::Step;
use crate::{engine, folder, needs};

/// LMCache and those of its dependencies that it loads here and vLLM's environment lacks.
const LMCACHE: &[&str] = &[
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.60b1",
    "redis==8.1.0",
    "sortedcontainers==2.4.0",
];

#[derive(Args)]
pub struct PeersArgs {
    /// Prompts of each kind
    #[arg(long, value_name = "N", default_value_t = 7)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    prompts: u32,
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
    needs::satisfy(NEEDS.iter().copied())?;
    install()?;
    let packages =
        pypi::packages(&folder::target("peers"), LMCACHE.iter().copied(), "LMCache (100 MB)");
    packages.fetch_and(lay_over_engine)?;
    let python = packages.folder.join("bin/python");
    let program = |name: &str| folder::workspace().join("bench/peers").join(name);
    Step::new("measure", python.to_string_lossy())
        .args([program("measure.py").as_path(), &args.folder].map(|path| path.to_string_lossy()))
        .args([format!("--prompts={}", args.prompts)])
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

/// Adds vLLM's environment to the path instead of installing it twice.
fn lay_over_engine(packages: &Packages) -> Result<()> {
    let below = engine::place().join("venv/lib");
    let site = packages.find("")?;
    let python = site.parent().and_then(|python| python.file_name()).unwrap_or_default();
    let path = env::current_dir()?.join(below).join(python).join("site-packages");
    let file = site.join("engine.pth");
    fs::write(&file, path.display().to_string())
        .with_context(|| format!("cannot write {}", file.display()))
}
