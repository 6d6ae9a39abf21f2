//! Comparison of all policies for one workload.

use std::time::Duration;

use crate::{
    engine::{Report, Request, Second, serve},
    machine::Machine,
    outcome::{Line, Outcome, Plot, Table},
    page::{number, size},
    policy::{Medium, Policy},
    summary::{Prices, Summary, percentile},
};

/// Default policies of a comparison.
pub const POLICIES: &[Policy] = &[
    Policy::RECOMPUTE,
    Policy::HBM,
    Policy::DRAM,
    Policy::SSD,
    Policy::GDS,
    Policy::NAIVE,
    Policy::OURS,
    Policy::AHEAD,
    Policy::WITH_HOST,
    Policy::LOOKAHEAD,
];

/// Serves the requests with each policy. Calls `next` with the policy's name before each run.
///
/// # Panics
/// Panics if one of the requests does not fit into the GPUs' memory: see [`Machine::too_long`].
#[must_use]
pub fn compare(
    machine: &Machine,
    prices: &Prices,
    requests: &[Request],
    mut next: impl FnMut(&str),
) -> Outcome {
    let setup = machine.setup();
    let mut outcome = Outcome { setting: machine.setting(), ..Outcome::default() };
    outcome.setting.extend(tiers(machine, prices));
    let (mut latency, mut places, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    let mut lines = Vec::new();
    for policy in POLICIES {
        next(policy.name);
        let policy = machine.policy(*policy);
        let report = serve(&setup, &policy, requests);
        let summary = Summary::of(&policy, requests, &report);
        latency.push(row(policy.name, &latencies(&summary, &report)));
        places.push(row(policy.name, &traffic(&summary, &report)));
        let hour = prices.hour(machine.gpu.count, &policy);
        let tokens = summary.tokens_per_second;
        let million = format!("{:.3}", Prices::million(hour, tokens));
        costs.push(row(
            policy.name,
            &[number(summary.requests_per_second), number(tokens), number(hour), million],
        ));
        lines.push(Line { name: policy.name.to_owned(), points: distribution(&report) });
        if policy.tier.is_some() && report.seconds.len() > 1 {
            outcome.plots.push(busy(policy.name, &policy, &report));
        }
    }
    outcome.plots.insert(
        0,
        Plot {
            title: "TTFT: so many percent of requests take no longer".to_owned(),
            x: "%".to_owned(),
            y: "s".to_owned(),
            lines,
        },
    );
    outcome.tables = vec![
        table("TTFT and inter-token latency", &LATENCY, latency),
        table("Where prompts' tokens were, and what was moved", &TRAFFIC, places),
        table("Cost", &["requests/s", "tokens/s", "$ an hour", "$ a million tokens"], costs),
    ];
    outcome
}

const LATENCY: [&str; 10] = [
    "TTFT, ms",
    "p50",
    "p95",
    "p99",
    "inter-token latency, ms",
    "p95",
    "p99",
    "bubble, % of steps",
    "preempted",
    "aborted",
];
const TRAFFIC: [&str; 10] = [
    "GPU, %",
    "host memory, %",
    "drives, %",
    "together, %",
    "read, GB",
    "written, GB",
    "from host memory",
    "read ahead",
    "wasted",
    "loaded in vain",
];

fn latencies(summary: &Summary, report: &Report) -> [String; 10] {
    let Summary { ttft, itl, bubble, .. } = summary;
    let ms = |seconds: f64| number(seconds * 1e3);
    let [first, half, most, nearly] = [ttft.mean, ttft.p50, ttft.p95, ttft.p99].map(ms);
    let [between, often, rarely] = [itl.mean, itl.p95, itl.p99].map(ms);
    let (waits, again) = (number(bubble * 100.0), report.preemptions.to_string());
    let aborted = (report.aborted_waiting + report.aborted_running).to_string();
    [first, half, most, nearly, between, often, rarely, waits, again, aborted]
}

fn traffic(summary: &Summary, report: &Report) -> [String; 10] {
    let parts = [summary.hbm_hits, summary.host_hits, summary.drive_hits, summary.hits()];
    let [gpu, host, drives, all] = parts.map(|part| number(part * 100.0));
    let Report { read_bytes, write_bytes, host_read_bytes, .. } = report;
    let Report { ahead_bytes, wasted_bytes, in_vain_bytes, .. } = report;
    let gb = |bytes: &u64| format!("{:.0}", *bytes as f64 / 1e9);
    let [read, written, copied] = [read_bytes, write_bytes, host_read_bytes].map(gb);
    let [ahead, wasted, in_vain] = [ahead_bytes, wasted_bytes, in_vain_bytes].map(gb);
    [gpu, host, drives, all, read, written, copied, ahead, wasted, in_vain]
}

fn row(name: &str, cells: &[String]) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(cells.iter().cloned()).collect()
}

