//! Recommends tiers for a workload.

use std::time::Duration;

use serde::Serialize;

use crate::{
    engine::{serve, serve_restarted},
    machine::Machine,
    outcome::{Line, Outcome, Plot, number, size},
    parallel::each,
    shown::{Numbers, tables},
    summary::{Counted, Prices, Summary, median},
};

/// Candidate tiers. No host memory and no drives are always among the choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    /// Bytes of host memory.
    pub dram: Vec<u64>,
    /// Numbers of drives.
    pub drives: Vec<u32>,
    /// Other numbers of GPUs, served with their memory alone.
    pub gpus: Vec<u32>,
    /// Time until the engine is back from a restart in the middle of the requests, which a second
    /// run has; `None` for no such run.
    pub restart: Option<Duration>,
}

/// Limits that a choice has to keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Seconds to the first token that 99 % of the requests must not exceed, with any seed.
    pub ttft_p99: Option<f64>,
    /// Drive writes a day for which drives are rated.
    pub writes_a_day: f64,
}

/// Costs that differ by less are equal: the difference is not one that a model can tell.
const TIE: f64 = 0.01;

/// GPUs and tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hardware {
    gpus: u32,
    dram: u64,
    drives: u32,
}

/// A run with one seed.
#[derive(Debug, Clone, Copy, Serialize)]
struct Run {
    summary: Summary,
    /// Bytes written to drives in a day.
    written: f64,
    /// Writes of the whole capacity a day; 0 without drives.
    drive_writes: f64,
    /// Dollars an hour.
    hour: f64,
    /// Dollars per million tokens.
    million: f64,
    /// The second half of the requests: without a restart, and after one.
    restart: Option<[Summary; 2]>,
}

/// Hardware, with its performance and cost by seed.
#[derive(Debug, Clone)]
struct Choice {
    hardware: Hardware,
    runs: Vec<Run>,
}

impl Choices {
    fn all(&self, gpus: u32) -> Vec<Hardware> {
        let dram = [0].into_iter().chain(self.dram.iter().copied());
        let tiers = dram.flat_map(|dram| {
            let drives = [0].into_iter().chain(self.drives.iter().copied());
            drives.map(move |drives| Hardware { gpus, dram, drives })
        });
        let more = self.gpus.iter().map(|gpus| Hardware { gpus: *gpus, dram: 0, drives: 0 });
        tiers.chain(more).collect()
    }

    /// Returns the number of runs with each seed.
    pub fn runs(&self) -> usize {
        (self.dram.len() + 1) * (self.drives.len() + 1) + self.gpus.len()
    }
}

impl Hardware {
    fn name(&self, gpus: u32) -> String {
        let Self { dram, drives, .. } = *self;
        let memory = format!("{} of DRAM", size(dram));
        let plural = if drives == 1 { "drive" } else { "drives" };
        match (dram, drives) {
            (0, 0) if self.gpus != gpus => format!("{} GPUs, their memory alone", self.gpus),
            (0, 0) => "the GPU's memory alone".to_owned(),
            (0, _) => format!("{drives} {plural}"),
            (_, 0) => memory,
            _ => format!("{memory}, {drives} {plural}"),
        }
    }

    /// Returns `machine` with this hardware; other GPUs bring 90 % of their memory.
    fn of<'a>(&self, machine: &Machine<'a>) -> Machine<'a> {
        let each = machine.gpu.bytes as f64 * 0.9;
        let more = (f64::from(self.gpus) - f64::from(machine.gpu.count)) * each;
        Machine {
            gpu: crate::Gpu { count: self.gpus, ..machine.gpu },
            kv_bytes: (machine.kv_bytes as f64 + more) as u64,
            dram_bytes: self.dram,
            drives: self.drives,
            ..*machine
        }
    }
}

