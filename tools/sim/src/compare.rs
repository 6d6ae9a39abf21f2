//! Comparison of all policies for one workload.

use std::time::Duration;

use crate::{
    engine::{Report, Second, serve},
    machine::Machine,
    outcome::{Line, Outcome, Plot, Table, number, size},
    parallel::each,
    parameters::Parameters,
    policy::{Path, Policy},
    storage::Storage,
    summary::{Counted, Prices, Summary, percentile},
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

/// Serves the workload with each policy, as many at a time as there are cores. Calls `next` with
/// the policy's name before each run.
///
/// # Panics
/// Panics if one of the requests does not fit into the GPUs' memory: see [`Machine::too_long`].
#[must_use]
pub fn compare(
    machine: &Machine,
    prices: &Prices,
    workload: &Counted,
    mut next: impl FnMut(&str),
) -> Outcome {
    let setup = machine.setup();
    let mut outcome = Outcome::of(machine.setting());
    outcome.setting.extend(tiers(machine, prices));
    let (mut latency, mut places, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    let mut lines = Vec::new();
    for some in POLICIES.chunks(rayon::current_num_threads()) {
        some.iter().for_each(|policy| next(policy.name));
        let served: Vec<Report> = each(some, |policy| serve(&setup, policy, &workload.requests));
        for (policy, report) in some.iter().zip(served) {
            let summary = Summary::of(policy, workload, &report);
            let cells = |columns: [Column; 10]| columns.map(|(_, of)| of(&summary, &report));
            latency.push(row(policy.name, cells(LATENCY)));
            places.push(row(policy.name, cells(TRAFFIC)));
            let hour = prices.hour(&setup, policy);
            let tokens = summary.tokens_per_second;
            let million = format!("{:.3}", Prices::million(hour, tokens));
            costs.push(row(
                policy.name,
                [number(summary.requests_per_second), number(tokens), number(hour), million],
            ));
            lines.push(Line::new(policy.name, distribution(&report)));
            if policy.tier.is_some() && report.seconds.len() > 1 {
                outcome.plots.push(busy(policy.name, policy, &setup.storage, &report));
            }
        }
    }
    let title = "TTFT: so many percent of requests take no longer";
    outcome.plots.insert(0, Plot::new(title, "%", "s", lines));
    outcome.tables = vec![
        table("TTFT and inter-token latency", LATENCY.map(|(name, _)| name), latency),
        table(
            "Where prompts' tokens were, and what was moved",
            TRAFFIC.map(|(name, _)| name),
            places,
        ),
        table("Cost", ["requests/s", "tokens/s", "$ an hour", "$ a million tokens"], costs),
    ];
    outcome
}

/// A column: its name, and its value for a policy.
type Column = (&'static str, fn(&Summary, &Report) -> String);

const LATENCY: [Column; 10] = [
    ("TTFT, ms", |it, _| ms(it.ttft.mean)),
    ("p50", |it, _| ms(it.ttft.p50)),
    ("p95", |it, _| ms(it.ttft.p95)),
    ("p99", |it, _| ms(it.ttft.p99)),
    ("inter-token latency, ms", |it, _| ms(it.itl.mean)),
    ("p95", |it, _| ms(it.itl.p95)),
    ("p99", |it, _| ms(it.itl.p99)),
    ("bubble, % of steps", |it, _| number(it.bubble * 100.0)),
    ("preempted", |_, run| run.preemptions.to_string()),
    ("aborted", |_, run| (run.aborted_waiting + run.aborted_running).to_string()),
];
const TRAFFIC: [Column; 10] = [
    ("GPU, %", |it, _| number(it.hbm_hits * 100.0)),
    ("host memory, %", |it, _| number(it.host_hits * 100.0)),
    ("drives, %", |it, _| number(it.drive_hits * 100.0)),
    ("together, %", |it, _| number(it.hits() * 100.0)),
    ("read, GB", |_, run| gb(run.read_bytes)),
    ("written, GB", |_, run| gb(run.write_bytes)),
    ("from host memory", |_, run| gb(run.host_read_bytes)),
    ("read ahead", |_, run| gb(run.ahead_bytes)),
    ("wasted", |_, run| gb(run.wasted_bytes)),
    ("loaded in vain", |_, run| gb(run.in_vain_bytes)),
];

fn ms(seconds: f64) -> String {
    number(seconds * 1e3)
}

fn gb(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / 1e9)
}

fn row(name: &str, cells: impl IntoIterator<Item = String>) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(cells).collect()
}

fn table<'a>(
    title: &str,
    columns: impl IntoIterator<Item = &'a str>,
    rows: Vec<Vec<String>>,
) -> Table {
    Table::new(title, std::iter::once("").chain(columns), rows)
}

