//! `ripieno sim plan`: finds the tiers to buy.

use clap::Args;
use ripieno_sim::{Choices, Outcome, plan};

use super::workload::above_zero;
use super::{ServingFlags, named, read, report};
use crate::progress::Progress;
use crate::size;

/// Flags of `ripieno sim plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanFlags {
    /// Workload, or a trace in the format of Mooncake (- is stdin)
    #[arg(value_name = "NAME|FILE")]
    name: String,

    /// Candidate sizes of host memory
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = size::parse,
        default_value = "64GiB,256GiB,1TiB", help_heading = "Choices")]
    dram: Vec<u64>,

    /// Candidate numbers of drives
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,2,4",
        value_parser = size::count::<u32>(1..=256), help_heading = "Choices")]
    drives: Vec<u32>,

    /// Seconds to the first token that 99 % of the requests must not exceed
    #[arg(long, value_name = "SECONDS", value_parser = above_zero, help_heading = "Choices")]
    ttft_p99: Option<f64>,

    #[command(flatten)]
    serving: ServingFlags,
}

impl PlanFlags {
    pub(super) fn serving(&self) -> &ServingFlags {
        &self.serving
    }
}

/// Simulates all combinations, and recommends one.
pub(crate) fn run(flags: &PlanFlags) -> anyhow::Result<u8> {
    let serving = &flags.serving;
    let files = serving.machine.files()?;
    let machine = serving.machine.machine(Some(0), 0, &files)?;
    let workload = read(&flags.name, &serving.workload, &machine)?;
    let mut choices = Choices { dram: flags.dram.clone(), drives: flags.drives.clone() };
    choices.dram.retain(|bytes| *bytes > 0);
    choices.dram.sort_unstable();
    choices.dram.dedup();
    choices.drives.sort_unstable();
    choices.drives.dedup();
    let progress = Progress::new("simulations", choices.runs(), true);
    let mut done = 0;
    let next = |name: &str| {
        progress.shows(done, || name.to_owned());
        done += 1;
    };
    let prices = files.parameters.prices();
    let found = plan(&machine, &prices, &choices, flags.ttft_p99, &workload.requests, next);
    progress.finish();
    let title = "which tiers to buy".to_owned();
    report(&[named(Outcome { title, ..found }, &flags.name, &workload)], &serving.report)?;
    Ok(0)
}
