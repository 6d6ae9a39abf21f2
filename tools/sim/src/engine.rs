//! An engine with continuous batching and chunked prefill, its GPU, and a tier below.
//!
//! A step computes a token of each request that decodes, and prompts until its budget is used up
//! (vLLM's chunked prefill). A step with loads goes layer by layer; any other one is an event.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use kv_catalog::{
    BlockKey, Catalog, CatalogConfig, Namespace, NamespaceId, PolicyKind, ReferenceId, WriteId,
};
use kv_schedule::{
    Curve, Decision, Direction, Flow, IoCosts, Kind, Op, OpId, Scheduler, Setting, SlackTable,
    StepId, StepShape,
};

use crate::{
    gpu::{Gpu, Model},
    lane::Lane,
    policy::{Loads, Policy, Tier},
};

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    /// When it comes.
    pub arrival: Duration,
    /// Tokens of the prompt.
    pub input: u32,
    /// Tokens that are generated.
    pub output: u32,
    /// What each full block of the prompt is called: equal names, equal prefixes.
    pub blocks: Vec<u64>,
}

/// The machine and the engine on it.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// The model.
    pub model: Model,
    /// The GPU.
    pub gpu: Gpu,
    /// Bytes of the GPU's memory for KV cache.
    pub kv_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens that a step computes at the most.
    pub step_tokens: u32,
    /// Requests that run at the same time at the most.
    pub requests_max: usize,
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
    /// Bytes that were loaded.
    pub read_bytes: u64,
    /// Bytes that were stored.
    pub write_bytes: u64,
    /// Blocks that were not stored, for want of memory to wait in.
    pub blocks_dropped: u64,
}

/// A catalog of block names.
#[derive(Debug)]
struct Index {
    catalog: Catalog,
    space: NamespaceId,
}

impl Index {
    fn new(bytes: u64, block_bytes: u64) -> Self {
        let files = u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX - 1);
        let mut catalog = Catalog::new(CatalogConfig {
            files,
            ranks: 1,
            words_per_file: 0,
            namespaces_max: 1,
            journal: false,
            files_ahead: 0,
            seed: 1,
            policy: PolicyKind::Lru,
            write_budget: None,
        });
        let space = catalog.namespace(&Namespace::default()).expect("the first of one");
        Self { catalog, space }
    }

    fn find(&self, blocks: &[u64]) -> usize {
        self.catalog.lookup(self.space, &keys(blocks)).expect("it is registered")
    }

    fn hold(&mut self, blocks: &[u64]) -> ReferenceId {
        self.catalog.acquire(self.space, &keys(blocks)).expect("it is registered").id
    }
}

fn keys(blocks: &[u64]) -> Vec<BlockKey> {
    let key = |block: &u64| {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&block.to_le_bytes());
        BlockKey(key)
    };
    blocks.iter().map(key).collect()
}

/// A request that is served.
#[derive(Debug)]
struct Active {
    request: usize,
    /// Tokens of the prompt whose keys and values are there.
    computed: u32,
    /// Tokens that were generated.
    generated: u32,
    /// Tokens that come from the tier.
    loaded: u32,
    /// Its blocks in the GPU's memory.
    hbm: Hbm,
    /// When its first token came.
    first: Duration,
    /// Loads that are not there yet.
    loading: u32,
}

#[derive(Debug, Clone, Copy)]
enum Hbm {
    /// They are being computed.
    Computing(WriteId),
    /// They may be found.
    Held(ReferenceId),
}

/// What an operation is for.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// A layer of the step that runs.
    Layer(u32),
    /// A request that waits.
    Request(usize),
    /// A layer of a write.
    Store(u64),
}

/// Blocks on their way to the tier.
#[derive(Debug)]
struct Store {
    write: WriteId,
    /// Layers that are not written yet.
    left: u32,
    units: u64,
}

/// A step of the engine.
#[derive(Debug)]
struct Step {
    id: StepId,
    shape: StepShape,
    /// Of each request in it: tokens that it computes.
    parts: Vec<(usize, u32)>,
    /// The layer that computes or waits; all of them at once if nothing is loaded or stored.
    layer: u32,
    is_layered: bool,
    /// Loads of each layer that are not there.
    missing: Vec<u32>,
    /// Since when it waits.
    waits: Option<Duration>,
    /// When what computes has ended.
    ends: Option<Duration>,
    /// Steps of the same kind, one after another: decoding only.
    times: u32,
    /// What becomes of it: writes to the tier, a layer's bytes each.
    stores: Vec<(u64, u64, u64)>,
}

