//! Recommends tiers for a workload.

use crate::{
    engine::{Request, serve},
    machine::Machine,
    outcome::{Line, Outcome, Plot, Table},
    page::{number, size},
    parameters::Parameters,
    policy::Policy,
    summary::{Prices, Summary},
};

/// Candidate tiers. No host memory and no drives are always among the choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    /// Bytes of host memory.
    pub dram: Vec<u64>,
    /// Numbers of drives.
    pub drives: Vec<u32>,
}

/// A combination of tiers, with its performance and cost.
#[derive(Debug, Clone, Copy)]
struct Choice {
    dram: u64,
    drives: u32,
    summary: Summary,
    /// Dollars an hour.
    hour: f64,
    /// Dollars per million tokens.
    million: f64,
}

impl Choices {
    fn all(&self) -> impl Iterator<Item = (u64, u32)> {
        let each = |counts: &[u32]| [0].into_iter().chain(counts.to_vec());
        let dram = [0].into_iter().chain(self.dram.iter().copied());
        dram.flat_map(move |dram| each(&self.drives).map(move |drives| (dram, drives)))
    }

    /// Returns the number of runs.
    #[must_use]
    pub fn runs(&self) -> usize {
        (self.dram.len() + 1) * (self.drives.len() + 1)
    }
}

impl Choice {
    fn of(
        machine: &Machine,
        prices: &Prices,
        requests: &[Request],
        (dram, drives): (u64, u32),
    ) -> Self {
        let machine = Machine { dram_bytes: dram, drives, ..*machine };
        let policy = match (dram, drives) {
            (0, 0) => Policy::HBM,
            (0, _) => Policy::OURS,
            (_, 0) => Policy::HOST_ALONE,
            _ => Policy::LOOKAHEAD,
        };
        let setup = machine.setup();
        let report = serve(&setup, &policy, requests);
        let summary = Summary::of(&policy, requests, &report);
        let hour = prices.hour(&setup, &policy);
        Self {
            dram,
            drives,
            summary,
            hour,
            million: Prices::million(hour, summary.tokens_per_second),
        }
    }

    fn row(&self) -> Vec<String> {
        let Self { summary, hour, million, .. } = self;
        let parts = [summary.hbm_hits, summary.host_hits, summary.drive_hits, summary.hits()];
        let times = [summary.ttft.mean, summary.ttft.p99, summary.itl.mean];
        std::iter::once(name(self.dram, self.drives))
            .chain(parts.map(|part| number(part * 100.0)))
            .chain(times.map(|time| number(time * 1e3)))
            .chain([summary.requests_per_second, summary.tokens_per_second, *hour].map(number))
            .chain([format!("{million:.3}")])
            .collect()
    }
}

fn name(dram: u64, drives: u32) -> String {
    let memory = format!("{} of host memory", size(dram));
    let plural = if drives == 1 { "drive" } else { "drives" };
    match (dram, drives) {
        (0, 0) => "the GPU's memory alone".to_owned(),
        (0, _) => format!("{drives} {plural}"),
        (_, 0) => memory,
        _ => format!("{memory}, {drives} {plural}"),
    }
}

/// Returns the choice with the lowest cost per token whose P99 TTFT is at most `ttft_p99` seconds,
/// if given; the first one among equals.
fn cheapest(choices: &[Choice], ttft_p99: Option<f64>) -> Option<&Choice> {
    let keeps = |it: &&Choice| ttft_p99.is_none_or(|limit| it.summary.ttft.p99 <= limit);
    choices.iter().filter(keeps).min_by(|one, other| one.million.total_cmp(&other.million))
}

/// Serves requests with each combination of tiers and recommends one: the cheapest that keeps
/// `ttft_p99` (seconds), or the cheapest of all. Calls `next` with a name before each run.
///
/// # Panics
/// Same as [`crate::compare()`].
#[must_use]
pub fn plan(
    machine: &Machine,
    prices: &Prices,
    choices: &Choices,
    ttft_p99: Option<f64>,
    requests: &[Request],
    mut next: impl FnMut(&str),
) -> Outcome {
    let run = |(dram, drives)| {
        next(&name(dram, drives));
        Choice::of(machine, prices, requests, (dram, drives))
    };
    let found: Vec<Choice> = choices.all().map(run).collect();
    let columns = ["tiers", "GPU, %", "host memory, %", "drives, %", "hits, %"]
        .into_iter()
        .chain(["TTFT, ms", "p99", "inter-token latency, ms"])
        .chain(["requests/s", "tokens/s", "$ an hour", "$ a million tokens"]);
    let table = Table {
        title: "Tiers, and what follows".to_owned(),
        columns: columns.map(str::to_owned).collect(),
        rows: found.iter().map(Choice::row).collect(),
    };
    Outcome {
        setting: machine.setting().into_iter().chain(setting(machine, prices)).collect(),
        tables: vec![table],
        plots: plots(choices, &found),
        notes: advice(&found, ttft_p99, requests),
        ..Outcome::default()
    }
}

