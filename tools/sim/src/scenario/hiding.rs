//! The scheduler against layer-wise order, with the same requests and drives.

use std::time::Duration;

use kv_schedule::{SlackTable, StepShape};
use serde::Deserialize;

use super::{
    served::{ms, prompt},
    testbed::{BLOCK_TOKENS, Testbed},
};
use crate::{
    engine::{Report, Request, Setup, Work, watch},
    lane::LaneModel,
    outcome::{Bar, Gantt},
    parameters::Parameters,
    policy::Policy,
    shown::{Results, results},
};

/// Requests of 32K tokens at regular times. The results are means of all but the first, in
/// milliseconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hiding {
    machine: Testbed,
    policy: Policy,
    /// Percentage of their tokens that an earlier one has stored.
    hits: f64,
    /// Interval between requests, in multiples of the time that one takes alone in layer-wise
    /// order; else 5 seconds.
    apart: Option<f64>,
    /// Their number, with the first one.
    count: u64,
    /// How many times as long as they are the scheduler's table has all times; if there is none, it
    /// knows the costs, and no layer times.
    factor: Option<f64>,
}

/// Returns prompts that share `hits` percent with the first one, which is alone for a minute; the
/// others arrive at intervals of `every`.
fn requests(hits: f64, every: Duration, count: u64) -> Vec<Request> {
    const INPUT: u32 = 32_768;
    let shared = (f64::from(INPUT / BLOCK_TOKENS) * hits / 100.0) as u32;
    let request = |number: u64| {
        let arrival = if number == 0 { 0.0 } else { 60.0 + every.as_secs_f64() * number as f64 };
        prompt(Duration::from_secs_f64(arrival), (INPUT, 20), shared, number + 1)
    };
    (0..count).map(request).collect()
}

fn served(setup: &Setup<'_>, policy: &Policy, requests: &[Request], watched: usize) -> Report {
    // GPU caching is off to measure the tier below.
    watch(setup, &Policy { keeps_hbm: false, ..*policy }, requests, watched)
}

impl Hiding {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let Self { hits, count, .. } = *self;
        let setup = self.machine.setup(parameters);
        let table = self.factor.map(|factor| table(&setup, factor));
        let setup = Setup { known: table.as_ref(), ..setup };
        let every = self.apart.map_or(Duration::from_secs(5), |apart| {
            let two = requests(hits, Duration::from_secs(60), 2);
            served(&setup, &Policy::NAIVE, &two, usize::MAX).served[1].ttft.mul_f64(apart)
        });
        let all = requests(hits, every, count);
        let Report { served, bubble, .. } = served(&setup, &self.policy, &all, usize::MAX);
        let others = (count - 1) as f64 / 1e3;
        let ttft: f64 = served[1..].iter().map(|it| it.ttft.as_secs_f64()).sum();
        results([("TTFT", ttft / others), ("bubble", bubble.as_secs_f64() / others)])
    }
}

/// Returns the table of a scheduler that knows all costs and layer times of a set-up, each
/// `factor` times what it is.
fn table(setup: &Setup<'_>, factor: f64) -> SlackTable {
    let lane = setup.storage.direct;
    let mut table =
        LaneModel { read: lane.read / factor, write: lane.write / factor, ..lane }.table();
    for tokens in [1, 256, 512, 1024, 2048, 4096, 8192] {
        for prefix in [0, 8192, 16_384, 24_576, 30_720] {
            let shape = StepShape::of([(tokens, prefix)]);
            table.learn(shape, setup.gpu.layer(&setup.model, shape).mul_f64(factor));
        }
    }
    table
}

/// Returns timelines of a request of which 90 % are stored.
pub(super) fn gantts(setup: &Setup<'_>) -> Vec<Gantt> {
    let requests = requests(90.0, Duration::from_secs(10), 2);
    [Policy::NAIVE, Policy::OURS].map(|policy| gantt(setup, &policy, &requests)).to_vec()
}

/// Returns the timeline of the last request, layer by layer.
fn gantt(setup: &Setup<'_>, policy: &Policy, requests: &[Request]) -> Gantt {
    let watched = requests.len() - 1;
    let arrival = requests[watched].arrival;
    let spans = served(setup, policy, requests, watched).spans;
    let ms = |time: Duration| ms(time.saturating_sub(arrival));
    let bar = |work: Work| {
        let of = spans.iter().filter(move |span| span.work == work);
        of.map(move |span| Bar { row: span.layer, from: ms(span.from), to: ms(span.to) }).collect()
    };
    let kinds = [Work::Read, Work::Compute, Work::Write];
    Gantt {
        title: format!("A prompt of 32K tokens, 90 % stored, layer by layer: {}", policy.name),
        x: "ms".to_owned(),
        y: "layer".to_owned(),
        bars: kinds.map(|work| (work, bar(work))).to_vec(),
    }
}
