//! Requests for callers in other languages, which name a layer's operation by the layer.

use std::sync::Arc;

use kv_schedule::Flow;
use objstore::{
    BlockId, BlockKey, Committed, JobId, Layer, LayerDone, LoadRequest, Order, PoolId, Prefix,
    Reservation, Store, StoreError, StoreRequest, Ticket, Transfer,
};

use crate::{error::StackError, found::find, own::Process};

/// A retrieval or storing of blocks, layer by layer. Several threads may use it.
///
/// Dropping it waits for its layers in flight ([`Store::wait`]), forgets those that wait for their
/// turn, and releases its resources; the engine may then use its blocks again. A request of a store
/// that was closed, or whose [`crate::Stack`] was dropped, has nothing in flight. A forked process
/// can only drop it, which does nothing.
#[derive(Debug)]
pub struct Request {
    store: Store,
    /// `None` once it was committed.
    job: Option<Job>,
    process: Process,
}

#[derive(Debug)]
enum Job {
    Retrieve(LoadRequest),
    Store(StoreRequest),
}

impl Request {
    /// Retrieves the positions of `prefix` from `first` on into `blocks`.
    ///
    /// # Errors
    /// Returns an error of [`Store::retrieve_from`].
    pub fn retrieve(
        store: &Store,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Self, StackError> {
        Ok(Self::new(store, Job::Retrieve(store.retrieve_from(prefix, first, blocks)?)))
    }

    /// Retrieves those of `keys` that are stored ([`find`]), each into its block, and returns which
    /// they are.
    ///
    /// # Errors
    /// Returns an error of [`find`], [`Store::lookup`] or [`Store::retrieve`].
    pub fn fetch(
        store: &Store,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<(Self, Vec<bool>), StackError> {
        let lookup = |keys: &[BlockKey]| Ok(store.lookup(keys)?);
        let are_stored = |keys: &[BlockKey]| Ok(store.are_stored(keys)?);
        let (prefix, blocks, found) = find::<_, StackError>(keys, blocks, lookup, are_stored)?;
        Ok((Self::retrieve(store, &prefix, 0, &blocks)?, found))
    }

    /// Stores `blocks` under `keys`, as many leading ones as there is room for; see
    /// [`Store::allocate`].
    ///
    /// # Errors
    /// Returns an error of [`Store::allocate`].
    pub fn store(store: &Store, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Self, StackError> {
        Ok(Self::new(store, Job::Store(store.allocate(keys, blocks)?)))
    }

    fn new(store: &Store, job: Job) -> Self {
        Self { store: store.clone(), job: Some(job), process: Process::current() }
    }

    fn transfer(&self, layer: Layer) -> Result<&Transfer, StackError> {
        self.process.check()?;
        match &self.job {
            Some(Job::Retrieve(load)) => Ok(load),
            Some(Job::Store(save)) => Ok(save),
            None => Err(StoreError::NotStarted { layer }.into()),
        }
    }

    fn ticket(&self, layer: Layer) -> Result<Ticket, StackError> {
        Ok(self.transfer(layer)?.ticket(layer))
    }

    /// Returns the job, for calls of [`objstore::Plane`].
    ///
    /// # Errors
    /// Returns [`StoreError::NotStarted`] once it was committed.
    pub fn id(&self) -> Result<JobId, StackError> {
        Ok(self.ticket(Layer(0))?.job)
    }

    /// Sets the owner of the request, whose other requests share its part of a paced store.
    ///
    /// # Errors
    /// Same as [`objstore::Plane::assign`].
    pub fn assign(&self, owner: u32) -> Result<(), StackError> {
        let id = self.id()?;
        Ok(self.store.plane().assign(id, Flow { tenant: owner, request: id.0 }, None)?)
    }

    /// Starts the layers that wait for their turn, and later ones at once.
    ///
    /// # Errors
    /// Same as [`objstore::Plane::hurry`].
    pub fn hurry(&self) -> Result<(), StackError> {
        Ok(self.store.plane().hurry(self.id()?)?)
    }

    /// Retrieves these positions of `prefix` into `blocks`, one for each.
    ///
    /// # Errors
    /// Returns an error of [`Store::retrieve_at`].
    pub fn retrieve_at(
        store: &Store,
        prefix: &Prefix,
        positions: &[usize],
        blocks: &[BlockId],
    ) -> Result<Self, StackError> {
        Ok(Self::new(store, Job::Retrieve(store.retrieve_at(prefix, positions, blocks)?)))
    }

    /// Writes `blocks` to these positions of a reservation, one for each.
    ///
    /// # Errors
    /// Returns an error of [`Store::fill`].
    pub fn fill(
        store: &Store,
        reservation: &Arc<Reservation>,
        positions: &[u32],
        blocks: &[BlockId],
    ) -> Result<Self, StackError> {
        Ok(Self::new(store, Job::Store(store.fill(reservation, positions, blocks)?)))
    }

    /// Ends requests of one store: waits for their layers in flight, and makes permanent what they
    /// wrote to reservations. Returns the failure of each.
    ///
    /// # Errors
    /// Returns an error of [`Store::end`].
    pub fn end_all(requests: Vec<Self>) -> Result<Vec<Option<StoreError>>, StackError> {
        let Some(first) = requests.first() else { return Ok(Vec::new()) };
        let jobs = requests.iter().map(Self::id).collect::<Result<Vec<JobId>, StackError>>()?;
        let ended = first.store.end(&jobs)?;
        Ok(ended.into_iter().map(|done| done.failure).collect())
    }

    /// Returns, for a storing request, the number of leading blocks stored after the commit, and
    /// how many of them this request writes; `None` for a retrieving one.
    #[must_use]
    pub fn accepted(&self) -> Option<(usize, usize)> {
        match &self.job {
            Some(Job::Store(save)) => Some((save.accepted(), save.written())),
            _ => None,
        }
    }

    /// Starts a layer; waits while as many are in flight as there may be.
    ///
    /// # Errors
    /// Same as [`Store::start`].
    pub fn start(&self, layer: Layer) -> Result<(), StackError> {
        self.store.start(self.transfer(layer)?, layer, Order::Unordered)?;
        Ok(())
    }

    /// Same as [`Request::start`], at the same blocks of another pool.
    ///
    /// # Errors
    /// Same as [`objstore::Plane::start_at`].
    pub fn start_at(&self, layer: Layer, pool: PoolId) -> Result<(), StackError> {
        Ok(self.store.plane().start_at(self.ticket(layer)?, pool)?)
    }

    /// Waits for a started layer. On return, no device uses the layer's blocks.
    ///
    /// # Errors
    /// Same as [`Store::wait`].
    pub fn wait(&self, layer: Layer) -> Result<LayerDone, StackError> {
        Ok(self.store.wait(self.ticket(layer)?)?)
    }

    /// Polls a layer: `None` while it is in flight.
    ///
    /// # Errors
    /// Same as [`Request::wait`].
    pub fn poll(&self, layer: Layer) -> Result<Option<LayerDone>, StackError> {
        Ok(self.store.poll(&self.ticket(layer)?)?)
    }

    /// Moves all layers, and waits for them. On return, no device uses the blocks.
    ///
    /// # Errors
    /// Same as [`Store::move_all`].
    pub fn move_all(&self) -> Result<(), StackError> {
        self.store.move_all(self.transfer(Layer(0))?)?;
        Ok(())
    }

    /// Makes the stored blocks durable and visible; see [`Store::commit`].
    ///
    /// # Errors
    /// Returns [`StackError::NotWriting`], [`StackError::Forked`], or an error of
    /// [`Store::commit`].
    pub fn commit(mut self) -> Result<Committed, StackError> {
        self.process.check()?;
        match self.job.take() {
            Some(Job::Store(save)) => Ok(self.store.commit(save)?),
            other => {
                self.job = other;
                Err(StackError::NotWriting)
            }
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.process.check().is_err() {
            std::mem::forget((self.job.take(), self.store.clone()));
            return;
        }
        if let Ok(id) = self.id() {
            // Or the waits below would start layers that wait for their turn.
            self.store.plane().abandon(id);
        }
        for layer in (0..self.store.shape().layers).map(Layer) {
            if let Ok(ticket) = self.ticket(layer) {
                // The result is no longer of interest, nor are layers that were not started.
                let _ = self.store.wait(ticket);
            }
        }
    }
}
