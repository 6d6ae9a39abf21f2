//! Requests as an engine without Rust's types uses them: a layer's operation is named by its layer.

use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme_spec::nvm::Direction;
use objstore::{
    BlockId, BlockKey, Committed, Layer, LayerDone, Prefix, Store, StoreError, Ticket, Transfer,
    Writing,
};

use crate::{bounce::Bounced, error::StackError, stack::Stack};

/// Blocks that are being retrieved or stored, layer by layer. Several threads may use it.
///
/// Dropping it gives back what it holds, and waits for its layers in flight first: the engine's
/// blocks are its own again afterwards.
#[derive(Debug)]
pub struct Request {
    store: Store,
    /// `None` once it was committed.
    job: Option<Job>,
    /// Of each layer in flight.
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
    /// As for [`Store::retrieve_from`], and [`StackError::Bounce`].
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

    /// Stores `blocks` under `keys`, as many leading ones as there is room for: see
    /// [`Store::allocate`].
    ///
    /// # Errors
    /// As there, and [`StackError::Bounce`].
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

    /// For a storing request, how many leading blocks will be found after the commit, and how many
    /// of them it stores itself; `None` for a retrieving one.
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
    /// As for [`Store::retrieve_layer`].
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

    /// Waits for a layer that was started. When this returns, no device uses the layer's blocks any
    /// more. One thread waits for a layer.
    ///
    /// # Errors
    /// As for [`Store::wait`], and [`StackError::NotStarted`].
    pub fn wait(&self, layer: Layer) -> Result<LayerDone, StackError> {
        let ticket = self.tickets().get_mut(layer.0 as usize).and_then(Option::take);
        let ticket = ticket.ok_or(StackError::NotStarted { layer })?;
        let done = self.store.wait(ticket)?;
        self.arrived(layer);
        Ok(done)
    }

    /// As [`Request::wait`], without waiting: `None` while the layer is in flight.
    ///
    /// # Errors
    /// As for [`Request::wait`].
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

    /// Moves all layers: starts as many as may be in flight, and waits for all of them. When this
    /// returns, no device uses the blocks any more.
    ///
    /// # Errors
    /// Those of the first [`Request::start`] or [`Request::wait`] that fails; after that, no
    /// further layer is started.
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
                    // Other requests have the rest; ours make room first.
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

    /// A retrieved layer is where the devices put it.
    fn arrived(&self, layer: Layer) {
        if let (Some(bounced), Some(Job::Retrieve(_))) = (&self.bounced, &self.job) {
            bounced.copy(layer, Direction::Read);
        }
    }

    /// Makes what was stored permanent and visible: see [`Store::commit`].
    ///
    /// # Errors
    /// As there, and [`StackError::NotWriting`].
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
            // What became of it nobody asks any more.
            let _ = self.store.wait(ticket);
        }
    }
}
