//! `bench catalog`: the catalog without devices. Cost of its index; hit rates of the eviction
//! policies on a recorded trace, and run lengths of files under churn.

pub mod eviction;
mod index;
mod runs;
mod scan;
pub mod trace;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use kv_catalog::PolicyKind;
use ripieno_sim::{Line, Plot};

use self::trace::Trace;
use crate::report::{Aim, Ratio, Report};

/// Capacities in percent of the trace's distinct blocks.
const CAPACITIES: [u32; 5] = [1, 5, 10, 25, 50];

/// The parts of `catalog`.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Hit rates of the eviction policies on a trace, and with a scan
    Eviction,
    /// Mean run length of files after a replay with eviction
    Runs,
    /// Keys, lookups and inserts by length of a context, against a hash map
    Index,
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
    /// Blocks in the index
    #[arg(long, value_name = "N", default_value_t = 1_000_000,
        value_parser = clap::value_parser!(u32).range(1000..=100_000_000))]
    files: u32,
    /// Directory for the plots (SVG)
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    plots: PathBuf,
}

/// Measures everything.
pub fn run(args: &CatalogArgs) -> Result<Report> {
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
    if wanted(Part::Index) {
        index::measure(args.files, &mut report)?;
    }
    Ok(report)
}

fn hit_rates(args: &CatalogArgs, trace: &Trace, report: &mut Report) -> Result<()> {
    let names = PolicyKind::ALL.iter().map(|kind| kind.name()).chain(["MIN"]);
    let mut lines: Vec<Line> = names.map(|name| Line::new(name, [])).collect();
    for percent in CAPACITIES {
        let files = (trace.distinct() * u64::from(percent) / 100) as u32;
        let bound = 100.0 * eviction::min(trace, files);
        for (kind, line) in PolicyKind::ALL.iter().zip(&mut lines) {
            let (hits, _) = eviction::served(trace, files, *kind);
            let rate = 100.0 * hits as f64 / trace.blocks() as f64;
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
    let x = "files, % of the trace's distinct blocks";
    let plot = Plot::new("Blocks found, by policy", x, "hit rate, %", lines);
    report.plot(&args.plots, "catalog-eviction.svg", &plot)
}

fn scan_rates(report: &mut Report) {
    for kind in PolicyKind::ALL {
        let [scanned, alone] = [true, false].map(|scans| 100.0 * scan::hit_rate(*kind, scans));
        let name = format!("hit rate of a working set beside scans, {}", kind.name());
        report.ratios.push(Ratio::new(name, "%", scanned, alone));
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