fn table(title: &str, columns: &[&str], rows: Vec<Vec<String>>) -> Table {
    let columns = std::iter::once("").chain(columns.iter().copied()).map(str::to_owned).collect();
    Table { title: title.to_owned(), columns, rows }
}

/// Describes tiers and prices in words.
pub(crate) fn tiers(machine: &Machine, prices: &Prices) -> [String; 3] {
    let gb = |bandwidth: f64| number(bandwidth / 1e9);
    let read = |policy| machine.policy(policy).tier.map_or_else(String::new, |it| gb(it.lane.read));
    [
        format!(
            "{} drives of {}: {} GB/s of reads directly, {} with GDS, {} through the CPU; \
             {} of host memory: {} GB/s (Tutti, figure 9 and section 2.2)",
            machine.drives,
            size(machine.drive_bytes),
            read(Policy::OURS),
            read(Policy::GDS),
            read(Policy::SSD),
            size(machine.dram_bytes),
            read(Policy::DRAM)
        ),
        format!(
            "${} an hour for a GPU, ${} and ${} for a gigabyte of host memory and of drives, for \
             all that a tier has{}; tokens of prompts and output, until the last request has ended",
            prices.gpu,
            prices.dram_gb,
            prices.drive_gb,
            if *prices == Prices::TUTTI { " (Tutti, section 4.3)" } else { "" }
        ),
        "bandwidths beyond two drives and one GPU are assumed to grow with their number, up to \
         what the links of the GPUs have"
            .to_owned(),
    ]
}

fn distribution(report: &Report) -> Vec<(f64, f64)> {
    let served = report.served.iter().filter(|it| !it.is_aborted);
    let mut times: Vec<f64> = served.map(|it| it.ttft.as_secs_f64()).collect();
    times.sort_unstable_by(f64::total_cmp);
    let percents = if times.is_empty() { 0 } else { 99 };
    (1..=percents).map(|percent| (percent as f64, percentile(&times, percent))).collect()
}

/// Returns a plot of GPU and tier utilisation: by minute, or coarser for a long run.
pub(crate) fn busy(title: &str, policy: &Policy, report: &Report) -> Plot {
    const POINTS: usize = 120;
    let Report { seconds, .. } = report;
    let span = seconds.len().div_ceil(POINTS).next_multiple_of(60).min(seconds.len() / 2).max(1);
    let line = |name: String, of: &dyn Fn(&Second) -> f64| {
        let point = |(at, part): (usize, &[Second])| {
            let busy = part.iter().map(of).sum::<f64>() / part.len() as f64;
            ((at * span) as f64 / 60.0, busy * 100.0)
        };
        Line { name, points: seconds.chunks(span).enumerate().map(point).collect() }
    };
    let mut lines = vec![line("GPU computes".to_owned(), &|it| Duration::as_secs_f64(&it.compute))];
    if let Some(tier) = policy.tier {
        let medium = match tier.medium {
            Medium::Host => "host memory",
            Medium::Drives => "drives",
        };
        lines.push(line(format!("{medium}: reads, of the bandwidth"), &|it| {
            it.read_bytes as f64 / tier.lane.read
        }));
        lines.push(line(format!("{medium}: writes, of the bandwidth"), &|it| {
            it.write_bytes as f64 / tier.lane.write
        }));
    }
    if let Some(host) = policy.host {
        lines.push(line("host memory: reads".to_owned(), &|it| {
            it.host_read_bytes as f64 / host.lane.read
        }));
        lines.push(line("host memory: writes".to_owned(), &|it| {
            it.host_write_bytes as f64 / host.lane.write
        }));
    }
    let (x, y) = ("minute".to_owned(), "%".to_owned());
    Plot { title: format!("{title}: what is busy"), x, y, lines }
}
