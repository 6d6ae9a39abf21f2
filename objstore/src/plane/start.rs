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

use gio_uring::{AffineOp, BlockMap, Checksums, Error, RawStream, ScatterGather, Wait};
use kv_schedule::{Kind, Op};
use nvme_spec::nvm::Direction;

use super::{
    checksums::JobChecksums,
    copier::{OnStreams, Until},
    job::{Job, LayerState, Turn},
    mover::Mover,
    pacer::Waiting,
    streams::Refused,
};
use crate::{
    error::StoreError,
    ids::{LayerDone, Ticket},
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
            return Err(StoreError::no_such_layer(layer, layers));
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
        let segments = self.setup.shape.segments;
        let layer_bytes = u64::from(segments) * u64::from(self.setup.geometry.object_bytes);
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
        let with_map = self.jobs.get(ticket.job).filter(|job| job.map.is_some());
        let blocks = with_map.map_or(0, |job| job.moves.len());
        if !self.has_room(blocks) {
            self.reap()?;
        }
        if self.transport.in_flight() >= self.setup.options.iocbs as usize {
            return Err(StoreError::Busy { in_flight: self.transport.in_flight() as u32 });
        }
        self.check_start(ticket, order)?;
        let is_coded = self.copier.coder.is_some();
        if is_coded && !self.copier.has_room(blocks) {
            return Err(StoreError::StagingBusy { buffers: self.transport.in_flight() as u32 });
        }
        let job = self.jobs.get_mut(ticket.job)?;
        let (direction, is_moved) = (job.direction, job.map.is_some());
        let ends = if let Err(failure) = self.copier.start(&job.copies, direction, layer) {
            job.layer(layer).state = LayerState::Ended(Err(failure));
            job.fail(failure);
            [None, None]
        } else if is_coded && is_moved {
            self.start_coded(ticket)?;
            [None, None]
        } else if job.has_tables() {
            self.start_moving(ticket, order)?
        } else {
            self.moved(ticket, LayerDone { layer, objects: 0, bytes: 0, device_bytes: 0 });
            [None, None]
        };
        if let Ok(job) = self.jobs.get_mut(ticket.job) {
            if direction == Direction::Write {
                // While the devices write the layer.
                self.copier.fill(&job.copies, layer);
            }
            job.layer(layer).ends = ends;
        }
        Ok(())
    }

    /// Starts a layer of encoded objects, of which there is room for all.
    fn start_coded(&mut self, ticket: Ticket) -> Result<(), StoreError> {
        let job = self.jobs.get_mut(ticket.job)?;
        let of = (job.direction, ticket.layer);
        let encoded = self.copier.encode(&mut job.copies, of, &*self.clock);
        let (at, unfit) = encoded.ok_or(StoreError::Ended { layer: ticket.layer })?;
        // Such a file is not committed.
        self.jobs.lost.extend(unfit);
        if let Err(error) = self.issue(ticket, None, Some(at), None) {
            let job = self.jobs.get_mut(ticket.job)?;
            self.copier.end_operation(&job.copies, at);
            return Err(error);
        }
        self.after_completions()
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
    fn has_room(&self, blocks: usize) -> bool {
        self.copier.has_room(blocks)
            && self.transport.in_flight() < self.setup.options.iocbs as usize
    }

    fn check_order(&mut self, order: Order<'_>) -> Result<(), StoreError> {
        if let (Order::AfterEvent(_), Some(field)) = (order, self.copier.copies_at_once()) {
            let problem = "with it, no layer can wait for an event; leave it out".to_owned();
            return Err(StoreError::Config { field, problem });
        }
        match order {
            Order::Unordered => Ok(()),
            // CPU copies happen immediately, so they cannot wait for a stream or an event.
            _ if self.copier.is_bounced() => Err(StoreError::NoStreams),
            Order::AfterEvent(wait) if self.transport.ring()?.owns(&wait.event) => Ok(()),
            Order::AfterEvent(_) => Err(Error::Foreign { what: "event" }.into()),
            Order::AfterStream(_) | Order::InStream(_) => self.transport.streams().map(|_| ()),
        }
    }

    /// Starts what devices and streams do of a layer. Returns the events of its end.
    ///
    /// The devices wait for the order, and a stream copies beside them: hits to the blocks, and
    /// fills from them, of a layer that is read when it is there. With staging memory, the devices
    /// may fill it at once, and only the stream waits for the order; or they wait for the stream.
    fn start_moving(
        &mut self,
        ticket: Ticket,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let layer = ticket.layer;
        let job = self.jobs.get(ticket.job).ok_or(StoreError::Ended { layer })?;
        let (direction, has_map) = (job.direction, job.map.is_some());
        let event = if let Order::AfterEvent(wait) = order { Some(wait.clone()) } else { None };
        let (of, checksums) = ((direction, layer), job.checksums.as_ref());
        let OnStreams { staged, hits, fills } =
            self.copier.on_streams(&job.copies, of, checksums, event)?;
        let is_direct = has_map && staged.is_none();
        let stream = if let Order::InStream(stream) = order { Some(stream) } else { None };
        let condition = match stream {
            // The copies are behind that position of the stream already.
            Some(_) if !is_direct => None,
            _ => self.transport.start_condition(order)?,
        };
        let mut first = condition.clone().filter(|_| stream.is_none());
        let condition = condition.filter(|_| is_direct);
        if !has_map {
            let hits = hits.ok_or(StoreError::Ended { layer })?;
            return Ok([Some(self.start_copied(ticket, stream, first, &hits)?), None]);
        }
        let (mut last, buffer) = (None, staged.as_ref().map(|(at, _)| *at));
        if let (Some((at, moves)), Direction::Write) = (&staged, direction) {
            last = Some(self.gather(*at, stream, first.take(), moves)?);
        }
        let end = self.issue(ticket, last.as_ref().or(condition.as_ref()), buffer, None)?;
        if self.transport.fault.is_some() {
            // It is about to be cancelled: there will be nothing to move.
            self.after_completions()?;
            return Ok([last.or(end), None]);
        }
        let is_read = direction == Direction::Read;
        let mut behind = end.clone().filter(|_| is_read);
        if let Some(hits) = &hits {
            // Cached blocks need not wait for the devices.
            last = Some(self.copy_beside(stream, [first.take(), None], hits)?);
        }
        let scattered = staged.as_ref().filter(|_| is_read).map(|(_, moves)| moves);
        for moves in scattered.into_iter().chain(&fills) {
            // The operation, and with it a buffer's use, ends only with the move.
            last = Some(self.copy_beside(stream, [first.take(), behind.take()], moves)?);
        }
        if let (Order::InStream(stream), true, Some(_)) = (order, is_direct, &end) {
            let followed = self.transport.follow(stream, std::slice::from_ref(&end));
            if let Err(error) = followed {
                return self.give_up(error);
            }
        }
        self.after_completions()?;
        // Once staged objects of a store were moved, the engine may use its blocks again.
        Ok([end.filter(|_| is_direct), last])
    }

    /// Has a stream move the objects of a store to staging buffer `at`.
    fn gather(
        &mut self,
        at: usize,
        stream: Option<RawStream>,
        first: Option<Wait>,
        moves: &ScatterGather,
    ) -> Result<Wait, StoreError> {
        let moved = self.transport.copy(stream, [first.as_ref(), None], moves);
        let (until, moved) = match moved {
            Ok(moved) => (Until::Reached(moved.clone()), Ok(moved)),
            Err(Refused { error, moving: true }) => (Until::Never, Err(error)),
            Err(Refused { error, moving: false }) => return Err(error),
        };
        if let Some(staging) = &mut self.copier.staging {
            staging.set_until(at, until);
        }
        moved
    }

    /// Has a stream copy a layer of which the devices move nothing. Returns the event of its end.
    fn start_copied(
        &mut self,
        ticket: Ticket,
        stream: Option<RawStream>,
        first: Option<Wait>,
        hits: &ScatterGather,
    ) -> Result<Wait, StoreError> {
        let moved = match self.transport.issue_copy(ticket, stream, first, hits) {
            Ok(moved) => moved,
            Err(Refused { error, moving: true }) => return Err(self.fail(error.to_string())),
            Err(Refused { error, moving: false }) => return Err(error),
        };
        self.jobs.get_mut(ticket.job)?.started(ticket.layer);
        Ok(moved)
    }

    /// Submits the operation of one layer, or of a `part` of its job with a map and checksums of
    /// its own. With streams, returns its completion event.
    pub(super) fn issue(
        &mut self,
        ticket: Ticket,
        wait: Option<&Wait>,
        buffer: Option<usize>,
        part: Option<&(BlockMap, Option<Checksums>)>,
    ) -> Result<Option<Wait>, StoreError> {
        let layer = ticket.layer;
        let ended = StoreError::Ended { layer };
        let Ok(job) = self.jobs.get_mut(ticket.job) else { return Err(ended) };
        let of_job = match &job.checksums {
            Some(JobChecksums::Kernel(checksums)) => Some(checksums),
            _ => None,
        };
        let of_job = job.map.as_ref().map(|map| (map, of_job));
        let part = part.map(|(map, checksums)| (map, checksums.as_ref()));
        let Some((map, checksums)) = part.or(of_job) else { return Err(ended) };
        let pool = match buffer.is_some() || job.is_ahead {
            true => self.copier.target(buffer),
            false => self.pools.target(job.copies.pool_of(layer)),
        };
        let pool = pool.ok_or(ended)?;
        let rows = job.rows(&self.setup.shape, layer);
        let op = AffineOp {
            fua: self.setup.fua && job.direction == Direction::Write,
            placement: job.placement,
            checksums,
            wait,
            sms: self.setup.options.sms,
            ..AffineOp::new(job.direction, map, pool, rows)
        };
        let end = self.transport.issue(ticket, &op, buffer)?;
        job.started(layer);
        if let (Some(staging), Some(at)) = (&mut self.copier.staging, buffer) {
            staging.begin(at);
        }
        Ok(end)
    }

    /// Has a stream move objects of the operation that was just issued.
    fn copy_beside(
        &mut self,
        stream: Option<RawStream>,
        waits: [Option<Wait>; 2],
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
