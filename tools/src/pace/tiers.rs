//! The store as the tiers of the simulator's engine: its loads and stores go through the store, in
//! virtual time and on one thread.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use gio_uring::Progress;
use kv_schedule::{Flow, Kind, OpId, SlackTable, StepId, StepShape};
use kv_tier::{LookaheadConfig, RequestId, When};
use nvme_driver::{Clock as _, Nanos};
use nvme_emu::SimClock;
use objstore::{
    BlockId, BlockKey, Layer, LoadRequest, PacedEnd, PacedStore, StoreError, StoreRequest,
};
use ripieno_sim::{Ended, Hit, Purpose, Request, Tiers};

use crate::model::Shape;
use crate::plan::Plan;
use crate::progress;

use super::tally::Tally;

/// Idle polls after which virtual time advances in large steps: nothing is in flight.
const IDLE: u32 = 64 * 20;

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
    is_loaded: bool,
    /// Leading blocks that were given to the store, or found there.
    stored: usize,
}

/// A paced store, its KV pool, and their use.
pub(super) struct StoreTiers<'a> {
    plan: &'a Plan,
    shape: Shape,
    clock: &'a Arc<SimClock>,
    progress: &'a progress::Progress,
    store: PacedStore,
    /// Time at which the engine begins.
    begin: Nanos,
    /// Time since then.
    now: Duration,
    free: Vec<BlockId>,
    pooled: HashMap<usize, Pooled>,
    /// Request and purpose of each operation.
    ops: HashMap<OpId, (usize, Purpose)>,
    storing: BTreeMap<u64, Storing>,
    numbers: u64,
    /// Requests that have ended.
    done: usize,
    /// Polls since something moved.
    idle: u32,
    /// Latest time of the next poll.
    wake: Option<Duration>,
    tally: Tally,
}

