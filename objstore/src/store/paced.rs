//! A store whose layers move when a scheduler decides, not when they are requested.

use std::{collections::HashMap, time::Duration};

use gio_uring::Progress;
use kv_catalog::{BlockId, BlockKey, Layer};
use kv_schedule::{Cancelled, Decision, Flow, Kind, Op, OpId, Scheduler, StepId, StepShape};
use kv_tier::{LookaheadConfig, LookaheadCounts, RequestId, When};
use nvme_driver::Nanos;

use super::{
    Inner, Store,
    ahead::Ahead,
    handles::{LoadRequest, StoreRequest},
};
use crate::{
    error::StoreError,
    ids::{LayerDone, Ticket},
    order::Order,
    plane::Polled,
};

/// Result of a layer.
#[derive(Debug)]
pub enum PacedEnd {
    /// The whole layer was moved.
    Moved(LayerDone),
    /// The layer failed as [`Store::wait`] reports, or could not be started.
    Failed(StoreError),
    /// A prefetch that could not be done in time.
    Dropped,
}

/// A store whose layers move when a [`Scheduler`] decides (paper, section 3.3).
///
/// The engine requests layers and reports when it begins and ends its own;
/// [`PacedStore::poll`], to be called after every event, starts and ends transfers. Times are those
/// of any monotonic clock. Calls on the [`Store`] itself are not scheduled, and work as usual.
#[derive(Debug)]
pub struct PacedStore {
    store: Store,
    scheduler: Scheduler,
    /// Operations that wait to be started.
    waiting: HashMap<OpId, Ticket>,
    /// Started operations that found no free IOCB or staging buffer: they are retried.
    refused: Vec<OpId>,
    /// Operations in flight, in the order in which they were started.
    in_flight: Vec<(OpId, Ticket)>,
    ended: Vec<(OpId, PacedEnd)>,
    last: u64,
    /// Time when something last moved or was started, by the store's clock.
    moved_at: Nanos,
    ahead: Option<Ahead>,
}

impl PacedStore {
    /// Paces `store` with `scheduler`, which must be idle.
    #[must_use]
    pub fn new(store: Store, scheduler: Scheduler) -> Self {
        let (waiting, refused, in_flight, ended) = Default::default();
        let (last, moved_at, ahead) = (0, store.inner.clock.now(), None);
        Self { store, scheduler, waiting, refused, in_flight, ended, last, moved_at, ahead }
    }

    /// Adds reading ahead for announced requests: from the devices to host memory
    /// ([`crate::StoreOptions::dram_bytes`]) as the scheduler allows, and from there to the
    /// engine's blocks, once allocated, as `link` allows. Times must be those of the store's
    /// clock.
    #[must_use]
    pub fn with_lookahead(mut self, link: Scheduler, config: LookaheadConfig) -> Self {
        self.ahead = Some(Ahead::new(self.store.clone(), link, config));
        self
    }

    /// Announces a request with these keys, whose blocks are read ahead. Returns how many leading
    /// ones are stored; they stay stored until it runs or is cancelled. Calling it again updates
    /// the time and retries blocks that were late, failed to read, or found no room. Without a
    /// lookahead or a DRAM cache, nothing is read.
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn prefetch(
        &mut self,
        request: RequestId,
        keys: &[BlockKey],
        when: When,
        now: Duration,
    ) -> Result<usize, StoreError> {
        self.ahead.as_mut().map_or(Ok(0), |ahead| ahead.prefetch(request, keys, when, now))
    }