/// The tier, while a run goes on.
#[derive(Debug)]
struct Below {
    tier: Tier,
    index: Index,
    lane: Lane,
    scheduler: Scheduler,
    /// Bytes of a unit in a layer.
    unit_layer_bytes: u64,
    purposes: HashMap<OpId, (Purpose, Direction, u64, u64)>,
    stores: HashMap<u64, Store>,
    wake: Option<Duration>,
}

/// A run.
#[derive(Debug)]
pub struct Run<'a> {
    setup: &'a Setup,
    policy: &'a Policy,
    requests: &'a [Request],
    now: Duration,
    arrived: usize,
    waiting: VecDeque<usize>,
    active: Vec<Active>,
    hbm: Index,
    below: Option<Below>,
    step: Option<Step>,
    numbers: u64,
    report: Report,
}

impl Below {
    fn new(setup: &Setup, tier: Tier) -> Self {
        let unit_layer_bytes = setup.model.token_layer_bytes() * u64::from(tier.unit_tokens);
        let layers = u64::from(setup.model.layers);
        let curve = |bandwidth| Curve::line(tier.lane.latency, bandwidth).expect("bandwidths");
        let (read, write) = (curve(tier.lane.read), curve(tier.lane.write));
        let costs = IoCosts { read, write, mixed: tier.lane.mixed };
        let [model, gpu] = [setup.model.name, setup.gpu.name].map(str::to_owned);
        let setting = Setting { model, gpu, engine: "sim".to_owned(), drives: Vec::new() };
        Self {
            tier,
            index: Index::new(tier.capacity, unit_layer_bytes * layers),
            lane: Lane::new(tier.lane),
            scheduler: Scheduler::new(tier.schedule, SlackTable::new(setting, costs)),
            unit_layer_bytes,
            purposes: HashMap::new(),
            stores: HashMap::new(),
            wake: None,
        }
    }

    /// Names of the units of a prompt: that of the last block of each.
    fn units(&self, blocks: &[u64], block_tokens: u32) -> Vec<u64> {
        let blocks_each = (self.tier.unit_tokens / block_tokens).max(1) as usize;
        blocks.chunks_exact(blocks_each).map(|unit| unit[blocks_each - 1]).collect()
    }

    /// Starts what may be started.
    fn pump(&mut self, now: Duration) {
        loop {
            match self.scheduler.next(now) {
                Decision::Start(id) => {
                    let (_, direction, bytes, objects) = self.purposes[&id];
                    self.lane.push(now, id, direction, bytes, objects);
                }
                Decision::Drop(_) => {}
                Decision::Wait(until) => {
                    self.wake = until;
                    return;
                }
            }
        }
    }
}

impl<'a> Run<'a> {
    /// Serves all requests, which come in the order of their arrival.
    #[must_use]
    pub fn serve(setup: &'a Setup, policy: &'a Policy, requests: &'a [Request]) -> Report {
        let block_bytes = setup.model.token_bytes() * u64::from(setup.block_tokens);
        let mut run = Self {
            setup,
            policy,
            requests,
            now: Duration::ZERO,
            arrived: 0,
            waiting: VecDeque::new(),
            active: Vec::new(),
            hbm: Index::new(setup.kv_bytes, block_bytes),
            below: policy.tier.map(|tier| Below::new(setup, tier)),
            step: None,
            numbers: 0,
            report: Report { served: vec![Served::default(); requests.len()], ..Report::default() },
        };
        while let Some(next) = run.next_event() {
            run.now = next;
            run.io_ends();
            run.compute_ends();
            run.arrive();
            run.plan();
            run.go_on();
            if let Some(below) = &mut run.below {
                below.pump(next);
            }
        }
        run.report.took = run.now;
        run.report
    }