impl Choice {
    fn of(
        machine: &Machine<'_>,
        workloads: &[Counted],
        limits: &Limits,
        (hardware, restart): (Hardware, Option<Duration>),
    ) -> Self {
        let machine = hardware.of(machine);
        let (setup, policy, prices) =
            (machine.setup(), machine.policy(), machine.parameters.prices());
        let capacity = setup.storage.drive_bytes as f64;
        let run = |workload: &Counted| {
            let report = serve(&setup, &policy, &workload.requests);
            let summary = Summary::of(&policy, workload, &report);
            let is_written = hardware.drives > 0;
            let written = if is_written { report.write_bytes as f64 } else { 0.0 };
            let written = written / report.took.as_secs_f64() * 86_400.0;
            // Drives that are written more often than rated are replaced sooner.
            let drive_writes = written / capacity.max(1.0);
            let wear = (drive_writes / limits.writes_a_day).max(1.0);
            let drive_gb = prices.drive_gb * wear;
            let hour = Prices { drive_gb, ..prices }.hour(&setup, &policy);
            let million = Prices::million(hour, summary.tokens_per_second);
            let restart = restart.map(|takes| {
                let last = workload.requests.last().map_or(Duration::ZERO, |last| last.arrival);
                let mut half = workload.clone();
                half.warm_up = half.warm_up.max(last / 2);
                let restarted =
                    serve_restarted(&setup, &policy, &half.requests, (half.warm_up, takes));
                [&report, &restarted].map(|report| Summary::of(&policy, &half, report))
            });
            Run { summary, written, drive_writes, hour, million, restart }
        };
        Self { hardware, runs: each(workloads, run) }
    }

    fn median(&self, of: impl Fn(&Run) -> f64) -> f64 {
        median(self.runs.iter().map(of).collect()).expect("there is a run")
    }

    /// Returns the lowest and the highest value over the seeds.
    fn range(&self, of: fn(&Run) -> f64) -> [f64; 2] {
        let all = || self.runs.iter().map(of);
        [all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max)]
    }

    fn drive_writes(&self) -> f64 {
        self.median(|it| it.drive_writes)
    }

    fn million(&self) -> f64 {
        self.median(|it| it.million)
    }

    fn p99(&self) -> [f64; 2] {
        self.range(|it| it.summary.ttft.p99)
    }

    fn p50(&self) -> f64 {
        self.median(|it| it.summary.ttft.p50)
    }

    fn hour(&self) -> f64 {
        self.median(|it| it.hour)
    }

    /// Returns true if requests wait in a queue that does not empty for long, with most seeds.
    fn is_saturated(&self) -> bool {
        self.median(|it| it.summary.backlog) > Summary::BACKLOG
    }

    fn keeps(&self, limits: &Limits) -> bool {
        limits.ttft_p99.is_none_or(|limit| self.p99()[1] <= limit)
    }

    /// Returns true if the costs differ by less than a hundredth, or than between seeds.
    fn ties_with(&self, other: &Self) -> bool {
        let [low, high] = self.range(|it| it.million);
        let [other_low, other_high] = other.range(|it| it.million);
        let is_close = (self.million() / other.million() - 1.0).abs() < TIE;
        is_close || (low <= other_high && other_low <= high)
    }
}

/// Serves the requests of each seed with each combination of tiers, and with more GPUs, and
/// recommends one: the cheapest by tokens that keeps the limits and serves what arrives. Calls
/// `next` with a name before each combination.
/// Panics as [`crate::compare()`] does, and without workloads.
pub fn plan(
    machine: &Machine<'_>,
    choices: &Choices,
    limits: &Limits,
    workloads: &[Counted],
    mut next: impl FnMut(&str),
) -> Outcome {
    let gpus = machine.gpu.count;
    let run = |hardware: Hardware| {
        next(&hardware.name(gpus));
        Choice::of(machine, workloads, limits, (hardware, choices.restart))
    };
    let found: Vec<Choice> = choices.all(gpus).into_iter().map(run).collect();
    let rows: Vec<(String, &[Run])> =
        found.iter().map(|it| (it.hardware.name(gpus), &it.runs[..])).collect();
    let mut all = tables("plan", &rows, Numbers::new());
    if let Some(takes) = choices.restart {
        let takes = Numbers::from([("takes".to_owned(), takes.as_secs_f64())]);
        all.extend(tables("restart", &rows, takes));
    }
    let setting = setting(machine, limits, workloads);
    Outcome {
        setting: machine.setting().into_iter().chain(setting).collect(),
        tables: all,
        plots: plots(choices, &found, gpus),
        notes: advice(&found, limits, gpus),
        ..Outcome::default()
    }
}

