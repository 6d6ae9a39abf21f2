//! Several engines behind a router: each has tiers of its own, and may fetch blocks from others.
//!
//! One event at a time is processed, of the engine whose next one is earliest.

use std::{cell::RefCell, collections::BTreeSet, rc::Rc, time::Duration};

use kv_schedule::StepShape;

use super::{
    Engine, Index, Report, Request, Setup, keys,
    model_tiers::ModelTiers,
    peers::{Directory, PeerCounts, Peers},
};
use crate::{lane::LaneModel, policy::Policy};

/// Choice of a request's engine. It knows the engines' load at any time, and their blocks by the
/// directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Router {
    /// Each in turn.
    RoundRobin,
    /// The one that has computed its prompts first; of several, that with the fewest requests.
    LeastLoaded,
    /// The one that has the request's first token first: after its prompts, blocks on the GPU are
    /// there, those in its tiers are loaded, and the rest is computed.
    Prefix,
}

/// Engines with equal machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cluster {
    /// Their number.
    pub(crate) engines: usize,
    pub(crate) router: Router,
    /// Link between any two machines; `None` if nothing is fetched.
    pub(crate) link: Option<LaneModel>,
    /// Time until the directory has an event.
    pub(crate) delay: Duration,
}

/// Results of a cluster.
#[derive(Debug)]
pub(crate) struct Clustered {
    /// All requests, and sums of computation, bubble, and bytes read and fetched.
    pub(crate) report: Report,
    /// By engine: time that its GPU computed.
    pub(crate) computes: Vec<Duration>,
    pub(crate) peers: PeerCounts,
}

impl Clustered {
    /// Returns the bytes a second that the engine with most of them sends in the mean.
    pub(crate) fn sends(&self) -> f64 {
        let most = self.peers.sent.iter().max().map_or(0.0, |bytes| *bytes as f64);
        most / self.report.took.as_secs_f64()
    }

    /// Returns the most GPU time of an engine by the mean of all.
    pub(crate) fn balance(&self) -> f64 {
        let most = self.computes.iter().max().map_or(0.0, Duration::as_secs_f64);
        most * self.computes.len() as f64 / self.report.compute.as_secs_f64()
    }
}

impl Engine<'_, ModelTiers> {
    /// Returns the time to compute tokens of prompts, given with those before them.
    fn prompts(&self, parts: impl IntoIterator<Item = (u32, u32)>) -> Duration {
        let shape = StepShape::of(parts);
        if shape.tokens == 0 {
            return Duration::ZERO;
        }
        self.setup.layer(shape) * self.setup.model.layers
    }

    /// Returns the time until its prompts are computed, if no more is found of those that wait, and
    /// the number of its requests.
    fn load(&self) -> (Duration, usize) {
        let active = self.active.iter().filter(|it| !it.is_decoding());
        let active = active.map(|it| (it.prompt - it.computed, it.computed));
        let waiting = self.waiting.iter().map(|it| (self.requests[it.request].input, 0));
        let requests = self.active.len() + self.waiting.len();
        (self.prompts(active.chain(waiting)), requests)
    }

    /// Returns the time for a prompt of which so many leading blocks are on the GPU, and there or
    /// in the tiers.
    fn prompt(&self, input: u32, found: [usize; 2]) -> Duration {
        let each = self.setup.block_tokens;
        let [on_gpu, stored] = found.map(|blocks| (blocks as u32).min((input - 1) / each) * each);
        let bytes = u64::from(stored - on_gpu) * self.setup.model.token_bytes();
        let costs = self.tiers.as_ref().map(|it| &it.link.scheduler.table().costs);
        let loads = costs.map_or(Duration::ZERO, |costs| costs.read.duration(bytes));
        // Layer by layer, beside the computation.
        self.prompts([(input - stored, stored)]).max(loads)
    }

    /// Publishes what was stored and dropped since the last call.
    fn publish(&mut self, me: usize, directory: &mut Directory) {
        let tier = self.tiers.as_mut().map(|tiers| &mut tiers.index);
        let changes = [self.hbm.index.as_mut(), tier]
            .map(|index| index.map_or_else(Vec::new, Index::changes));
        directory.publish(self.now, me, changes);
    }
}

