//! The store as the tiers of the simulator's engine: its loads and stores go through the store, in
//! virtual time and on one thread.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use gio_uring::Progress;
use kv_schedule::{Flow, Scheduler, SlackTable, StepId, StepShape};
use kv_tier::{LookaheadConfig, RequestId, When};
use nvme_driver::{Clock as _, Nanos};
use nvme_emu::SimClock;
use objstore::{
    BlockId, BlockKey, Layer, LoadRequest, Order, Prefix, Store, StoreError, StoreRequest, Ticket,
};
use ripieno_sim::{Ended, Hit, Place, Purpose, Request, Tiers};

use crate::model::Shape;
use crate::plan::Plan;
use crate::progress;

use super::tally::Tally;

/// Idle polls after which virtual time advances in the largest steps: nothing is in flight.
const IDLE: u32 = 64 * 44;

/// Pool blocks of a request.
struct Pooled {
    blocks: Vec<BlockId>,
    /// Reference count: the request itself and its writes.
    users: u32,
}

/// Blocks being written to the devices.
struct Storing {
    request: usize,
    save: StoreRequest,
    /// Layers that have not ended.
    left: u32,
    /// True after it was dropped.
    is_dropped: bool,
}

/// State of a request in the store.
pub(super) struct Held {
    /// Blocks to load with its first step, or being loaded.
    load: Option<LoadRequest>,
    /// Their bytes.
    load_bytes: u64,
    is_loaded: bool,
    /// Leading blocks that were given to the store, or found there.
    stored: usize,
    /// True once the store refused a block: those after it cannot be found.
    is_refused: bool,
}

/// Layers that were started, and when to look at them again.
#[derive(Debug, Default)]
struct Started {
    /// Request and purpose of each layer.
    ops: HashMap<Ticket, (usize, Purpose)>,
    /// Layers that have ended, until the engine takes them.
    over: Vec<Ticket>,
    in_flight: usize,
    /// Polls since something moved.
    idle: u32,
    /// Latest time of the next poll.
    wake: Option<Nanos>,
}

/// A store with a pacer, its KV pool, and their use.
pub(super) struct StoreTiers<'a> {
    plan: &'a Plan,
    shape: Shape,
    clock: &'a Arc<SimClock>,
    progress: &'a progress::Progress,
    store: Store,
    looks_ahead: bool,
    /// Blocks of requests that were announced: they stay stored.
    announced: HashMap<usize, Prefix>,
    /// Time at which the engine begins.
    begin: Nanos,
    /// Time since then.
    now: Duration,
    free: Vec<BlockId>,
    pooled: HashMap<usize, Pooled>,
    started: Started,
    storing: BTreeMap<u64, Storing>,
    numbers: u64,
    /// Requests that have ended.
    done: usize,
    tally: Tally,
}

