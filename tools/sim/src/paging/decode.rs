//! An engine that decodes for more requests than fit into the GPU's memory: they take turns.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use kv_schedule::Config;
use kv_tier::{LookaheadConfig, RequestId};
// The standard library's functions differ by platform, and the requests must not.
use libm::log as ln;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde::{Deserialize, Deserializer, de::Error as _};

use super::{LowerTiers, Paging};
use crate::workload::{Lengths, Profile, normal};

/// Tokens per block of the engine whose memory all block sizes have.
const USUAL_BLOCK: u32 = 16;
/// Iterations before the measurement.
const WARM_UP: u64 = 100;

/// Eviction order in the GPU's memory, for requests that do not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Hbm {
    /// Least recently run first.
    Lru,
    /// Least frequently run first.
    Lfu,
    /// Request that runs latest first.
    Latest,
}

/// Kinds of requests. The paper has lengths of the fourth only. Its table 6 implies that no other
/// is longer than 1,830 tokens: more do not come over the link in four iterations.
const PROFILES: [Profile; 5] = [
    Profile { input: lengths(16, 512, 160.0, 0.7), output: lengths(16, 512, 150.0, 0.6) },
    Profile { input: lengths(256, 1280, 900.0, 0.3), output: lengths(16, 256, 128.0, 0.4) },
    Profile { input: lengths(32, 1024, 400.0, 0.5), output: lengths(16, 768, 300.0, 0.7) },
    Profile { input: lengths(512, 512, 512.0, 0.0), output: lengths(256, 256, 256.0, 0.0) },
    // Longer prompts than the paper can have.
    Profile { input: lengths(256, 16_384, 3_000.0, 0.6), output: lengths(16, 1_024, 256.0, 0.5) },
];
pub(super) const fn lengths(least: u32, most: u32, mean: f64, spread: f64) -> Lengths {
    Lengths { tokens: (least, most), mean, spread }
}

/// Reads the kind of requests by its name.
fn requests<'a, D: Deserializer<'a>>(deserializer: D) -> Result<&'static [Profile], D::Error> {
    let name = String::deserialize(deserializer)?;
    Ok(match name.as_str() {
        "chatbot" => &PROFILES[..1],
        "summarization" => &PROFILES[1..2],
        "code" => &PROFILES[2..3],
        "uniform" => &PROFILES[3..4],
        // As many of each.
        "mixed" => &PROFILES[..4],
        "long" => &PROFILES[4..],
        _ => return Err(D::Error::custom(format!("{name}: no such requests"))),
    })
}

/// An engine and its requests.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Decode {
    /// Time of an iteration without waits: normally distributed, with a deviation of 2 %.
    pub iteration_us: f64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Mean number of requests that fit into the GPU's memory and run together, with blocks of 16
    /// tokens.
    pub batch: f64,
    /// Ratio of all requests' blocks to those that fit.
    pub oversubscription: f64,
    /// Mean number of requests that return to the batch per iteration.
    pub exchanged: f64,
    #[serde(deserialize_with = "requests")]
    pub requests: &'static [Profile],
    pub lower: LowerTiers,
    /// True if requests that do not run are on the drives instead of in host memory.
    pub on_drives: bool,
    pub hbm: Hbm,
    /// Iterations ahead of which blocks are read.
    pub window: u32,
    /// Blocks that move together; 0 if missing blocks are there at once.
    pub batch_blocks: u32,
    /// The scheduler's, if it is not the usual one.
    pub high_water: Option<f64>,
    /// Fraction of announced requests that lose their turn.
    pub preempted: f64,
    pub iterations: u64,
}

/// Results of a run by name: `iteration` and `turns` in ms, `tokens/s`, `hits`, `wasted`, `link`
/// and `unfilled` in percent, and `blocks` over the link per iteration.
pub(crate) type Decoded = BTreeMap<&'static str, f64>;

#[derive(Debug, Clone)]
struct Request {
    id: RequestId,
    prompt: u32,
    output: u32,
    done: u32,
    /// Blocks of its prefix that stay in the GPU's memory while it does not run.
    resident: u32,
    /// Blocks of the GPU's memory that wait for its other blocks.
    staged: u32,
    is_announced: bool,
    block_tokens: u32,
}

impl Request {
    fn blocks(&self) -> u32 {
        (self.prompt + self.done).div_ceil(self.block_tokens)
    }

    fn final_blocks(&self) -> u32 {
        (self.prompt + self.output).div_ceil(self.block_tokens)
    }

