//! An engine with continuous batching and chunked prefill, its GPU, and the tiers below.
//!
//! A step computes a token of each decoding request, and prompts until its budget is used up
//! (vLLM's chunked prefill). A step with loads or stores runs layer by layer; any other one is a
//! single event.

mod below;
mod host;
mod index;
mod record;
mod requests;
mod steps;
mod way;

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use kv_catalog::{BlockKey, PolicyKind};
use kv_schedule::{SlackTable, StepShape};

use crate::{
    gpu::{Gpu, Model},
    policy::Policy,
};
use below::Below;
use index::Index;
use record::Record;
pub use record::{Second, Span, Work};
use requests::{Active, Waiting};
use steps::Step;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Arrival time.
    pub arrival: Duration,
    /// Tokens of the prompt.
    pub input: u32,
    /// Tokens to generate.
    pub output: u32,
    /// Name of each full block of the prompt; equal names stand for equal prefixes.
    pub blocks: Vec<u64>,
    /// Time after arrival at which its client disconnects, if it does not have all tokens by then.
    pub leaves: Option<Duration>,
}

impl Request {
    /// Returns the time when its client disconnects, and its number.
    fn leaves(&self, number: usize) -> Option<(Duration, usize)> {
        self.leaves.map(|after| (self.arrival + after, number))
    }
}

/// The machine and the engine on it.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// The model.
    pub model: Model,
    /// The GPU.
    pub gpu: Gpu,
    /// Measured layer times of an engine, used instead of the model of `gpu`.
    pub layers: Option<&'a SlackTable>,
    /// Bytes of GPU memory for KV cache.
    pub kv_bytes: u64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Maximum tokens per step.
    pub step_tokens: u32,
    /// Maximum number of concurrent requests.
    pub requests_max: usize,
}

impl Setup<'_> {
    /// Returns the compute time of a layer of a step.
    fn layer(&self, step: StepShape) -> Duration {
        let measured = self.layers.and_then(|layers| layers.layer(step));
        measured.unwrap_or_else(|| self.gpu.layer(&self.model, step))
    }
}

/// Result of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    /// Time from arrival to the first token.
    pub ttft: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// Prompt tokens found in the GPU's memory.
    pub hbm_tokens: u32,
    /// Prompt tokens that were loaded.
    pub loaded_tokens: u32,
    /// Loaded tokens that came from the host memory cache.
    pub host_tokens: u32,
    /// True when its client disconnected early.
    pub is_aborted: bool,
}

/// Results of a run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Results of all requests, in order of arrival.
    pub served: Vec<Served>,
    /// Time when the last request ended.
    pub took: Duration,
    /// Time that the GPU computed.
    pub compute: Duration,
    /// Time that the GPU waited for loads of a step.
    pub bubble: Duration,
    /// Bytes read from the tier.
    pub read_bytes: u64,
    /// Bytes stored.
    pub write_bytes: u64,
    /// Bytes read from the host memory cache.
    pub host_read_bytes: u64,
    /// Bytes written to it.
    pub host_write_bytes: u64,
    /// Bytes prefetched from the tier.
    pub ahead_bytes: u64,
    /// Prefetched bytes evicted from host memory before use.
    pub wasted_bytes: u64,
    /// Bytes loaded for requests that were aborted or preempted before their prompt was computed.
    pub in_vain_bytes: u64,
    /// Blocks that were not stored because the write backlog was full.
    pub blocks_dropped: u64,
    /// Preemptions for lack of a block; the request restarts.
    pub preemptions: u64,
    /// Requests whose clients disconnected while they waited.
    pub aborted_waiting: u64,
    /// Requests whose clients disconnected while they were served.
    pub aborted_running: u64,
    /// Totals of each second.
    pub seconds: Vec<Second>,
    /// Work for the watched request, layer by layer.
    pub spans: Vec<Span>,
}

