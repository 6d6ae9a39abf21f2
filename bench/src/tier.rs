//! `bench tier`: hit rates by size and policy, and bytes written, of host memory above the drives,
//! and of drives alone. There is no I/O: results are reproducible. `ripieno sim` measures the
//! effect of lookahead.

mod sizes;

use std::path::PathBuf;

use anyhow::Result;
use kv_catalog::PolicyKind;
use kv_tier::TierCounts;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::{
    catalog::{eviction, trace::Trace},
    report::{Ratio, Report},
};

/// Sizes of host memory, in per mille of the distinct blocks.
const SIZES: [u64; 5] = [10, 20, 50, 100, 250];
/// Length of the engine's waiting queue.
const QUEUE: usize = 32;
/// Bytes of a block of 512 tokens: Llama-3-8B.
const BLOCK_BYTES: u64 = 64 << 20;

/// Arguments of `tier`.
#[derive(clap::Args, Debug)]
pub struct TierArgs {
    /// A recorded trace, one JSON object a line; without it, only the synthetic one is measured
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// Measures everything.
pub fn run(args: &TierArgs) -> Result<Report> {
    let mut report = Report::new("tier");
    let zipf = zipf();
    hit_rates("Zipf", &zipf, &mut report);
    match &args.trace {
        Some(path) => {
            let trace = Trace::read(path)?;
            hit_rates("trace", &trace, &mut report);
        }
        None => report.notes.push("no --trace was given: only Zipf was measured".into()),
    }
    report.notes.push(
        "hit rates are of blocks that are stored, held against Belady's bound: what host memory of \
         that size would serve that knows all requests to come"
            .into(),
    );
    Ok(report)
}

/// Measures hits of host memory above drives that have all blocks, and then hits and bytes written
/// of drives without host memory.
fn hit_rates(name: &str, trace: &Trace, report: &mut Report) {
    const MEMORY: [(PolicyKind, usize); 3] =
        [(PolicyKind::Lru, 0), (PolicyKind::ReuseRate, 0), (PolicyKind::ReuseRate, QUEUE)];
    let reads = (trace.blocks() - trace.distinct()) as f64;
    let terabytes = |blocks: u64| (blocks * BLOCK_BYTES) as f64 / 1e12;
    let (mut drives, mut drives_written) = (Vec::new(), Vec::new());
    for size in SIZES {
        let blocks = (trace.distinct() * size / 1000) as u32;
        let bound = 100.0 * eviction::min(trace, blocks) * trace.blocks() as f64 / reads;
        let percent = size as f64 / 10.0;
        let ratio = |what: String, hits: u64| {
            Ratio::new(format!("served by {what}"), "%", 100.0 * hits as f64 / reads, bound)
        };
        for (policy, queue) in MEMORY {
            let TierCounts { hits, miss_bytes, admissions, .. } =
                sizes::replay(trace, blocks, policy, queue);
            let queue = if queue > 0 { format!(" and a queue of {queue}") } else { String::new() };
            let what = format!("{name}, {}{queue}, {percent} %", policy.name());
            report.ratios.push(ratio(format!("host memory, {what}"), hits));
            report.counts.push((format!("TB from the drives, {what}"), miss_bytes as f64 / 1e12));
            report.counts.push((format!("TB to host memory, {what}"), terabytes(admissions)));
        }
        for policy in PolicyKind::ALL {
            let (hits, written) = eviction::served(trace, blocks, *policy);
            let what = format!("{name}, {}, {percent} %", policy.name());
            drives.push(ratio(format!("drives, {what}"), hits));
            drives_written.push((format!("TB written to drives, {what}"), terabytes(written)));
        }
    }
    report.ratios.extend(drives);
    report.counts.extend(drives_written);
}

/// Returns requests for single blocks with Zipf-distributed popularity: exponent 0.9.
fn zipf() -> Trace {
    const BLOCKS: u32 = 20_000;
    let mut random = StdRng::seed_from_u64(1);
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=BLOCKS)
        .map(|rank| {
            sum += f64::from(rank).powf(-0.9);
            sum
        })
        .collect();
    // Every block once first, so that all are stored.
    let draw = |_| {
        let at = random.random_range(0.0..sum);
        sums.partition_point(|below| *below < at) as u32 + 1
    };
    Trace::of((1..=BLOCKS).chain((0..10 * BLOCKS).map(draw)).map(|block| vec![block]).collect())
}