    /// Provides the request's blocks, one for each of its leading keys: data in host memory may be
    /// copied there until it runs or is cancelled. Blocks of keys that are not stored are left
    /// alone. On a GPU, no work enqueued on a stream may use the blocks any more. Calling it again
    /// replaces the blocks, and none of the old ones is written to any more; data copied to a block
    /// that is no longer in the list must be retrieved by the request itself.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn allocated(&mut self, request: RequestId, blocks: &[BlockId]) -> Result<(), StoreError> {
        self.ahead.as_mut().map_or(Ok(()), |ahead| ahead.allocated(request, blocks))
    }

    /// Ends reading ahead for a request that runs now. Returns how many leading blocks are in
    /// place: the request must retrieve the others itself ([`Store::retrieve_from`]). None of its
    /// blocks is written to any more: this waits for copies by a GPU.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn run(&mut self, request: RequestId) -> Result<usize, StoreError> {
        let scheduler = &mut self.scheduler;
        self.ahead.as_mut().map_or(Ok(0), |ahead| ahead.run(request, scheduler))
    }

    /// Ends reading ahead for an aborted or preempted request. None of its blocks is written to any
    /// more. Cached blocks that only it wanted are evicted first.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn abort(&mut self, request: RequestId) -> Result<(), StoreError> {
        let scheduler = &mut self.scheduler;
        self.ahead.as_mut().map_or(Ok(()), |ahead| ahead.cancel(request, scheduler))
    }

    /// Reports the duration of an iteration of the engine.
    pub fn iteration(&mut self, took: Duration) {
        if let Some(ahead) = &mut self.ahead {
            ahead.iteration(took);
        }
    }

    /// Returns counts of the lookahead; `None` without one. [`crate::DramStats::wasted_bytes`]
    /// counts device reads that turned out to be useless.
    #[must_use]
    pub fn lookahead(&self) -> Option<LookaheadCounts> {
        self.ahead.as_ref().map(Ahead::counts)
    }

    /// Returns the store, for everything except layers.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the scheduler, with its configuration and counts.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Same as [`Scheduler::announce`].
    pub fn announce(&mut self, step: StepId, shape: StepShape, at: Duration) {
        self.scheduler.announce(step, shape, at);
    }

    /// Same as [`Scheduler::layer_begins`].
    pub fn layer_begins(&mut self, step: StepId, layer: Layer, now: Duration) {
        self.scheduler.layer_begins(step, layer.0, now);
    }

    /// Same as [`Scheduler::layer_ends`].
    pub fn layer_ends(&mut self, step: StepId, now: Duration) {
        self.scheduler.layer_ends(step, now);
    }

    /// Same as [`Scheduler::step_ends`].
    pub fn step_ends(&mut self, step: StepId) {
        self.scheduler.step_ends(step);
    }

    /// Same as [`Scheduler::drain`].
    pub fn drain(&mut self) {
        self.scheduler.drain();
    }

    /// Requests a layer of a load request; `kind` tells when it is needed. The request must live
    /// until the layer has ended.
    ///
    /// # Errors
    /// Returns [`StoreError::Foreign`].
    ///
    /// # Panics
    /// Panics for [`Kind::Write`].
    pub fn retrieve_layer(
        &mut self,
        load: &LoadRequest,
        layer: Layer,
        flow: Flow,
        kind: Kind,
        now: Duration,
    ) -> Result<OpId, StoreError> {
        assert!(kind != Kind::Write, "a load request only reads");
        self.store.own(&load.handle, "load request")?;
        let op = self.op(load.blocks, flow, kind);
        self.scheduler.add(op, now).expect("only writes are refused");
        self.waiting.insert(op.id, load.ticket(layer));
        Ok(op.id)
    }

    /// Requests that a layer be stored when it delays no reads. The request must live until the
    /// layer has ended.
    ///
    /// # Errors
    /// Returns [`StoreError::Foreign`], or [`StoreError::Backlog`] if the backlog of writes is
    /// full: drop the request, it is only a cache entry.
    pub fn store_layer(
        &mut self,
        save: &StoreRequest,
        layer: Layer,
        flow: Flow,
        now: Duration,
    ) -> Result<OpId, StoreError> {
        self.store.own(&save.handle, "store request")?;
        let op = self.op(save.written, flow, Kind::Write);
        self.scheduler.add(op, now)?;
        self.waiting.insert(op.id, save.ticket(layer));
        Ok(op.id)
    }

    /// Same as [`Scheduler::cancel`]. Operations in flight end by themselves.
    pub fn cancel(&mut self, id: OpId) -> Cancelled {
        let cancelled = self.scheduler.cancel(id);
        let mut started = self.in_flight.iter().map(|(id, _)| id).chain(&self.refused);
        if started.any(|started| *started == id) {
            return Cancelled::InFlight;
        }
        self.waiting.remove(&id);
        cancelled
    }

    fn op(&mut self, blocks: usize, flow: Flow, kind: Kind) -> Op {
        self.last += 1;
        let shape = self.store.shape();
        let bytes = blocks as u64 * u64::from(shape.segments) * u64::from(shape.object_bytes);
        Op { id: OpId(self.last), flow, bytes, kind }
    }

    /// Records completions, and starts everything that may start. Returns the progress, and the
    /// time of the next call if no event occurs before.
    ///
    /// An operation in flight for [`crate::StoreOptions::wait_timeout`] while nothing moves has
    /// failed, the same as for [`Store::wait`].
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`]. Errors of a layer are in its [`PacedEnd`].
    pub fn poll(&mut self, now: Duration) -> Result<(Progress, Option<Duration>), StoreError> {
        let (in_flight, ended) = (&mut self.in_flight, &mut self.ended);
        let before = ended.len();
        let mut progress = self.store.inner.plane.with(|plane| {
            let progress = plane.reap()?;
            let over = in_flight.extract_if(.., |(_, ticket)| plane.is_over(*ticket));
            let over: Vec<(OpId, Ticket)> = over.collect();
            ended.extend(over.into_iter().map(|(id, ticket)| match plane.poll(ticket) {
                Ok(Polled::Done(done)) => (id, PacedEnd::Moved(done)),
                Ok(Polled::Pending(_)) => unreachable!("it is over"),
                Err(error) => (id, PacedEnd::Failed(error)),
            }));
            Ok(progress)
        })?;
        for (id, end) in &self.ended[before..] {
            let moved = if let PacedEnd::Moved(done) = end { done.device_bytes } else { 0 };
            self.scheduler.ended(*id, moved, now);
            progress = Progress::Moved;
        }
        let refused = std::mem::take(&mut self.refused);
        refused.iter().for_each(|id| self.start(*id, now));
        if self.refused.len() < refused.len() {
            progress = Progress::Moved;
        }
        self.overdue(progress)?;
        let due = match &mut self.ahead {
            Some(ahead) => ahead.plan(&mut self.scheduler, now)?,
            None => None,
        };
        let until = loop {
            match (self.scheduler.next(now), &mut self.ahead) {
                (Decision::Wait(until), _) => break until,
                (Decision::Start(id), Some(ahead)) if ahead.owns(id) => {
                    ahead.read(id, &mut self.scheduler, now)?;
                }
                (Decision::Drop(id), Some(ahead)) if ahead.owns(id) => ahead.dropped(id),
                (Decision::Start(id), _) => self.start(id, now),
                (Decision::Drop(id), _) => {
                    self.waiting.remove(&id);
                    self.ended.push((id, PacedEnd::Dropped));
                }
            }
            progress = Progress::Moved;
        };
        // Reads go first.
        let mut again = None;
        if let Some(ahead) = &mut self.ahead {
            let (moved, until) = ahead.copy(now)?;
            again = until;
            progress = if moved { Progress::Moved } else { progress };
        }
        Ok((progress, until.into_iter().chain(again).chain(due).min()))
    }

    /// Handles an operation that has been in flight for too long while nothing moved as dead.
    fn overdue(&mut self, progress: Progress) -> Result<(), StoreError> {
        let Inner { clock, wait_timeout, .. } = &*self.store.inner;
        let ahead = || self.ahead.as_ref().and_then(Ahead::oldest);
        let oldest = self.in_flight.first().map(|(_, ticket)| ticket).or_else(ahead);
        let is_quiet = progress == Progress::Idle && clock.now() > self.moved_at + *wait_timeout;
        if let Some(ticket) = oldest.filter(|_| is_quiet) {
            self.store.inner.plane.with(|plane| plane.overdue(*ticket))?;
        }
        if oldest.is_none() || is_quiet || progress == Progress::Moved {
            self.moved_at = clock.now();
        }
        Ok(())
    }

    fn start(&mut self, id: OpId, now: Duration) {
        let ticket = self.waiting[&id];
        let inner = &self.store.inner;
        let started = inner.plane.with(|plane| plane.start(ticket, Order::Unordered));
        if let Err(StoreError::Busy { .. } | StoreError::StagingBusy { .. }) = started {
            return self.refused.push(id);
        }
        self.waiting.remove(&id);
        match started {
            Ok(()) => {
                self.moved_at = inner.clock.now();
                self.in_flight.push((id, ticket));
            }
            Err(error) => {
                self.scheduler.ended(id, 0, now);
                self.ended.push((id, PacedEnd::Failed(error)));
            }
        }
    }

    /// Returns the operations that ended since the last call.
    pub fn ended(&mut self) -> Vec<(OpId, PacedEnd)> {
        std::mem::take(&mut self.ended)
    }

    /// Returns the number of operations in flight, without those of the lookahead.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() + self.refused.len()
    }
}
