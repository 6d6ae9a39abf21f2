//! An engine with continuous batching and chunked prefill, its GPU, and the tiers below.
//!
//! A step computes a token of each decoding request, and prompts until its budget is used up
//! (vLLM's chunked prefill). A step with loads or stores runs layer by layer; any other one is a
//! single event. [`Tiers`] holds and moves the keys and values: [`serve`] runs over the model of
//! this crate, [`serve_over`] over any other, such as a store.

mod cluster;
mod hbm;
mod host;
mod index;
mod link;
mod memory;
mod model_tiers;
mod numbered;
mod peers;
mod record;
mod requests;
mod steps;
mod tiers;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt::Debug,
    time::Duration,
};

use kv_catalog::BlockKey;
use kv_schedule::{SlackTable, StepShape};
use serde::Serialize;

use crate::{
    gpu::{Gpu, Model},
    policy::Policy,
    storage::Storage,
};
pub(crate) use cluster::{Cluster, Router, serve_cluster};
use hbm::Hbm;
use index::Index;
pub use index::plain_catalog;
pub(crate) use link::Link;
pub(crate) use memory::Memory;
pub(crate) use model_tiers::ALONE;
use model_tiers::ModelTiers;
use record::Record;
pub use record::{Second, Span, Work};
use requests::{Active, Waiting};
use steps::Step;
pub use tiers::{Ended, Hit, Place, Purpose, Tiers};

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Arrival time; with `after`, the earliest one.
    pub arrival: Duration,
    /// Tokens of the prompt.
    pub input: u32,
    /// Tokens to generate.
    pub output: u32,
    /// Name of each full block of the prompt; equal names stand for equal prefixes.
    pub blocks: Vec<u64>,
    /// Time after arrival at which its client disconnects, if it does not have all tokens by then.
    pub leaves: Option<Duration>,
    /// Number of an earlier request, and how long after its end this one comes at the earliest: the
    /// next turn of a session.
    pub after: Option<(usize, Duration)>,
}

/// Compute times of layers.
pub trait LayerTimes: Debug + Sync {
    /// Returns the compute time of a layer of a step; `None` if it is not known.
    fn layer(&self, step: StepShape) -> Option<Duration>;
}

impl LayerTimes for SlackTable {
    fn layer(&self, step: StepShape) -> Option<Duration> {
        Self::layer(self, step)
    }
}

/// The machine and the engine on it.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// The model.
    pub model: Model,
    /// The GPU.
    pub gpu: Gpu,
    /// Layer times, used instead of the model of `gpu`.
    pub layers: Option<&'a dyn LayerTimes>,
    /// Tiers below the GPU.
    pub storage: Storage,
    /// Initial table of the tier's scheduler; if `None`, the costs of the tier's channel, and no
    /// layer times. The scheduler learns while it runs.
    pub known: Option<&'a SlackTable>,
    /// Bytes of GPU memory for KV cache; `u64::MAX` for as much as it takes, with no cache.
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
    /// Time when it came: later than [`Request::arrival`] if the turn before ended later.
    pub arrival: Duration,
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
    /// Loaded tokens that came from other engines.
    pub peer_tokens: u32,
    /// True when its client disconnected early.
    pub is_aborted: bool,
}

/// Results of a run. Its counters are numbers of tables.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Results of all requests, in order of arrival.
    #[serde(skip)]
    pub served: Vec<Served>,
    /// Time when the last request ended.
    #[serde(skip)]
    pub took: Duration,
    /// Time that the GPU computed.
    #[serde(skip)]
    pub compute: Duration,
    /// Time that the GPU waited for loads of a step.
    #[serde(skip)]
    pub bubble: Duration,
    /// Bytes read from the tier.
    pub read_bytes: u64,
    /// Bytes stored.
    pub write_bytes: u64,
    /// Bytes read from the host memory cache.
    pub host_read_bytes: u64,
    /// Bytes written to it.
    pub host_write_bytes: u64,
    /// Bytes fetched from other engines.
    pub peer_bytes: u64,
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
    /// Totals by their first second: of each second in which there was something, or of several
    /// seconds in a very long run.
    #[serde(skip)]
    pub seconds: BTreeMap<u64, Second>,
    /// Work for the watched request, layer by layer.
    #[serde(skip)]
    pub spans: Vec<Span>,
}

