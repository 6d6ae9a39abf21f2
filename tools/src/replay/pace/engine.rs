//! An engine with continuous batching and chunked prefill, whose layers take a given time. Its
//! loads and stores go through the store, in virtual time and on one thread.

mod ahead;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gio_uring::Progress;
use kv_schedule::{Flow, Kind, OpId, SlackTable, StepId, StepShape};
use nvme_driver::{Clock as _, Nanos};
use nvme_emu::SimClock;
use objstore::{BlockId, BlockKey, Layer, PacedEnd, PacedStore, StoreError, Transfer, Writing};

use crate::interrupt::Interrupt;
use crate::pace::Pace;
use crate::plan::Plan;
use crate::progress;

use super::tally::Tally;

/// Idle polls after which virtual time advances in large steps: nothing is in flight.
pub(super) const IDLE: u32 = 64 * 20;

/// Constant setup of the engine.
pub(super) struct Setup<'a> {
    pub(super) plan: &'a Plan,
    pub(super) pace: &'a Pace,
    pub(super) layers: u32,
    pub(super) block_tokens: u32,
    /// Known layer times.
    pub(super) known: Option<&'a SlackTable>,
    pub(super) clock: &'a Arc<SimClock>,
    pub(super) progress: &'a progress::Progress,
}

impl Setup<'_> {
    fn layer(&self, shape: StepShape) -> Duration {
        let known = self.known.and_then(|table| table.layer(shape));
        known.unwrap_or_else(|| self.pace.layer(shape))
    }

    fn input(&self, request: usize) -> u32 {
        u32::try_from(self.plan.times(request).input).unwrap_or(u32::MAX).max(1)
    }

    fn output(&self, request: usize) -> u32 {
        u32::try_from(self.plan.times(request).output).unwrap_or(u32::MAX).max(1)
    }

    fn arrival(&self, request: usize) -> Duration {
        self.pace.arrival(self.plan.times(request).arrival)
    }

    /// Returns the number of full blocks of a prompt. Only those have a key.
    fn full_blocks(&self, request: usize) -> usize {
        let full = (self.input(request) / self.block_tokens) as usize;
        full.min(self.plan.keys(request).len())
    }

    /// Returns the keys of the loadable blocks: at least one token must be computed.
    fn loadable(&self, request: usize) -> &[BlockKey] {
        let most = ((self.input(request) - 1) / self.block_tokens) as usize;
        &self.plan.keys(request)[..most.min(self.full_blocks(request))]
    }
}

/// A request being served.
struct Active {
    request: usize,
    /// Prompt tokens whose keys and values are present, or will be loaded before the first step.
    computed: u32,
    generated: u32,
    /// Blocks to load with its first step.
    transfer: Option<Transfer>,
    /// Blocks that were given to the store, or found there.
    stored: usize,
    first: Duration,
}

/// Pool blocks of a request.
struct Held {
    blocks: Vec<BlockId>,
    /// Reference count: the request itself and its writes.
    users: u32,
}

/// Blocks being written to the devices.
struct Storing {
    request: usize,
    writing: Writing,
    /// Layers that have not ended.
    left: u32,
    /// True after it was dropped.
    is_dropped: bool,
}

/// Purpose of an operation.
#[derive(Clone, Copy)]
enum Purpose {
    Load(u32),
    Store(u64),
}

/// A step of the engine.
struct Step {
    id: StepId,
    shape: StepShape,
    /// Index of each active request in the step, with the tokens it computes.
    parts: Vec<(usize, u32)>,
    /// Requests being loaded.
    transfers: Vec<Transfer>,
    /// Writes of the blocks that it fills.
    stores: Vec<u64>,
    /// Pending loads of each layer.
    missing: Vec<u32>,
    layer: u32,
    /// True if the step runs layer by layer; it runs as a whole if it loads and stores nothing.
    is_layered: bool,
    began: Duration,
    /// Time since when the GPU waits.
    waits: Duration,
    /// Start and end of the current computation.
    computes: Option<(Duration, Duration)>,
}

/// The engine.
pub(super) struct Engine<'a> {
    setup: Setup<'a>,
    store: PacedStore,
    /// Time of the first possible arrival.
    begin: Nanos,
    arrived: usize,
    waiting: VecDeque<usize>,
    active: Vec<Active>,
    free: Vec<BlockId>,
    held: HashMap<usize, Held>,
    step: Option<Step>,
    purposes: HashMap<OpId, Purpose>,
    storing: BTreeMap<u64, Storing>,
    numbers: u64,
    done: usize,
    tally: Tally,
}

