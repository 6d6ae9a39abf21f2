//! Layers that move when a scheduler says so, and not when they are asked for.

use std::{collections::HashMap, time::Duration};

use gio_uring::Progress;
use kv_catalog::{BlockId, BlockKey, Layer};
use kv_schedule::{Cancelled, Decision, Flow, Kind, Op, OpId, Scheduler, StepId, StepShape};
use kv_tier::{LookaheadConfig, LookaheadCounts, RequestId, When};
use nvme_driver::Nanos;

use super::{
    Inner, Store,
    ahead::Ahead,
    handles::{Transfer, Writing},
    lock,
};
use crate::{
    error::StoreError,
    order::Order,
    plane::{JobId, LayerDone, Ticket},
};

/// What became of a layer.
#[derive(Debug)]
pub enum PacedEnd {
    /// All of it is where it was to go.
    Moved(LayerDone),
    /// As [`Store::wait`] says, or it could not be started.
    Failed(StoreError),
    /// A prefetch that could not be done in time.
    Dropped,
}

/// A store whose layers move when a [`Scheduler`] says so (paper, section 3.3).
///
/// The engine asks for layers and says when its own begin and end; [`PacedStore::poll`], to be
/// called whenever something happened, starts and ends transfers. Times are those of any clock that
/// never goes back. Whoever uses the [`Store`] itself is not scheduled, and loses nothing.
#[derive(Debug)]
pub struct PacedStore {
    store: Store,
    scheduler: Scheduler,
    /// What operations are that wait.
    waiting: HashMap<OpId, (JobId, Layer)>,
    /// Of these, those that were started and found no operation free: they are tried again.
    refused: Vec<OpId>,
    /// In the order in which they were started.
    in_flight: Vec<(OpId, Ticket)>,
    ended: Vec<(OpId, PacedEnd)>,
    last: u64,
    /// When something last moved or was started, by the store's clock.
    moved_at: Nanos,
    ahead: Option<Ahead>,
}

impl PacedStore {
    /// Lets `scheduler` decide, which has nothing to do yet.
    #[must_use]
    pub fn new(store: Store, scheduler: Scheduler) -> Self {
        let depth = scheduler.config().write_depth_bytes;
        lock(&store.inner.commits).write_depth_bytes = depth;
        let (waiting, refused, in_flight, ended) = Default::default();
        let (last, moved_at, ahead) = (0, store.inner.clock.now(), None);
        Self { store, scheduler, waiting, refused, in_flight, ended, last, moved_at, ahead }
    }

    /// The same, and reads ahead for requests that are announced: from the devices to host memory
    /// ([`crate::StoreOptions::dram_bytes`]) as the scheduler lets it, and from there to the
    /// engine's blocks, once there are any, as `link` does. Times have to be those of the store's
    /// clock.
    #[must_use]
    pub fn with_lookahead(mut self, link: Scheduler, config: LookaheadConfig) -> Self {
        self.ahead = Some(Ahead::new(self.store.clone(), link, config));
        self
    }

