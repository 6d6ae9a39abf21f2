//! Starting layers, in order with the engine's streams.
//!
//! An operation is issued before a stream is made to wait for it, never the other way round: an
//! executor may launch its kernel only on issue, and a GPU may delay such a launch behind a stream
//! that waits.

use gio_uring::{AffineOp, Error, RawStream, ScatterGather, Signal, Wait};
use nvme_spec::nvm::Direction;

use super::{
    HostMemory, Op, Plane, Target,
    checksums::JobChecksums,
    staging::Until,
    streams::{Refused, Streams},
};
use kv_catalog::Layer;

use crate::{
    error::StoreError,
    order::Order,
    plane::job::{JobId, LayerDone, LayerState, Ticket},
};

impl Plane {
    /// Starts moving one layer of a job, with an order: nothing accesses the layer's blocks before
    /// `order` allows it. O(1) in the number of blocks; nothing is allocated.
    ///
    /// A stream that waits continues even if the layer failed. The contents of its blocks are then
    /// undefined; the ticket reports the failure.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchLayer`], [`StoreError::InFlight`], [`StoreError::Busy`],
    /// [`StoreError::StagingBusy`], [`StoreError::RequestFailed`] after a layer of the job failed,
    /// [`StoreError::Failed`], [`StoreError::NoStreams`] without a GPU, [`StoreError::Stream`] if
    /// the stream refuses, or [`StoreError::Ring`] for another plane's event.
    pub fn start(
        &mut self,
        id: JobId,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<Ticket, StoreError> {
        self.check()?;
        let layers = self.shape.layers;
        if layer.0 >= layers {
            return Err(StoreError::NoSuchLayer { layer, layers });
        }
        self.check_order(order)?;
        if !self.has_room() {
            self.reap()?;
        }
        if self.ops.len() >= self.options.iocbs as usize {
            return Err(StoreError::Busy { in_flight: self.ops.len() as u32 });
        }
        let job = self.jobs.get_mut(&id).filter(|job| !job.abandoned);
        let Some(job) = job else { return Err(StoreError::Ended { layer }) };
        if let Some(failure) = job.failure {
            return Err(StoreError::RequestFailed { failure });
        }
        if matches!(job.layers[layer.0 as usize], LayerState::InFlight) {
            return Err(StoreError::InFlight { layer });
        }
        let (mut objects, mut bytes) = (0, 0);
        let mut served = Ok(());
        if let Some(memory) = &mut self.memory {
            (objects, bytes) = memory.size(job.hits.len());
            served = memory.serve(job, layer);
        }
        let is_on_streams = job.is_on_streams();
        let state = &mut job.layers[layer.0 as usize];
        let ends = if let Err(failure) = served {
            *state = LayerState::Ended(Err(failure));
            job.failure = Some(failure);
            [None, None]
        } else if is_on_streams {
            [self.start_copied(id, layer, order)?, None]
        } else if job.map.is_none() {
            let done = LayerDone { layer, objects, bytes, device_bytes: 0 };
            *state = LayerState::Ended(Ok(done));
            [None, None]
        } else {
            match (&self.target, job.direction) {
                (Target::Pool(_), _) => self.start_direct(id, layer, order)?,
                (Target::Staged(_), Direction::Read) => self.start_staged_read(id, layer, order)?,
                (Target::Staged(_), Direction::Write) => {
                    self.start_staged_write(id, layer, order)?
                }
            }
        };
        // Copy to the cache while the devices write the layer.
        let job = self.jobs.get(&id).filter(|job| job.direction == Direction::Write);
        if let (Some(memory), Some(job)) = (&mut self.memory, job) {
            memory.fill(job, layer);
        }
        Ok(self.ticket(id, layer, ends))
    }

    /// Makes work enqueued on `stream` from now on wait for the layer: it sees a retrieved layer's
    /// data, and may change the blocks of a stored one. The stream continues even if the layer
    /// failed. May be called for any number of streams, and for a layer that has ended.
    ///
    /// # Errors
    /// Returns [`StoreError::NoStreams`] without a GPU, [`StoreError::Stream`] if the stream
    /// refuses, [`StoreError::Foreign`], or [`StoreError::Failed`].
    pub fn join(&mut self, ticket: &Ticket, stream: RawStream) -> Result<(), StoreError> {
        self.check_ticket(ticket)?;
        let (ring, streams) = self.streams()?;
        for end in ticket.ends.iter().flatten() {
            // An event of another ring, from before the executor was replaced: if streams may still
            // wait for it, it is kept for good; if it is reached, there is nothing to wait for.
            if ring.owns(&end.event) || !end.is_reached() {
                streams.follow(ring, stream, end)?;
            }
        }
        Ok(())
    }

    /// Returns true if an operation can be started without reaping completions first.
    fn has_room(&self) -> bool {
        let buffer = match &self.target {
            Target::Pool(_) => true,
            Target::Staged(staging) => staging.free().is_some(),
        };
        buffer && self.ops.len() < self.options.iocbs as usize
    }

    fn check_order(&mut self, order: Order<'_>) -> Result<(), StoreError> {
        match order {
            Order::Unordered => Ok(()),
            // CPU copies happen immediately, so they cannot wait for an event.
            Order::AfterEvent(_)
                if self.memory.as_ref().is_some_and(HostMemory::copies_at_once) =>
            {
                let problem = "with it, no layer can wait for an event; leave it 0".to_owned();
                Err(StoreError::Config { field: "dram_bytes", problem })
            }
            Order::AfterEvent(wait) if self.ring()?.owns(&wait.event) => Ok(()),
            Order::AfterEvent(_) => Err(Error::Foreign { what: "event" }.into()),
            Order::AfterStream(_) | Order::InStream(_) => self.streams().map(|_| ()),
        }
    }

    /// Starts an operation on the engine's own memory.
    fn start_direct(
        &mut self,
        id: JobId,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let first = self.start_condition(order)?;
        let end = self.issue(id, layer, first.as_ref(), None)?;
        let moved = self.copy_direct(id, layer, order, [first.as_ref(), end.as_ref()])?;
        if let (Order::InStream(stream), Some(end), None) = (order, &end, &self.fault) {
            let (ring, streams) = self.streams()?;
            if let Err(error) = streams.follow(ring, stream, end) {
                return self.give_up(error);
            }
        }
        self.after_completions()?;
        Ok([end, moved])
    }

    /// Has a stream copy to or from the cache, beside an operation on the engine's own memory.
    fn copy_direct(
        &mut self,
        id: JobId,
        layer: Layer,
        order: Order<'_>,
        [first, end]: [Option<&Wait>; 2],
    ) -> Result<Option<Wait>, StoreError> {
        let Some(streams) = self.streams.as_ref().filter(|_| self.fault.is_none()) else {
            return Ok(None);
        };
        let (stream, first) = match order {
            // The operation waits for the same position of the stream.
            Order::InStream(stream) => (stream, None),
            _ => (streams.own(), first),
        };
        let served = self.copy_hits(id, layer, stream, first)?;
        let kept = self.copy_fills(id, layer, stream, [first, end])?;
        Ok(kept.or(served))
    }

    /// Starts a staged retrieve. The devices may fill staging memory immediately: only the move
    /// waits for the order.
    fn start_staged_read(
        &mut self,
        id: JobId,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let (at, moves) = self.take_buffer(id, layer, Direction::Read, order)?;
        let (copier, first) = self.copy_stream(order)?;
        let end = self.issue(id, layer, None, Some(at))?;
        if self.fault.is_some() {
            // It is about to be cancelled: there will be nothing to move.
            self.after_completions()?;
            return Ok([end, None]);
        }
        // Cached blocks need not wait for the devices.
        self.copy_hits(id, layer, copier, first.as_ref())?;
        // The operation, and with it the buffer's use, ends only with the move.
        let moved = self.copy_beside(copier, [first.as_ref(), end.as_ref()], &moves)?;
        let kept = self.copy_fills(id, layer, copier, [None, None])?;
        self.after_completions()?;
        Ok([Some(kept.unwrap_or(moved)), None])
    }

    /// Starts a staged store: the operation waits for the move.
    fn start_staged_write(
        &mut self,
        id: JobId,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<[Option<Wait>; 2], StoreError> {
        let (at, moves) = self.take_buffer(id, layer, Direction::Write, order)?;
        let (copier, first) = self.copy_stream(order)?;
        let (ring, streams) = self.streams()?;
        let moved = match streams.copy_objects(ring, copier, [first.as_ref(), None], &moves) {
            Ok(moved) => moved,
            Err(Refused { error, moving }) => {
                if moving {
                    self.set_until(at, Until::Never);
                }
                return Err(error);
            }
        };
        self.set_until(at, Until::Reached(moved.clone()));
        self.issue(id, layer, Some(&moved), Some(at))?;
        let kept = match &self.fault {
            None => self.copy_fills(id, layer, copier, [None, None])?,
            Some(_) => None,
        };
        self.after_completions()?;
        // Once the objects were moved, the engine may use its blocks again.
        Ok([Some(kept.unwrap_or(moved)), None])
    }

    /// Returns the condition that an operation waits for; a stream is told to signal it.
    fn start_condition(&mut self, order: Order<'_>) -> Result<Option<Wait>, StoreError> {
        match order {
            Order::Unordered => Ok(None),
            Order::AfterEvent(wait) => Ok(Some(wait.clone())),
            Order::AfterStream(stream) | Order::InStream(stream) => {
                let (ring, streams) = self.streams()?;
                streams.mark(ring, stream).map(Some)
            }
        }
    }

    /// Returns the stream that moves objects, and the condition that it waits for first.
    pub(super) fn copy_stream(
        &mut self,
        order: Order<'_>,
    ) -> Result<(RawStream, Option<Wait>), StoreError> {
        match order {
            Order::InStream(stream) => Ok((stream, None)),
            order => {
                let first = self.start_condition(order)?;
                Ok((self.streams()?.1.own(), first))
            }
        }
    }

    fn take_buffer(
        &mut self,
        id: JobId,
        layer: Layer,
        direction: Direction,
        order: Order<'_>,
    ) -> Result<(usize, ScatterGather), StoreError> {
        let job = self.jobs.get(&id);
        let blocks = job.and_then(|job| job.blocks.clone());
        let (Target::Staged(staging), Some(blocks)) = (&mut self.target, blocks) else {
            return Err(StoreError::Ended { layer });
        };
        let at = staging.free().ok_or_else(|| staging.busy())?;
        let checksums = job.and_then(|job| job.checksums.as_ref());
        let checksums = checksums.and_then(|made| made.of_moves(layer, self.shape.segments));
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
        id: JobId,
        layer: Layer,
        wait: Option<&Wait>,
        buffer: Option<usize>,
    ) -> Result<Option<Wait>, StoreError> {
        let job = self.jobs.get_mut(&id).ok_or(StoreError::Ended { layer })?;
        let (Some(ring), Some(map)) = (&mut self.ring, &job.map) else {
            return Err(StoreError::Ended { layer });
        };
        let ahead = self.memory.as_ref().filter(|_| job.is_ahead);
        let pool = match (&self.target, buffer) {
            _ if ahead.is_some() => ahead.expect("it was just asked").target(),
            (Target::Staged(staging), Some(at)) => staging.pool(at),
            (Target::Pool(pool), _) => pool,
            (Target::Staged(_), None) => return Err(StoreError::Ended { layer }),
        };
        let end = self.streams.as_mut().map(Streams::take_end);
        let signal = end.as_ref().map(|end| Signal { event: end.event.clone(), value: end.value });
        let rows = match job.is_ahead {
            true => 0..self.shape.rows(),
            false => self.shape.layer_rows(layer),
        };
        let op = AffineOp {
            fua: self.fua && job.direction == Direction::Write,
            placement: job.placement,
            checksums: match &job.checksums {
                Some(JobChecksums::Kernel(checksums)) => Some(checksums),
                _ => None,
            },
            wait,
            signal: signal.as_ref(),
            sms: self.options.sms,
            ..AffineOp::new(job.direction, map, pool, rows)
        };
        let iocb = match ring.submit(&op) {
            Ok(iocb) => iocb,
            // It fails when the ring is stopped, which is what comes next.
            Err(Error::Submitted { iocb, source }) => {
                self.fault = Some(source.to_string());
                iocb
            }
            Err(error) => {
                if let (Some(streams), Some(end)) = (&mut self.streams, end) {
                    streams.return_end(end);
                }
                return Err(error.into());
            }
        };
        job.layers[layer.0 as usize] = LayerState::InFlight;
        job.in_flight += 1;
        if let (Target::Staged(staging), Some(at)) = (&mut self.target, buffer) {
            staging.begin(at);
        }
        self.ops.push(Op {
            iocb: Some(iocb),
            job: id,
            layer,
            outcome: None,
            end: end.clone(),
            buffer,
            moved: None,
            first: None,
        });
        Ok(end)
    }

    /// Recovers after a stream failed to wait for an issued operation: nothing may be in flight
    /// when the caller gets the error.
    pub(super) fn give_up<T>(&mut self, error: StoreError) -> Result<T, StoreError> {
        self.fault.get_or_insert_with(|| error.to_string());
        self.after_completions()?;
        Err(error)
    }
}
