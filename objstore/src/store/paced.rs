//! Layers that move when a scheduler says so, and not when they are asked for.

use std::{collections::HashMap, time::Duration};

use gio_uring::Progress;
use kv_catalog::Layer;
use kv_schedule::{Cancelled, Decision, Flow, Kind, Op, OpId, Scheduler, StepId, StepShape};

use super::{
    Store,
    handles::{Transfer, Writing},
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
    /// In the order in which they were started.
    in_flight: Vec<(OpId, Ticket)>,
    ended: Vec<(OpId, PacedEnd)>,
    last: u64,
}

impl PacedStore {
    /// Lets `scheduler` decide, which has nothing to do yet.
    #[must_use]
    pub fn new(store: Store, scheduler: Scheduler) -> Self {
        let (waiting, in_flight, ended) = Default::default();
        Self { store, scheduler, waiting, in_flight, ended, last: 0 }
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
        self.scheduler.add(op, now)?;
        self.waiting.insert(op.id, (writing.handle.job, layer));
        Ok(op.id)
    }

    /// As [`Scheduler::cancel`]. What is in flight ends by itself.
    pub fn cancel(&mut self, id: OpId) -> Cancelled {
        self.waiting.remove(&id);
        self.scheduler.cancel(id)
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
        for (id, _) in &self.ended[before..] {
            self.scheduler.ended(*id, now);
            progress = Progress::Moved;
        }
        loop {
            match self.scheduler.next(now) {
                Decision::Start(id) => self.start(id, now),
                Decision::Drop(id) => {
                    self.waiting.remove(&id);
                    self.ended.push((id, PacedEnd::Dropped));
                }
                Decision::Wait(until) => return Ok((progress, until)),
            }
            progress = Progress::Moved;
        }
    }

    fn start(&mut self, id: OpId, now: Duration) {
        let (job, layer) = self.waiting.remove(&id).expect("it waits");
        let inner = &self.store.inner;
        match inner.with_plane(|plane| plane.start(job, layer, Order::Unordered)) {
            Ok(ticket) => self.in_flight.push((id, ticket)),
            Err(error) => {
                self.scheduler.ended(id, now);
                self.ended.push((id, PacedEnd::Failed(error)));
            }
        }
    }

    /// What has ended since the last call.
    pub fn ended(&mut self) -> Vec<(OpId, PacedEnd)> {
        std::mem::take(&mut self.ended)
    }

    /// Operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The store, and what was learned. Nothing may wait or be in flight.
    ///
    /// # Panics
    /// When something does.
    #[must_use]
    pub fn into_parts(self) -> (Store, Scheduler) {
        assert!(self.waiting.is_empty() && self.in_flight.is_empty(), "layers have not ended");
        (self.store, self.scheduler)
    }
}