fn setting(machine: &Machine<'_>, limits: &Limits, workloads: &[Counted]) -> Vec<String> {
    let (prices, source) = machine.parameters.price_words();
    let one = machine.parameters.storage(1, 1);
    let mut lines = vec![
        format!(
            "drives of {:.1} TB with {} and {} GB/s; host memory at {} GB/s for each GPU",
            machine.drive_bytes as f64 / 1e12,
            number(one.direct.read / 1e9),
            number(one.direct.write / 1e9),
            number(one.host.read / 1e9)
        ),
        "drives alone: directly and by layers, with the scheduler; host memory alone: the same; \
         both: host memory before the drives, with lookahead"
            .to_owned(),
        format!(
            "{prices}, used or not{source}; tokens of prompts and output, until the last request \
             has ended"
        ),
        format!(
            "drives are rated for {} drive writes a day; what is written more often costs as many \
             times more. Bytes are those of the store, without the drives' own copies",
            limits.writes_a_day
        ),
        "a first question has less than half of its prompt's blocks in earlier requests".to_owned(),
    ];
    if let [first, others @ ..] = workloads {
        if first.warm_up > Duration::ZERO {
            lines.push(format!(
                "requests of the first {} s are served and not counted",
                first.warm_up.as_secs_f64()
            ));
        }
        if !others.is_empty() {
            lines.push(format!("{} seeds", workloads.len()));
        }
    }
    lines.extend(machine.parameters.replaced());
    lines
}

/// Returns the cheapest choice that keeps the limits: of those that serve what arrives, or of all
/// if none does.
fn cheapest<'a>(choices: &'a [Choice], limits: &Limits) -> Option<&'a Choice> {
    let all_saturated = choices.iter().all(Choice::is_saturated);
    let keeps = |it: &&Choice| it.keeps(limits) && (all_saturated || !it.is_saturated());
    choices.iter().filter(keeps).min_by(|one, other| one.million().total_cmp(&other.million()))
}

fn names<'a>(choices: impl IntoIterator<Item = &'a Choice>, gpus: u32) -> String {
    let names: Vec<String> = choices.into_iter().map(|it| it.hardware.name(gpus)).collect();
    names.join("; ")
}

/// Says which choices write more to drives than these are rated for.
fn worn(found: &[Choice], limits: &Limits) -> Option<String> {
    let worn: Vec<f64> =
        found.iter().map(Choice::drive_writes).filter(|it| *it > limits.writes_a_day).collect();
    let most = worn.iter().copied().fold(0.0, f64::max);
    (!worn.is_empty()).then(|| {
        format!(
            "Drives are written more often than {} times a day with {} of {} choices, {} times at \
             most. Their price counts as often as they have to be replaced. That is while a store \
             fills, for {} hours or more; a full one refuses what is worth less than what it has, \
             and writes less.",
            limits.writes_a_day,
            worn.len(),
            found.len(),
            number(most),
            number(24.0 / most)
        )
    })
}

/// Returns what is sooner than a choice for more dollars an hour: of what costs less and serves
/// what arrives, all are later.
fn dearer(found: &[Choice], best: &Choice, gpus: u32) -> Option<String> {
    let mut others: Vec<&Choice> = found.iter().filter(|it| !it.is_saturated()).collect();
    others.sort_by(|one, other| one.hour().total_cmp(&other.hour()));
    let (mut before, mut lines) = ([best.p50(), best.p99()[1]], Vec::new());
    for it in others.into_iter().filter(|it| it.hour() > best.hour()) {
        let now = [it.p50(), it.p99()[1]];
        // Less than a tenth is no reason to pay.
        if (0..2).any(|at| now[at] < before[at] * 0.9)
            && (0..2).all(|at| now[at] < before[at] * 1.1)
        {
            lines.push(format!(
                "{} (+${:.2} an hour): {} and {} ms",
                it.hardware.name(gpus),
                it.hour() - best.hour(),
                number(now[0] * 1e3),
                number(now[1] * 1e3)
            ));
            before = now;
        }
    }
    (!lines.is_empty())
        .then(|| format!("Sooner, for more (TTFT of 50 and 99 %): {}.", lines.join("; ")))
}