    fn next_event(&self) -> Option<Duration> {
        let arrival = self.requests.get(self.arrived).map(|request| request.arrival);
        let compute = self.step.as_ref().and_then(|step| step.ends);
        let io = self.below.as_ref().and_then(|below| below.lane.next_event());
        let wake = self.below.as_ref().and_then(|below| below.wake);
        let next = [arrival, compute, io, wake].into_iter().flatten().min()?;
        Some(next.max(self.now))
    }

    fn arrive(&mut self) {
        while self.requests.get(self.arrived).is_some_and(|next| next.arrival <= self.now) {
            self.waiting.push_back(self.arrived);
            self.arrived += 1;
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    // I/O

    fn io_ends(&mut self) {
        let Some(below) = &mut self.below else { return };
        below.wake = below.wake.filter(|wake| *wake > self.now);
        for id in below.lane.arrived(self.now) {
            below.scheduler.ended(id, self.now);
            let (purpose, direction, bytes, _) =
                below.purposes.remove(&id).expect("it was started");
            match direction {
                Direction::Read => self.report.read_bytes += bytes,
                Direction::Write => self.report.write_bytes += bytes,
            }
            match purpose {
                Purpose::Layer(layer) => {
                    let step = self.step.as_mut().expect("a step waits for its loads");
                    step.missing[layer as usize] -= 1;
                }
                Purpose::Request(request) => {
                    let active = self.active.iter_mut().find(|active| active.request == request);
                    active.expect("it waits for its loads").loading -= 1;
                }
                Purpose::Store(number) => {
                    // Not if a layer of it was dropped.
                    let Some(store) = below.stores.get_mut(&number) else { continue };
                    store.left -= 1;
                    if store.left == 0 {
                        let write = below.stores.remove(&number).expect("seen above").write;
                        below.index.catalog.written(write, 0, &[]).expect("it is a write");
                        below.index.catalog.commit(write).expect("all of it was written");
                    }
                }
            }
        }
    }

    /// Hands an operation to the tier's scheduler.
    fn io(
        &mut self,
        purpose: Purpose,
        kind: Kind,
        request: usize,
        units: u64,
        layers: u64,
    ) -> bool {
        let id = OpId(self.number());
        let below = self.below.as_mut().expect("there is a tier");
        let bytes = units * below.unit_layer_bytes * layers;
        let objects = units * u64::from(below.tier.objects) * layers;
        let direction = if kind == Kind::Write { Direction::Write } else { Direction::Read };
        let flow = Flow { tenant: 0, request: request as u64 };
        let taken = below.scheduler.add(Op { id, flow, bytes, kind }, self.now).is_ok();
        if taken {
            below.purposes.insert(id, (purpose, direction, bytes, objects));
        }
        taken
    }

    // Requests

    /// Takes a request on, if its blocks fit into the GPU's memory.
    fn admit(&mut self, request: usize) -> bool {
        let Setup { block_tokens, .. } = *self.setup;
        let Request { input, output, blocks, .. } = &self.requests[request];
        let total = (input + output).div_ceil(block_tokens) as usize;
        let cached = if self.policy.keeps_hbm { self.hbm.find(blocks) } else { 0 };
        let mut names = blocks.clone();
        // Names of its own for what nobody else has.
        names.extend((blocks.len()..total).map(|at| !((request as u64) << 24 | at as u64)));
        let write = self.hbm.catalog.begin(self.hbm.space, &keys(&names)).expect("registered");
        if write.positions.len() < names.len() {
            self.hbm.catalog.abort(write.id).expect("it has just begun");
            return false;
        }
        // One token has to be computed.
        let most = (input - 1) / block_tokens * block_tokens;
        let in_hbm = (cached as u32 * block_tokens).min(most);
        let mut loaded = 0;
        if let Some(below) = &mut self.below {
            let units = below.units(blocks, block_tokens);
            let found = below.index.find(&units) as u32 * below.tier.unit_tokens;
            loaded = found.min(most).saturating_sub(in_hbm);
        }
        let served = &mut self.report.served[request];
        (served.hbm_tokens, served.loaded_tokens) = (in_hbm, loaded);
        self.active.push(Active {
            request,
            computed: in_hbm + loaded,
            generated: 0,
            loaded,
            hbm: Hbm::Computing(write.id),
            first: Duration::ZERO,
            loading: 0,
        });
        if loaded > 0 && self.below.as_ref().is_some_and(|it| it.tier.loads == Loads::Whole) {
            let units = self.load_units(loaded);
            let layers = self.setup.model.layers.into();
            self.io(Purpose::Request(request), Kind::Soon, request, units, layers);
            let active = self.active.last_mut().expect("it was just taken on");
            (active.loading, active.loaded) = (1, 0);
        }
        true
    }

    fn load_units(&self, tokens: u32) -> u64 {
        let tier = self.below.as_ref().expect("there is a tier").tier;
        u64::from(tokens.div_ceil(tier.unit_tokens))
    }

    /// Begins the next step, if there is something to do.
    fn plan(&mut self) {
        if self.step.is_some() {
            return;
        }
        while self.active.len() < self.setup.requests_max
            && let Some(request) = self.waiting.front().copied()
            && self.admit(request)
        {
            self.waiting.pop_front();
        }
        let mut left = self.setup.step_tokens;
        let (mut parts, mut loads) = (Vec::new(), Vec::new());
        for (at, active) in self.active.iter_mut().enumerate() {
            let input = self.requests[active.request].input;
            let wanted = if active.computed < input { input - active.computed } else { 1 };
            if active.loading == 0 && left > 0 {
                parts.push((at, wanted.min(left)));
                left -= wanted.min(left);
                if active.loaded > 0 {
                    loads.push((active.request, std::mem::take(&mut active.loaded)));
                }
            }
        }
        if parts.is_empty() {
            return;
        }
        let shape = StepShape::of(parts.iter().map(|(at, tokens)| {
            let active = &self.active[*at];
            (*tokens, active.computed + active.generated)
        }));
        let (id, layers) = (StepId(self.number()), self.setup.model.layers);
        self.step = Some(Step {
            id,
            shape,
            layer: 0,
            is_layered: !loads.is_empty(),
            missing: vec![0; layers as usize],
            waits: Some(self.now),
            ends: None,
            times: 1,
            stores: Vec::new(),
            parts,
        });
        if let Some(below) = &mut self.below {
            below.scheduler.announce(id, shape, self.now);
        }
        for (request, tokens) in loads {
            let units = self.load_units(tokens);
            for layer in 0..layers {
                let kind = Kind::Layer { step: id, layer };
                self.io(Purpose::Layer(layer), kind, request, units, 1);
                self.step.as_mut().expect("set above").missing[layer as usize] += 1;
            }
        }
        self.plan_stores();
        self.plan_times();
    }

    /// What the step is going to store: units that become full.
    fn plan_stores(&mut self) {
        let (Some(step), Some(below)) = (&self.step, &mut self.below) else { return };
        let mut stores = Vec::new();
        for (at, tokens) in &step.parts {
            let active = &self.active[*at];
            let Request { input, blocks, .. } = &self.requests[active.request];
            let units = below.units(blocks, self.setup.block_tokens);
            let full = ((active.computed + tokens).min(*input) / below.tier.unit_tokens) as usize;
            if active.computed >= *input || full == 0 {
                continue;
            }
            let full = &units[..full.min(units.len())];
            let write = below.index.catalog.begin(below.index.space, &keys(full));
            let write = write.expect("it is registered");
            let own = write.own().count() as u64;
            if own == 0 {
                below.index.catalog.abort(write.id).expect("it has just begun");
                continue;
            }
            self.numbers += 1;
            let store = Store { write: write.id, left: self.setup.model.layers, units: own };
            below.stores.insert(self.numbers, store);
            stores.push((self.numbers, active.request as u64, own));
        }
        let step = self.step.as_mut().expect("seen above");
        step.is_layered |= !stores.is_empty();
        step.stores = stores;
    }

    /// Steps that only decode, and change nothing, are one event.
    fn plan_times(&mut self) {
        let Some(step) = &mut self.step else { return };
        if step.shape.is_prefill || self.active.iter().any(|active| active.loading > 0) {
            return;
        }
        let left = step.parts.iter().map(|(at, _)| {
            let active = &self.active[*at];
            self.requests[active.request].output.saturating_sub(active.generated)
        });
        let left = left.min().unwrap_or(1).max(1);
        let layer = self.setup.gpu.layer(&self.setup.model, step.shape);
        let took = layer * self.setup.model.layers;
        let arrival = self.requests.get(self.arrived).map(|request| request.arrival);
        let until = arrival.map_or(u32::MAX, |arrival| {
            let wait = arrival.saturating_sub(self.now).as_secs_f64();
            (wait / took.as_secs_f64()).ceil().max(1.0) as u32
        });
        // A context that grows makes them longer: not too many.
        step.times = left.min(until).min(64);
    }

    // The GPU

    /// Computes what the step may compute now.
    fn go_on(&mut self) {
        let Some(step) = &mut self.step else { return };
        if step.ends.is_some() {
            return;
        }
        let layer = self.setup.gpu.layer(&self.setup.model, step.shape);
        let took = if step.is_layered {
            if step.missing[step.layer as usize] > 0 {
                return;
            }
            layer
        } else {
            layer * self.setup.model.layers * step.times
        };
        if let Some(since) = step.waits.take() {
            self.report.bubble += self.now - since;
        }
        step.ends = Some(self.now + took);
        self.report.compute += took;
        if let Some(below) = &mut self.below {
            below.scheduler.layer_begins(step.id, step.layer, self.now);
        }
    }

    fn compute_ends(&mut self) {
        let Some(step) = &mut self.step else { return };
        if step.ends.is_none_or(|ends| ends > self.now) {
            return;
        }
        step.ends = None;
        let layers = self.setup.model.layers;
        let (id, layer, is_layered) = (step.id, step.layer, step.is_layered);
        let stores = step.stores.clone();
        if is_layered {
            if let Some(below) = &mut self.below {
                below.scheduler.layer_ends(id, self.now);
            }
            let step = self.step.as_mut().expect("seen above");
            (step.layer, step.waits) = (layer + 1, Some(self.now));
        }
        for (number, request, units) in stores {
            let count = if is_layered { 1 } else { layers };
            (0..count).for_each(|_| self.store(number, request as usize, units));
        }
        if !is_layered || layer + 1 == layers {
            self.step_ends();
        }
    }

    /// A layer of a write has been computed.
    fn store(&mut self, number: u64, request: usize, units: u64) {
        let is_there = self.below.as_ref().is_some_and(|below| below.stores.contains_key(&number));
        if is_there && !self.io(Purpose::Store(number), Kind::Write, request, units, 1) {
            let below = self.below.as_mut().expect("seen above");
            // Layers that are on their way are for nothing.
            if let Some(store) = below.stores.remove(&number) {
                below.index.catalog.abort(store.write).expect("it is a write");
                self.report.blocks_dropped += store.units;
            }
        }
    }

    fn step_ends(&mut self) {
        let step = self.step.take().expect("it ends");
        if let Some(below) = &mut self.below {
            below.scheduler.step_ends(step.id);
        }
        for (at, tokens) in step.parts {
            let active = &mut self.active[at];
            let Request { input, arrival, .. } = self.requests[active.request];
            if active.computed >= input {
                active.generated += step.times;
                continue;
            }
            active.computed += tokens;
            if active.computed >= input {
                (active.generated, active.first) = (1, self.now);
                self.report.served[active.request].ttft = self.now - arrival;
                let Hbm::Computing(write) = active.hbm else { continue };
                self.hbm.catalog.written(write, 0, &[]).expect("it is a write");
                self.hbm.catalog.commit(write).expect("all of it is there");
                active.hbm = Hbm::Held(self.hbm.hold(&self.requests[active.request].blocks));
            }
        }
        let (requests, now) = (self.requests, self.now);
        let (done, rest) = std::mem::take(&mut self.active)
            .into_iter()
            .partition(|it| it.generated >= requests[it.request].output.max(1));
        self.active = rest;
        let done: Vec<Active> = done;
        for active in done {
            self.report.served[active.request].decode = now - active.first;
            if let Hbm::Held(held) = active.hbm {
                self.hbm.catalog.release(held).expect("it is held");
            }
            if !self.policy.keeps_hbm {
                let blocks = keys(&self.requests[active.request].blocks);
                self.hbm.catalog.remove(self.hbm.space, &blocks).expect("it is registered");
            }
        }
    }
}

#[cfg(test)]
mod tests;