impl Cluster {
    /// Returns the engine for a request that arrives; of equal ones the next in turn.
    fn choose(
        &self,
        engines: &[Engine<'_, ModelTiers>],
        directory: &mut Directory,
        (number, request, time): (usize, &Request, Duration),
    ) -> usize {
        let keys = keys(request.blocks.iter().copied());
        let turns = (0..self.engines).map(|turn| (number + turn) % self.engines);
        let cost = |at: &usize| match self.router {
            Router::RoundRobin => (Duration::ZERO, 0),
            Router::LeastLoaded => engines[*at].load(),
            Router::Prefix => {
                let found = directory.known(time, *at, &keys);
                let (before, requests) = engines[*at].load();
                (before + engines[*at].prompt(request.input, found), requests)
            }
        };
        turns.min_by_key(cost).expect("a cluster has engines")
    }
}

/// Serves all requests, which are sorted by arrival, with a cluster of up to 64 engines.
/// Panics as [`serve`] does.
pub(crate) fn serve_cluster(
    setup: &Setup<'_>,
    policy: &Policy,
    requests: &[Request],
    cluster: &Cluster,
) -> Clustered {
    let directory = Rc::new(RefCell::new(Directory::new(cluster.delay, cluster.engines)));
    let engine = |me: usize| {
        let mut engine = Engine::over_model(setup, policy, requests, usize::MAX);
        engine.sessions.is_routed = true;
        engine.publish(me, &mut directory.borrow_mut());
        if let (Some(tiers), Some(link)) = (&mut engine.tiers, cluster.link) {
            let directory = Rc::clone(&directory);
            tiers.peers = Some(Peers::new(directory, me, setup, &tiers.tier, link));
        }
        engine
    };
    let mut engines: Vec<_> = (0..cluster.engines).map(engine).collect();
    let mut next: Vec<Option<Duration>> = engines.iter_mut().map(Engine::wait).collect();
    let mut served_by = vec![0; requests.len()];
    let (mut arrived, mut turns) = (0, BTreeSet::new());
    let first = |next: &[Option<Duration>]| {
        let known = next.iter().enumerate().filter_map(|(at, next)| Some(((*next)?, at)));
        known.min()
    };
    loop {
        let turn = turns.first().map(|(time, _)| *time);
        let event = first(&next).map(|(now, _)| now);
        let Some(now) = event.into_iter().chain(turn).min() else { break };
        // An arrival is an event of all engines, and a later turn one of the chosen engine.
        let mut arrives = |number: usize, time: Duration| {
            let request = (number, &requests[number], time);
            let chosen = cluster.choose(&engines, &mut directory.borrow_mut(), request);
            engines[chosen].enqueue(number, time);
            served_by[number] = chosen;
            next[chosen] = Some(next[chosen].map_or(time, |next| next.min(time)));
        };
        while let Some(request) = requests.get(arrived).filter(|it| it.arrival <= now) {
            if request.after.is_none() {
                arrives(arrived, request.arrival);
            }
            arrived += 1;
        }
        while let Some(&(time, number)) = turns.first().filter(|(time, _)| *time <= now) {
            turns.pop_first();
            arrives(number, time);
        }
        let (now, at) = first(&next).expect("there is an event, or a turn made one");
        let Ok(()) = engines[at].event(now, &mut || true);
        turns.append(&mut engines[at].sessions.turns);
        engines[at].publish(at, &mut directory.borrow_mut());
        next[at] = engines[at].wait();
    }
    #[cfg(test)]
    tests::check_directory(&engines, &directory.borrow());
    let ended: Vec<Report> = engines.into_iter().map(|engine| engine.end().0).collect();
    let served = served_by.iter().enumerate().map(|(number, at)| ended[*at].served[number]);
    let mut report = Report { served: served.collect(), ..Report::default() };
    for one in &ended {
        report.took = report.took.max(one.took);
        report.compute += one.compute;
        report.bubble += one.bubble;
        report.read_bytes += one.read_bytes;
        report.peer_bytes += one.peer_bytes;
    }
    let computes = ended.iter().map(|one| one.compute).collect();
    Clustered { report, computes, peers: directory.take().counts }
}

#[cfg(test)]
mod tests;
