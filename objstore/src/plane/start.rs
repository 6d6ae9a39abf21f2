//! Starting layers: in their turn, and in order with the engine's streams.
//!
//! An operation is issued before a stream is made to wait for it, never the other way round: an
//! executor may launch its kernel only on issue, and a GPU may delay such a launch behind a stream
//! that waits.
//!
//! Copies between the DRAM cache and blocks on a GPU are made by the stream of the layer's order,
//! or else by the store's own. Hits are copied to the blocks. Fills are copied out of them: of a
//! layer that is stored, when its order lets the store read them; of one that is read, when the
//! devices are done. A layer ends with its copies, also for streams that wait for it.

use gio_uring::{AffineOp, Error, RawStream, ScatterGather, Wait};
use kv_schedule::{Kind, Op};
use nvme_spec::nvm::Direction;

use super::{
    checksums::JobChecksums,
    job::{Job, LayerState, Turn},
    memory::HostMemory,
    mover::Mover,
    pacer::Waiting,
    staging::Until,
    streams::Refused,
    target::Target,
};
use crate::{
    error::StoreError,
    ids::{LayerDone, PoolId, Ticket},
    order::Order,
};

impl Mover {
    /// Refuses a layer that cannot be started. Returns its job.
    pub(super) fn check_start(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
    ) -> Result<&mut Job, StoreError> {
        self.check()?;
        self.check_owner()?;
        let (layer, layers) = (ticket.layer, self.setup.shape.layers);
        if layer.0 >= layers {
            return Err(StoreError::NoSuchLayer { layer, layers });
        }
        self.check_order(order)?;
        let job = self.jobs.get_mut(ticket.job).ok().filter(|job| !job.abandoned);
        let Some(job) = job else { return Err(StoreError::Ended { layer }) };
        if let Some(failure) = job.failure {
            return Err(StoreError::RequestFailed { failure });
        }
        match job.layer(layer).state {
            LayerState::InFlight | LayerState::Waiting(_) => Err(StoreError::InFlight { layer }),
            LayerState::Idle | LayerState::Ended(_) => Ok(job),
        }
    }

    /// Starts a layer; with a pacer, hands it to the scheduler.
    pub(crate) fn start(&mut self, ticket: Ticket, order: Order<'_>) -> Result<(), StoreError> {
        if self.pacer.is_none() {
            return self.start_now(ticket, order);
        }
        let shape = &self.setup.shape;
        let layer_bytes = u64::from(shape.segments) * u64::from(shape.object_bytes);
        let job = self.check_start(ticket, order)?;
        let bytes = job.moves.len() as u64 * layer_bytes;
        let kind = match (job.direction, job.turn.step) {
            (Direction::Write, _) => Kind::Write,
            (Direction::Read, Some(step)) => Kind::Layer { step, layer: ticket.layer.0 },
            (Direction::Read, None) => Kind::Soon,
        };
        let Turn { flow, is_urgent, .. } = job.turn;
        // A stream can wait only for an operation that was issued.
        let is_in_stream = matches!(order, Order::InStream(_));
        let after = match is_in_stream {
            true => None,
            false => self.transport.start_condition(order)?,
        };
        let now = self.now();
        let Some(pacer) = &mut self.pacer else { return self.start_now(ticket, order) };
        let op = pacer.next_op();
        pacer.scheduler.add(Op { id: op, flow, bytes, kind }, now)?;
        if is_in_stream {
            pacer.scheduler.demand(op, now);
            let started = self.start_now(ticket, order);
            self.paced(|pacer, mover| match &started {
                Ok(()) => {
                    pacer.moved_at = mover.clock.now();
                    pacer.in_flight.push((op, ticket));
                }
                Err(_) => pacer.scheduler.ended(op, 0, now),
            });
            return started;
        }
        let is_read = kind != Kind::Write;
        pacer.waiting.insert(op, Waiting { ticket, after, is_read });
        self.set_state(ticket, LayerState::Waiting(op));
        // No device moves a layer that is in the cache.
        if is_urgent || bytes == 0 {
            self.paced(|pacer, mover| mover.demand_waiting(pacer, op));
        }
        Ok(())
    }

