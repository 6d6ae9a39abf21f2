//! `bench catalog`: the catalog without devices. Hit rates of the eviction policies on a recorded
//! trace, and run lengths of files under churn.

pub mod eviction;
mod runs;
mod scan;
pub mod trace;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use kv_catalog::PolicyKind;
use ripieno_sim::{Line, Plot};

use self::trace::Trace;
use crate::{
    plot,
    report::{Aim, Ratio, Report},
};

/// Capacities in percent of the trace's distinct blocks.
const CAPACITIES: [u32; 5] = [1, 5, 10, 25, 50];

/// The parts of `catalog`.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Hit rates of the eviction policies on a trace, and with a scan
    Eviction,
    /// Mean run length of files after a replay with eviction
    Runs,
}

/// Arguments of `catalog`.
#[derive(clap::Args, Debug)]
pub struct CatalogArgs {
    /// Measure only this part
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// A recorded trace, one JSON object a line; without it, parts that need one are skipped
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Directory for the plots (SVG)
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    plots: PathBuf,
}

/// Measures everything and prints it.
///
/// # Errors
/// Returns an error if the trace cannot be read or a plot cannot be written.
pub fn run(args: &CatalogArgs) -> Result<()> {
    let mut report = Report::new("catalog");
    let wanted = |part| args.only.is_none_or(|only| only == part);
    let trace = args.trace.as_deref().map(Trace::read).transpose()?;
    if trace.is_none() {
        report.notes.push("no --trace was given: nothing that needs one was measured".into());
    }
    if wanted(Part::Eviction) {
        scan_rates(&mut report);
        if let Some(trace) = &trace {
            hit_rates(args, trace, &mut report).context("hit rates")?;
        }
    }
    if let Some(trace) = trace.as_ref().filter(|_| wanted(Part::Runs)) {
        run_lengths(trace, &mut report);
    }
    report.print(args.json)
}

fn hit_rates(args: &CatalogArgs, trace: &Trace, report: &mut Report) -> Result<()> {
    let mut lines: Vec<Line> = PolicyKind::ALL
        .iter()
        .map(|kind| Line { name: kind.name().to_owned(), points: Vec::new() })
        .chain([Line { name: "MIN".to_owned(), points: Vec::new() }])
        .collect();
    for percent in CAPACITIES {
        let files = (trace.distinct() * u64::from(percent) / 100) as u32;
        let bound = 100.0 * eviction::min(trace, files);
        for (kind, line) in PolicyKind::ALL.iter().zip(&mut lines) {
            let rate = 100.0 * eviction::hit_rate(trace, files, *kind);
            line.points.push((f64::from(percent), rate));
            let name = format!("hit rate, {} at {percent} % of the blocks", kind.name());
            report.ratios.push(Ratio::new(name, "%", rate, bound));
        }
        lines[PolicyKind::ALL.len()].points.push((f64::from(percent), bound));
    }
    report.notes.push(
        "hit rates are held against MIN (Belady's bound): what a cache of that size would hit \
         that knows all requests to come"
            .into(),
    );
    let path = args.plots.join("catalog-eviction.svg");
    let x = "files, % of the trace's distinct blocks".to_owned();
    let [title, y] = ["Blocks found, by policy", "hit rate, %"].map(str::to_owned);
    plot::write(&path, &Plot { title, x, y, lines })?;
    report.plots.push(path.display().to_string());
    Ok(())
}

fn scan_rates(report: &mut Report) {
    for kind in PolicyKind::ALL {
        let found = scan::measure(*kind);
        let name = format!("hit rate of a working set beside scans, {}", kind.name());
        report.ratios.push(Ratio::new(name, "%", 100.0 * found.scanned, 100.0 * found.alone));
    }
}

fn run_lengths(trace: &Trace, report: &mut Report) {
    let without = runs::without(trace);
    let mut compare = |name: &str, found: &runs::Found| {
        for (what, ours, theirs) in [
            ("allocated", found.allocated, without.allocated),
            ("found by a request", found.found, without.found),
        ] {
            let name = format!("files a run, {what} after churn, {name}");
            let ratio = Ratio::new(name, "files", ours, theirs).aim(Aim::AtLeast(1.0, 4.0));
            report.ratios.push(ratio);
        }
        let name = format!("hit rate with 16-token blocks, {name}");
        let (ours, theirs) = (100.0 * found.hit_rate, 100.0 * without.hit_rate);
        report.ratios.push(Ratio::new(name, "%", ours, theirs));
    };
    for kind in PolicyKind::ALL {
        compare(kind.name(), &runs::measure(trace, *kind));
    }
    report.notes.push("runs are held against LRU with a stack of free files".into());
}
