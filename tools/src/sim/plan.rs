//! `ripieno sim plan`: finds the tiers to buy.

use clap::Args;
use ripieno_sim::{Choices, Counted, Limits, Machine, Outcome, plan};

use super::workload::{Workload, above_zero, seconds};
use super::{ServingFlags, named, read};
use crate::problem::Problem;
use crate::progress::Progress;
use crate::size;

/// Flags of `ripieno sim plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanFlags {
    /// Workload, or a trace (- is stdin)
    #[arg(value_name = "NAME|FILE")]
    name: String,

    /// Candidate sizes of host memory
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = size::memory,
        default_value = "64GiB,256GiB,1TiB", help_heading = "Choices")]
    dram: Vec<u64>,

    /// Candidate numbers of drives
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,2,4",
        value_parser = size::count::<u32>(1..=256), help_heading = "Choices")]
    drives: Vec<u32>,

    /// Time to the first token that 99 % of the requests must not exceed, with any seed
    #[arg(long, value_name = "TIME", value_parser = seconds, help_heading = "Choices")]
    ttft_p99: Option<f64>,

    /// Other numbers of GPUs, without host memory and drives [default: twice as many as --gpus]
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser =
        size::count::<u32>(1..=64), conflicts_with = "layers", help_heading = "Choices")]
    more_gpus: Option<Vec<u32>>,

    /// Number of seeds, from --seed on; results are medians, and limits hold for all of them
    #[arg(long, value_name = "COUNT", default_value_t = 3, help_heading = "Choices",
        value_parser = size::count::<u64>(1..=100))]
    seeds: u64,

    /// Serve all again, with a restart of the engine in the middle: host memory is lost
    #[arg(long, help_heading = "Choices")]
    restart: bool,

    /// Drive writes a day for which drives are rated [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = above_zero, help_heading = "Choices")]
    drive_writes: Option<f64>,

    /// Also show what does not decide, such as hits by tier
    #[arg(long, help_heading = "Report")]
    pub(super) wide: bool,

    #[command(flatten)]
    pub(super) serving: ServingFlags,
}

/// Simulates all combinations, and recommends one.
pub(crate) fn outcome(flags: &PlanFlags) -> anyhow::Result<Outcome> {
    let serving = &flags.serving;
    let files = serving.machine.files()?;
    let machine = serving.machine.machine(Some(0), 0, &files)?;
    let (setting, workloads) = workloads(flags, &machine)?;
    // Measured layer times are those of one number of GPUs.
    let gpus = match (&flags.more_gpus, machine.layers) {
        (Some(counts), _) => counts.clone(),
        (None, Some(_)) => Vec::new(),
        (None, None) => vec![machine.gpu.count * 2],
    };
    let takes = std::time::Duration::from_secs_f64(files.parameters.value("engine.restart"));
    let (dram, drives) = (flags.dram.clone(), flags.drives.clone());
    let restart = flags.restart.then_some(takes);
    let mut choices = Choices { dram, drives, gpus, restart };
    choices.dram.retain(|bytes| *bytes > 0);
    choices.dram.sort_unstable();
    choices.dram.dedup();
    for counts in [&mut choices.drives, &mut choices.gpus] {
        counts.sort_unstable();
        counts.dedup();
    }
    choices.gpus.retain(|count| *count != machine.gpu.count);
    let parameters = &files.parameters;
    let rated = parameters.value("drive.writes_a_day");
    let writes_a_day = flags.drive_writes.unwrap_or(rated);
    let limits = Limits { ttft_p99: flags.ttft_p99, writes_a_day };
    let progress = Progress::new("combinations", choices.runs(), true);
    let found = plan(&machine, &choices, &limits, &workloads, progress.steps());
    progress.finish();
    Ok(named(found, "which tiers to buy", &flags.name, &setting))
}

/// Returns the description of the workload, and its requests for each seed, or once if it is not
/// random.
fn workloads(
    flags: &PlanFlags,
    machine: &Machine<'_>,
) -> Result<(Vec<String>, Vec<Counted>), Problem> {
    let of = &flags.serving.workload;
    let with = |seed: u64| read(&flags.name, of, seed, machine);
    let Workload { setting, counted, is_random } = with(of.seed)?;
    let more = if is_random && flags.name != "-" { flags.seeds } else { 1 };
    let others = (1..more).map(|more| Ok(with(of.seed.wrapping_add(more))?.counted));
    let all: Result<_, Problem> = std::iter::once(Ok(counted)).chain(others).collect();
    Ok((setting, all?))
}
