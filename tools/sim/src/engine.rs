//! An engine with continuous batching and chunked prefill, its GPU, and the tiers below.
//!
//! A step computes a token of each request that decodes, and prompts until its budget is used up
//! (vLLM's chunked prefill). A step with loads or stores goes layer by layer; any other one is an
//! event.

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
    /// When it comes.
    pub arrival: Duration,
    /// Tokens of the prompt.
    pub input: u32,
    /// Tokens that are generated.
    pub output: u32,
    /// What each full block of the prompt is called: equal names, equal prefixes.
    pub blocks: Vec<u64>,
    /// How long after that its client goes away, if it has not all tokens by then.
    pub leaves: Option<Duration>,
}

impl Request {
    /// When its client goes away, and its number.
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
    /// How long layers took an engine, in place of what `gpu` computes in that time.
    pub layers: Option<&'a SlackTable>,
    /// Bytes of the GPU's memory for KV cache.
    pub kv_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens that a step computes at the most.
    pub step_tokens: u32,
    /// Requests that run at the same time at the most.
    pub requests_max: usize,
}

impl Setup<'_> {
    /// How long a layer of a step computes.
    fn layer(&self, step: StepShape) -> Duration {
        let measured = self.layers.and_then(|layers| layers.layer(step));
        measured.unwrap_or_else(|| self.gpu.layer(&self.model, step))
    }
}

/// What became of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    /// From its arrival to its first token.
    pub ttft: Duration,
    /// From its first token to its last.
    pub decode: Duration,
    /// Tokens of its prompt that were in the GPU's memory.
    pub hbm_tokens: u32,
    /// Tokens of its prompt that were loaded.
    pub loaded_tokens: u32,
    /// Of those, tokens from host memory before the drives.
    pub host_tokens: u32,
    /// Its client went away before.
    pub is_aborted: bool,
}

/// What a run was like.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Of each request, in the order of arrival.
    pub served: Vec<Served>,
    /// When the last one ended.
    pub took: Duration,
    /// The GPU computed.
    pub compute: Duration,
    /// The GPU waited for a load that a step needs.
    pub bubble: Duration,
    /// Bytes that were read from the tier.
    pub read_bytes: u64,
    /// Bytes that were stored.
    pub write_bytes: u64,
    /// Bytes that came from host memory before it.
    pub host_read_bytes: u64,
    /// Bytes that were put there.
    pub host_write_bytes: u64,
    /// Bytes that were read from the tier ahead of time.
    pub ahead_bytes: u64,
    /// Of those, bytes that went from host memory without being used.
    pub wasted_bytes: u64,
    /// Bytes that were loaded for requests which were aborted or preempted before their prompt was
    /// computed.
    pub in_vain_bytes: u64,
    /// Blocks that were not stored, for want of memory to wait in.
    pub blocks_dropped: u64,
    /// How often a request was put back to where it began, for want of a block.
    pub preemptions: u64,
    /// Requests whose clients went away while they waited.
    pub aborted_waiting: u64,
    /// The same, while they were served.
    pub aborted_running: u64,
    /// What was done in each second.
    pub seconds: Vec<Second>,
    /// What was done for the request that was watched, layer by layer.
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
    /// Clients that are going to go away, and when, of requests that came and have not ended.
    leaving: BTreeSet<(Duration, usize)>,
    waiting: VecDeque<Waiting>,
    /// Something came or began: time to look ahead.
    is_new: bool,
    /// The first that waits found no room, and nobody has left since.
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
    /// Serves all requests, which come in the order of their arrival.
    ///
    /// # Panics
    /// When the GPU's memory has no room for one of them alone.
    #[must_use]
    pub fn serve(setup: &'a Setup<'a>, policy: &'a Policy, requests: &'a [Request]) -> Report {
        Self::watch(setup, policy, requests, usize::MAX)
    }

    /// As [`Run::serve`]; what is done for one of them, by its number, is in the report.
    ///
    /// # Panics
    /// As [`Run::serve`].
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
            // As engines have it.
            hbm: Index::new(setup.kv_bytes, block_bytes, PolicyKind::Lru),
            below: policy.tier.map(|tier| Below::new(setup, tier, policy.host.as_ref())),
            step: None,
            steps: 0,
            record: Record::new(watched),
            report: Report { served: vec![Served::default(); requests.len()], ..Report::default() },
        }
    }

    /// All that happens, in its order.
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

    /// When a client comes or goes.
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