/// A run.
#[derive(Debug)]
pub struct Run<'a> {
    setup: &'a Setup<'a>,
    policy: &'a Policy,
    requests: &'a [Request],
    now: Duration,
    arrived: usize,
    /// Disconnect times of clients whose requests have arrived and not ended.
    leaving: BTreeSet<(Duration, usize)>,
    waiting: VecDeque<Waiting>,
    /// Set after an arrival or a start: the lookahead has to be updated.
    is_new: bool,
    /// Set when the first waiting request found no room, until a request ends.
    is_full: bool,
    active: Vec<Active>,
    hbm: Index,
    below: Option<Below>,
    step: Option<Step>,
    steps: u64,
    record: Record,
    report: Report,
}

fn keys(names: impl IntoIterator<Item = u64>) -> Vec<BlockKey> {
    let key = |name: u64| {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&name.to_le_bytes());
        BlockKey(key)
    };
    names.into_iter().map(key).collect()
}

impl<'a> Run<'a> {
    /// Serves all requests, which are sorted by arrival.
    ///
    /// # Panics
    /// Panics if one of them alone does not fit into the GPU's memory.
    #[must_use]
    pub fn serve(setup: &'a Setup<'a>, policy: &'a Policy, requests: &'a [Request]) -> Report {
        Self::watch(setup, policy, requests, usize::MAX)
    }

    /// Like [`Run::serve`]; the report also has the work for the request with this number.
    ///
    /// # Panics
    /// Same as [`Run::serve`].
    #[must_use]
    pub fn watch(
        setup: &'a Setup<'a>,
        policy: &'a Policy,
        requests: &'a [Request],
        watched: usize,
    ) -> Report {
        let mut run = Self::new(setup, policy, requests, watched);
        run.go();
        run.report.took = run.now;
        if let Some(host) = run.below.as_ref().and_then(|below| below.host.as_ref()) {
            run.report.wasted_bytes = host.memory.tier.counts().wasted_bytes;
        }
        (run.report.seconds, run.report.spans) = run.record.end();
        run.report
    }

    fn new(
        setup: &'a Setup<'a>,
        policy: &'a Policy,
        requests: &'a [Request],
        watched: usize,
    ) -> Self {
        let block_bytes = setup.model.token_bytes() * u64::from(setup.block_tokens);
        Self {
            setup,
            policy,
            requests,
            now: Duration::ZERO,
            arrived: 0,
            leaving: BTreeSet::new(),
            waiting: VecDeque::new(),
            is_new: false,
            is_full: false,
            active: Vec::new(),
            // LRU, as engines use it.
            hbm: Index::new(setup.kv_bytes, block_bytes, PolicyKind::Lru),
            below: policy.tier.map(|tier| Below::new(setup, tier, policy.host.as_ref())),
            step: None,
            steps: 0,
            record: Record::new(watched),
            report: Report { served: vec![Served::default(); requests.len()], ..Report::default() },
        }
    }

    /// Processes all events in order.
    fn go(&mut self) {
        while let Some(next) = self.next_event() {
            self.now = next;
            self.io_ends();
            self.compute_ends();
            self.arrive();
            self.leave();
            self.plan();
            self.look_ahead();
            self.go_on();
            if let Some(below) = &mut self.below {
                below.pump(next);
            }
        }
        let (setup, first) = (self.setup, self.waiting.front());
        assert!(first.is_none(), "{setup:?} has no room for {first:?}");
    }

    fn next_event(&self) -> Option<Duration> {
        let compute = self.step.as_ref().and_then(Step::ends);
        let io = self.below.as_ref().and_then(Below::next_event);
        let next = [self.next_client(), compute, io].into_iter().flatten().min()?;
        Some(next.max(self.now))
    }

    /// Returns the time of the next arrival or disconnect.
    fn next_client(&self) -> Option<Duration> {
        let arrival = self.requests.get(self.arrived).map(|request| request.arrival);
        let leaves = self.leaving.first().map(|(time, _)| *time);
        [arrival, leaves].into_iter().flatten().min()
    }

    fn arrive(&mut self) {
        while let Some(next) = self.requests.get(self.arrived)
            && next.arrival <= self.now
        {
            self.leaving.extend(next.leaves(self.arrived));
            self.waiting.push_back(Waiting::new(self.arrived));
            self.arrived += 1;
            self.is_new = true;
        }
    }
}

#[cfg(test)]
mod tests;
