//! Report of a paced replay: one JSON object, or a table with the runs side by side.

use std::time::Duration;

use ripieno_sim::{Request, median, percentile};
use serde::Serialize;

use crate::config::StoreArgs;
use crate::plan::Plan;
use crate::size::{Size, grouped};
use crate::table::grid;
use crate::timing::Timing;

use super::Served;

/// Distribution of times in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Spread {
    fn new(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut ms: Vec<f64> = times.into_iter().map(|it| it.as_secs_f64() * 1e3).collect();
        if ms.is_empty() {
            return Self::default();
        }
        ms.sort_unstable_by(f64::total_cmp);
        let mean = ms.iter().sum::<f64>() / ms.len() as f64;
        let [p50, p99, max] = [50, 99, 100].map(|part| percentile(&ms, part));
        Self { mean, p50, p99, max }
    }

    fn text(&self) -> String {
        format!("{:.1}, {:.1}, {:.1}", self.mean, self.p50, self.p99)
    }
}

/// Results of one schedule. Field names are the JSON keys.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Run {
    /// "slack" or "naive".
    pub(crate) schedule: &'static str,
    /// Requests served.
    pub(crate) requests: u64,
    /// Fraction of all prompt tokens that was loaded.
    pub(crate) hit_ratio: f64,
    /// Time from arrival to the first token, in milliseconds.
    pub(crate) ttft_ms: Spread,
    /// Time from the first token to the last, in milliseconds.
    pub(crate) decode_ms: Spread,
    /// Seconds that the GPU waited for loads, in total and by layer.
    pub(crate) bubble_s: f64,
    pub(crate) bubble_layers_s: Vec<f64>,
    /// Waits by layer, in milliseconds per request.
    pub(crate) bubble_layer_ms: Spread,
    pub(crate) compute_s: f64,
    /// Seconds with I/O in flight.
    pub(crate) io_busy_s: f64,
    /// Fraction of them in which the GPU did not wait.
    pub(crate) hidden: f64,
    /// Seconds until everything was written.
    pub(crate) took_s: f64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    /// Bytes of all reads that came from host memory.
    pub(crate) dram_bytes: u64,
    /// Bytes prefetched from the devices to host memory, those of them never used, and batches too
    /// late to prefetch.
    pub(crate) prefetched_bytes: u64,
    pub(crate) wasted_bytes: u64,
    pub(crate) late_batches: u64,
    /// Blocks that were not stored: no room, or too many pending writes.
    pub(crate) blocks_dropped: u64,
    /// Reads that started too late for their deadline.
    pub(crate) late_reads: u64,
    /// Median and largest relative error of the slack table after the first hundred requests; null
    /// before that.
    pub(crate) slack_error_p50: Option<f64>,
    pub(crate) slack_error_max: Option<f64>,
    pub(crate) io_errors: u64,
    interrupted: bool,
}

impl Run {
    pub(super) fn new(is_scheduled: bool, requests: &[Request], served: Served) -> Self {
        let Served { report, tally, is_interrupted } = served;
        let both = || requests.iter().zip(&report.served).filter(|(_, it)| !it.ttft.is_zero());
        let sum = |of: fn(&(&Request, &ripieno_sim::Served)) -> u32| {
            both().map(|it| f64::from(of(&it))).sum::<f64>()
        };
        let count = both().count();
        let each = tally.bubbles.iter().map(|time| *time / (count as u32).max(1));
        Self {
            schedule: if is_scheduled { "slack" } else { "naive" },
            requests: count as u64,
            hit_ratio: sum(|it| it.1.loaded_tokens) / sum(|it| it.0.input).max(1.0),
            ttft_ms: Spread::new(both().map(|(_, it)| it.ttft)),
            decode_ms: Spread::new(both().map(|(_, it)| it.decode)),
            bubble_s: tally.bubble().as_secs_f64(),
            bubble_layer_ms: Spread::new(each),
            bubble_layers_s: tally.bubbles.iter().map(Duration::as_secs_f64).collect(),
            compute_s: tally.compute.as_secs_f64(),
            io_busy_s: tally.io_busy.as_secs_f64(),
            hidden: tally.hidden(),
            took_s: report.took.as_secs_f64(),
            read_bytes: report.read_bytes,
            write_bytes: report.write_bytes,
            dram_bytes: tally.dram.retrieved_bytes,
            prefetched_bytes: tally.dram.prefetched_bytes,
            wasted_bytes: tally.dram.wasted_bytes,
            late_batches: tally.late_batches,
            blocks_dropped: report.blocks_dropped + tally.blocks_refused,
            late_reads: tally.counts.late_reads,
            slack_error_p50: median(tally.errors.clone()),
            slack_error_max: tally.errors.iter().copied().max_by(f64::total_cmp),
            io_errors: tally.io_errors,
            interrupted: is_interrupted,
        }
    }
}