/// Describes tiers and prices in words.
pub(crate) fn tiers(machine: &Machine, prices: &Prices) -> Vec<String> {
    let gb = |bandwidth: f64| number(bandwidth / 1e9);
    let storage = machine.storage();
    let read = |path| gb(storage.lane(path).read);
    let mut lines = vec![
        format!(
            "{} drives of {}: {} GB/s of reads directly, {} with GDS, {} through the CPU; \
             {} of host memory: {} GB/s",
            machine.drives,
            size(machine.drive_bytes),
            read(Path::Direct),
            read(Path::Gds),
            read(Path::Cpu),
            size(machine.dram_bytes),
            read(Path::Host)
        ),
        format!(
            "${} an hour for a GPU, ${} and ${} for a gigabyte of host memory and of drives, for \
             all that a tier has{}; tokens of prompts and output, until the last request has ended",
            prices.gpu,
            prices.dram_gb,
            prices.drive_gb,
            if *prices == Parameters::default().prices() { " (Tutti, section 4.3)" } else { "" }
        ),
        "bandwidths beyond two drives and one GPU are assumed to grow with their number, up to \
         what the links of the GPUs have"
            .to_owned(),
    ];
    lines.extend(machine.parameters.replaced());
    lines
}

fn distribution(report: &Report) -> Vec<(f64, f64)> {
    let served = report.served.iter().filter(|it| !it.is_aborted);
    let mut times: Vec<f64> = served.map(|it| it.ttft.as_secs_f64()).collect();
    times.sort_unstable_by(f64::total_cmp);
    let percents = if times.is_empty() { 0 } else { 99 };
    (1..=percents).map(|percent| (percent as f64, percentile(&times, percent))).collect()
}

/// Returns a plot of GPU and tier utilisation: by minute, or coarser for a long run.
pub(crate) fn busy(title: &str, policy: &Policy, storage: &Storage, report: &Report) -> Plot {
    const POINTS: usize = 120;
    let Report { seconds, .. } = report;
    let span = seconds.len().div_ceil(POINTS).next_multiple_of(60).min(seconds.len() / 2).max(1);
    let line = |name: String, of: &dyn Fn(&Second) -> f64| {
        let point = |(at, part): (usize, &[Second])| {
            let busy = part.iter().map(of).sum::<f64>() / part.len() as f64;
            ((at * span) as f64 / 60.0, busy * 100.0)
        };
        Line::new(name, seconds.chunks(span).enumerate().map(point))
    };
    let mut lines = vec![line("GPU computes".to_owned(), &|it| Duration::as_secs_f64(&it.compute))];
    if let Some(tier) = policy.tier {
        let medium = if tier.path == Path::Host { "host memory" } else { "drives" };
        let lane = storage.lane(tier.path);
        lines.push(line(format!("{medium}: reads, of the bandwidth"), &|it| {
            it.read_bytes as f64 / lane.read
        }));
        lines.push(line(format!("{medium}: writes, of the bandwidth"), &|it| {
            it.write_bytes as f64 / lane.write
        }));
    }
    if policy.host.is_some() {
        lines.push(line("host memory: reads".to_owned(), &|it| {
            it.host_read_bytes as f64 / storage.host.read
        }));
        lines.push(line("host memory: writes".to_owned(), &|it| {
            it.host_write_bytes as f64 / storage.host.write
        }));
    }
    Plot::new(format!("{title}: what is busy"), "minute", "%", lines)
}
