//! Prefixes and reservations of a client, and requests that move their blocks layer by layer.

use std::{collections::BTreeSet, ops::Range, sync::Mutex, time::Instant};

use kv_catalog::lock;
use objstore::{BlockId, BlockKey, Committed, Direction, Layer};
use ripieno_stack::{RawStream, StackError, find};

use super::{ANSWER_TIMEOUT, Client, SpaceId, answer, unexpected};
use crate::{
    error::ServeError,
    protocol::{Answer, Call, Ended, Mark},
};

/// Bits of a place that are a position of a prefix or reservation. A message has fewer keys.
const POSITION_BITS: u32 = 16;

/// Numbers of a session, which are released on drop.
#[derive(Debug)]
pub(super) struct Handle {
    client: Client,
    generation: u64,
    /// The one that it is about, and others that end with it.
    numbers: Vec<u64>,
    /// Set when a call was made that ends them.
    is_over: Mutex<bool>,
}

impl Handle {
    pub(super) fn new(client: &Client, generation: u64, number: u64) -> Self {
        let (client, is_over) = (client.clone(), Mutex::new(false));
        Self { client, generation, numbers: vec![number], is_over }
    }

    /// Has the numbers of another handle released with these.
    fn join(&mut self, mut other: Self) {
        self.numbers.append(&mut other.numbers);
    }

    fn number(&self) -> u64 {
        self.numbers[0]
    }

    fn call(&self, call: &Call) -> Result<Answer, ServeError> {
        self.client.call_in(self.generation, call)
    }

    /// Notes that the call was made.
    fn set_over(&self) {
        *lock(&self.is_over) = true;
    }

    /// Makes the call that ends the numbers, within the client's time. Does nothing the second
    /// time.
    fn release(&self, client: &Client) -> Result<(), ServeError> {
        if self.numbers.is_empty() || std::mem::replace(&mut *lock(&self.is_over), true) {
            return Ok(());
        }
        let call = Call::Release { handles: self.numbers.clone() };
        answer!(client.call_in(self.generation, &call), Answer::Done => ())
    }

    /// Returns the place of a position: plain data for other clients of the engine.
    fn place(&self, position: u32) -> u64 {
        self.number() << POSITION_BITS | u64::from(position)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Of a session that was lost, the server has released it.
        let _ = self.release(&self.client);
    }
}

/// Stored blocks that a lookup found. They stay stored until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it gives the blocks back"]
pub struct Prefix {
    handle: Handle,
    blocks: u32,
}

impl Prefix {
    pub(super) fn new(handle: Handle, blocks: u32) -> Self {
        Self { handle, blocks }
    }

    /// Returns the number of blocks found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks as usize
    }

    /// Returns true if not even the first block was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Returns its number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.handle.number()
    }

    /// Returns the place of each block, in order, for [`Client::begin`] of the engine's ranks.
    #[must_use]
    pub fn places(&self) -> Vec<u64> {
        (0..self.blocks).map(|at| self.handle.place(at)).collect()
    }
}

/// Room for new blocks. Dropping it frees what was not published.
#[derive(Debug)]
#[must_use = "dropping it gives the room back"]
pub struct Reservation {
    handle: Handle,
    accepted: u32,
    positions: Vec<u32>,
}

impl Reservation {
    pub(super) fn new(handle: Handle, accepted: u32, positions: Vec<u32>) -> Self {
        Self { handle, accepted, positions }
    }

    /// Returns how many leading keys lookups find once it is published.
    #[must_use]
    pub fn accepted(&self) -> u32 {
        self.accepted
    }

    /// Returns the positions, among these, of the blocks to store.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Returns its number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.handle.number()
    }

    /// Returns the places to store them at, for [`Client::begin`] of the engine's ranks.
    #[must_use]
    pub fn places(&self) -> Vec<u64> {
        self.positions.iter().map(|at| self.handle.place(*at)).collect()
    }

    /// Reports that a rank has filled its part, or failed to. Returns `None` while other ranks have
    /// not reported, true if it can be published, and false if it has ended.
    ///
    /// # Errors
    /// Same as [`Client::peek`], and [`ServeError::Stale`].
    pub fn report(&self, rank: u32, is_filled: bool) -> Result<Option<bool>, ServeError> {
        let call = Call::Report { reservation: self.number(), rank, is_filled };
        let reported = answer!(self.handle.call(&call), Answer::Reported(reported) => reported)?;
        if reported == Some(false) {
            self.handle.set_over();
        }
        Ok(reported)
    }

    /// Makes its blocks visible to all clients of the namespace. They are durable when this returns
    /// if that is asked for, or else after [`Client::sync`].
    ///
    /// # Errors
    /// Same as [`Reservation::report`]. After [`ServeError::Lost`] they are either found or not.
    pub fn publish(&self, is_durable: bool) -> Result<(), ServeError> {
        let call = Call::Publish { reservation: self.number(), requests: Vec::new(), is_durable };
        answer!(self.handle.call(&call), Answer::Done => self.handle.set_over())
    }
}

