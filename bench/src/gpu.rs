//! `bench gpu`: the I/O kernel on an NVIDIA GPU.
//!
//! Parts are independent: a failed part does not stop the others. Everything also runs over a mock
//! of libcuda, so that tests execute this code; its figures are marked.

mod abi;
mod caller;
mod device;
mod drive;
mod rate;
mod retrieve;
mod stack;
mod tables;

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context as _, Result, bail};

use self::device::Gpu;
use crate::report::Report;

/// The parts of `gpu`.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Commands a second against a controller that completes immediately
    Rate,
    /// Cost of a small operation on the same controller, with 1 to 64 warps
    Operation,
    /// Retrieve into the GPU's memory against a plain copy
    Retrieve,
    /// The caller's CPU time per layer
    Caller,
}

/// Arguments of `gpu`.
#[derive(clap::Args, Debug)]
pub struct GpuArgs {
    /// CUDA device number
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Rounds of each measurement; the sides of a ratio alternate
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure only this part; may be repeated
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Skip parts that need a resident kernel
    #[arg(long)]
    per_batch: bool,
    /// Use meaningless small sizes, to check that everything runs
    #[arg(long)]
    tiny: bool,
    /// Also write the JSON object to this file; refused over a mock of the GPU's driver
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
}

/// Measures everything and prints it.
///
/// # Errors
/// Returns an error without a GPU, or if a part failed; other parts' results are still printed.
pub fn run(args: &GpuArgs, json: bool) -> Result<()> {
    let gpu = Arc::new(Gpu::open(args.gpu)?);
    let mut report = Report::new("gpu");
    report.gpu = Some(gpu.device.report().to_string());
    report.mock = gpu.is_mock();
    if report.mock && args.keep.is_some() {
        bail!("this is a stand-in for a GPU: its figures are not kept; leave --keep away");
    }
    let parts: [(Part, &str, Measure); 4] = [
        (Part::Rate, "commands a second", tables::rate),
        (Part::Operation, "a small operation", tables::operation),
        (Part::Retrieve, "retrieve against a plain copy", tables::retrieve),
        (Part::Caller, "CPU time of the caller", tables::caller),
    ];
    for (part, name, measure) in parts {
        if !args.only.is_empty() && !args.only.contains(&part) {
            continue;
        }
        if let Err(error) = measure(args, &gpu, &mut report) {
            report.failed.push(format!("{name}: {error:#}"));
        }
    }
    report.print(json)?;
    if let Some(path) = &args.keep {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    match report.failed.len() {
        0 => Ok(()),
        failed => bail!("{failed} of the parts failed; the report above says why"),
    }
}

type Measure = fn(&GpuArgs, &Arc<Gpu>, &mut Report) -> Result<()>;
