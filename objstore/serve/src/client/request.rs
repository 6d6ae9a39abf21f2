//! Requests of a client: blocks that are loaded or stored, layer by layer.

use std::ops::Range;

use objstore::{BlockId, BlockKey, Committed, Layer};
use ripieno_stack::StackError;

use super::{Client, Handle, Prefix, SpaceId, unexpected};
use crate::{
    error::ServeError,
    protocol::{Answer, Call, Keys},
};

/// Blocks that are being loaded or stored. Dropping it waits for its layers in flight, and frees
/// what was not committed.
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct Request {
    /// The request, and what ends with it.
    pub(crate) handle: Handle,
    /// Leading layers that were started with it.
    started: u32,
    /// The reservation that it fills, if it stores blocks.
    reservation: Option<u64>,
    accepted: usize,
    moved: usize,
}

impl Client {
    /// Prepares to load, and starts leading layers.
    pub(super) fn begin_load(
        &self,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
        layers: u32,
    ) -> Result<Request, ServeError> {
        let first = u32::try_from(first).unwrap_or(u32::MAX);
        let positions = (0..blocks.len() as u32).map(|at| first.saturating_add(at)).collect();
        let Prefix { handle, number, .. } = prefix;
        let (prefix, blocks) = (*number, numbers(blocks));
        self.request(handle.generation, &Call::Load { prefix, positions, blocks, layers })
    }

    /// Prepares to store blocks, and starts leading layers.
    pub(super) fn begin_save(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
        layers: u32,
    ) -> Result<Request, ServeError> {
        if keys.len() != blocks.len() {
            let (what, given) = ("blocks, one for each key", blocks.len() as u64);
            return Err(ServeError::Argument { what, given, expected: keys.len() as u64 });
        }
        let (namespace, keys) = (space.number, Keys(keys.to_vec()));
        let call = Call::Reserve { namespace, keys };
        let (reservation, accepted, positions) = match self.call_in(space.generation, &call)? {
            Answer::Reserved { reservation, accepted, positions } => {
                (reservation, accepted as usize, positions)
            }
            other => return Err(unexpected(&other)),
        };
        let reserved = self.handle(reservation, space.generation);
        let block = |at: &u32| Some(blocks.get(*at as usize)?.0);
        let Some(blocks) = positions.iter().map(block).collect::<Option<Vec<u32>>>() else {
            return Err(ServeError::Answer { found: format!("positions {positions:?}") });
        };
        let call = Call::Fill { reservation, positions, blocks, layers };
        let mut request = self.request(space.generation, &call)?;
        request.handle.join(reserved);
        Ok(Request { reservation: Some(reservation), accepted, ..request })
    }

    pub(crate) fn request(&self, generation: u64, call: &Call) -> Result<Request, ServeError> {
        let moved = match call {
            Call::Load { blocks, .. } | Call::Fill { blocks, .. } => blocks.len(),
            _ => 0,
        };
        match self.call_in(generation, call)? {
            Answer::Request { request, started } => {
                let handle = self.handle(request, generation);
                Ok(Request { handle, started, reservation: None, accepted: moved, moved })
            }
            other => Err(unexpected(&other)),
        }
    }
}

impl Request {
    /// Returns how many leading blocks will be found after the commit; of a load, its blocks.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// Returns how many blocks it moves.
    #[must_use]
    pub fn moved(&self) -> usize {
        self.moved
    }

    /// Starts a layer. The devices may access its blocks until [`Request::wait`] returns.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], [`ServeError::Stale`] or [`ServeError::Lost`].
    pub fn start(&self, layer: Layer) -> Result<(), ServeError> {
        self.start_all(layer.0..layer.0 + 1)
    }

    /// Starts layers in this order, by one message if the server takes all of them at once.
    ///
    /// # Errors
    /// Same as [`Request::start`]; layers before the one that is refused are started.
    pub fn start_all(&self, layers: Range<u32>) -> Result<(), ServeError> {
        self.each(layers, |request, layers| Call::Start { request, layers }).1
    }