/// The source of later requests.
#[derive(Debug)]
struct Sessions {
    /// True if a router hands the engine its requests: it serves no others.
    is_routed: bool,
    /// By request, those that wait for its end.
    followers: BTreeMap<usize, Vec<usize>>,
    /// Later turns, whose time is known and has not come.
    turns: BTreeSet<(Duration, usize)>,
}

/// A run.
#[derive(Debug)]
struct Engine<'a, T: Tiers> {
    setup: &'a Setup<'a>,
    requests: &'a [Request],
    now: Duration,
    arrived: usize,
    sessions: Sessions,
    /// Disconnect times of clients whose requests have arrived and not ended.
    leaving: BTreeSet<(Duration, usize)>,
    waiting: VecDeque<Waiting>,
    /// Set after an arrival or a start: the lookahead has to be updated.
    is_new: bool,
    /// Set when the first waiting request found no room, until a request ends.
    is_full: bool,
    active: Vec<Active<T::Held>>,
    hbm: Hbm,
    tiers: Option<T>,
    step: Option<Step<T::Store>>,
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

/// Serves all requests, which are sorted by arrival, over a model of the policy's tiers.
/// Panics if one of them alone does not fit into the GPU's memory.
pub fn serve(setup: &Setup<'_>, policy: &Policy, requests: &[Request]) -> Report {
    watch(setup, policy, requests, usize::MAX)
}

/// Like [`serve`]; the report also has the work for the request with this number.
/// Panics as [`serve`] does.
pub fn watch(setup: &Setup<'_>, policy: &Policy, requests: &[Request], watched: usize) -> Report {
    let mut engine = Engine::over_model(setup, policy, requests, watched);
    let Ok(()) = engine.run(&mut || true);
    let wasted_bytes = engine.tiers.as_ref().map_or(0, ModelTiers::wasted_bytes);
    Report { wasted_bytes, ..engine.end().0 }
}

/// Serves all requests, which are sorted by arrival, over `tiers`. `goes_on` is called after each
/// event; once it returns false, the requests that wait or have yet to arrive are left out.
/// Returns an error of the tiers.
/// Panics as [`serve`] does.
pub fn serve_over<T: Tiers>(
    setup: &Setup<'_>,
    tiers: T,
    requests: &[Request],
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(Report, T), T::Error> {
    let mut engine = Engine::new(setup, Hbm::new(setup, false), Some(tiers), requests, usize::MAX);
    engine.run(goes_on)?;
    let (report, tiers) = engine.end();
    Ok((report, tiers.expect("it was given")))
}

/// Like [`serve`], with a restart: the engine ends what came before the time `at`, and is back
/// `takes` later. Nothing is left in the GPU's memory and in host memory; drives and other machines
/// keep what they have. The report has no seconds, and of the bytes those read and written.
pub(crate) fn serve_restarted(
    setup: &Setup<'_>,
    policy: &Policy,
    requests: &[Request],
    (at, takes): (Duration, Duration),
) -> Report {
    let (first, rest) = requests.split_at(requests.partition_point(|it| it.arrival < at));
    let all = enough(setup, requests);
    let serve = |tiers: Option<ModelTiers>, requests: &[Request]| {
        let hbm = Hbm::new(&all, policy.keeps_hbm);
        let mut engine = Engine::new(setup, hbm, tiers, requests, usize::MAX);
        let Ok(()) = engine.run(&mut || true);
        engine.end()
    };
    let (before, tiers) = serve(model_tiers(setup, policy, requests), first);
    let back = before.took.max(at) + takes;
    // The turn before, if it is among the later ones, too.
    let turn = |it: &Request| Some((it.after?.0.checked_sub(first.len())?, it.after?.1));
    let came = |it: &Request| match it
        .after
        .map(|(number, thinks)| (before.served.get(number), thinks))
    {
        Some((Some(was), thinks)) => it.arrival.max(was.arrival + was.ttft + was.decode + thinks),
        Some((None, _)) => back,
        None => it.arrival,
    };
    let late = |it: &Request| back.saturating_sub(came(it));
    let later = |it: &Request| Request {
        arrival: came(it).max(back),
        leaves: it.leaves.map(|after| after.saturating_sub(late(it))),
        after: turn(it),
        ..it.clone()
    };
    let later: Vec<Request> = rest.iter().map(later).collect();
    let fresh = model_tiers(setup, policy, requests);
    let tiers = tiers.zip(fresh).map(|(old, fresh)| old.restarted(fresh));
    let (after, _) = serve(tiers, &later);
    let waited = rest.iter().zip(&after.served);
    let waited = waited.map(|(it, was)| {
        let (arrival, ttft) = (was.arrival - late(it), was.ttft + late(it));
        Served { arrival, ttft, ..*was }
    });
    Report {
        served: before.served.iter().copied().chain(waited).collect(),
        took: before.took.max(after.took),
        compute: before.compute + after.compute,
        bubble: before.bubble + after.bubble,
        read_bytes: before.read_bytes + after.read_bytes,
        write_bytes: before.write_bytes + after.write_bytes,
        ..Report::default()
    }
}

/// Returns the machine with memories and drives that are large enough for these requests, or as
/// large as it has them. The index of a tier is as large as the tier, whatever is in it.
fn enough<'a>(setup: &Setup<'a>, requests: &[Request]) -> Setup<'a> {
    let Setup { kv_bytes, storage, block_tokens, .. } = *setup;
    // The last blocks of prompt and output are partial.
    let tokens =
        |it: &Request| 2 * (u64::from(it.input) + u64::from(it.output) + u64::from(block_tokens));
    let tokens: u64 = requests.iter().map(tokens).sum();
    let most = tokens.saturating_mul(setup.model.token_bytes()).max(1 << 30);
    let [drive_bytes, host_bytes] =
        [storage.drive_bytes, storage.host_bytes].map(|bytes| bytes.min(most));
    let kv_bytes = if kv_bytes < u64::MAX { kv_bytes.min(most) } else { kv_bytes };
    Setup { kv_bytes, storage: Storage { drive_bytes, host_bytes, ..storage }, ..*setup }
}

