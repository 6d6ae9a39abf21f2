//! `ripieno pace --hit-rates`: the scheduler and naive order by hit rate, over the same
//! devices, and the hit rate at which the GPU starts to wait for longer than it computes.

use std::time::Duration;

use kv_schedule::SlackTable;
use serde::Serialize;

use crate::config::StoreArgs;
use crate::interrupt::Interrupt;
use crate::model::TRACE_BLOCK_TOKENS;
use crate::outcome::percent;
use crate::plan::Plan;
use crate::table::{Column, columns};
use crate::terminal;
use crate::timing::Timing;
use crate::trace::Request;

use super::mixed::{self, Mixed};
use super::{RunSetup, Served};

/// Approximate tokens of a prompt, adjusted so that a whole number of its blocks is stored.
const INPUT: u64 = 32_768;
const OUTPUT: u64 = 20;
/// Default number of requests; the first one stores the shared prefix.
const REQUESTS: usize = 31;
/// Arrival of the second request: the first one's blocks are on the devices by then.
const SECOND: Duration = Duration::from_secs(60);

/// Load levels: the fraction of the interval between requests that one takes alone, unscheduled.
const LOADS: [(&str, f64); 3] = [("alone", 0.05), ("nearly always", 0.9), ("too much", 1.25)];

/// Returns prompts of which `percent` was stored by the first one, at regular intervals.
fn requests(percent: f64, every: Duration, count: usize) -> Vec<Request> {
    let all = INPUT / u64::from(TRACE_BLOCK_TOKENS);
    let shared = (all as f64 * percent / 100.0).round().max(1.0) as u64;
    let stored = shared * u64::from(TRACE_BLOCK_TOKENS);
    // At least one token must be computed.
    let input = ((stored as f64 * 100.0 / percent).round() as u64).max(stored + 1);
    let blocks = input.div_ceil(u64::from(TRACE_BLOCK_TOKENS));
    let request = |number: usize| {
        let own = (number as u64 + 1) << 32;
        let arrival = match number {
            0 => Duration::ZERO,
            _ => SECOND + every * (number as u32 - 1),
        };
        Request {
            arrival,
            input_tokens: input,
            output_tokens: OUTPUT,
            hash_ids: (0..blocks).map(|at| if at < shared { at } else { own | at }).collect(),
            ..Request::default()
        }
    };
    (0..count).map(request).collect()
}

/// Results of one schedule at one hit rate. Field names are the JSON keys; means of all requests
/// but the first.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Found {
    hit_ratio: f64,
    ttft_ms: f64,
    bubble_ms: f64,
    /// Fraction of the time with I/O in flight in which the GPU did not wait.
    hidden: f64,
}

impl Found {
    /// Returns how much longer the GPU waits than it computes before the first token, for a request
    /// alone.
    fn over(&self) -> f64 {
        2.0 * self.bubble_ms - self.ttft_ms
    }
}

/// Results of a hit rate under a load.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    hit_rate: f64,
    load: &'static str,
    slack: Found,
    naive: Found,
}

/// Hit rate in percent above which the GPU waits for longer than it computes before the first
/// token; null if there is none.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Crossover {
    slack: Option<f64>,
    naive: Option<f64>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Sweep {
    /// Version of this program.
    version: &'static str,
    model: &'static str,
    requests: usize,
    rows: Vec<Row>,
    crossover: Crossover,
    mixed: Vec<Mixed>,
    io_errors: u64,
    interrupted: bool,
}

/// Inputs and state of the runs.
struct Runs<'a> {
    args: &'a StoreArgs,
    timing: &'a Timing,
    table: &'a SlackTable,
    interrupt: &'a mut Interrupt,
    io_errors: u64,
    is_interrupted: bool,
}

