//! Benchmarks of Ripieno. Each result is a ratio of two things measured side by side in one run,
//! because absolute speeds of a shared machine say little.
//!
//! Results do not affect the exit code: benchmarks inform, tests judge.

mod catalog;
mod codec;
mod commit;
mod file;
mod gpu;
mod instant;
mod path;
mod report;
mod sample;
mod served;
mod stack;
mod tier;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

/// Exit code if this machine lacks a program to compare with.
const EXIT_MACHINE: u8 = 3;

/// Benchmarks of Ripieno, each a ratio measured side by side in one run.
///
/// Exit codes: 0 measured, 1 something failed, 2 wrong usage, 3 a program to compare with is not on
/// this machine. A ratio that misses its aim is reported, and is not a failure.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Cli {
    /// Print one JSON object instead of a table
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The whole path on software controllers: retrieve against memcpy, and cycles per command of
    /// both submit-and-reap paths
    Path(PathArgs),
    /// The catalog without devices: cost of its index, hit rates of the eviction policies on a
    /// recorded trace, and run lengths of files
    Catalog(catalog::CatalogArgs),
    /// Encoding and decoding of KV objects against memcpy of the raw bytes, on one core
    Codec(codec::CodecArgs),
    /// Commits: latency, and bytes written per byte stored
    Commit(commit::CommitArgs),
    /// Software controllers over files (`--path DIR`) against fio's io_uring engine
    File(file::FileArgs),
    /// The I/O kernel on an NVIDIA GPU: commands a second, retrieve against a plain copy, the
    /// caller's CPU time per layer, and the slowdown of a matrix product beside it
    Gpu(gpu::GpuArgs),
    /// A client of a server against the server's own process: lookups, and loads layer by layer
    Served(served::ServedArgs),
    /// Host memory above the drives: hit rates against LRU and Belady on a recorded trace, by size
    /// and policy
    Tier(tier::TierArgs),
}

/// The parts of `path`.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Retrieve against memcpy
    Retrieve,
    /// Retrieve with checksums against without
    Checksums,
    /// Stores and hits with a host memory cache, against the media alone
    Dram,
    /// Cycles per command
    Command,
}

/// Arguments of `path`.
#[derive(clap::Args, Debug)]
pub struct PathArgs {
    /// Rounds of each measurement; the two sides of a ratio alternate
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Measure only this part
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Directory for the plots (SVG)
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    plots: PathBuf,
}

#[allow(clippy::print_stderr, reason = "the program's error report")]
fn main() -> ExitCode {
    let Cli { json, command } = Cli::parse();
    let print = |report: report::Report| report.print(json);
    let result = match command {
        Command::Path(args) => path::run(&args).and_then(print),
        Command::Catalog(args) => catalog::run(&args).and_then(print),
        Command::Codec(args) => codec::run(&args).and_then(print),
        Command::Commit(args) => commit::run(&args).and_then(print),
        Command::File(args) => file::run(&args).and_then(print),
        Command::Gpu(args) => gpu::run(&args, json),
        Command::Served(args) => served::run(&args).and_then(print),
        Command::Tier(args) => tier::run(&args).and_then(print),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<ripieno::fio::Missing>() {
                ExitCode::from(EXIT_MACHINE)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