type Value = fn(&Run) -> String;

/// Rows of the table: a title, and the value of a run.
const ROWS: [(&str, Value); 16] = [
    ("", |it| it.schedule.to_owned()),
    ("requests", |it| grouped(it.requests)),
    ("hits, of tokens", |it| percent(it.hit_ratio)),
    ("time to first token, ms: mean, p50, p99", |it| it.ttft_ms.text()),
    ("generation, ms: mean, p50, p99", |it| it.decode_ms.text()),
    ("the GPU waited, s", |it| format!("{:.3}", it.bubble_s)),
    ("of that by layer, ms a request: mean, p50, p99", |it| it.bubble_layer_ms.text()),
    ("the GPU computed, s", |it| format!("{:.3}", it.compute_s)),
    ("I/O was in flight, s", |it| format!("{:.3}", it.io_busy_s)),
    ("of that hidden", |it| percent(it.hidden)),
    ("loaded", |it| Size(it.read_bytes).to_string()),
    ("of that from host memory", |it| Size(it.dram_bytes).to_string()),
    ("read ahead to it, for nothing", |it| {
        format!("{}, {}", Size(it.prefetched_bytes), Size(it.wasted_bytes))
    }),
    ("stored", |it| Size(it.write_bytes).to_string()),
    ("blocks not stored", |it| grouped(it.blocks_dropped)),
    ("error of the slack table after 100 requests, p50", |it| {
        it.slack_error_p50.map_or("-".to_owned(), percent)
    }),
];

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// The whole report. Field names are the JSON keys.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    /// Version of this program.
    version: &'static str,
    model: &'static str,
    layers: u32,
    trace: Option<String>,
    seed: u64,
    requests_planned: u64,
    /// Bytes a second of all devices, and the fraction left while reads and writes mix.
    read_bytes_s: f64,
    write_bytes_s: f64,
    mixed: f64,
    step_tokens: u32,
    batch: u32,
    pub(crate) runs: Vec<Run>,
    pub(crate) interrupted: bool,
}

impl Report {
    pub(super) fn new(args: &StoreArgs, timing: &Timing, plan: &Plan, runs: Vec<Run>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            model: args.shape.model,
            layers: args.shape.layers,
            trace: args.common.trace.as_ref().map(|path| path.display().to_string()),
            seed: args.common.seed,
            requests_planned: plan.requests() as u64,
            read_bytes_s: timing.medium.read,
            write_bytes_s: timing.medium.write,
            mixed: timing.medium.mixed,
            step_tokens: timing.flags.step_tokens,
            batch: timing.flags.batch,
            interrupted: runs.iter().any(|run| run.interrupted),
            runs,
        }
    }

    /// Returns true if all I/O succeeded.
    pub(super) fn is_clean(&self) -> bool {
        self.runs.iter().all(|run| run.io_errors == 0)
    }

    pub(super) fn text(&self) -> String {
        let workload = self.trace.as_deref().unwrap_or("synthetic");
        let row = |(title, value): &(&str, Value)| {
            std::iter::once((*title).to_owned()).chain(self.runs.iter().map(value)).collect()
        };
        let table = grid(&[], ROWS.iter().map(row).collect(), 1);
        format!(
            "ripieno {} pace: {workload}, {} requests; model {}, {} layers; reads {}/s, \
             writes {}/s, mixed {}\n\n{table}\n\nIn virtual time; the bytes were moved and not \
             checked.",
            self.version,
            grouped(self.requests_planned),
            self.model,
            self.layers,
            Size(self.read_bytes_s as u64),
            Size(self.write_bytes_s as u64),
            self.mixed,
        )
    }
}