    fn keys(&self, from: u32) -> Vec<u64> {
        (from..self.blocks()).map(|at| self.id.0 << 16 | u64::from(at)).collect()
    }
}

struct Engine<'a> {
    setting: &'a Decode,
    paging: Option<Paging>,
    chance: StdRng,
    now: Duration,
    named: u64,
    /// Blocks of the GPU's memory; the next field counts the free ones.
    capacity: u32,
    free: u32,
    /// Running requests in order of arrival.
    batch: VecDeque<Request>,
    /// Other requests, the next to run first.
    others: VecDeque<Request>,
    /// Final blocks of both.
    sums: [u32; 2],
    /// Arrived requests that have never run; the next field is the next arrival.
    arrived: VecDeque<Request>,
    next_arrival: f64,
    mean_output: f64,
    credit: f64,
    totals: Totals,
}

/// Sums over iterations.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    /// Generated tokens.
    tokens: u64,
    /// Present requests.
    requests: u64,
    /// Tokens with room in the batch's blocks.
    room: u64,
    /// Those that are there.
    filled: u64,
}

impl Decode {
    /// Returns the time of an iteration without waits.
    pub(crate) fn iteration(&self) -> Duration {
        Duration::from_secs_f64(self.iteration_us * 1e-6)
    }

    /// Runs the engine with random numbers of this seed.
    pub(crate) fn seeded(&self, seed: u64) -> Decoded {
        let mut engine = Engine::new(self, seed);
        (0..WARM_UP).for_each(|_| engine.iterate());
        let (before, since) = (engine.totals(), engine.now);
        (0..self.iterations).for_each(|_| engine.iterate());
        let after = engine.totals();
        let of = |name: &str| after.get(name).map_or(0, |total| total - before[name]);
        let (tokens, took) = (of("tokens") as f64, (engine.now - since).as_secs_f64());
        let part = |some: u64, all: u64| some as f64 / all.max(1) as f64;
        let count = self.iterations as f64;
        let iteration_ms = took / count * 1e3;
        BTreeMap::from([
            // Including waits.
            ("iteration", iteration_ms),
            ("tokens/s", tokens / took),
            // Between two tokens of a request, including turns it waited.
            ("turns", iteration_ms * of("requests") as f64 / tokens),
            // Of the loaded blocks, those that were present when their request ran.
            ("hits", part(of("ready"), of("ready") + of("late")) * 100.0),
            // Of the prefetched bytes, those that were never used.
            ("wasted", part(of("wasted"), of("ahead")) * 100.0),
            // Of the time, how long the link was busy.
            ("link", of("link") as f64 / self.lower.link.bandwidth / took * 100.0),
            ("blocks", part(of("link"), self.lower.block_bytes) / count),
            // Of the running requests' blocks, the part that has no tokens.
            ("unfilled", (1.0 - part(engine.totals.filled, engine.totals.room)) * 100.0),
        ])
    }
}

impl<'a> Engine<'a> {
    fn new(setting: &'a Decode, seed: u64) -> Self {
        let Decode { window, batch_blocks, high_water, .. } = *setting;
        let ahead = LookaheadConfig { window, drives_window: 2 * window, batch_blocks };
        let usual = Config::default();
        let schedule = Config { high_water: high_water.unwrap_or(usual.high_water), ..usual };
        let paging = || Paging::new(&setting.lower, ahead, schedule);
        let mut engine = Self {
            setting,
            paging: (batch_blocks > 0).then(paging),
            chance: StdRng::seed_from_u64(seed),
            now: Duration::ZERO,
            named: 0,
            capacity: 0,
            free: 0,
            batch: VecDeque::new(),
            others: VecDeque::new(),
            sums: [0; 2],
            arrived: VecDeque::new(),
            next_arrival: 0.0,
            mean_output: 0.0,
            credit: 0.0,
            totals: Totals::default(),
        };
        let sample: Vec<Request> = (0..2000).map(|_| engine.request()).collect();
        let output: f64 = sample.iter().map(|it| f64::from(it.output)).sum();
        // Weighted by output: longer requests are present for longer.
        let usual = |it: &Request| (it.prompt + it.output).div_ceil(USUAL_BLOCK);
        let weighed = |it: &Request| f64::from(usual(it)) * f64::from(it.output);
        let blocks = sample.iter().map(weighed).sum::<f64>() / output;
        let blocks = (blocks * setting.batch) as u32;
        engine.capacity = blocks * USUAL_BLOCK / setting.block_tokens;
        engine.mean_output = output / sample.len() as f64;
        engine.free = engine.capacity;
        engine.fill();
        // The remaining GPU memory is shared by the others in proportion.
        let all: u32 = engine.others.iter().map(Request::blocks).sum();
        let free = engine.free;
        for request in &mut engine.others {
            request.resident = request.blocks() * free.min(all) / all;
            engine.free -= request.resident;
        }
        engine
    }