impl<'a> StoreTiers<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        shape: Shape,
        clock: &'a Arc<SimClock>,
        progress: &'a progress::Progress,
        (store, free): (PacedStore, Vec<BlockId>),
    ) -> Self {
        let (pooled, ops) = Default::default();
        Self {
            plan,
            shape,
            clock,
            progress,
            store,
            begin: clock.now(),
            now: Duration::ZERO,
            free,
            pooled,
            ops,
            storing: BTreeMap::new(),
            numbers: 0,
            done: 0,
            idle: 0,
            wake: None,
            tally: Tally::new(shape.layers),
        }
    }

    /// Returns the counts so far.
    ///
    /// # Errors
    /// Returns an error if the store has failed.
    pub(super) fn tally(&self) -> anyhow::Result<Tally> {
        let mut tally = self.tally.clone();
        tally.counts = self.store.scheduler().counts();
        tally.dram = self.store.store().stats()?.dram;
        tally.late_batches = self.store.lookahead().map_or(0, |counts| counts.dropped);
        Ok(tally)
    }

    /// Returns the scheduler's table with the times that it learned.
    pub(super) fn table(&self) -> SlackTable {
        self.store.scheduler().table().clone()
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
        let (progress, wake) = self.store.poll(self.now)?;
        self.wake = wake;
        if progress != Progress::Idle {
            self.idle = 0;
        }
        Ok(())
    }

    fn flow(number: usize) -> Flow {
        Flow { tenant: 0, request: number as u64 }
    }

    fn store_layer(&mut self, number: u64, layer: u32) -> anyhow::Result<u64> {
        let storing = self.storing.get_mut(&number).expect("its layers have not ended");
        let mut dropped = 0;
        if !storing.is_dropped {
            let flow = Self::flow(storing.request);
            match self.store.store_layer(&storing.save, Layer(layer), flow, self.now) {
                Ok(op) => {
                    self.ops.insert(op, (storing.request, Purpose::Store { number, layer }));
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
        } else if let Err(error) = self.store.store().commit(save) {
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
    ///
    /// # Errors
    /// Returns an error if the store cannot continue, or if a transfer fails.
    pub(super) fn move_all(&mut self, batches: &[&[BlockKey]]) -> anyhow::Result<Duration> {
        let begin = self.now;
        let (mut loads, mut writes) = (Vec::new(), Vec::new());
        for (number, keys) in batches.iter().enumerate() {
            let blocks = self.free.split_off(self.free.len() - keys.len());
            let prefix = self.store.store().lookup(keys)?;
            let save = match prefix.is_empty() {
                true => Some(self.store.store().allocate(keys, &blocks)?),
                false => None,
            };
            if save.is_none() {
                loads.push(self.store.store().retrieve(&prefix, &blocks)?);
            }
            self.pooled.insert(number, Pooled { blocks, users: 1 });
            writes.extend(save.map(|save| self.add_write(number, save)));
        }
        for layer in 0..self.shape.layers {
            for at in 0..batches.len() {
                if let Some(load) = loads.get(at) {
                    let (flow, layer) = (Flow::default(), Layer(layer));
                    let op = self.store.retrieve_layer(load, layer, flow, Kind::Soon, begin)?;
                    self.ops.insert(op, (at, Purpose::Whole));
                    self.ended()?;
                }
                if let Some(number) = writes.get(at) {
                    self.store_layer(*number, layer)?;
                    self.ended()?;
                }
            }
        }
        self.pump(true)?;
        while self.wait(None).is_some() {
            self.ended()?;
            self.pump(true)?;
        }
        ensure!(self.tally.io_errors == 0, "a transfer failed");
        (0..batches.len()).for_each(|number| self.release(number));
        Ok(self.now - begin)
    }

    fn add_write(&mut self, request: usize, save: StoreRequest) -> u64 {
        self.pooled.get_mut(&request).expect("it has blocks").users += 1;
        self.numbers += 1;
        let (left, is_dropped) = (self.shape.layers, false);
        self.storing.insert(self.numbers, Storing { request, save, left, is_dropped });
        self.numbers
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
        let prefix = self.store.store().lookup(self.loadable(number, request))?;
        let found = prefix.len();
        let load = match found {
            0 => None,
            _ => Some(self.store.store().retrieve(&prefix, &blocks[..found])?),
        };
        self.store.run(RequestId(number as u64))?;
        self.pooled.insert(number, Pooled { blocks, users: 1 });
        Ok(Hit {
            tokens: found as u32 * self.shape.block_tokens,
            host_tokens: 0,
            loading: 0,
            loading_bytes: 0,
            held: Held { load, is_loaded: false, stored: found },
        })
    }

    fn loaded(&mut self, held: &mut Held) {
        held.load = None;
    }

    fn end(&mut self, number: usize, _held: Held) {
        self.release(number);
        self.done += 1;
        self.progress.advance(self.done, || self.tally.line());
    }

    /// Requests load in their first step only.
    fn cancel(&mut self, _number: usize) -> (u32, u64) {
        (0, 0)
    }

    fn cancel_ahead(&mut self, number: usize) -> anyhow::Result<()> {
        Ok(self.store.abort(RequestId(number as u64))?)
    }

    fn steps_ahead(&self) -> Option<u32> {
        self.store.lookahead().map(|_| LookaheadConfig::default().drives_window)
    }

    fn announce(
        &mut self,
        number: usize,
        request: &Request,
        _in_hbm: u32,
        (_, after): (Duration, u32),
    ) -> anyhow::Result<u32> {
        let (id, keys) = (RequestId(number as u64), self.loadable(number, request));
        let stored = self.store.prefetch(id, keys, When::In(after + 1), self.now)?;
        Ok(stored as u32 * self.shape.block_tokens)
    }

    /// The store plans when it is polled.
    fn plan_ahead(&mut self) {}

    fn step_begins(&mut self, step: StepId, shape: StepShape, layer: Duration) {
        self.tally.predicted(self.store.scheduler().table().layer(shape), layer, self.done);
        self.store.announce(step, shape, self.now);
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
        for (layer, missing) in (0..).zip(missing) {
            let (flow, kind) = (Self::flow(number), Kind::Layer { step, layer });
            let op = self.store.retrieve_layer(load, Layer(layer), flow, kind, self.now)?;
            self.ops.insert(op, (number, Purpose::Layer(layer)));
            *missing += 1;
        }
        Ok(held.stored as u64 * self.store.store().shape().block_bytes())
    }

    fn begin_store(
        &mut self,
        held: &mut Held,
        number: usize,
        tokens: u32,
    ) -> anyhow::Result<Option<u64>> {
        let full = self.full_blocks(number, tokens);
        if full <= held.stored {
            return Ok(None);
        }
        let pooled = self.pooled.get(&number).expect("it has blocks");
        let range = held.stored..full;
        let keys = &self.plan.keys(number)[range.clone()];
        let save = self.store.store().allocate(keys, &pooled.blocks[range])?;
        let refused = keys.len() - save.accepted();
        // Blocks after one that is not stored cannot be found.
        held.stored = if refused > 0 { usize::MAX } else { full };
        self.tally.blocks_refused += refused as u64;
        Ok((save.written() > 0).then(|| self.add_write(number, save)))
    }

    fn layer_begins(&mut self, step: StepId, layer: u32, waited: Duration, takes: Duration) {
        self.tally.computes(layer as usize, waited, takes);
        self.store.layer_begins(step, Layer(layer), self.now);
    }

    fn layer_ends(&mut self, step: StepId, layer: u32, stores: &[u64]) -> anyhow::Result<u64> {
        self.store.layer_ends(step, self.now);
        stores.iter().map(|number| self.store_layer(*number, layer)).sum()
    }

    fn computed_at_once(&mut self, step: StepId, first: Duration) {
        self.store.layer_ends(step, first);
    }

    fn step_ends(&mut self, step: StepId, took: Duration) {
        self.store.step_ends(step);
        self.store.iteration(took);
    }

    fn ended(&mut self) -> anyhow::Result<Vec<Ended>> {
        self.poll()?;
        self.tally.io(self.store.in_flight() > 0, self.now);
        let mut all = Vec::new();
        for (id, end) in self.store.ended() {
            let Some((request, purpose)) = self.ops.remove(&id) else { continue };
            let bytes = match end {
                PacedEnd::Moved(done) => done.bytes,
                PacedEnd::Failed(error @ StoreError::Failed { .. }) => return Err(error.into()),
                PacedEnd::Failed(error) => {
                    tracing::error!("{error}");
                    self.tally.io_errors += 1;
                    0
                }
                PacedEnd::Dropped => 0,
            };
            if let Purpose::Store { number, .. } = purpose {
                self.stored(number)?;
            }
            all.push(Ended { purpose, request, is_host: false, bytes, began: self.now });
        }
        Ok(all)
    }

    fn pump(&mut self, is_last: bool) -> anyhow::Result<()> {
        if is_last {
            self.store.drain();
        }
        self.poll()
    }

    fn wait(&mut self, until: Option<Duration>) -> Option<Duration> {
        match until {
            None if self.ops.is_empty() => return None,
            Some(until) if until <= self.now => return Some(self.now),
            _ => {}
        }
        self.idle = if self.store.in_flight() == 0 { IDLE } else { self.idle };
        let at = |time: Duration| self.begin + Nanos(time.max(self.now).as_nanos() as u64);
        let until = until.into_iter().chain(self.wake).min().map_or(Nanos::MAX, at);
        self.clock.pause(self.idle, until);
        self.idle += 1;
        self.now = (self.clock.now() - self.begin).duration();
        Some(self.now)
    }
}