    /// Starts moving a layer of a job, with an order: nothing accesses the layer's blocks before
    /// `order` allows it. O(1) in the number of blocks; nothing is allocated.
    pub(super) fn start_now(&mut self, ticket: Ticket, order: Order<'_>) -> Result<(), StoreError> {
        let layer = ticket.layer;
        if !self.has_room() {
            self.reap()?;
        }
        if self.transport.in_flight() >= self.setup.options.iocbs as usize {
            return Err(StoreError::Busy { in_flight: self.transport.in_flight() as u32 });
        }
        self.check_start(ticket, order)?;
        let job = self.jobs.get_mut(ticket.job)?;
        let direction = job.direction;
        if let (Some(bounce), Some(bounced)) = (&self.bounce, &job.engine.bounced) {
            if !matches!(order, Order::Unordered) {
                // The copy would not be ordered with the stream.
                return Err(StoreError::NoStreams);
            }
            if direction == Direction::Write {
                bounce.copy(bounced, layer, direction);
            }
        }
        let (mut objects, mut bytes) = (0, 0);
        let mut served = Ok(());
        if let Some(memory) = &mut self.memory {
            (objects, bytes) = memory.size(job.cached.hits.len());
            served = memory.serve(&job.cached, layer);
        }
        let ends = if let Err(failure) = served {
            job.layer(layer).state = LayerState::Ended(Err(failure));
            job.fail(failure);
            [None, None]
        } else if job.is_on_streams() {
            [self.start_copied(ticket, order)?, None]
        } else if job.map.is_none() {
            let done = LayerDone { layer, objects, bytes, device_bytes: 0 };
            if let Some(begun) = job.moved(layer, done) {
                self.tally.times.moved(job.direction, self.clock.now() - begun);
            }
            if let (Some(bounce), Some(bounced), Direction::Read) =
                (&self.bounce, &job.engine.bounced, direction)
            {
                bounce.copy(bounced, layer, direction);
            }
            [None, None]
        } else {
            match (&self.target, direction) {
                (Target::Pool(_), _) => self.start_direct(ticket, order)?,
                (Target::Staged(_), Direction::Read) => self.start_staged_read(ticket, order)?,
                (Target::Staged(_), Direction::Write) => self.start_staged_write(ticket, order)?,
            }
        };
        if let Ok(job) = self.jobs.get_mut(ticket.job) {
            // Copy to the cache while the devices write the layer.
            if let (Some(memory), Direction::Write) = (&mut self.memory, direction) {
                memory.fill(&job.cached, layer);
            }
            job.layer(layer).ends = ends;
        }
        Ok(())
    }

    /// Makes work enqueued on `stream` from now on wait for a layer that was started.
    pub(crate) fn join(&mut self, ticket: Ticket, stream: RawStream) -> Result<(), StoreError> {
        self.check()?;
        let layer = ticket.layer;
        if !self.demand(ticket) {
            self.reap()?;
            self.pump()?;
        }
        if matches!(self.jobs.state(ticket), Some(LayerState::Waiting(_))) {
            return Err(StoreError::Busy { in_flight: self.transport.in_flight() as u32 });
        }
        let job = self.jobs.get(ticket.job).ok_or(StoreError::Ended { layer })?;
        let entry = job.layers.get(layer.0 as usize);
        let entry = entry.filter(|entry| entry.state != LayerState::Idle);
        let ends = &entry.ok_or(StoreError::NotStarted { layer })?.ends;
        self.transport.follow(stream, ends)
    }

    /// Returns true if an operation can be started without reaping completions first.
    fn has_room(&self) -> bool {
        let buffer = match &self.target {
            Target::Pool(_) => true,
            Target::Staged(staging) => staging.free().is_some(),
        };
        buffer && self.transport.in_flight() < self.setup.options.iocbs as usize
    }

    fn check_order(&mut self, order: Order<'_>) -> Result<(), StoreError> {
        match order {
            Order::Unordered => Ok(()),
            // CPU copies happen immediately, so they cannot wait for an event.
            Order::AfterEvent(_)
                if self.memory.as_ref().is_some_and(HostMemory::copies_at_once) =>
            {
                let problem = "with it, no layer can wait for an event; leave it 0".to_owned();
                Err(StoreError::Config { field: "dram", problem })
            }
            Order::AfterEvent(wait) if self.transport.ring()?.owns(&wait.event) => Ok(()),
            Order::AfterEvent(_) => Err(Error::Foreign { what: "event" }.into()),
            Order::AfterStream(_) | Order::InStream(_) => self.transport.streams().map(|_| ()),
        }
    }

    /// Starts an operation on the engine's own memory.
    fn start_direct(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let first = self.transport.start_condition(order)?;
        let end = self.issue(ticket, first.as_ref(), None)?;
        let moved = self.copy_direct(ticket, order, [first.as_ref(), end.as_ref()])?;
        if let (Order::InStream(stream), Some(_), None) = (order, &end, &self.transport.fault) {
            let followed = self.transport.follow(stream, std::slice::from_ref(&end));
            if let Err(error) = followed {
                return self.give_up(error);
            }
        }
        self.after_completions()?;
        Ok([end, moved])
    }