    /// Adds requests until the memory is full, each at a random point of its output.
    fn fill(&mut self) {
        let all = f64::from(self.capacity) * self.setting.oversubscription;
        let longest = self.setting.requests.iter().map(|it| it.output.tokens.1).max();
        let longest = longest.expect("there are profiles");
        loop {
            let mut request = self.request();
            // The longer a request is present, the likelier it is found at a random time.
            if self.chance.random_range(0..longest) >= request.output {
                continue;
            }
            request.done = self.chance.random_range(0..request.output);
            let more = request.final_blocks();
            if self.sums[0] + more <= self.capacity {
                self.sums[0] += more;
                self.free -= request.blocks();
                self.batch.push_back(request);
            } else if f64::from(self.sums[0] + self.sums[1] + more) <= all {
                self.sums[1] += more;
                self.put_away(&request);
                self.others.push_back(request);
            } else {
                return;
            }
        }
    }

    fn request(&mut self) -> Request {
        self.named += 1;
        let which = self.chance.random_range(0..self.setting.requests.len());
        let profile = self.setting.requests[which];
        Request {
            id: RequestId(self.named),
            prompt: profile.input.draw(&mut self.chance),
            output: profile.output.draw(&mut self.chance),
            done: 0,
            resident: 0,
            staged: 0,
            is_announced: false,
            block_tokens: self.setting.block_tokens,
        }
    }

    fn iterate(&mut self) {
        let waited = self.exchange();
        self.admit();
        self.announce();
        let noise = 1.0 + 0.02 * normal(&mut self.chance);
        let took = self.setting.iteration().mul_f64(noise);
        if let Some(paging) = &mut self.paging {
            paging.compute(waited, took);
        }
        self.now += waited + took;
        let totals = &mut self.totals;
        totals.tokens += self.batch.len() as u64;
        for it in &self.batch {
            totals.room += u64::from(it.blocks() * it.block_tokens);
            totals.filled += u64::from(it.prompt + it.done);
        }
        totals.requests += (self.batch.len() + self.others.len()) as u64;
        self.decode();
    }

