//! Requests that an engine serves.

use std::time::Duration;

use serde::Deserialize;

use super::testbed::{BLOCK_TOKENS, Testbed};
use crate::{
    compare::busy,
    engine::{Report, Request, Served, Setup, serve},
    outcome::Plot,
    parameters::Parameters,
    policy::Policy,
    shown::{Results, results},
    summary::Prices,
    workload::{Documents, Lengths, Profile, Workload},
};

pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub(super) fn mean(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = numbers.len() as f64;
    numbers.sum::<f64>() / count
}

/// Returns a request of so many tokens of prompt and output. All of them share the first `shared`
/// blocks; the others are those of number `own`.
pub(super) fn prompt(
    arrival: Duration,
    (input, output): (u32, u32),
    shared: u32,
    own: u64,
) -> Request {
    let name = |at: u32| if at < shared { at.into() } else { own << 32 | u64::from(at) };
    let blocks = (0..input / BLOCK_TOKENS).map(name).collect();
    Request { arrival, input, output, blocks, leaves: None, after: None }
}

/// Equal prompts that come at once, of which earlier ones have stored a part.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Prompts {
    machine: Testbed,
    policy: Policy,
    count: u64,
    /// Tokens, in units of 1,024.
    input: u32,
    output: u32,
    /// Percentage of them that is stored.
    stored: f64,
}

impl Prompts {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let Self { count, input, output, stored, .. } = *self;
        let setup = self.machine.setup(parameters);
        let request = |number| prompt(Duration::ZERO, (input << 10, output), 0, number);
        let requests: Vec<Request> = (1..=count).map(request).collect();
        let report = serve_stored(&setup, &self.policy, &requests, stored);
        let (ttft, compute) = (ms(report.served[0].ttft), ms(report.compute));
        let bubble = ttft - compute;
        results([
            ("TTFT", ttft),
            ("seconds", ttft / 1e3),
            ("computation", compute),
            ("bubble", bubble),
            ("part", bubble / ttft * 100.0),
            ("took", report.took.as_secs_f64()),
        ])
    }
}

/// Questions about documents, at random times.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Questions {
    machine: Testbed,
    policy: Policy,
    documents: Library,
    /// Requests a second.
    rate: f64,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Library {
    Named(String),
    Of(Documents),
}

impl Questions {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let documents = match &self.documents {
            Library::Named(name) => Workload::documents(name),
            Library::Of(documents) => *documents,
        };
        let setup = self.machine.setup(parameters);
        let requests = documents.requests(self.rate, BLOCK_TOKENS, 1);
        let Report { served, took, .. } = serve(&setup, &self.policy, &requests);
        let input: f64 = requests.iter().map(|it| f64::from(it.input)).sum();
        let hit: f64 = served.iter().map(|it| f64::from(it.hbm_tokens + it.loaded_tokens)).sum();
        let seconds =
            |of: fn(&Served) -> Duration| mean(served.iter().map(|it| of(it).as_secs_f64()));
        let count = served.len() as f64;
        let tokens = (input + count * f64::from(documents.answer)) / took.as_secs_f64();
        let hour = parameters.prices().hour(&setup, &self.policy);
        results([
            ("TTFT", seconds(|it| it.ttft)),
            ("ITL", seconds(|it| it.decode) / f64::from(documents.answer - 1) * 1e3),
            ("hits", hit / input * 100.0),
            ("requests/s", count / took.as_secs_f64()),
            ("$", Prices::million(hour, tokens)),
        ])
    }
}

/// Serves requests of whose prompts an earlier pass has stored so many percent. Returns the results
/// of the second pass.
fn serve_stored(setup: &Setup<'_>, policy: &Policy, requests: &[Request], stored: f64) -> Report {
    // GPU caching is off to measure the tier below.
    let policy = Policy { keeps_hbm: false, ..*policy };
    let first = |it: &Request| Request { arrival: Duration::ZERO, output: 1, ..it.clone() };
    let mut all: Vec<Request> = requests.iter().map(first).collect();
    let before = serve(setup, &policy, &all);
    let begins = before.took + Duration::from_secs(60);
    let second = |it: &Request| {
        let mut second = Request { arrival: it.arrival + begins, ..it.clone() };
        let new = (it.blocks.len() as f64 * stored / 100.0) as usize..;
        second.blocks[new].iter_mut().for_each(|name| *name |= 1 << 63);
        second
    };
    all.extend(requests.iter().map(second));
    let Report { mut served, took, compute, .. } = serve(setup, &policy, &all);
    let served = served.split_off(requests.len());
    let (took, compute) = (took - begins, compute - before.compute);
    Report { served, took, compute, ..Report::default() }
}

/// Prefill on some GPUs, and decoding on as many others, behind a link (LMCache, section 7.4).
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Apart {
    machine: Testbed,
    policy: Policy,
}

const fn exactly(tokens: u32) -> Lengths {
    Lengths { tokens: (tokens, tokens), mean: tokens as f64, spread: 0.0 }
}

impl Apart {
    /// Part of the time that the prefill's GPUs compute.
    const LOAD: f64 = 0.5;

    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        const PROFILE: Profile = Profile { input: exactly(8192), output: exactly(200) };
        let setup = self.machine.setup(parameters);
        let alone = PROFILE.requests(1, 1.0, BLOCK_TOKENS, 1);
        let alone = serve(&setup, &Policy::RECOMPUTE, &alone[..]).served[0].ttft;
        let requests = PROFILE.requests(128, Self::LOAD / alone.as_secs_f64(), BLOCK_TOKENS, 1);
        let first = |it: &Request| Request { output: 1, ..it.clone() };
        let first: Vec<Request> = requests.iter().map(first).collect();
        let prefill: Vec<Duration> =
            serve(&setup, &Policy::RECOMPUTE, &first).served.iter().map(|it| it.ttft).collect();
        // Prompts are computed in order of arrival.
        let sent = |(it, took): (&Request, &Duration)| Request {
            arrival: it.arrival + *took,
            ..it.clone()
        };
        let decoded: Vec<Request> = requests.iter().zip(&prefill).map(sent).collect();
        let served = serve_stored(&setup, &self.policy, &decoded, 100.0).served;
        let ttft = served.iter().zip(&prefill).map(|(it, prefill)| ms(it.ttft + *prefill));
        let tokens = PROFILE.output.mean - 1.0;
        let itl = mean(served.iter().map(|it| ms(it.decode) / tokens));
        results([("TTFT", mean(ttft)), ("ITL", itl)])
    }
}

/// Plots what is busy while questions about LooGLE's documents are answered.
pub(super) fn busy_plots(setup: &Setup<'_>) -> Vec<Plot> {
    let loogle = Workload::documents("loogle").requests(0.5, BLOCK_TOKENS, 1);
    let plot = |policy: Policy| {
        let report = serve(setup, &policy, &loogle);
        busy(&format!("LooGLE at 0.5/s, {}", policy.name), &policy, &setup.storage, &report)
    };
    [Policy::GDS, Policy::OURS].map(plot).to_vec()
}