/// Returns a model of the policy's tiers.
fn model_tiers(setup: &Setup<'_>, policy: &Policy, requests: &[Request]) -> Option<ModelTiers> {
    let setup = enough(setup, requests);
    policy.tier.map(|tier| ModelTiers::new(&setup, tier, policy.host.as_ref()))
}

impl<'a> Engine<'a, ModelTiers> {
    fn over_model(
        setup: &'a Setup<'a>,
        policy: &Policy,
        requests: &'a [Request],
        watched: usize,
    ) -> Self {
        let tiers = model_tiers(setup, policy, requests);
        let hbm = Hbm::new(&enough(setup, requests), policy.keeps_hbm);
        Self::new(setup, hbm, tiers, requests, watched)
    }
}

impl<'a, T: Tiers> Engine<'a, T> {
    fn new(
        setup: &'a Setup<'a>,
        hbm: Hbm,
        tiers: Option<T>,
        requests: &'a [Request],
        watched: usize,
    ) -> Self {
        Self {
            setup,
            requests,
            now: Duration::ZERO,
            arrived: 0,
            sessions: Sessions::of(requests),
            leaving: BTreeSet::new(),
            waiting: VecDeque::new(),
            is_new: false,
            is_full: false,
            active: Vec::new(),
            hbm,
            tiers,
            step: None,
            steps: 0,
            record: Record::new(watched),
            report: Report { served: vec![Served::default(); requests.len()], ..Report::default() },
        }
    }

    /// Processes all events in order.
    fn run(&mut self, goes_on: &mut dyn FnMut() -> bool) -> Result<(), T::Error> {
        while let Some(next) = self.wait() {
            self.event(next, goes_on)?;
        }
        Ok(())
    }

    /// Processes the events until the time `next`, which [`Self::wait`] returned.
    fn event(&mut self, next: Duration, goes_on: &mut dyn FnMut() -> bool) -> Result<(), T::Error> {
        self.now = next.max(self.now);
        self.io_ends()?;
        self.compute_ends()?;
        if !goes_on() {
            self.arrived = self.requests.len();
            self.sessions.turns.clear();
            self.waiting.clear();
            self.leaving.clear();
        }
        self.arrive();
        self.leave()?;
        self.plan()?;
        self.look_ahead()?;
        self.go_on();
        self.tiers.as_mut().map_or(Ok(()), Tiers::pump)
    }

    fn end(mut self) -> (Report, Option<T>) {
        let (setup, first) = (self.setup, self.waiting.front());
        assert!(first.is_none(), "{setup:?} has no room for {first:?}");
        self.report.took = self.now;
        (self.report.seconds, self.report.spans) = self.record.end();
        (self.report, self.tiers)
    }