    /// Returns totals since the beginning.
    fn totals(&self) -> BTreeMap<&'static str, u64> {
        let Totals { tokens, requests, .. } = self.totals;
        let paging = self.paging.iter().flat_map(Paging::totals);
        paging.chain([("tokens", tokens), ("requests", requests)]).collect()
    }

    /// Moves the next requests into the batch and the oldest out of it. Returns the time spent
    /// waiting for blocks.
    fn exchange(&mut self) -> Duration {
        let limit = f64::from(self.capacity) * (self.setting.oversubscription - 1.0);
        self.credit += self.setting.exchanged;
        while self.credit >= 1.0 {
            self.credit -= 1.0;
            let Some(mut next) = self.others.pop_front() else { continue };
            let more = next.final_blocks();
            self.sums[1] -= more;
            while self.sums[0] + more > self.capacity || f64::from(self.sums[1]) < limit {
                let Some(mut last) = self.batch.pop_front() else { break };
                self.sums[0] -= last.final_blocks();
                self.sums[1] += last.final_blocks();
                last.resident = last.blocks();
                self.put_away(&last);
                self.others.push_back(last);
            }
            self.sums[0] += more;
            self.bring(&mut next);
            self.batch.push_back(next);
        }
        self.paging.as_mut().map_or(Duration::ZERO, Paging::wait)
    }

    /// Brings the blocks of a request that runs now to the GPU.
    fn bring(&mut self, request: &mut Request) {
        let missing = request.blocks() - request.resident;
        if request.staged == 0 {
            assert!(self.take(missing, true), "the batch fits");
        }
        if let Some(paging) = &mut self.paging {
            let keys = request.keys(request.resident);
            if request.is_announced {
                paging.run(request.id, &keys);
            } else {
                paging.read(request.id, &keys);
            }
        }
        (request.staged, request.is_announced) = (0, false);
    }

    /// Takes a request off the GPU: host memory has all its blocks.
    fn put_away(&mut self, request: &Request) {
        if let Some(paging) = self.paging.as_mut().filter(|_| !self.setting.on_drives) {
            request.keys(0).into_iter().for_each(|key| paging.keep(key));
        }
    }

    /// Admits new requests as soon as there is room.
    fn admit(&mut self) {
        let seconds = self.setting.iteration().as_secs_f64() * self.mean_output;
        let rate = self.setting.oversubscription * self.setting.batch / seconds;
        while self.next_arrival <= self.now.as_secs_f64() {
            self.next_arrival -= ln(self.chance.random_range(f64::MIN_POSITIVE..1.0)) / rate;
            let request = self.request();
            self.arrived.push_back(request);
        }
        while let Some(request) = self.arrived.front() {
            let (blocks, more) = (request.blocks(), request.final_blocks());
            if self.sums[0] + more > self.capacity {
                break;
            }
            assert!(self.take(blocks, true), "the batch fits");
            self.sums[0] += more;
            self.batch.extend(self.arrived.pop_front());
        }
    }

    /// Announces the requests of the next iterations, and makes room for them.
    fn announce(&mut self) {
        let Decode { window, on_drives, exchanged, .. } = *self.setting;
        // In host memory, nothing has to come from the drives first.
        let horizon = if on_drives { 2 * window } else { window };
        if self.paging.is_none() || horizon == 0 {
            return;
        }
        self.preempt();
        let mut credit = self.credit;
        let mut at = 0;
        for iterations in 1..=horizon {
            credit += exchanged;
            while credit >= 1.0 && at < self.others.len() {
                credit -= 1.0;
                let request = &mut self.others[at];
                request.is_announced = true;
                let (id, resident) = (request.id, request.resident);
                let keys = request.keys(resident);
                let is_due = iterations <= window && request.staged == 0;
                let paging = self.paging.as_mut().expect("there is a lookahead");
                paging.announce(id, &keys, iterations);
                if is_due && !keys.is_empty() && self.take(keys.len() as u32, false) {
                    self.others[at].staged = keys.len() as u32;
                    self.paging.as_mut().expect("there is a lookahead").allocated(id);
                }
                at += 1;
            }
        }
    }

    /// Makes some announced requests lose their turn.
    fn preempt(&mut self) {
        let announced = self.others.iter().take_while(|it| it.is_announced).count();
        let chance = self.setting.preempted * self.setting.exchanged;
        if announced == 0 || !self.chance.random_bool(chance.min(1.0)) {
            return;
        }
        let at = self.chance.random_range(0..announced);
        let mut request = self.others.remove(at).expect("it is one of them");
        self.unstage(&mut request);
        self.others.push_back(request);
    }

    fn unstage(&mut self, request: &mut Request) {
        self.free += request.staged;
        (request.staged, request.is_announced) = (0, false);
        self.paging.as_mut().expect("it was announced").cancel(request.id);
    }

    /// Takes `blocks` blocks of the GPU's memory and evicts others for it; if needed, also
    /// prefetched ones.
    fn take(&mut self, blocks: u32, is_needed: bool) -> bool {
        while self.free < blocks {
            let missing = blocks - self.free;
            let may_go = |at: &usize| {
                let request = &self.others[*at];
                request.resident > 0 && !request.is_announced
            };
            let mut all = 0..self.others.len();
            let found = match self.setting.hbm {
                Hbm::Lru => all.find(may_go),
                Hbm::Latest => all.rev().find(may_go),
                Hbm::Lfu => all.filter(may_go).min_by_key(|at| self.others[*at].done),
            };
            if let Some(at) = found {
                let request = &mut self.others[at];
                let gone = missing.min(request.resident);
                request.resident -= gone;
                self.free += gone;
                continue;
            }
            let staged = |request: &Request| request.is_announced;
            let Some(at) = self.others.iter().rposition(staged).filter(|_| is_needed) else {
                return false;
            };
            let mut request = self.others[at].clone();
            self.unstage(&mut request);
            self.others[at] = request;
        }
        self.free -= blocks;
        true
    }

    /// Generates a token for each request of the batch.
    fn decode(&mut self) {
        let mut ended = Vec::new();
        for at in 0..self.batch.len() {
            let request = &mut self.batch[at];
            let before = request.blocks();
            request.done += 1;
            let more = request.blocks() - before;
            if request.done >= request.output {
                ended.push(at);
            }
            assert!(self.take(more, true), "the batch fits");
        }
        for at in ended.into_iter().rev() {
            let request = self.batch.remove(at).expect("it was seen");
            self.sums[0] -= request.final_blocks();
            self.free += request.blocks();
            if let Some(paging) = self.paging.as_mut().filter(|_| !self.setting.on_drives) {
                request.keys(0).into_iter().for_each(|key| paging.forget(key));
            }
        }
    }
}
