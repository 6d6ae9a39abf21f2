//! An engine that says which requests run in the next iterations (TierKV, sections 3.4 and 4.4).

use std::{collections::BTreeMap, time::Duration};

use kv_catalog::PolicyKind;
use kv_schedule::{Config, Curve, Decision, IoCosts, OpId, Scheduler, Setting, SlackTable};
use kv_tier::{Batch, Hop, Lookahead, LookaheadConfig, RequestId, Tier, TierConfig, When};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

/// A block of 16 tokens of TierKV's model of 7 billion parameters.
const BLOCK_BYTES: u64 = 2 << 20;
/// Of an experiment.
const ITERATIONS: u64 = 10_000;

/// An engine, and what it does.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Mean time of an iteration.
    pub iteration: Duration,
    /// Part of the iterations in which a request begins whose blocks are not on the GPU.
    pub begins: f64,
    /// Whether its blocks are on the drives, or in host memory.
    pub on_drives: bool,
    /// Part of the requests that are preempted after they were announced, and run later.
    pub preempted: f64,
}

impl Case {
    /// Iterations of TierKV's table 6.
    pub const HOST: Self = Self {
        iteration: Duration::from_micros(1200),
        begins: 0.1,
        on_drives: false,
        preempted: 0.0,
    };
    /// Iterations of TierKV's section 3.5.
    pub const DRIVES: Self =
        Self { iteration: Duration::from_millis(20), on_drives: true, ..Self::HOST };
}

/// What came of it.
pub struct Ahead {
    /// Blocks that were on the GPU when their request ran, in per cent.
    pub blocks: f64,
    /// Requests of which all were.
    pub requests: f64,
    /// Mean time of an iteration, with what it waited.
    pub iteration_ms: f64,
    /// Bytes of both hops that nobody used, in per cent.
    pub wasted: f64,
}

/// A way for bytes: one batch after another.
struct Channel {
    scheduler: Scheduler,
    free_at: Duration,
}

impl Channel {
    fn new(latency: Duration, bytes_per_second: f64) -> Self {
        let curve = || Curve::line(latency, bytes_per_second).expect("it rises");
        let costs = IoCosts { read: curve(), write: curve(), mixed: 1.0 };
        let [model, gpu, engine] = ["7B", "H100", "TierKV"].map(str::to_owned);
        let setting = Setting { model, gpu, engine, drives: Vec::new() };
        let config = Config { margin: 1.0, ..Config::default() };
        let scheduler = Scheduler::new(config, SlackTable::new(setting, costs));
        Self { scheduler, free_at: Duration::ZERO }
    }

    /// When so many bytes that begin now are there.
    fn end(&mut self, bytes: u64, now: Duration) -> Duration {
        let took = self.scheduler.table().costs.read.duration(bytes);
        self.free_at = self.free_at.max(now) + took;
        self.free_at
    }
}

struct Engine {
    tier: Tier<u64>,
    drives: Channel,
    link: Channel,
    ahead: Lookahead<u64>,
    ends: BTreeMap<(Duration, OpId), Batch<u64>>,
    now: Duration,
}

impl Engine {
    /// Everything that happens until `then`.
    fn until(&mut self, then: Duration) {
        loop {
            let wake = self.decide();
            let end = self.ends.first_key_value().map(|((time, _), _)| *time);
            let Some(next) = end.into_iter().chain(wake).min().filter(|next| *next <= then) else {
                break;
            };
            self.now = self.now.max(next);
            while self.ends.first_key_value().is_some_and(|((time, _), _)| *time <= self.now) {
                let ((_, id), batch) = self.ends.pop_first().expect("it was looked at");
                match batch.hop {
                    Hop::Drives => self.drives.scheduler.ended(id, self.now),
                    Hop::Link => self.link.scheduler.ended(id, self.now),
                }
                self.ahead.ended(id, true, &mut self.tier);
            }
        }
        self.now = self.now.max(then);
    }

    /// Starts what starts now; says when to look again.
    fn decide(&mut self) -> Option<Duration> {
        let Self { tier, drives, link, ahead, ends, now } = self;
        ahead.plan(tier, &mut drives.scheduler, &mut link.scheduler, *now);
        let mut wake = None;
        for channel in [drives, link] {
            loop {
                match channel.scheduler.next(*now) {
                    Decision::Start(id) => {
                        let again = Duration::from_millis(1);
                        let batch = ahead.start(id, again, tier).expect("it is one of its own");
                        let bytes = batch.blocks.len() as u64 * BLOCK_BYTES;
                        ends.insert((channel.end(bytes, *now), id), batch);
                    }
                    Decision::Drop(id) => ahead.dropped(id),
                    Decision::Wait(until) => {
                        wake = wake.into_iter().chain(until.filter(|until| until > now)).min();
                        break;
                    }
                }
            }
        }
        wake
    }

    /// A request begins: reads what is missing. Whether nothing was.
    fn begin(&mut self, id: RequestId) -> bool {
        let Self { tier, drives, link, ahead, .. } = self;
        let missing = ahead.run(id, tier, &mut drives.scheduler, &mut link.scheduler);
        let is_moving = |((_, id), _): &(&(Duration, OpId), _)| missing.in_flight.contains(id);
        let mut ready = self.ends.iter().filter(is_moving).map(|((time, _), _)| *time).max();
        if !missing.blocks.is_empty() {
            let near = missing.blocks.iter().filter_map(|key| self.tier.get(*key));
            let near: Vec<_> = near.collect();
            let far = (missing.blocks.len() - near.len()) as u64;
            near.into_iter().for_each(|memory| self.tier.release(memory));
            let mut then = self.now;
            if far > 0 {
                then = self.drives.end(far * BLOCK_BYTES, self.now);
            }
            let bytes = missing.blocks.len() as u64 * BLOCK_BYTES;
            ready = ready.max(Some(self.link.end(bytes, then)));
        }
        if let Some(ready) = ready {
            self.until(ready.max(self.now));
        }
        ready.is_none()
    }
}