    /// Has a stream copy to or from the cache, beside an operation on the engine's own memory.
    fn copy_direct(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
        [first, end]: [Option<&Wait>; 2],
    ) -> Result<Option<Wait>, StoreError> {
        let Some(streams) = self.transport.streams.as_ref() else { return Ok(None) };
        if self.transport.fault.is_some() {
            return Ok(None);
        }
        let (stream, first) = match order {
            // The operation waits for the same position of the stream.
            Order::InStream(stream) => (stream, None),
            _ => (streams.own(), first),
        };
        let served = self.copy_hits(ticket, stream, first)?;
        let kept = self.copy_fills(ticket, stream, [first, end])?;
        Ok(kept.or(served))
    }

    /// Starts a staged retrieve. The devices may fill staging memory immediately: only the move
    /// waits for the order.
    fn start_staged_read(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let (at, moves) = self.take_buffer(ticket, Direction::Read, order)?;
        let (copier, first) = self.transport.copy_stream(order)?;
        let end = self.issue(ticket, None, Some(at))?;
        if self.transport.fault.is_some() {
            // It is about to be cancelled: there will be nothing to move.
            self.after_completions()?;
            return Ok([end, None]);
        }
        // Cached blocks need not wait for the devices.
        self.copy_hits(ticket, copier, first.as_ref())?;
        // The operation, and with it the buffer's use, ends only with the move.
        let moved = self.copy_beside(copier, [first.as_ref(), end.as_ref()], &moves)?;
        let kept = self.copy_fills(ticket, copier, [None, None])?;
        self.after_completions()?;
        Ok([Some(kept.unwrap_or(moved)), None])
    }

    /// Starts a staged store: the operation waits for the move.
    fn start_staged_write(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let (at, moves) = self.take_buffer(ticket, Direction::Write, order)?;
        let (copier, first) = self.transport.copy_stream(order)?;
        let moved = match self.transport.copy(copier, [first.as_ref(), None], &moves) {
            Ok(moved) => moved,
            Err(Refused { error, moving }) => {
                if moving {
                    self.set_until(at, Until::Never);
                }
                return Err(error);
            }
        };
        self.set_until(at, Until::Reached(moved.clone()));
        self.issue(ticket, Some(&moved), Some(at))?;
        let kept = match &self.transport.fault {
            None => self.copy_fills(ticket, copier, [None, None])?,
            Some(_) => None,
        };
        self.after_completions()?;
        // Once the objects were moved, the engine may use its blocks again.
        Ok([Some(kept.unwrap_or(moved)), None])
    }

    /// Has streams copy a layer of which the devices move nothing. Returns the event of its end.
    pub(super) fn start_copied(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
    ) -> Result<Option<Wait>, StoreError> {
        let layer = ticket.layer;
        let moves = self.hits(ticket).or_else(|| self.fills(ticket));
        let moves = moves.ok_or(StoreError::Ended { layer })?;
        let (stream, first) = self.transport.copy_stream(order)?;
        let moved = match self.transport.issue_copy(ticket, stream, first, &moves) {
            Ok(moved) => moved,
            Err(Refused { error, moving: true }) => return Err(self.fail(error.to_string())),
            Err(Refused { error, moving: false }) => return Err(error),
        };
        self.jobs.get_mut(ticket.job)?.started(layer);
        Ok(Some(moved))
    }

    fn take_buffer(
        &mut self,
        ticket: Ticket,
        direction: Direction,
        order: Order<'_>,
    ) -> Result<(usize, ScatterGather), StoreError> {
        let (layer, shape) = (ticket.layer, &self.setup.shape);
        let job = self.jobs.get(ticket.job);
        let blocks = job.and_then(|job| job.blocks.clone());
        let (Target::Staged(staging), Some(blocks)) = (&mut self.target, blocks) else {
            return Err(StoreError::Ended { layer });
        };
        let at = staging.free().ok_or_else(|| staging.busy())?;
        let checksums = job.and_then(|job| job.checksums.as_ref());
        let checksums = checksums.and_then(|made| made.of_moves(layer, shape.segments));
        let moves = staging.scatter_gather(at, direction, layer, &blocks, checksums);
        let first = match order {
            Order::AfterEvent(wait) => Some(wait.clone()),
            _ => None,
        };
        staging.hold(at, Until::Now, first, blocks);
        Ok((at, moves))
    }