/// Blocks that are being loaded or stored. Dropping it waits for its layers in flight, and frees
/// what was not committed: nothing accesses the blocks then. Those that were being loaded in a
/// session that was lost, and whose end no server confirms, are zeros, if they are whole pages of
/// the memory; others may still be written to until the next session has begun.
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct Request {
    /// The request, and what ends with it: of a save, its reservation.
    handle: Handle,
    direction: Direction,
    /// The prefix or reservation.
    of: u64,
    blocks: Vec<BlockId>,
    /// Layers that may be in flight.
    moving: Mutex<BTreeSet<u32>>,
    /// Leading layers that were started with it.
    started: u32,
    accepted: usize,
}

impl Client {
    /// Prepares to load the positions of a prefix from `first` on.
    ///
    /// # Errors
    /// Same as [`Client::peek`], and [`ServeError::Stale`].
    pub fn retrieve(
        &self,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Request, ServeError> {
        self.begin_load(prefix, first, blocks, 0)
    }

    fn begin_load(
        &self,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
        layers: u32,
    ) -> Result<Request, ServeError> {
        let first = u32::try_from(first).unwrap_or(u32::MAX);
        let positions = (0..blocks.len() as u32).map(|at| first.saturating_add(at)).collect();
        let of = (prefix.handle.generation, Direction::Read, prefix.number());
        self.request(of, positions, blocks.to_vec(), layers)
    }

    /// Prepares to store blocks, as many leading ones as there is room for.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn allocate(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Request, ServeError> {
        self.begin_save(space, keys, blocks, 0)
    }

    fn begin_save(
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
        // Before others are evicted for a call that is refused.
        blocks.iter().try_for_each(|block| self.inside(block.0 < self.blocks(), *block))?;
        let Reservation { handle, accepted, positions } = self.reserve(space, keys)?;
        let block = |at: &u32| blocks.get(*at as usize).copied();
        let Some(own) = positions.iter().map(block).collect::<Option<Vec<BlockId>>>() else {
            return Err(ServeError::Answer { found: format!("positions {positions:?}") });
        };
        let of = (handle.generation, Direction::Write, handle.number());
        let mut request = self.request(of, positions, own, layers)?;
        request.handle.join(handle);
        request.accepted = accepted as usize;
        Ok(request)
    }