impl<'a> Engine<'a> {
    pub(super) fn new(setup: Setup<'a>, store: PacedStore, free: Vec<BlockId>) -> Self {
        let begin = setup.clock.now();
        let tally = Tally::new(setup.layers);
        let (waiting, active, held, purposes) = Default::default();
        let storing = BTreeMap::new();
        Self {
            setup,
            store,
            begin,
            arrived: 0,
            waiting,
            active,
            free,
            held,
            step: None,
            purposes,
            storing,
            numbers: 0,
            done: 0,
            tally,
        }
    }

    /// Serves all requests, and completes the pending writes.
    ///
    /// # Errors
    /// Returns an error if the store cannot continue. Failed transfers are only counted.
    pub(super) fn serve(
        mut self,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<(PacedStore, Tally)> {
        let mut idle = 0;
        while !(self.is_served() && self.purposes.is_empty()) {
            let (moved, _) = self.store.poll(self.now())?;
            let is_busy = self.store.in_flight() > 0;
            self.tally.io(is_busy, self.now());
            self.io_ends()?;
            self.compute_ends()?;
            if !self.tally.is_interrupted && interrupt.asked() {
                self.tally.is_interrupted = true;
                self.arrived = self.setup.plan.requests();
                self.waiting.clear();
            }
            self.arrive()?;
            self.plan()?;
            self.compute();
            if self.is_served() {
                self.store.drain();
            }
            let (started, wake) = self.store.poll(self.now())?;
            idle = match (moved, started) {
                (Progress::Idle, Progress::Idle) => idle + 1,
                _ => 0,
            };
            if self.store.in_flight() == 0 {
                idle = IDLE;
            }
            let now = self.now();
            let next = self.next_event().into_iter().chain(wake).min();
            let until = next.map_or(Nanos::MAX, |next| self.at(next.max(now)));
            self.setup.clock.pause(idle, until);
        }
        self.tally.took = self.now();
        self.tally.counts = self.store.scheduler().counts();
        self.tally.dram = self.store.store().stats()?.dram;
        self.tally.late_batches = self.store.lookahead().map_or(0, |counts| counts.dropped);
        Ok((self.store, self.tally))
    }

    fn is_served(&self) -> bool {
        let all = self.arrived == self.setup.plan.requests();
        all && self.waiting.is_empty() && self.active.is_empty()
    }

    fn now(&self) -> Duration {
        (self.setup.clock.now() - self.begin).duration()
    }

    fn at(&self, time: Duration) -> Nanos {
        self.begin + Nanos(time.as_nanos() as u64)
    }

    /// Returns the time of the next arrival or end of computation.
    fn next_event(&self) -> Option<Duration> {
        let all = self.setup.plan.requests();
        let arrival = (self.arrived < all).then(|| self.setup.arrival(self.arrived));
        let computed = self.step.as_ref().and_then(|step| Some(step.computes?.1));
        arrival.into_iter().chain(computed).min()
    }

    fn arrive(&mut self) -> anyhow::Result<()> {
        let (now, all, before) = (self.now(), self.setup.plan.requests(), self.arrived);
        while self.arrived < all && self.setup.arrival(self.arrived) <= now {
            self.waiting.push_back(self.arrived);
            self.arrived += 1;
        }
        if self.arrived > before { self.look_ahead() } else { Ok(()) }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn io_ends(&mut self) -> anyhow::Result<()> {
        for (id, end) in self.store.ended() {
            let Some(purpose) = self.purposes.remove(&id) else { continue };
            match (end, purpose) {
                (PacedEnd::Moved(done), Purpose::Load(_)) => self.tally.read_bytes += done.bytes,
                (PacedEnd::Moved(done), Purpose::Store(_)) => self.tally.write_bytes += done.bytes,
                (PacedEnd::Failed(error @ StoreError::Failed { .. }), _) => {
                    return Err(error.into());
                }
                (PacedEnd::Failed(error), _) => {
                    tracing::error!("{error}");
                    self.tally.io_errors += 1;
                }
                (PacedEnd::Dropped, _) => {}
            }
            match purpose {
                Purpose::Load(layer) => {
                    let step = self.step.as_mut().expect("a step waits for its loads");
                    step.missing[layer as usize] -= 1;
                }
                Purpose::Store(number) => self.stored(number)?,
            }
        }
        Ok(())
    }

    /// Handles a layer of a write that has ended or was not accepted.
    fn stored(&mut self, number: u64) -> anyhow::Result<()> {
        let storing = self.storing.get_mut(&number).expect("its layers have not ended");
        storing.left -= 1;
        if storing.left > 0 {
            return Ok(());
        }
        let Storing { request, writing, is_dropped, .. } =
            self.storing.remove(&number).expect("seen above");
        if is_dropped {
            drop(writing);
        } else if let Err(error) = self.store.store().commit(writing) {
            match error {
                StoreError::Transfer { .. } | StoreError::Incomplete { .. } => {}
                error => return Err(error.into()),
            }
        }
        self.release(request);
        Ok(())
    }

    fn release(&mut self, request: usize) {
        let held = self.held.get_mut(&request).expect("it has blocks");
        held.users -= 1;
        if held.users == 0 {
            self.free.extend(self.held.remove(&request).expect("seen above").blocks);
        }
    }

    /// Admits a request if its blocks fit into the pool.
    fn admit(&mut self, request: usize) -> anyhow::Result<bool> {
        let input = self.setup.input(request);
        let wanted = self.setup.full_blocks(request);
        let Some(left) = self.free.len().checked_sub(wanted) else { return Ok(false) };
        let blocks = self.free.split_off(left);
        let prefix = self.store.store().lookup(self.setup.loadable(request))?;
        let found = prefix.len();
        let transfer = match found {
            0 => None,
            _ => Some(self.store.store().retrieve(&prefix, &blocks[..found])?),
        };
        self.looked_ahead(request)?;
        let computed = found as u32 * self.setup.block_tokens;
        self.tally.loaded_tokens += u64::from(computed);
        self.tally.input_tokens += u64::from(input);
        self.held.insert(request, Held { blocks, users: 1 });
        let first = Duration::ZERO;
        self.active.push(Active {
            request,
            computed,
            generated: 0,
            transfer,
            stored: found,
            first,
        });
        Ok(true)
    }

    /// Starts the next step if there is work.
    fn plan(&mut self) -> anyhow::Result<()> {
        if self.step.is_some() {
            return Ok(());
        }
        while self.active.len() < self.setup.pace.batch()
            && let Some(request) = self.waiting.front().copied()
            && self.admit(request)?
        {
            self.waiting.pop_front();
        }
        self.look_ahead()?;
        let mut left = self.setup.pace.step_tokens();
        let (mut parts, mut loads) = (Vec::new(), Vec::new());
        for (at, active) in self.active.iter_mut().enumerate() {
            let input = self.setup.input(active.request);
            let wanted = if active.computed < input { input - active.computed } else { 1 };
            if left > 0 {
                parts.push((at, wanted.min(left)));
                left -= wanted.min(left);
                loads.extend(active.transfer.take().map(|transfer| (active.request, transfer)));
            }
        }
        if parts.is_empty() {
            return Ok(());
        }
        let shape = StepShape::of(parts.iter().map(|(at, tokens)| {
            let active = &self.active[*at];
            (*tokens, active.computed + active.generated)
        }));
        let (id, now) = (StepId(self.number()), self.now());
        let truth = self.setup.layer(shape);
        self.tally.predicted(self.store.scheduler().table().layer(shape), truth, self.done);
        self.store.announce(id, shape, now);
        let mut missing = vec![0; self.setup.layers as usize];
        for (request, transfer) in &loads {
            let flow = Flow { tenant: 0, request: *request as u64 };
            for layer in 0..self.setup.layers {
                let kind = Kind::Layer { step: id, layer };
                let op = self.store.retrieve_layer(transfer, Layer(layer), flow, kind, now)?;
                self.purposes.insert(op, Purpose::Load(layer));
                missing[layer as usize] += 1;
            }
        }
        let stores = self.plan_stores(&parts)?;
        let is_layered = !(loads.is_empty() && stores.is_empty());
        let transfers = loads.into_iter().map(|(_, transfer)| transfer).collect();
        let (layer, computes) = (0, None);
        self.step = Some(Step {
            id,
            shape,
            parts,
            transfers,
            stores,
            missing,
            layer,
            is_layered,
            began: now,
            waits: now,
            computes,
        });
        Ok(())
    }

    /// Allocates the writes of a step: blocks that become full.
    fn plan_stores(&mut self, parts: &[(usize, u32)]) -> anyhow::Result<Vec<u64>> {
        let mut stores = Vec::new();
        for (at, tokens) in parts {
            let active = &mut self.active[*at];
            let request = active.request;
            let computed = (active.computed + tokens) / self.setup.block_tokens;
            let full = (computed as usize).min(self.setup.full_blocks(request));
            if full <= active.stored {
                continue;
            }
            let held = self.held.get_mut(&request).expect("it has blocks");
            let range = active.stored..full;
            let keys = &self.setup.plan.keys(request)[range.clone()];
            let writing = self.store.store().allocate(keys, &held.blocks[range])?;
            let refused = keys.len() - writing.accepted();
            // Blocks after one that is not stored cannot be found.
            active.stored = if refused > 0 { usize::MAX } else { full };
            self.tally.blocks_dropped += refused as u64;
            if writing.written() == 0 {
                continue;
            }
            held.users += 1;
            self.numbers += 1;
            let (left, is_dropped) = (self.setup.layers, false);
            self.storing.insert(self.numbers, Storing { request, writing, left, is_dropped });
            stores.push(self.numbers);
        }
        Ok(stores)
    }

    /// Starts the next computation if its loads have arrived.
    fn compute(&mut self) {
        let now = self.now();
        let Some(step) = &mut self.step else { return };
        let layer = step.layer as usize;
        if step.computes.is_some() || (step.is_layered && step.missing[layer] > 0) {
            return;
        }
        let layers = if step.is_layered { 1 } else { self.setup.layers };
        let took = self.setup.layer(step.shape) * layers;
        self.tally.waited(layer, now - step.waits);
        self.tally.compute += took;
        step.computes = Some((now, now + took));
        self.store.layer_begins(step.id, Layer(step.layer), now);
    }

    fn compute_ends(&mut self) -> anyhow::Result<()> {
        let now = self.now();
        let Some(step) = &mut self.step else { return Ok(()) };
        let Some((began, _)) = step.computes.take_if(|(_, ends)| *ends <= now) else {
            return Ok(());
        };
        let layer = step.layer;
        step.layer += if step.is_layered { 1 } else { self.setup.layers };
        step.waits = now;
        let is_over = step.layer == self.setup.layers;
        // The time of one layer, also if all were computed as a whole.
        let ends = if step.is_layered { now } else { began + self.setup.layer(step.shape) };
        self.store.layer_ends(step.id, ends);
        for number in step.stores.clone() {
            self.store_layer(number, Layer(layer), now)?;
        }
        if is_over {
            self.step_ends(now);
        }
        Ok(())
    }

    fn store_layer(&mut self, number: u64, layer: Layer, now: Duration) -> anyhow::Result<()> {
        let storing = self.storing.get_mut(&number).expect("its layers have not ended");
        if !storing.is_dropped {
            let flow = Flow { tenant: 0, request: storing.request as u64 };
            match self.store.store_layer(&storing.writing, layer, flow, now) {
                Ok(op) => {
                    self.purposes.insert(op, Purpose::Store(number));
                    return Ok(());
                }
                Err(StoreError::Backlog(_)) => {
                    storing.is_dropped = true;
                    self.tally.blocks_dropped += storing.writing.written() as u64;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.stored(number)
    }

    fn step_ends(&mut self, now: Duration) {
        let Step { id, parts, transfers, began, .. } = self.step.take().expect("it ends");
        self.store.step_ends(id);
        self.store.iteration(now - began);
        drop(transfers);
        for (at, tokens) in parts {
            let active = &mut self.active[at];
            let input = self.setup.input(active.request);
            if active.computed >= input {
                active.generated += 1;
                continue;
            }
            active.computed += tokens;
            if active.computed >= input {
                (active.generated, active.first) = (1, now);
                self.tally.ttft.push(now - self.setup.arrival(active.request));
            }
        }
        let setup = &self.setup;
        let ended = self.active.extract_if(.., |it| it.generated >= setup.output(it.request));
        let ended: Vec<Active> = ended.collect();
        for active in ended {
            self.tally.decode.push(now - active.first);
            self.done += 1;
            self.release(active.request);
            self.setup.progress.advance(self.done, || self.tally.line());
        }
    }
}