    /// A request is going to run, with these keys: its blocks are read ahead. Says how many leading
    /// ones are stored; they stay so until it runs or is cancelled. Said again of the same request,
    /// the time is another one, and what was left is tried again: what could not be done in time,
    /// was not read well, or found no room. Without a lookahead or host memory, nothing is read.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn prefetch(
        &mut self,
        request: RequestId,
        keys: &[BlockKey],
        when: When,
        now: Duration,
    ) -> Result<usize, StoreError> {
        self.ahead.as_mut().map_or(Ok(0), |ahead| ahead.prefetch(request, keys, when, now))
    }

    /// The request has blocks: what is in host memory may be copied there, until it runs or is
    /// cancelled. A block for each of its leading keys; those of which nothing is stored are left
    /// alone. On a GPU, nothing that was enqueued on a stream uses them any more. Said again, it
    /// has these blocks instead, and none of the others is written to any more; what was copied to
    /// one that it has no longer, the request retrieves itself.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    pub fn allocated(&mut self, request: RequestId, blocks: &[BlockId]) -> Result<(), StoreError> {
        self.ahead.as_mut().map_or(Ok(()), |ahead| ahead.allocated(request, blocks))
    }

    /// The request runs now. Says how many leading blocks are where they are to go: it has to
    /// retrieve the others itself ([`Store::retrieve_from`]). None of its blocks is written to any
    /// more: what a GPU copies there is waited for.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    pub fn run(&mut self, request: RequestId) -> Result<usize, StoreError> {
        let scheduler = &mut self.scheduler;
        self.ahead.as_mut().map_or(Ok(0), |ahead| ahead.run(request, scheduler))
    }

    /// The request was aborted or preempted: nothing more is read for it, and none of its blocks is
    /// written to any more. What only it wanted is the first to go.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    pub fn abort(&mut self, request: RequestId) -> Result<(), StoreError> {
        let scheduler = &mut self.scheduler;
        self.ahead.as_mut().map_or(Ok(()), |ahead| ahead.cancel(request, scheduler))
    }

    /// An iteration of the engine took so long.
    pub fn iteration(&mut self, took: Duration) {
        if let Some(ahead) = &mut self.ahead {
            ahead.iteration(took);
        }
    }

    /// What the lookahead did; `None` without one. Of what was read from the devices for nothing,
    /// [`crate::DramStats::wasted_bytes`] has the count.
    #[must_use]
    pub fn lookahead(&self) -> Option<LookaheadCounts> {
        self.ahead.as_ref().map(Ahead::counts)
    }

    /// The store: for everything but layers.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What it goes by, and what it counts.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// As [`Scheduler::announce`].
    pub fn announce(&mut self, step: StepId, shape: StepShape, at: Duration) {
        self.scheduler.announce(step, shape, at);
    }

    /// As [`Scheduler::layer_begins`].
    pub fn layer_begins(&mut self, step: StepId, layer: Layer, now: Duration) {
        self.scheduler.layer_begins(step, layer.0, now);
    }

    /// As [`Scheduler::layer_ends`].
    pub fn layer_ends(&mut self, step: StepId, now: Duration) {
        self.scheduler.layer_ends(step, now);
    }

    /// As [`Scheduler::step_ends`].
    pub fn step_ends(&mut self, step: StepId) {
        self.scheduler.step_ends(step);
    }

    /// As [`Scheduler::drain`].
    pub fn drain(&mut self) {
        self.scheduler.drain();
    }

    /// Asks for a layer of a transfer; `kind` says when it is needed. The transfer has to live
    /// until the layer has ended.
    ///
    /// # Errors
    /// [`StoreError::Foreign`].
    ///
    /// # Panics
    /// For [`Kind::Write`].
    pub fn retrieve_layer(
        &mut self,
        transfer: &Transfer,
        layer: Layer,
        flow: Flow,
        kind: Kind,
        now: Duration,
    ) -> Result<OpId, StoreError> {
        assert!(kind != Kind::Write, "a transfer is read");
        self.store.own(&transfer.handle, "transfer")?;
        let op = self.op(transfer.blocks, flow, kind);
        self.scheduler.add(op, now).expect("only writes are refused");
        self.waiting.insert(op.id, (transfer.handle.job, layer));
        Ok(op.id)
    }

    /// Asks for a layer of a writing to be stored when that is in nobody's way. The writing has to
    /// live until the layer has ended.
    ///
    /// # Errors
    /// [`StoreError::Foreign`]; [`StoreError::Backlog`] when more waits already than may: give the
    /// writing up, it is a cache entry and no data.
    pub fn store_layer(
        &mut self,
        writing: &Writing,
        layer: Layer,
        flow: Flow,
        now: Duration,
    ) -> Result<OpId, StoreError> {
        self.store.own(&writing.handle, "writing")?;
        let op = self.op(writing.written, flow, Kind::Write);
        let job = writing.handle.job;
        let is_kept = self.store.inner.with_plane(|plane| Ok(plane.is_kept(job)))?;
        if !is_kept {
            self.scheduler.add(op, now)?;
        }
        self.waiting.insert(op.id, (job, layer));
        if is_kept {
            self.start(op.id, now);
        }
        Ok(op.id)
    }

    /// As [`Scheduler::cancel`]. What is in flight ends by itself.
    pub fn cancel(&mut self, id: OpId) -> Cancelled {
        let cancelled = self.scheduler.cancel(id);
        let mut started = self.in_flight.iter().map(|(id, _)| id).chain(&self.refused);
        // With write-back a layer is started without the scheduler.
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

    /// Takes note of what has ended, and starts what may start. Says whether anything moved, and
    /// when to call again although nothing happens.
    ///
    /// What is in flight for [`crate::StoreOptions::wait_timeout`] while nothing moves has failed,
    /// as for [`Store::wait`].
    ///
    /// # Errors
    /// [`StoreError::Failed`]. What a layer fails with is its [`PacedEnd`].
    pub fn poll(&mut self, now: Duration) -> Result<(Progress, Option<Duration>), StoreError> {
        let (in_flight, ended) = (&mut self.in_flight, &mut self.ended);
        let before = ended.len();
        let mut progress = self.store.inner.with_plane(|plane| {
            let progress = plane.reap()?;
            let over = in_flight.extract_if(.., |(_, ticket)| plane.is_over(ticket));
            let over: Vec<(OpId, Ticket)> = over.collect();
            ended.extend(over.into_iter().map(|(id, ticket)| match plane.poll(&ticket) {
                Ok(Some(done)) => (id, PacedEnd::Moved(done)),
                Ok(None) => unreachable!("it is over"),
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
        // What is read goes first.
        let mut again = None;
        if let Some(ahead) = &mut self.ahead {
            let (moved, until) = ahead.copy(now)?;
            again = until;
            progress = if moved { Progress::Moved } else { progress };
        }
        self.store.inner.tend();
        Ok((progress, until.into_iter().chain(again).chain(due).min()))
    }

    /// What has been in flight for too long, while nothing moved, is taken for dead.
    fn overdue(&mut self, progress: Progress) -> Result<(), StoreError> {
        let Inner { clock, wait_timeout, .. } = &*self.store.inner;
        let ahead = || self.ahead.as_ref().and_then(Ahead::oldest);
        let oldest = self.in_flight.first().map(|(_, ticket)| ticket).or_else(ahead);
        let is_quiet = progress == Progress::Idle && clock.now() > self.moved_at + *wait_timeout;
        if let Some(ticket) = oldest.filter(|_| is_quiet) {
            self.store.inner.with_plane(|plane| plane.overdue(ticket))?;
        }
        if oldest.is_none() || is_quiet || progress == Progress::Moved {
            self.moved_at = clock.now();
        }
        Ok(())
    }

    fn start(&mut self, id: OpId, now: Duration) {
        let (job, layer) = self.waiting[&id];
        let inner = &self.store.inner;
        let started = inner.with_plane(|plane| plane.start(job, layer, Order::Unordered));
        if let Err(StoreError::Busy { .. } | StoreError::StagingBusy { .. }) = started {
            return self.refused.push(id);
        }
        self.waiting.remove(&id);
        match started {
            Ok(ticket) => {
                self.moved_at = inner.clock.now();
                self.in_flight.push((id, ticket));
            }
            Err(error) => {
                self.scheduler.ended(id, 0, now);
                self.ended.push((id, PacedEnd::Failed(error)));
            }
        }
    }

    /// What has ended since the last call.
    pub fn ended(&mut self) -> Vec<(OpId, PacedEnd)> {
        std::mem::take(&mut self.ended)
    }

    /// Operations that were started and have not ended, but for those of the lookahead.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() + self.refused.len()
    }
}