    /// Prepares to move blocks from or to places, one for each, which are of one prefix or
    /// reservation of this client's engine.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn begin(
        &self,
        direction: Direction,
        places: &[u64],
        blocks: Vec<BlockId>,
    ) -> Result<Request, ServeError> {
        let of = places.first().map_or(0, |place| place >> POSITION_BITS);
        if let Some(other) = places.iter().find(|place| *place >> POSITION_BITS != of) {
            let (what, given) = ("places of one prefix or reservation", other >> POSITION_BITS);
            return Err(ServeError::Argument { what, given, expected: of });
        }
        let mask = (1 << POSITION_BITS) - 1;
        let positions = places.iter().map(|place| (place & mask) as u32).collect();
        self.request((self.live()?, direction, of), positions, blocks, 0)
    }

    /// Makes a request of a session that moves blocks of a prefix or reservation, and starts its
    /// leading layers.
    fn request(
        &self,
        (session, direction, of): (u64, Direction, u64),
        positions: Vec<u32>,
        blocks: Vec<BlockId>,
        layers: u32,
    ) -> Result<Request, ServeError> {
        let numbers = blocks.iter().map(|block| block.0).collect();
        let call = match direction {
            Direction::Read => Call::Load { prefix: of, positions, blocks: numbers, layers },
            Direction::Write => Call::Fill { reservation: of, positions, blocks: numbers, layers },
        };
        let answered = self.call_in(session, &call);
        if let (Err(error), Direction::Read) = (&answered, direction) {
            self.settle(session, &blocks, &(0..layers).collect(), error)?;
        }
        answer!(answered, Answer::Request { request, started } => {
            let (handle, accepted) = (Handle::new(self, session, request), blocks.len());
            let moving = Mutex::new((0..started).collect());
            Request { handle, direction, of, blocks, moving, started, accepted }
        })
    }

    /// Prepares to load those of the keys that are stored ([`find`]), each into its block, and
    /// starts leading layers. Returns which keys they are.
    ///
    /// # Errors
    /// Same as [`find`], [`Client::lookup`] and [`Client::retrieve`].
    pub fn fetch(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
        layers: u32,
    ) -> Result<(Request, Vec<bool>), ServeError> {
        let lookup = |keys: &[BlockKey]| self.lookup(space, keys);
        let are_stored = |keys: &[BlockKey]| self.are_stored(space, keys);
        let (prefix, blocks, found) = find(keys, blocks, lookup, are_stored)?;
        let mut request = self.begin_load(&prefix, 0, &blocks, layers)?;
        // One message ends both.
        request.handle.join(prefix.handle);
        Ok((request, found))
    }

    /// Loads those of the keys that are stored, each into its block, and returns which they are.
    ///
    /// # Errors
    /// Same as [`Client::fetch`] and [`Request::wait`].
    pub fn load(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Vec<bool>, ServeError> {
        let (request, found) = self.fetch(space, keys, blocks, self.shape().layers)?;
        request.move_all()?;
        Ok(found)
    }

    /// Stores blocks under keys, as many leading ones as there is room for, and returns their
    /// number. They are durable then.
    ///
    /// # Errors
    /// Same as [`Client::allocate`], [`Request::wait`] and [`Request::commit`].
    pub fn save(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<usize, ServeError> {
        let request = self.begin_save(space, keys, blocks, self.shape().layers)?;
        request.move_all()?;
        Ok(request.commit()?.accepted)
    }

    /// Ends requests of this client: waits for their layers, and makes what they stored durable. On
    /// return, nothing accesses their blocks, which are treated as by a drop of the request. On a
    /// server that hangs, this takes 90 seconds in all, and longer if another thread connects to it
    /// meanwhile.
    ///
    /// # Errors
    /// Returns [`ServeError::Memory`] if blocks that have to be replaced by zeros cannot be.
    pub fn end(&self, requests: &[&Request]) -> Result<Vec<Ended>, ServeError> {
        self.by(Some(Instant::now() + ANSWER_TIMEOUT)).end_in_time(requests)
    }

    /// Same as [`Client::end`], within the client's time.
    pub(super) fn end_in_time(&self, requests: &[&Request]) -> Result<Vec<Ended>, ServeError> {
        let mut ended = vec![Ended { error: None, is_mismatch: false, lost: None }; requests.len()];
        let mut sessions: Vec<u64> = requests.iter().map(|it| it.handle.generation).collect();
        sessions.sort_unstable();
        sessions.dedup();
        for session in sessions {
            let all = requests.iter().zip(&mut ended);
            let (own, results): (Vec<&&Request>, Vec<&mut Ended>) =
                all.filter(|(request, _)| request.handle.generation == session).unzip();
            let numbers = own.iter().map(|request| request.handle.number()).collect();
            let call = Call::End { requests: numbers };
            let answered = answer!(self.call_in(session, &call), Answer::Ended(all) => all);
            match answered {
                Ok(all) if all.len() == own.len() => {
                    own.iter().for_each(|request| request.handle.set_over());
                    results.into_iter().zip(all).for_each(|(result, ended)| *result = ended);
                }
                Ok(all) => return Err(unexpected(&Answer::Ended(all))),
                Err(error) => {
                    for (request, result) in own.into_iter().zip(results) {
                        result.error = Some(error.to_string());
                        request.lost(self, &error)?;
                    }
                }
            }
        }
        Ok(ended)
    }

    /// Makes sure that nothing writes to layers of blocks that a session was loading when a call
    /// failed with this error.
    fn settle(
        &self,
        session: u64,
        blocks: &[BlockId],
        layers: &BTreeSet<u32>,
        error: &ServeError,
    ) -> Result<(), ServeError> {
        // A server that lives has refused the call, or has ended the session that was lost before
        // it began the next one. It would find zeros in place of a block that it reads.
        if layers.is_empty() || !matches!(error, ServeError::Lost { .. }) {
            return Ok(());
        }
        if !self.is_late() {
            // If that fails, it is not confirmed.
            let _ = self.live();
        }
        self.replace(session, blocks, layers)
    }

    /// Gives blocks that a session was loading new pages, unless the next session has begun: the
    /// earlier one has ended then, and drives of the server know the pages that there are now. So
    /// may those of another client's session, if this client was closed.
    pub(super) fn replace(
        &self,
        session: u64,
        blocks: &[BlockId],
        layers: &BTreeSet<u32>,
    ) -> Result<(), ServeError> {
        // No session begins meanwhile.
        let _beginning = lock(&self.inner.beginning);
        let is_last = self.session().0 == session && !lock(&self.inner.links).is_closed;
        if is_last { self.discard(blocks, layers) } else { Ok(()) }
    }
}

impl Request {
    /// Returns how many leading blocks will be found after the commit; of a load, its blocks.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// Returns its number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.handle.number()
    }

    /// Returns the place of a position, such as the one that could not be read ([`Ended::lost`]).
    #[must_use]
    pub fn place(&self, position: u32) -> u64 {
        self.of << POSITION_BITS | u64::from(position)
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
        self.start_some(layers, None).1
    }

    /// Same as [`Request::start_all`], after what is enqueued on a stream so far: the server does
    /// not access the blocks on the GPU before. The stream does not wait for the layers:
    /// [`Request::wait`] does.
    ///
    /// # Errors
    /// Same as [`Request::start`]; [`ServeError::Unshared`] if the blocks are not on a GPU, or
    /// [`ServeError::Stack`] if the stream refuses.
    pub fn start_after(&self, layers: Range<u32>, stream: RawStream) -> Result<(), ServeError> {
        let pool = self.handle.client.inner.pool.as_ref();
        let mark = pool.map(|pool| pool.mark(stream)).transpose()?;
        self.start_some(layers, mark).1
    }

    /// Starts layers. Returns the layer with which it ended.
    fn start_some(&self, layers: Range<u32>, after: Option<Mark>) -> (u32, Result<(), ServeError>) {
        lock(&self.moving).extend(layers.clone());
        let call = |request, layers| Call::Start { request, layers, after };
        let (at, started) = self.each(layers.clone(), call);
        if matches!(started, Err(ServeError::Refused { .. })) {
            lock(&self.moving).retain(|layer| !(at..layers.end).contains(layer));
        }
        (at, started)
    }

    /// Makes calls about layers, each of which the server may answer for leading ones only. Returns
    /// the layer with which it ended.
    fn each(
        &self,
        layers: Range<u32>,
        call: impl Fn(u64, Range<u32>) -> Call,
    ) -> (u32, Result<(), ServeError>) {
        let mut at = layers.start;
        while at < layers.end {
            let answered = self.handle.call(&call(self.handle.number(), at..layers.end));
            match answer!(answered, Answer::Number(done @ 1..) => done) {
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
            // Of the others, too: then nothing uses their blocks any more.
            let is_refused = matches!(waited, Err(ServeError::Refused { .. }));
            let is_lost = waited.is_err() && !is_refused;
            first = first.and(waited);
            let next = failed.saturating_add(u32::from(is_refused));
            lock(&self.moving).retain(|layer| !(at..next).contains(layer));
            at = if is_lost { layers.end } else { next };
        }
        first
    }

    /// Starts the layers that wait for their turn at a server that paces, and later ones at once.
    ///
    /// # Errors
    /// Same as [`Request::start`].
    pub fn hurry(&self) -> Result<(), ServeError> {
        let call = Call::Hurry { request: self.handle.number() };
        answer!(self.handle.call(&call), Answer::Done => ())
    }

    /// Starts all layers, and waits for them. No device accesses the blocks any more, unless the
    /// session was lost.
    ///
    /// # Errors
    /// Returns the first error of a wait, or else that of a start, after which no further layer is
    /// started.
    pub fn move_all(&self) -> Result<(), ServeError> {
        let layers = self.started..self.handle.client.shape().layers;
        let (begun, started) = self.start_some(layers, None);
        self.wait_all(0..begun).and(started)
    }

    /// Makes the stored blocks durable and visible to all clients of the namespace.
    ///
    /// # Errors
    /// Same as [`Request::start`]. After [`ServeError::Lost`] they are either found or not.
    pub fn commit(self) -> Result<Committed, ServeError> {
        let (Direction::Write, &[request, reservation]) =
            (self.direction, &self.handle.numbers[..])
        else {
            return Err(StackError::NotWriting.into());
        };
        let call = Call::Publish { reservation, requests: vec![request], is_durable: true };
        // After a refusal, the request may be left.
        answer!(self.handle.call(&call), Answer::Done => self.handle.set_over())?;
        Ok(Committed { accepted: self.accepted, written: self.blocks.len() })
    }

    /// Returns true if a layer that was started has ended.
    ///
    /// # Errors
    /// Same as [`Request::wait`].
    pub fn poll(&self, layer: Layer) -> Result<bool, ServeError> {
        let call = Call::Poll { request: self.handle.number(), layer: layer.0 };
        let ended = answer!(self.handle.call(&call), Answer::Number(ended) => ended > 0)?;
        if ended {
            lock(&self.moving).remove(&layer.0);
        }
        Ok(ended)
    }

    /// Settles a request whose end has failed.
    fn lost(&self, client: &Client, error: &ServeError) -> Result<(), ServeError> {
        if matches!(error, ServeError::Refused { .. }) {
            return Ok(());
        }
        // The session has gone, and nothing is left to release.
        self.handle.set_over();
        match self.direction {
            Direction::Read => {
                client.settle(self.handle.generation, &self.blocks, &lock(&self.moving), error)
            }
            Direction::Write => Ok(()),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let client = self.handle.client.by(Some(Instant::now() + ANSWER_TIMEOUT));
        if let Err(error) = self.handle.release(&client)
            && let Err(error) = self.lost(&client, &error)
        {
            tracing::warn!(%error, "blocks that were being loaded may still be written to");
        }
    }
}
