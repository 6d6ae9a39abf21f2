//! `ripieno sim cluster`: engines on several machines.

use std::time::Duration;

use clap::Args;
use ripieno_sim::{Clusters, Outcome, cluster};

use super::workload::{Workload, above_zero, seconds_or_zero};
use super::{ServingFlags, TierFlags, named, read};
use crate::progress::Progress;
use crate::size;

/// Flags of `ripieno sim cluster`.
#[derive(Debug, Args)]
pub(crate) struct ClusterFlags {
    /// Workload, or a trace (- is stdin), which the cluster serves
    #[arg(value_name = "NAME|FILE")]
    name: String,

    /// Numbers of engines
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "4",
        value_parser = size::count::<u32>(1..=Clusters::ENGINES_MAX.into()),
        help_heading = "Cluster")]
    engines: Vec<u32>,

    /// Links between machines; none at all is among the results, too
    #[arg(long, value_name = "GBPS", value_delimiter = ',', default_value = "15,100,400",
        value_parser = gbps, help_heading = "Cluster")]
    link: Vec<f64>,

    /// Time until the directory knows what an engine stored or dropped
    #[arg(long, value_name = "TIME", default_value_t = 0.1, value_parser = seconds_or_zero,
        help_heading = "Cluster")]
    directory_delay: f64,

    #[command(flatten)]
    tiers: TierFlags,

    #[command(flatten)]
    pub(super) serving: ServingFlags,
}

fn gbps(text: &str) -> Result<f64, String> {
    let gbps = above_zero(text)?;
    let known = 0.001..=100_000.0;
    if known.contains(&gbps) { Ok(gbps) } else { Err("expected 0.001 to 100000".to_owned()) }
}

/// Simulates all clusters.
pub(crate) fn outcome(flags: &ClusterFlags) -> anyhow::Result<Outcome> {
    let ServingFlags { workload: of, machine, .. } = &flags.serving;
    let files = machine.files()?;
    let machine = machine.machine(flags.tiers.dram, flags.tiers.drives, &files)?;
    let Workload { setting, counted, .. } = read(&flags.name, of, of.seed, &machine)?;
    let delay = Duration::from_secs_f64(flags.directory_delay);
    let clusters = Clusters { engines: flags.engines.clone(), links: flags.link.clone(), delay };
    let progress = Progress::new("clusters", clusters.runs(), true);
    let found = cluster(&machine, &clusters, &counted, progress.steps());
    progress.finish();
    Ok(named(found, "engines on several machines", &flags.name, &setting))
}