fn setting(machine: &Machine, prices: &Prices) -> [String; 3] {
    let from = if *prices == Parameters::default().prices() { " (Tutti, section 4.3)" } else { "" };
    [
        format!(
            "drives of {:.1} TB, each with half of the bandwidth of the Tutti paper's two \
             (figure 9); host memory at 50 GB/s for each GPU (section 2.2)",
            machine.drive_bytes as f64 / 1e12
        ),
        "drives alone: directly and by layers, with the scheduler; host memory alone: the same; \
         both: host memory before the drives, with lookahead"
            .to_owned(),
        format!(
            "${} an hour for a GPU, ${} and ${} for a gigabyte of host memory and of drives, used \
             or not{from}; tokens of prompts and output, until the last request has ended",
            prices.gpu, prices.dram_gb, prices.drive_gb
        ),
    ]
}

fn advice(found: &[Choice], ttft_p99: Option<f64>, requests: &[Request]) -> Vec<String> {
    let p99 = |it: &Choice| number(it.summary.ttft.p99 * 1e3);
    let all = found.len();
    let asked =
        ttft_p99.map(|limit| format!("a TTFT of {} ms or less (99 %)", number(limit * 1e3)));
    let mut notes = match (cheapest(found, ttft_p99), asked) {
        (Some(it), asked) => {
            let why = asked.map_or_else(
                || format!("the lowest cost of {all} combinations"),
                |asked| {
                    let kept = |it: &&Choice| ttft_p99.is_some_and(|at| it.summary.ttft.p99 <= at);
                    let keep = found.iter().filter(kept).count();
                    format!("the lowest cost of the {keep} of {all} combinations with {asked}")
                },
            );
            vec![format!(
                "Recommended: {}: ${:.3} a million tokens, TTFT {} ms (99 %): {why}.",
                name(it.dram, it.drives),
                it.million,
                p99(it)
            )]
        }
        (None, asked) => {
            let order = |it: &&Choice, other: &&Choice| {
                it.summary.ttft.p99.total_cmp(&other.summary.ttft.p99)
            };
            let nearest = found.iter().min_by(order).expect("nothing is a choice");
            vec![format!(
                "Recommended: none: no combination has {}; {} comes nearest, with {} ms.",
                asked.unwrap_or_default(),
                name(nearest.dram, nearest.drives),
                p99(nearest)
            )]
        }
    };
    let span = requests.last().map_or(0.0, |last| last.arrival.as_secs_f64());
    let comes = requests.len() as f64 / span.max(1e-9);
    if found.iter().all(|it| it.summary.requests_per_second > comes * 0.97) {
        notes.push(
            "All of them serve what comes, so that what costs least an hour costs least: \
             --ttft-p99 asks for more, and --rate for what they can serve at the most."
                .to_owned(),
        );
    }
    notes
}

const GIB: f64 = (1_u64 << 30) as f64;

/// Plots cost and TTFT by host memory, with a line for each number of drives.
fn plots(choices: &Choices, found: &[Choice]) -> Vec<Plot> {
    if choices.dram.is_empty() {
        return Vec::new();
    }
    let plot = |title: &str, y: &str, of: fn(&Choice) -> f64| {
        let line = |drives: u32| {
            let those = found.iter().filter(|it| it.drives == drives);
            let mut points: Vec<_> = those.map(|it| (it.dram as f64 / GIB, of(it))).collect();
            points.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
            Line { name: format!("{drives} drives"), points }
        };
        Plot {
            title: title.to_owned(),
            x: "host memory, GiB".to_owned(),
            y: y.to_owned(),
            lines: [0].into_iter().chain(choices.drives.iter().copied()).map(line).collect(),
        }
    };
    vec![
        plot("Cost of a million tokens", "$", |it| it.million),
        plot("TTFT, 99 %", "ms", |it| it.summary.ttft.p99 * 1e3),
        plot("Prompts' tokens that are not computed", "%", |it| it.summary.hits() * 100.0),
    ]
}

#[cfg(test)]
mod tests;
