//! Report of a paced replay: one JSON object, or a table with the runs side by side.

use std::time::Duration;

use ripieno_sim::{Request, median};
use serde::Serialize;

use crate::config::StoreArgs;
use crate::outcome::{Fact, Facts, Spread, Value, facts};
use crate::plan::Plan;
use crate::size::{Size, grouped};
use crate::table::grid;
use crate::timing::Timing;

use super::Served;

/// Returns the results of one schedule.
fn run(requests: &[Request], is_scheduled: bool, served: &Served) -> Facts {
    let Served { report, tally, is_interrupted } = served;
    let both = || requests.iter().zip(&report.served).filter(|(_, it)| !it.ttft.is_zero());
    let sum = |of: fn(&(&Request, &ripieno_sim::Served)) -> u32| {
        both().map(|it| f64::from(of(&it))).sum::<f64>()
    };
    let count = both().count();
    let hits = sum(|it| it.1.loaded_tokens) / sum(|it| it.0.input).max(1.0);
    let ttft = Spread::of(both().map(|(_, it)| it.ttft));
    let decode = Spread::of(both().map(|(_, it)| it.decode));
    let by_layer = Spread::of(tally.bubbles.iter().map(|time| *time / (count as u32).max(1)));
    let (prefetched, wasted) = (tally.dram.prefetched_bytes, tally.dram.wasted_bytes);
    let ahead = format!("{}, {}", Size(prefetched), Size(wasted));
    // No room, or too many pending writes.
    let dropped = report.blocks_dropped + tally.blocks_refused;
    let off = "error of the slack table after 100 requests, p50";
    let seconds = |time: Duration| Value::Seconds(time.as_secs_f64());
    let mut run = Facts(vec![
        ("schedule", "", Value::Text(if is_scheduled { "slack" } else { "naive" }.to_owned())),
        ("requests", "requests", Value::Count(count as u64)),
        ("hit_ratio", "hits, of tokens", Value::Part(Some(hits))),
        ("ttft_ms", "time to first token, ms: mean, p50, p99", Value::Spread(ttft)),
        ("decode_ms", "generation, ms: mean, p50, p99", Value::Spread(decode)),
        ("bubble_s", "the GPU waited, s", seconds(tally.bubble())),
        (
            "bubble_layer_ms",
            "of that by layer, ms a request: mean, p50, p99",
            Value::Spread(by_layer),
        ),
        ("compute_s", "the GPU computed, s", seconds(tally.compute)),
        ("io_busy_s", "I/O was in flight, s", seconds(tally.io_busy)),
        ("hidden", "of that hidden", Value::Part(Some(tally.hidden()))),
        ("read_bytes", "loaded", Value::Bytes(report.read_bytes)),
        ("dram_bytes", "of that from host memory", Value::Bytes(tally.dram.retrieved_bytes)),
        ("", "read ahead to it, for nothing", Value::Text(ahead)),
        ("write_bytes", "stored", Value::Bytes(report.write_bytes)),
        ("blocks_dropped", "blocks not stored", Value::Count(dropped)),
        ("slack_error_p50", off, Value::Part(median(tally.errors.clone()))),
    ]);
    run.0.extend(
        facts! {
            bubble_layers_s: tally.bubbles.iter().map(Duration::as_secs_f64).collect::<Vec<_>>(),
            // Until everything was written.
            took_s: report.took.as_secs_f64(),
            prefetched_bytes: prefetched,
            wasted_bytes: wasted,
            late_batches: tally.late_batches,
            late_reads: tally.counts.late_reads,
            slack_error_max: tally.errors.iter().copied().max_by(f64::total_cmp),
            io_errors: tally.io_errors,
            interrupted: is_interrupted,
        }
        .0,
    );
    run
}

/// The whole report. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    setting: Facts,
    runs: Vec<Facts>,
    pub(super) interrupted: bool,
    #[serde(skip)]
    heading: String,
    /// True if all I/O succeeded.
    #[serde(skip)]
    pub(super) is_clean: bool,
}

impl Report {
    /// Makes a report of runs with the scheduler (true) and without it.
    pub(super) fn new(
        args: &StoreArgs,
        timing: &Timing,
        plan: &Plan,
        requests: &[Request],
        runs: &[(bool, Served)],
    ) -> Self {
        let (shape, medium, planned) = (args.shape, timing.medium, plan.requests() as u64);
        let trace = args.common.trace.as_ref().map(|path| path.display().to_string());
        let heading = format!(
            "ripieno {} pace: {}, {} requests; model {}, {} layers; reads {}/s, writes {}/s, mixed \
             {}",
            env!("CARGO_PKG_VERSION"),
            trace.as_deref().unwrap_or("synthetic"),
            grouped(planned),
            shape.model,
            shape.layers,
            Size(medium.read as u64),
            Size(medium.write as u64),
            medium.mixed,
        );
        let setting = facts! {
            version: env!("CARGO_PKG_VERSION"),
            model: shape.model,
            layers: shape.layers,
            trace: trace,
            seed: args.common.seed,
            requests_planned: planned,
            // Of all devices, and the fraction left while reads and writes mix.
            read_bytes_s: medium.read,
            write_bytes_s: medium.write,
            mixed: medium.mixed,
            step_tokens: timing.flags.step_tokens,
            batch: timing.flags.batch,
        };
        Self {
            setting,
            interrupted: runs.iter().any(|(_, served)| served.is_interrupted),
            is_clean: runs.iter().all(|(_, served)| served.tally.io_errors == 0),
            runs: runs.iter().map(|(how, served)| run(requests, *how, served)).collect(),
            heading,
        }
    }

    pub(super) fn text(&self) -> String {
        let row = |(at, (_, name, _)): (usize, &Fact)| {
            let of = |run: &Facts| run.0[at].2.text();
            std::iter::once((*name).to_owned()).chain(self.runs.iter().map(of)).collect()
        };
        // The first one names the schedule, above all others.
        let all = self.runs[0].0.iter().enumerate();
        let shown = all.filter(|(at, (_, name, _))| *at == 0 || !name.is_empty());
        let table = grid(&[], shown.map(row).collect(), 1);
        let heading = &self.heading;
        format!("{heading}\n\n{table}\n\nIn virtual time; the bytes were moved and not checked.")
    }
}