    fn set_until(&mut self, at: usize, until: Until) {
        if let Target::Staged(staging) = &mut self.target {
            staging.set_until(at, until);
        }
    }

    /// Submits the operation of one layer. With streams, returns its completion event.
    pub(super) fn issue(
        &mut self,
        ticket: Ticket,
        wait: Option<&Wait>,
        buffer: Option<usize>,
    ) -> Result<Option<Wait>, StoreError> {
        let layer = ticket.layer;
        let ended = StoreError::Ended { layer };
        let Ok(job) = self.jobs.get_mut(ticket.job) else { return Err(ended) };
        let Some(map) = &job.map else { return Err(ended) };
        let ahead = self.memory.as_ref().filter(|_| job.is_ahead);
        let pool = match (&self.target, buffer, ahead) {
            (_, _, Some(memory)) => memory.target(),
            (Target::Staged(staging), Some(at), None) => staging.pool(at),
            (Target::Pool(_), ..) if job.engine.pool != PoolId::default() => {
                self.pools.target(job.engine.pool).ok_or(ended)?
            }
            (Target::Pool(pool), ..) => pool,
            (Target::Staged(_), None, None) => return Err(ended),
        };
        let rows = job.rows(&self.setup.shape, layer);
        let op = AffineOp {
            fua: self.setup.fua && job.direction == Direction::Write,
            placement: job.placement,
            checksums: match &job.checksums {
                Some(JobChecksums::Kernel(checksums)) => Some(checksums),
                _ => None,
            },
            wait,
            sms: self.setup.options.sms,
            ..AffineOp::new(job.direction, map, pool, rows)
        };
        let end = self.transport.issue(ticket, &op, buffer)?;
        job.started(layer);
        if let (Target::Staged(staging), Some(at)) = (&mut self.target, buffer) {
            staging.begin(at);
        }
        Ok(end)
    }

    /// Returns the copy by a stream of a layer's cached blocks.
    fn hits(&self, ticket: Ticket) -> Option<ScatterGather> {
        let (job, shape) = (self.jobs.get(ticket.job)?, &self.setup.shape);
        let rows = job.rows(shape, ticket.layer);
        self.memory.as_ref()?.copy_of_hits(&job.cached, ticket.layer, rows)
    }

    /// Returns the copy by a stream of a layer to the cache.
    fn fills(&self, ticket: Ticket) -> Option<ScatterGather> {
        self.memory.as_ref()?.copy_of_fills(&self.jobs.get(ticket.job)?.cached, ticket.layer)
    }

    /// Has a stream copy hits, beside the operation that was just issued.
    fn copy_hits(
        &mut self,
        ticket: Ticket,
        stream: RawStream,
        first: Option<&Wait>,
    ) -> Result<Option<Wait>, StoreError> {
        match self.hits(ticket) {
            Some(hits) => self.copy_beside(stream, [first, None], &hits).map(Some),
            None => Ok(None),
        }
    }

    /// Has a stream copy fills: for a layer that is read, behind the operation that was just
    /// issued, which signals `end`.
    fn copy_fills(
        &mut self,
        ticket: Ticket,
        stream: RawStream,
        [first, end]: [Option<&Wait>; 2],
    ) -> Result<Option<Wait>, StoreError> {
        let direction = self.jobs.get(ticket.job).map(|job| job.direction);
        let end = end.filter(|_| direction == Some(Direction::Read));
        match self.fills(ticket) {
            Some(fills) => self.copy_beside(stream, [first, end], &fills).map(Some),
            None => Ok(None),
        }
    }

    /// Has a stream move objects of the operation that was just issued.
    fn copy_beside(
        &mut self,
        stream: RawStream,
        waits: [Option<&Wait>; 2],
        moves: &ScatterGather,
    ) -> Result<Wait, StoreError> {
        match self.transport.copy_beside(stream, waits, moves) {
            Ok(moved) => Ok(moved),
            // Objects will be moved at an unknown time.
            Err(Refused { error, moving: true }) => Err(self.fail(error.to_string())),
            Err(Refused { error, moving: false }) => self.give_up(error),
        }
    }

    /// Recovers after a stream failed to wait for an issued operation: nothing may be in flight
    /// when the caller gets the error.
    fn give_up<T>(&mut self, error: StoreError) -> Result<T, StoreError> {
        self.transport.fault.get_or_insert_with(|| error.to_string());
        self.after_completions()?;
        Err(error)
    }
}