impl Runs<'_> {
    fn run(&mut self, requests: &[Request], is_scheduled: bool) -> anyhow::Result<Found> {
        let Self { args, timing, table, .. } = *self;
        let plan = &Plan::new(requests.iter().cloned(), &args.shape, None);
        let sizing = &super::sizing(args, plan)?;
        let setup = RunSetup { args, timing, plan, sizing, table };
        let (Served { report, tally, is_interrupted }, _) =
            setup.serve(&super::requests(timing, plan), is_scheduled, self.interrupt)?;
        self.io_errors += tally.io_errors;
        self.is_interrupted |= is_interrupted;
        let others = (requests.len() - 1) as f64;
        let ms = |sum: Duration| sum.as_secs_f64() * 1e3 / others;
        // The first request loads nothing, and ends before the second arrives.
        let input: u64 = requests[1..].iter().map(|it| it.input_tokens).sum();
        let loaded: u64 = report.served.iter().map(|it| u64::from(it.loaded_tokens)).sum();
        Ok(Found {
            hit_ratio: loaded as f64 / input as f64,
            ttft_ms: ms(report.served[1..].iter().map(|it| it.ttft).sum()),
            bubble_ms: ms(tally.bubble()),
            hidden: tally.hidden(),
        })
    }

    fn mixed(&self) -> anyhow::Result<Vec<Mixed>> {
        let Self { args, timing, table, .. } = *self;
        let plan = &Plan::new(mixed::requests().into_iter(), &args.shape, None);
        let sizing = &super::sizing(args, plan)?;
        RunSetup { args, timing, plan, sizing, table }.mixed()
    }

    fn rows(&mut self, percent: f64, count: usize) -> anyhow::Result<Vec<Row>> {
        let alone = self.run(&requests(percent, Duration::ZERO, 2), false)?;
        let row = |(load, part): (&'static str, f64)| {
            let every = Duration::from_secs_f64(alone.ttft_ms / 1e3 / part);
            let requests = requests(percent, every, count);
            let [slack, naive] = [true, false].map(|it| self.run(&requests, it));
            Ok(Row { hit_rate: percent, load, slack: slack?, naive: naive? })
        };
        LOADS.into_iter().map(row).collect()
    }
}

/// Returns the interpolated zero crossing between two adjacent hit rates.
fn crossover(rows: &[Row], of: fn(&Row) -> Found) -> Option<f64> {
    let alone = rows.iter().filter(|row| row.load == LOADS[0].0);
    let mut points: Vec<(f64, f64)> = alone.map(|row| (row.hit_rate, of(row).over())).collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    points.windows(2).find_map(|pair| {
        let [(from, low), (to, high)] = pair else { return None };
        (*low < 0.0 && *high >= 0.0).then(|| from + (to - from) * low / (low - high))
    })
}

/// Runs the sweep and reports. Returns the exit code.
pub(super) fn run(
    args: &StoreArgs,
    timing: &Timing,
    rates: &[f64],
    interrupt: &mut Interrupt,
) -> anyhow::Result<u8> {
    interrupt.orderly();
    let table = &super::table(args, timing)?;
    let count = args.common.requests.unwrap_or(REQUESTS).max(2);
    let mut runs = Runs { args, timing, table, interrupt, io_errors: 0, is_interrupted: false };
    let mut rows = Vec::new();
    for rate in rates {
        if !runs.is_interrupted {
            rows.extend(runs.rows(*rate, count)?);
        }
    }
    let sweep = Sweep {
        version: env!("CARGO_PKG_VERSION"),
        model: args.shape.model,
        requests: count,
        crossover: Crossover {
            slack: crossover(&rows, |row| row.slack),
            naive: crossover(&rows, |row| row.naive),
        },
        rows,
        mixed: runs.mixed()?,
        io_errors: runs.io_errors,
        interrupted: runs.is_interrupted,
    };
    terminal::report(&sweep, args.common.output.json, Sweep::text)?;
    Ok(interrupt.end(sweep.io_errors == 0, sweep.interrupted))
}

const COLUMNS: [Column<Row>; 9] = [
    ("hit rate", |it| format!("{} %", it.hit_rate)),
    ("GPU used", |it| it.load.to_owned()),
    ("TTFT, ms: naive", |it| format!("{:.1}", it.naive.ttft_ms)),
    ("slack", |it| format!("{:.1}", it.slack.ttft_ms)),
    ("less", |it| percent(1.0 - it.slack.ttft_ms / it.naive.ttft_ms)),
    ("bubble, ms: naive", |it| format!("{:.2}", it.naive.bubble_ms)),
    ("slack", |it| format!("{:.2}", it.slack.bubble_ms)),
    ("I/O hidden: naive", |it| percent(it.naive.hidden)),
    ("slack", |it| percent(it.slack.hidden)),
];

impl Sweep {
    fn text(&self) -> String {
        let table = columns(&COLUMNS, &self.rows, 2);
        let mixed = columns(&mixed::COLUMNS, &self.mixed, 0);
        let at = |it: Option<f64>| it.map_or("no rate".to_owned(), |it| format!("{it:.1} %"));
        format!(
            "ripieno {} pace --hit-rates: model {}, {} prompts of about {INPUT} tokens, \
             of which so many were stored\n\n{table}\n\nMeans of all but the first. Alone, the \
             GPU waits for longer than it computes from {} on, and without the scheduler from {} \
             on.\n\nReads and writes that are all there at the beginning, both together:\n\n\
             {mixed}",
            self.version,
            self.model,
            self.requests,
            at(self.crossover.slack),
            at(self.crossover.naive),
        )
    }
}