    /// Waits for the next event. Returns its time, or `None` if all is done.
    fn wait(&mut self) -> Option<Duration> {
        let computed = self.step.as_ref().and_then(Step::ends);
        let until = self.next_client().into_iter().chain(computed).min();
        match &mut self.tiers {
            Some(tiers) => tiers.wait(until),
            None => until,
        }
    }

    /// Returns the time of the next arrival or disconnect.
    fn next_client(&self) -> Option<Duration> {
        let arrival = self.requests.get(self.arrived).map(|request| request.arrival);
        let [turn, leaves] = [&self.sessions.turns, &self.leaving].map(|it| Some(it.first()?.0));
        [arrival, turn, leaves].into_iter().flatten().min()
    }

    fn io_ends(&mut self) -> Result<(), T::Error> {
        let ended = self.tiers.as_mut().map_or(Ok(Vec::new()), |tiers| tiers.ended())?;
        ended.into_iter().for_each(|ended| self.moved(ended));
        Ok(())
    }

    /// Accounts for a completed transfer.
    fn moved(&mut self, ended: Ended) {
        let Ended { purpose, request, place, bytes, began } = ended;
        let (second, report) = (self.record.second(self.now), &mut self.report);
        let is_read = !matches!(purpose, Purpose::Store { .. });
        let (all, part) = match (place, is_read) {
            (Place::Tier, true) => (&mut report.read_bytes, Some(&mut second.read_bytes)),
            (Place::Tier, false) => (&mut report.write_bytes, Some(&mut second.write_bytes)),
            (Place::Host, true) => (&mut report.host_read_bytes, Some(&mut second.host_read_bytes)),
            (Place::Host, false) => {
                (&mut report.host_write_bytes, Some(&mut second.host_write_bytes))
            }
            (Place::Peer, _) => (&mut report.peer_bytes, None),
        };
        *all += bytes;
        part.into_iter().for_each(|part| *part += bytes);
        let (work, layer) = match purpose {
            Purpose::Ahead => {
                self.report.ahead_bytes += bytes;
                return;
            }
            Purpose::Layer(layer) => {
                self.step.as_mut().expect("a step waits for its loads").loaded(layer);
                (Work::Read, layer)
            }
            Purpose::Whole => {
                let mut active = self.active.iter_mut();
                let active = active.find(|active| active.request == request);
                active.expect("it waits for its loads").loading -= 1;
                (Work::Read, 0)
            }
            Purpose::Store { layer, .. } => (Work::Write, layer),
        };
        if self.record.is_watched(request) {
            self.record.span(work, layer, began, self.now);
        }
    }

    fn arrive(&mut self) {
        while let Some(next) = self.requests.get(self.arrived)
            && next.arrival <= self.now
        {
            let (number, arrival) = (self.arrived, next.arrival);
            let is_turn = next.after.is_some();
            if !self.sessions.is_routed && !is_turn {
                self.enqueue(number, arrival);
            }
            self.arrived += 1;
        }
        while let Some(&(time, number)) = self.sessions.turns.first()
            && time <= self.now
            && !self.sessions.is_routed
        {
            self.sessions.turns.pop_first();
            self.enqueue(number, time);
        }
    }

    /// Makes a request wait that arrives now.
    fn enqueue(&mut self, number: usize, arrival: Duration) {
        self.report.served[number].arrival = arrival;
        let leaves = self.requests[number].leaves;
        self.leaving.extend(leaves.map(|after| (arrival + after, number)));
        self.waiting.push_back(Waiting::new(number));
        self.is_new = true;
    }

    /// Sets the time of the turns that follow a request, which ends now.
    fn follow(&mut self, number: usize) {
        for next in self.sessions.followers.remove(&number).into_iter().flatten() {
            let Request { arrival, after, .. } = self.requests[next];
            let thinks = after.map_or(Duration::ZERO, |(_, thinks)| thinks);
            self.sessions.turns.insert((arrival.max(self.now + thinks), next));
        }
    }
}

impl Sessions {
    fn of(requests: &[Request]) -> Self {
        let mut followers = BTreeMap::<usize, Vec<usize>>::new();
        for (number, request) in requests.iter().enumerate() {
            if let Some((before, _)) = request.after {
                followers.entry(before).or_default().push(number);
            }
        }
        Self { is_routed: false, followers, turns: BTreeSet::new() }
    }
}

#[cfg(test)]
mod tests;
