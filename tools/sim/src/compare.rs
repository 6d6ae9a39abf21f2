//! Comparison of all policies for one workload.

use std::time::Duration;

use serde::Serialize;

use crate::{
    engine::{Report, Second, serve},
    machine::Machine,
    outcome::{Line, Outcome, Plot, number, size},
    parallel::each,
    policy::{Path, Policy},
    shown::{Numbers, tables},
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
/// Panics if one of the requests does not fit into the GPUs' memory: see [`Machine::too_long`].
pub fn compare(machine: &Machine, workload: &Counted, mut next: impl FnMut(&str)) -> Outcome {
    let setup = machine.setup();
    let mut outcome = Outcome { setting: machine.setting(), ..Outcome::default() };
    outcome.setting.extend(tiers(machine));
    let (mut runs, mut lines) = (Vec::new(), Vec::new());
    for some in POLICIES.chunks(rayon::current_num_threads()) {
        some.iter().for_each(|policy| next(policy.name));
        let served: Vec<Report> = each(some, |policy| serve(&setup, policy, &workload.requests));
        for (policy, mut report) in some.iter().zip(served) {
            lines.push(Line::new(policy.name, distribution(&report)));
            if policy.tier.is_some() && seconds(&report) > 1 {
                outcome.plots.push(busy(policy.name, policy, &setup.storage, &report));
            }
            let (summary, hour) = (
                Summary::of(policy, workload, &report),
                machine.parameters.prices().hour(&setup, policy),
            );
            // The tables need only the counters; a trace may have millions of requests.
            report.served = Vec::new();
            let million = Prices::million(hour, summary.tokens_per_second);
            runs.push(Run { summary, report, hour, million });
        }
    }
    let title = "TTFT: so many percent of requests take no longer";
    outcome.plots.insert(0, Plot::new(title, "%", "s", lines));
    let rows: Vec<(String, &[Run])> =
        POLICIES.iter().map(|policy| policy.name.to_owned()).zip(runs.chunks(1)).collect();
    outcome.tables = tables("compare", &rows, Numbers::new());
    outcome
}

/// Results of a policy.
#[derive(Serialize)]
struct Run {
    summary: Summary,
    report: Report,
    /// Dollars an hour, and for a million tokens.
    hour: f64,
    million: f64,
}

/// Describes tiers and prices in words.
fn tiers(machine: &Machine) -> Vec<String> {
    let gb = |bandwidth: f64| number(bandwidth / 1e9);
    let (storage, (prices, source)) = (machine.storage(), machine.parameters.price_words());
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
            "{prices}, for all that a tier has{source}; tokens of prompts and output, until the \
             last request has ended"
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

/// Returns the length of a run in seconds, rounded up.
fn seconds(report: &Report) -> u64 {
    report.seconds.last_key_value().map_or(0, |(last, _)| last + 1)
}

/// Returns a plot of GPU and tier utilisation: by minute, or coarser for a long run.
pub(crate) fn busy(title: &str, policy: &Policy, storage: &Storage, report: &Report) -> Plot {
    const POINTS: u64 = 120;
    let all = seconds(report);
    let span = all.div_ceil(POINTS).next_multiple_of(60).min(all / 2).max(1);
    let line = |name: String, of: &dyn Fn(&Second) -> f64| {
        let point = |at: u64| {
            let part = at..all.min(at + span);
            let length = (part.end - part.start) as f64;
            let busy = report.seconds.range(part).map(|(_, it)| of(it)).sum::<f64>() / length;
            (at as f64 / 60.0, busy * 100.0)
        };
        Line::new(name, (0..all).step_by(span as usize).map(point))
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