    /// Makes calls about layers, each of which the server may answer for leading ones only. Returns
    /// the layer with which it ended.
    fn each(
        &self,
        layers: Range<u32>,
        call: impl Fn(u64, Range<u32>) -> Call,
    ) -> (u32, Result<(), ServeError>) {
        let (Handle { client, generation, .. }, mut at) = (&self.handle, layers.start);
        while at < layers.end {
            match client.number(*generation, &call(self.handle.numbers[0], at..layers.end)) {
                Ok(0) => return (at, Err(unexpected(&Answer::Number(0)))),
                Ok(done) => at = at.saturating_add(done),
                Err(error) => return (at, Err(error)),
            }
        }
        (at, Ok(()))
    }

    /// Waits for a layer that was started. No device accesses its blocks any more, unless the
    /// session was lost.
    ///
    /// # Errors
    /// Same as [`Request::start`].
    pub fn wait(&self, layer: Layer) -> Result<(), ServeError> {
        self.wait_all(layer.0..layer.0 + 1)
    }

    /// Waits for layers that were started, by one message if that does not take long.
    ///
    /// # Errors
    /// Returns the first error.
    pub fn wait_all(&self, layers: Range<u32>) -> Result<(), ServeError> {
        let (mut at, mut first) = (layers.start, Ok(()));
        while at < layers.end {
            let (failed, waited) =
                self.each(at..layers.end, |request, layers| Call::Wait { request, layers });
            let goes_on = matches!(waited, Ok(()) | Err(ServeError::Refused { .. }));
            first = first.and(waited);
            // Of the others, too: then nothing uses their blocks any more.
            at = if goes_on { failed.saturating_add(1) } else { layers.end };
        }
        first
    }

    /// Starts the layers that wait for their turn at a server that paces, and later ones at once.
    ///
    /// # Errors
    /// Same as [`Request::start`].
    pub fn hurry(&self) -> Result<(), ServeError> {
        let Handle { client, numbers, generation, .. } = &self.handle;
        client.done(*generation, &Call::Hurry { request: numbers[0] })
    }

    /// Starts all layers, and waits for them. No device accesses the blocks any more, unless the
    /// session was lost.
    ///
    /// # Errors
    /// Returns the first error of a wait, or else that of a start, after which no further layer is
    /// started.
    pub fn move_all(&self) -> Result<(), ServeError> {
        let layers = self.started..self.handle.client.inner.shape.layers;
        let (begun, started) = self.each(layers, |request, layers| Call::Start { request, layers });
        self.wait_all(0..begun).and(started)
    }

    /// Makes the stored blocks durable and visible to all clients of the namespace.
    ///
    /// # Errors
    /// Same as [`Request::start`]. After [`ServeError::Lost`] they are either found or not.
    pub fn commit(self) -> Result<Committed, ServeError> {
        let (Handle { client, numbers, generation, .. }, Some(reservation)) =
            (&self.handle, self.reservation)
        else {
            return Err(StackError::NotWriting.into());
        };
        let requests = vec![numbers[0]];
        let call = Call::Publish { reservation, requests, is_durable: true };
        let done = client.done(*generation, &call);
        // After a refusal, the request may be left.
        *self.handle.is_over() = done.is_ok();
        done.map(|()| Committed { accepted: self.accepted, written: self.moved })
    }

    /// Returns true if a layer that was started has ended.
    ///
    /// # Errors
    /// Same as [`Request::wait`].
    pub fn poll(&self, layer: Layer) -> Result<bool, ServeError> {
        let Handle { client, numbers, generation, .. } = &self.handle;
        let call = Call::Poll { request: numbers[0], layer: layer.0 };
        Ok(client.number(*generation, &call)? > 0)
    }
}

pub(crate) fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}