fn advice(found: &[Choice], limits: &Limits, gpus: u32) -> Vec<String> {
    let ms = |time: f64| number(time * 1e3);
    let all = found.len();
    let kept = found.iter().filter(|it| it.keeps(limits)).count();
    let asked = limits
        .ttft_p99
        .map(|limit| format!("a TTFT of {} ms or less (99 %, with any seed)", ms(limit)));
    let mut notes = Vec::new();
    let best = cheapest(found, limits);
    if let Some(it) = best {
        let why = match &asked {
            Some(asked) => format!("the lowest cost of the {kept} of {all} with {asked}"),
            None => format!("the lowest cost of {all} combinations"),
        };
        notes.push(format!(
            "Recommended: {}: ${:.3} a million tokens, TTFT {} ms (50 %), {} ms (99 %): {why}.",
            it.hardware.name(gpus),
            it.million(),
            ms(it.p50()),
            ms(it.p99()[1])
        ));
        notes.extend(dearer(found, it, gpus));
        let ties: Vec<&Choice> = found
            .iter()
            .filter(|other| other.hardware != it.hardware && other.keeps(limits))
            .filter(|other| other.is_saturated() == it.is_saturated() && other.ties_with(it))
            .collect();
        if !ties.is_empty() {
            notes.push(format!(
                "These cost the same, within 1 % or what seeds differ by: {}.",
                names(ties, gpus)
            ));
        }
    } else {
        let least = found.iter().map(|it| it.p99()[1]).fold(f64::INFINITY, f64::min);
        let nearest = found.iter().filter(|it| it.p99()[1] <= least * (1.0 + TIE));
        notes.push(format!(
            "Recommended: none: no combination that serves what arrives has {}. Nearest, with {} \
             ms: {}.",
            asked.unwrap_or_default(),
            ms(least),
            names(nearest, gpus)
        ));
    }
    let saturated: Vec<&Choice> = found.iter().filter(|it| it.is_saturated()).collect();
    if saturated.len() == all {
        notes.push(
            "More requests arrive than any of them serves, for a quarter of the time at least: \
             TTFT says how long that was, and costs are those of a full load. Use a lower --rate, \
             or more GPUs."
                .to_owned(),
        );
    } else if !saturated.is_empty() {
        notes.push(format!(
            "More requests arrive than these serve, for a quarter of the time at least, and their \
             TTFT says how long that was: {}.",
            names(saturated, gpus)
        ));
    }
    notes.extend(worn(found, limits));
    notes
}

const GIB: f64 = (1_u64 << 30) as f64;

/// Plots cost and TTFT by host memory, with a line for each number of drives.
fn plots(choices: &Choices, found: &[Choice], gpus: u32) -> Vec<Plot> {
    if choices.dram.is_empty() {
        return Vec::new();
    }
    let plot = |title: &str, y: &str, of: fn(&Choice) -> f64| {
        let line = |drives: u32| {
            let is_its = |it: &&Choice| it.hardware.drives == drives && it.hardware.gpus == gpus;
            let those = found.iter().filter(is_its);
            let mut points: Vec<_> =
                those.map(|it| (it.hardware.dram as f64 / GIB, of(it))).collect();
            points.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
            Line::new(format!("{drives} drives"), points)
        };
        let drives = [0].into_iter().chain(choices.drives.iter().copied());
        Plot::new(title, "host memory, GiB", y, drives.map(line))
    };
    vec![
        plot("Cost of a million tokens", "$", Choice::million),
        plot("TTFT, 99 %", "ms", |it| it.median(|run| run.summary.ttft.p99) * 1e3),
        plot("Prompts' tokens that are not computed", "%", |it| {
            it.median(|run| run.summary.hits) * 100.0
        }),
    ]
}

#[cfg(test)]
mod tests;