impl<'a> StoreTiers<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        shape: Shape,
        clock: &'a Arc<SimClock>,
        progress: &'a progress::Progress,
        (store, looks_ahead, free): (Store, bool, Vec<BlockId>),
    ) -> Self {
        let (announced, pooled, started) = Default::default();
        Self {
            plan,
            shape,
            clock,
            progress,
            store,
            looks_ahead,
            announced,
            begin: clock.now(),
            now: Duration::ZERO,
            free,
            pooled,
            started,
            storing: BTreeMap::new(),
            numbers: 0,
            done: 0,
            tally: Tally::new(shape.layers),
        }
    }

    /// Returns the counts so far.
    pub(super) fn tally(&self) -> anyhow::Result<Tally> {
        let mut tally = self.tally.clone();
        let plane = self.store.plane();
        tally.counts = plane.with_scheduler(|it| it.counts())?.context("it is paced")?;
        tally.dram = self.store.stats()?.plane.dram;
        tally.late_batches = plane.with_lookahead(|it| it.counts().dropped)?.unwrap_or_default();
        Ok(tally)
    }

    /// Returns the scheduler's table with the times that it learned.
    pub(super) fn table(&self) -> anyhow::Result<SlackTable> {
        self.store.plane().with_scheduler(|it| it.table().clone())?.context("it is paced")
    }

    /// Tells the scheduler about the engine. A store that has failed reports it at the next poll.
    fn tell(&self, act: impl FnOnce(&mut Scheduler)) {
        let _ = self.store.plane().with_scheduler(act);
    }

    /// Returns a time of the engine by the store's clock.
    fn at(&self, time: Duration) -> Duration {
        self.begin.duration() + time
    }

    /// Returns the number of full blocks among a prompt's first tokens. Only those have a key.
    fn full_blocks(&self, number: usize, tokens: u32) -> usize {
        let full = (tokens / self.shape.block_tokens) as usize;
        full.min(self.plan.keys(number).len())
    }

    /// Returns the keys of the loadable blocks: at least one token must be computed.
    fn loadable(&self, number: usize, request: &Request) -> &'a [BlockKey] {
        &self.plan.keys(number)[..self.full_blocks(number, request.input - 1)]
    }

    /// Polls the store, and notes whether anything moved.
    fn poll(&mut self) -> anyhow::Result<()> {
        let advanced = self.store.plane().advance()?;
        (self.started.wake, self.started.in_flight) = (advanced.wake, advanced.in_flight);
        self.started.over.extend(advanced.ended);
        if advanced.progress != Progress::Idle {
            self.started.idle = 0;
        }
        Ok(())
    }

    /// Notes a layer that was started.
    fn add(&mut self, ticket: Ticket, request: usize, purpose: Purpose) {
        self.started.ops.insert(ticket, (request, purpose));
        (self.started.idle, self.started.in_flight) = (0, self.started.in_flight + 1);
    }

    fn flow(number: usize) -> Flow {
        Flow { tenant: 0, request: number as u64 }
    }

    fn store_layer(&mut self, number: u64, layer: u32) -> anyhow::Result<u64> {
        let storing = self.storing.get_mut(&number).expect("its layers have not ended");
        let mut dropped = 0;
        if !storing.is_dropped {
            let request = storing.request;
            match self.store.start(&storing.save, Layer(layer), Order::Unordered) {
                Ok(ticket) => {
                    self.add(ticket, request, Purpose::Store { number, layer });
                    return Ok(0);
                }
                Err(StoreError::Backlog(_)) => {
                    storing.is_dropped = true;
                    dropped = storing.save.written() as u64;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.stored(number)?;
        Ok(dropped)
    }

    /// Handles a layer of a write that has ended or was not accepted.
    fn stored(&mut self, number: u64) -> anyhow::Result<()> {
        let storing = self.storing.get_mut(&number).expect("its layers have not ended");
        storing.left -= 1;
        if storing.left > 0 {
            return Ok(());
        }
        let Storing { request, save, is_dropped, .. } =
            self.storing.remove(&number).expect("seen above");
        if is_dropped {
            drop(save);
        } else if let Err(error) = self.store.commit(save) {
            match error {
                StoreError::Transfer { .. } | StoreError::Incomplete { .. } => {}
                error => return Err(error.into()),
            }
        }
        self.release(request);
        Ok(())
    }

    /// Reads or stores the blocks of all batches, layer by layer and all requested at once: reads
    /// those that are stored. Returns the time that it took.
    pub(super) fn move_all(&mut self, batches: &[&[BlockKey]]) -> anyhow::Result<Duration> {
        let begin = self.now;
        let (mut loads, mut writes) = (Vec::new(), Vec::new());
        for (number, keys) in batches.iter().enumerate() {
            let blocks = self.free.split_off(self.free.len() - keys.len());
            let prefix = self.store.lookup(keys)?;
            let save = match prefix.is_empty() {
                true => Some(self.store.allocate(keys, &blocks)?),
                false => None,
            };
            if save.is_none() {
                loads.push(self.store.retrieve(&prefix, &blocks)?);
            }
            self.pooled.insert(number, Pooled { blocks, users: 1 });
            if let Some(save) = save {
                writes.push(self.add_write(number, save)?);
            }
        }
        for layer in 0..self.shape.layers {
            for at in 0..batches.len() {
                if let Some(load) = loads.get(at) {
                    let ticket = self.store.start(load, Layer(layer), Order::Unordered)?;
                    self.add(ticket, at, Purpose::Whole);
                    self.ended()?;
                }
                if let Some(number) = writes.get(at) {
                    self.store_layer(*number, layer)?;
                    self.ended()?;
                }
            }
        }
        self.poll()?;
        while self.wait(None).is_some() {
            self.ended()?;
            self.poll()?;
        }
        ensure!(self.tally.io_errors == 0, "a transfer failed");
        (0..batches.len()).for_each(|number| self.release(number));
        Ok(self.now - begin)
    }

    fn add_write(&mut self, request: usize, save: StoreRequest) -> anyhow::Result<u64> {
        let job = save.ticket(Layer(0)).job;
        self.store.plane().assign(job, Self::flow(request), None)?;
        self.pooled.get_mut(&request).expect("it has blocks").users += 1;
        self.numbers += 1;
        let (left, is_dropped) = (self.shape.layers, false);
        self.storing.insert(self.numbers, Storing { request, save, left, is_dropped });
        Ok(self.numbers)
    }

    fn release(&mut self, number: usize) {
        let pooled = self.pooled.get_mut(&number).expect("it has blocks");
        pooled.users -= 1;
        if pooled.users == 0 {
            self.free.extend(self.pooled.remove(&number).expect("seen above").blocks);
        }
    }
}

impl Tiers for StoreTiers<'_> {
    type Held = Held;
    type Store = u64;
    type Error = anyhow::Error;

    /// The scheduler learns from each step.
    const EQUAL_STEPS: u32 = 1;

    fn has_room(&self, number: usize, request: &Request) -> bool {
        self.full_blocks(number, request.input) <= self.free.len()
    }

    fn begin(
        &mut self,
        number: usize,
        request: &Request,
        _in_hbm: u32,
        _most: u32,
    ) -> anyhow::Result<Hit<Held>> {
        let left = self.free.len() - self.full_blocks(number, request.input);
        let blocks = self.free.split_off(left);
        let prefix = self.store.lookup(self.loadable(number, request))?;
        let found = prefix.len();
        let load = match found {
            0 => None,
            _ => Some(self.store.retrieve(&prefix, &blocks[..found])?),
        };
        let load_bytes = found as u64 * self.store.shape().block_bytes();
        self.announced.remove(&number);
        self.store.plane().withdraw(RequestId(number as u64), true)?;
        self.pooled.insert(number, Pooled { blocks, users: 1 });
        Ok(Hit {
            tokens: found as u32 * self.shape.block_tokens,
            host_tokens: 0,
            peer_tokens: 0,
            loading: 0,
            loading_bytes: 0,
            held: Held { load, load_bytes, is_loaded: false, stored: found, is_refused: false },
        })
    }

    fn loaded(&mut self, held: &mut Held) {
        held.load = None;
    }

    fn end(&mut self, number: usize, _held: Held) {
        self.release(number);
        self.done += 1;
        self.progress.shows(self.done, || self.tally.line());
    }

    /// Requests load in their first step only.
    fn cancel(&mut self, _number: usize) -> (u32, u64) {
        (0, 0)
    }

    fn cancel_ahead(&mut self, number: usize) -> anyhow::Result<()> {
        self.announced.remove(&number);
        Ok(self.store.plane().withdraw(RequestId(number as u64), false)?)
    }

    fn steps_ahead(&self) -> Option<u32> {
        self.looks_ahead.then(|| LookaheadConfig::default().drives_window)
    }

    fn announce(
        &mut self,
        number: usize,
        request: &Request,
        _in_hbm: u32,
        (_, after): (Duration, u32),
    ) -> anyhow::Result<u32> {
        let (id, keys) = (RequestId(number as u64), self.loadable(number, request));
        let prefix = self.store.hold_prefix(keys)?;
        self.store.announce(id, &prefix, When::In(after + 1))?;
        let stored = prefix.len();
        self.announced.insert(number, prefix);
        Ok(stored as u32 * self.shape.block_tokens)
    }

    /// The store plans when it is polled.
    fn plan_ahead(&mut self) {}

    fn step_begins(&mut self, step: StepId, shape: StepShape, layer: Duration) {
        let (predicted, now) = (&mut None, self.at(self.now));
        self.tell(|it| {
            *predicted = it.table().layer(shape);
            it.announce(step, shape, now);
        });
        self.tally.predicted(*predicted, layer, self.done);
    }

    fn load(
        &mut self,
        held: &mut Held,
        number: usize,
        step: StepId,
        missing: &mut [u32],
    ) -> anyhow::Result<u64> {
        let Some(load) = &held.load else { return Ok(0) };
        if std::mem::replace(&mut held.is_loaded, true) {
            return Ok(0);
        }
        let job = load.ticket(Layer(0)).job;
        self.store.plane().assign(job, Self::flow(number), Some(step))?;
        for (layer, missing) in (0..).zip(missing) {
            let ticket = self.store.start(load, Layer(layer), Order::Unordered)?;
            self.add(ticket, number, Purpose::Layer(layer));
            *missing += 1;
        }
        Ok(held.load_bytes)
    }

    fn begin_store(
        &mut self,
        held: &mut Held,
        number: usize,
        tokens: u32,
    ) -> anyhow::Result<Option<u64>> {
        let full = self.full_blocks(number, tokens);
        if full <= held.stored || held.is_refused {
            return Ok(None);
        }
        let pooled = self.pooled.get(&number).expect("it has blocks");
        let range = held.stored..full;
        let keys = &self.plan.keys(number)[range.clone()];
        let save = self.store.allocate(keys, &pooled.blocks[range])?;
        let refused = keys.len() - save.accepted();
        (held.stored, held.is_refused) = (full - refused, refused > 0);
        self.tally.blocks_refused += refused as u64;
        (save.written() > 0).then(|| self.add_write(number, save)).transpose()
    }

    fn layer_begins(&mut self, step: StepId, layer: u32, waited: Duration, takes: Duration) {
        self.tally.computes(layer as usize, waited, takes);
        let now = self.at(self.now);
        self.tell(|it| it.layer_begins(step, layer, now));
    }

    fn layer_ends(&mut self, step: StepId, layer: u32, stores: &[u64]) -> anyhow::Result<u64> {
        let now = self.at(self.now);
        self.tell(|it| it.layer_ends(step, now));
        stores.iter().map(|number| self.store_layer(*number, layer)).sum()
    }

    fn step_ends(&mut self, step: StepId, took: Duration, first: Option<Duration>) {
        let first = first.map(|first| self.at(first));
        self.tell(|it| {
            first.into_iter().for_each(|first| it.layer_ends(step, first));
            it.step_ends(step);
        });
        // A store that has failed reports it at the next poll.
        let _ = self.store.plane().with_lookahead(|it| it.iteration(took));
    }

    fn ended(&mut self) -> anyhow::Result<Vec<Ended>> {
        self.poll()?;
        self.tally.io(self.started.in_flight > 0, self.now);
        let mut all = Vec::new();
        for ticket in std::mem::take(&mut self.started.over) {
            let Some((request, purpose)) = self.started.ops.remove(&ticket) else { continue };
            let bytes = match self.store.poll(&ticket) {
                Ok(done) => done.context("it has ended")?.bytes,
                Err(error @ StoreError::Failed { .. }) => return Err(error.into()),
                Err(error) => {
                    tracing::error!("{error}");
                    self.tally.io_errors += 1;
                    0
                }
            };
            if let Purpose::Store { number, .. } = purpose {
                self.stored(number)?;
            }
            all.push(Ended { purpose, request, place: Place::Tier, bytes, began: self.now });
        }
        Ok(all)
    }

    fn pump(&mut self) -> anyhow::Result<()> {
        self.poll()
    }

    fn wait(&mut self, until: Option<Duration>) -> Option<Duration> {
        match until {
            None if self.started.ops.is_empty() => return None,
            // Layers that have ended are taken first.
            _ if !self.started.over.is_empty() => return Some(self.now),
            Some(until) if until <= self.now => return Some(self.now),
            _ => {}
        }
        self.started.idle = if self.started.in_flight == 0 { IDLE } else { self.started.idle };
        let at = |time: Duration| self.begin + Nanos(time.max(self.now).as_nanos() as u64);
        let wake = self.started.wake.map(|time| time.max(self.clock.now()));
        let until = until.map(at).into_iter().chain(wake).min().unwrap_or(Nanos::MAX);
        self.clock.pause(self.started.idle, until);
        self.started.idle += 1;
        self.now = (self.clock.now() - self.begin).duration();
        Some(self.now)
    }
}