/// Blocks of a request: tokens by a lognormal distribution, up to 1,024.
fn blocks(random: &mut StdRng) -> u64 {
    // The sum of twelve uniform numbers is nearly normal.
    let normal = (0..12).map(|_| random.random_range(0.0..1.0)).sum::<f64>() - 6.0;
    (33.0 * (0.774 * normal).exp()).clamp(1.0, 64.0) as u64
}

/// Requests that are known, by the iteration in which they begin.
type Plan = BTreeMap<u64, (RequestId, Vec<u64>)>;

/// Runs the engine with a window of so many iterations, and twice as many for the drives.
pub fn measure(case: &Case, window: u32) -> Ahead {
    let mut random = StdRng::seed_from_u64(42);
    let config = LookaheadConfig { window, drives_window: 2 * window, batch_blocks: 8 };
    let tier = TierConfig { blocks: 4096, block_bytes: BLOCK_BYTES, policy: PolicyKind::Lru };
    let mut engine = Engine {
        tier: Tier::new(tier),
        drives: Channel::new(Duration::from_micros(80), 7e9),
        link: Channel::new(Duration::from_micros(5), 50e9),
        ahead: Lookahead::new(config),
        ends: BTreeMap::new(),
        now: Duration::ZERO,
    };
    engine.ahead.iteration(case.iteration);
    let (mut plan, mut key) = (Plan::new(), 0);
    let (mut ran, mut ready) = (0_u64, 0_u64);
    let horizon = u64::from(2 * window).max(1);
    for number in 0..ITERATIONS {
        let begins = random.random_bool(case.begins);
        let count = blocks(&mut random);
        if begins && !plan.contains_key(&(number + horizon)) {
            let keys: Vec<u64> = (key..key + count).collect();
            key += count;
            if !case.on_drives {
                keys.iter().for_each(|key| bring(&mut engine.tier, *key));
            }
            plan.insert(number + horizon, (RequestId(number), keys));
        }
        if random.random_bool(case.preempted * case.begins) {
            preempt(&mut engine, &mut plan, number, horizon, &mut random);
        }
        if let Some((id, _)) = plan.remove(&number) {
            ran += 1;
            ready += u64::from(engine.begin(id));
        }
        for (at, (id, keys)) in plan.range(number + 1..) {
            let iterations = (at - number) as u32;
            let when = When::In(iterations);
            engine.ahead.prefetch(*id, keys, when, &mut engine.tier, engine.now);
            if iterations <= window {
                engine.ahead.allocated(*id);
            }
        }
        let noise = 1.0 + 0.02 * random.random_range(-1.7..1.7);
        let took = case.iteration.mul_f64(noise);
        engine.ahead.iteration(took);
        engine.until(engine.now + took);
    }
    let counts = engine.ahead.counts();
    let moved = counts.drives_bytes + counts.link_bytes;
    let wasted = counts.wasted_link_bytes + engine.tier.counts().wasted_bytes;
    let part = |some: u64, all: u64| 100.0 * some as f64 / all.max(1) as f64;
    Ahead {
        blocks: part(counts.ready_blocks, counts.ready_blocks + counts.late_blocks),
        requests: part(ready, ran),
        iteration_ms: 1e3 * engine.now.as_secs_f64() / ITERATIONS as f64,
        wasted: part(wasted, moved),
    }
}

/// Another request takes the place of one that was announced; it runs when nothing else is planned.
fn preempt(engine: &mut Engine, plan: &mut Plan, number: u64, horizon: u64, random: &mut StdRng) {
    let known: Vec<u64> = plan.range(number + 1..).map(|(at, _)| *at).collect();
    if known.is_empty() {
        return;
    }
    let at = known[random.random_range(0..known.len())];
    let (id, keys) = plan.remove(&at).expect("it was found");
    let Engine { tier, drives, link, ahead, .. } = engine;
    ahead.cancel(id, tier, &mut drives.scheduler, &mut link.scheduler);
    let free = (number + 2 * horizon..).find(|at| !plan.contains_key(at)).expect("there is no end");
    plan.insert(free, (id, keys));
}

fn bring(tier: &mut Tier<u64>, key: u64) {
    let again = Duration::from_millis(1);
    let block = kv_tier::Block { key, again, is_dirty: false, by: None };
    if let kv_tier::Admission::Fill(memory) = tier.admit(block) {
        tier.filled(memory, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_iterations_ahead_are_enough_and_none_is_not() {
        for case in [Case::HOST, Case::DRIVES] {
            assert_eq!(measure(&case, 0).blocks, 0.0);
            let found = measure(&case, 4);
            assert!(found.blocks > 99.5 && found.wasted == 0.0, "{}", found.blocks);
            assert!(measure(&case, 6).blocks > 99.99);
            let preempted = measure(&Case { preempted: 0.5, ..case }, 4);
            assert!(preempted.wasted > 0.5 && preempted.wasted < 50.0, "{}", preempted.wasted);
        }
    }
}
