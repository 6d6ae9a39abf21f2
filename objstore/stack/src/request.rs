//! Requests for callers in other languages, which name a layer's operation by the layer.

use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme_spec::nvm::Direction;
use objstore::{
    BlockId, BlockKey, Committed, Layer, LayerDone, Prefix, Store, StoreError, Ticket, Transfer,
    Writing,
};

use crate::{bounce::Bounced, error::StackError, stack::Stack};

/// A retrieval or storing of blocks, layer by layer. Several threads may use it.
///
/// Dropping it waits for its layers in flight and releases its resources; the engine may then use
/// its blocks again.
#[derive(Debug)]
pub struct Request {
    store: Store,
    /// `None` once it was committed.
    job: Option<Job>,
    /// The ticket of each layer in flight.
    tickets: Mutex<Vec<Option<Ticket>>>,
    bounced: Option<Bounced>,
}

#[derive(Debug)]
enum Job {
    Retrieve(Transfer),
    Store(Writing),
}

impl Request {
    /// Retrieves the positions of `prefix` from `first` on into `blocks`.
    ///
    /// # Errors
    /// Returns [`StackError::Bounce`], or an error of [`Store::retrieve_from`].
    pub fn retrieve(
        stack: &Stack,
        store: &Store,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Self, StackError> {
        let bounced = stack.bounce(blocks)?;
        let targets = bounced.as_ref().map_or(blocks, Bounced::buffers);
        let job = Job::Retrieve(store.retrieve_from(prefix, first, targets)?);
        Ok(Self::new(store, job, bounced))
    }

    /// Stores `blocks` under `keys`, as many leading ones as there is room for; see
    /// [`Store::allocate`].
    ///
    /// # Errors
    /// Returns [`StackError::Bounce`], or an error of [`Store::allocate`].
    pub fn store(
        stack: &Stack,
        store: &Store,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Self, StackError> {
        let bounced = stack.bounce(blocks)?;
        let sources = bounced.as_ref().map_or(blocks, Bounced::buffers);
        let job = Job::Store(store.allocate(keys, sources)?);
        Ok(Self::new(store, job, bounced))
    }

    fn new(store: &Store, job: Job, bounced: Option<Bounced>) -> Self {
        let layers = (0..store.shape().layers).map(|_| None).collect();
        Self { store: store.clone(), job: Some(job), tickets: Mutex::new(layers), bounced }
    }

    fn tickets(&self) -> MutexGuard<'_, Vec<Option<Ticket>>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns, for a storing request, the number of leading blocks stored after the commit, and
    /// how many of them this request writes; `None` for a retrieving one.
    #[must_use]
    pub fn accepted(&self) -> Option<(usize, usize)> {
        match &self.job {
            Some(Job::Store(writing)) => Some((writing.accepted(), writing.written())),
            _ => None,
        }
    }

    /// Starts a layer.
    ///
    /// # Errors
    /// Same as [`Store::retrieve_layer`].
    pub fn start(&self, layer: Layer) -> Result<(), StackError> {
        let mut tickets = self.tickets();
        let ticket = match &self.job {
            Some(Job::Retrieve(transfer)) => self.store.retrieve_layer(transfer, layer)?,
            Some(Job::Store(writing)) => {
                if let Some(bounced) = &self.bounced {
                    bounced.copy(layer, Direction::Write);
                }
                self.store.store_layer(writing, layer)?
            }
            None => return Err(StackError::NotStarted { layer }),
        };
        tickets[layer.0 as usize] = Some(ticket);
        Ok(())
    }

    /// Waits for a started layer. On return, no device uses the layer's blocks. Only one thread may
    /// wait for a layer.
    ///
    /// # Errors
    /// Returns [`StackError::NotStarted`], or an error of [`Store::wait`].
    pub fn wait(&self, layer: Layer) -> Result<LayerDone, StackError> {
        let ticket = self.tickets().get_mut(layer.0 as usize).and_then(Option::take);
        let ticket = ticket.ok_or(StackError::NotStarted { layer })?;
        let done = self.store.wait(ticket)?;
        self.arrived(layer);
        Ok(done)
    }

    /// Polls a layer: `None` while it is in flight.
    ///
    /// # Errors
    /// Same as [`Request::wait`].
    pub fn poll(&self, layer: Layer) -> Result<Option<LayerDone>, StackError> {
        let mut tickets = self.tickets();
        let slot = tickets.get_mut(layer.0 as usize);
        let slot = slot.ok_or(StackError::NotStarted { layer })?;
        let ticket = slot.as_ref().ok_or(StackError::NotStarted { layer })?;
        let polled = self.store.poll(ticket);
        if !matches!(polled, Ok(None)) {
            *slot = None;
        }
        drop(tickets);
        let done = polled?;
        if done.is_some() {
            self.arrived(layer);
        }
        Ok(done)
    }

    /// Moves all layers: starts as many as may be in flight, and waits for all of them. On return,
    /// no device uses the blocks.
    ///
    /// # Errors
    /// Returns the first error of [`Request::start`] or [`Request::wait`]; after that, no further
    /// layer is started.
    pub fn move_all(&self) -> Result<(), StackError> {
        let layers = self.store.shape().layers;
        let (mut started, mut waited, mut result) = (0, 0, Ok(()));
        while waited < started || (started < layers && result.is_ok()) {
            if started < layers && result.is_ok() {
                match self.start(Layer(started)) {
                    Ok(()) => {
                        started += 1;
                        continue;
                    }
                    // Other requests have the rest; a layer of this one must end first.
                    Err(StackError::Store(StoreError::Busy { .. })) if waited < started => {}
                    Err(error) => {
                        result = Err(error);
                        continue;
                    }
                }
            }
            result = result.and(self.wait(Layer(waited)).map(|_| ()));
            waited += 1;
        }
        result
    }

    /// Copies a retrieved layer out of its bounce buffers.
    fn arrived(&self, layer: Layer) {
        if let (Some(bounced), Some(Job::Retrieve(_))) = (&self.bounced, &self.job) {
            bounced.copy(layer, Direction::Read);
        }
    }

    /// Makes the stored blocks durable and visible; see [`Store::commit`].
    ///
    /// # Errors
    /// Returns [`StackError::NotWriting`], or an error of [`Store::commit`].
    pub fn commit(mut self) -> Result<Committed, StackError> {
        match self.job.take() {
            Some(Job::Store(writing)) => Ok(self.store.commit(writing)?),
            other => {
                self.job = other;
                Err(StackError::NotWriting)
            }
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let tickets = std::mem::take(&mut *self.tickets());
        for ticket in tickets.into_iter().flatten() {
            // The result is no longer of interest.
            let _ = self.store.wait(ticket);
        }
    }
}
