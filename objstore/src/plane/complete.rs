//! Waiting for completions, and processing them.

use gio_uring::{Completion, IoStatus, Progress, Wait};
use kv_catalog::Layer;
use nvme_driver::Waiter;
use nvme_spec::nvm::Direction;

use super::{JobId, LayerDone, LayerState, Move, Op, Plane, Target, Ticket};
use crate::error::{Failure, StoreError};

/// Result of polling a layer.
#[derive(Debug)]
pub(crate) enum Polled {
    /// The layer is done.
    Done(LayerDone),
    /// The layer is in flight.
    Pending(Progress),
}

impl Plane {
    /// Waits until all of the layer's data is in place.
    ///
    /// When this returns, with any result, nothing accesses the layer's blocks any more: after a
    /// timeout or a fault the I/O kernel was stopped and the controllers were recovered first.
    /// Everything else in flight at that time has failed as well, with [`IoStatus::Cancelled`] or
    /// [`IoStatus::Fault`], which its tickets report.
    ///
    /// # Errors
    /// Returns [`StoreError::Transfer`] with layer, block, file and status. After a failed read,
    /// [`Plane::take_lost`] returns the files that failed. Returns [`StoreError::Failed`] if the
    /// controllers could not be recovered.
    pub fn wait(&mut self, ticket: Ticket) -> Result<LayerDone, StoreError> {
        let clock = self.clock.clone();
        let timeout = self.options.wait_timeout;
        loop {
            let mut waiter = Waiter::new(&*clock, clock.now() + timeout);
            loop {
                match self.poll_layer(&ticket)? {
                    Polled::Done(done) => return Ok(done),
                    Polled::Pending(Progress::Moved) => waiter.moved(),
                    Polled::Pending(Progress::Idle) if waiter.wait() => {}
                    Polled::Pending(Progress::Idle) => break,
                }
            }
            self.overdue(&ticket)?;
        }
    }

    /// Checks if the layer is done, without waiting. After an error, or once it is done, the ticket
    /// is used up.
    ///
    /// # Errors
    /// Same as [`Plane::wait`].
    pub fn poll(&mut self, ticket: &Ticket) -> Result<Option<LayerDone>, StoreError> {
        match self.poll_layer(ticket)? {
            Polled::Done(done) => Ok(Some(done)),
            Polled::Pending(_) => Ok(None),
        }
    }

    /// Same as [`Plane::poll`], and returns whether anything moved.
    pub(crate) fn poll_layer(&mut self, ticket: &Ticket) -> Result<Polled, StoreError> {
        self.check_ticket(ticket)?;
        let (job, layer) = (ticket.job, ticket.layer);
        let mut progress = Progress::Idle;
        if self.op_of(job, layer).is_some() {
            progress = self.reap()?;
            if progress == Progress::Idle {
                self.attend()?;
            }
        }
        match self.jobs.get(&job).map(|job| job.layers[layer.0 as usize]) {
            Some(LayerState::Ended(outcome)) => match outcome {
                Ok(done) => Ok(Polled::Done(done)),
                Err(failure) => Err(StoreError::Transfer { failure }),
            },
            Some(_) => Ok(Polled::Pending(progress)),
            None => Err(StoreError::Ended { layer }),
        }
    }

    /// Handles the timeout of a layer: declares the I/O kernel or a device dead, or the stream that
    /// moves the layer's objects.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub(crate) fn overdue(&mut self, ticket: &Ticket) -> Result<(), StoreError> {
        // It may have completed while the clock was read.
        self.reap()?;
        let (job, layer) = (ticket.job, ticket.layer);
        let Some(at) = self.op_of(job, layer) else { return Ok(()) };
        if self.ops[at].outcome.is_some() {
            let cause = format!(
                "the stream that moves layer {layer} between memory of the host and the pool did \
                 not get there in time"
            );
            return Err(self.fail(cause));
        }
        let waited = self.options.wait_timeout.0 / 1_000_000;
        self.fault = Some(format!("layer {layer} did not complete within {waited} ms"));
        self.after_completions()
    }

    /// Waits for everything in flight. Failures stay with their jobs.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn drain(&mut self) -> Result<(), StoreError> {
        self.check()?;
        while let Some(op) = self.ops.first() {
            let ticket = self.ticket(op.job, op.layer, [op.end.clone(), op.moved.clone()]);
            // The job holds the result.
            let _ = self.wait(ticket);
            self.check()?;
        }
        self.sync()
    }

    pub(super) fn check_ticket(&self, ticket: &Ticket) -> Result<(), StoreError> {
        self.check()?;
        if ticket.plane == self.id { Ok(()) } else { Err(StoreError::Foreign { what: "ticket" }) }
    }

    /// Returns true if no operation of the layer is in flight, as of the last poll.
    pub(crate) fn is_over(&self, ticket: &Ticket) -> bool {
        let job = self.jobs.get(&ticket.job);
        job.is_none_or(|job| job.layers[ticket.layer.0 as usize] != LayerState::InFlight)
    }

    fn op_of(&self, job: JobId, layer: Layer) -> Option<usize> {
        self.ops.iter().position(|op| op.job == job && op.layer == layer)
    }

    /// Processes all operations that have completed.
    pub(crate) fn reap(&mut self) -> Result<Progress, StoreError> {
        let mut progress = Progress::Idle;
        if !self.ops.is_empty() {
            match self.ring()?.poll() {
                Ok(found) => progress = found,
                // The executor of a lost GPU reports that here.
                Err(error) => self.fault = Some(error.to_string()),
            }
        }
        let mut at = 0;
        while at < self.ops.len() {
            if let Op { outcome: None, iocb: Some(iocb), .. } = self.ops[at] {
                match self.ring()?.try_completion(iocb) {
                    Ok(Some(completion)) => self.arrived(at, completion),
                    Ok(None) => {}
                    Err(error) => {
                        self.fault = Some(error.to_string());
                        break;
                    }
                }
            }
            if self.ops[at].is_over() {
                // The last operation takes its place.
                self.complete(at);
            } else {
                at += 1;
            }
        }
        self.after_completions()?;
        Ok(progress)
    }

    /// Recovers if a completion requires it, then ends abandoned jobs. In this order: a file is
    /// free only when no device can write to it.
    pub(super) fn after_completions(&mut self) -> Result<(), StoreError> {
        if let Some(cause) = self.fault.take() {
            self.recover(&cause)?;
        }
        let over = |job: &super::Job| job.abandoned && job.in_flight == 0;
        if self.abandoned > 0 {
            let over: Vec<_> = self.jobs.extract_if(|_, job| over(job)).collect();
            over.iter().for_each(|(_, job)| self.let_go(job));
            let before = self.ended.len();
            self.ended.extend(over.iter().map(|(id, _)| *id));
            self.abandoned -= self.ended.len() - before;
            self.ended[before..].sort_unstable();
        }
        Ok(())
    }

    /// Processes the ring's completion of an operation.
    pub(super) fn arrived(&mut self, at: usize, completion: Completion) {
        let outcome = self.outcome_of(&self.ops[at], completion);
        self.ops[at].outcome = Some(outcome);
        if let Err(failure) = outcome {
            let still = |status: IoStatus| status.may_still_transfer();
            let job = self.jobs.get(&self.ops[at].job);
            let map = job.filter(|_| failure.direction == Direction::Read);
            let mut entries = map.and_then(|job| job.map.as_ref()).into_iter();
            let others = entries.any(|map| map.failures().any(|(_, status)| still(status)));
            if others || still(failure.status) {
                self.fault.get_or_insert_with(|| failure.to_string());
            }
        }
    }

    fn outcome_of(&self, op: &Op, completion: Completion) -> Result<LayerDone, Failure> {
        let Completion { objects, errors, error } = completion;
        let layer = op.layer;
        if completion.is_ok() {
            let bytes = objects * u64::from(self.shape.object_bytes);
            return Ok(LayerDone { layer, objects, bytes, device_bytes: bytes });
        }
        let job = &self.jobs[&op.job];
        let (status, entry) = error.unwrap_or((IoStatus::Incomplete, 0));
        // For an index that no kernel should report, use the first block.
        let entry = job.moves.get(entry as usize).unwrap_or(&job.moves[0]);
        let (direction, position, file) = (job.direction, entry.position, entry.file);
        Err(Failure { direction, layer, position, file, status, errors })
    }

    /// Ends an operation that neither the ring nor a stream works on any more.
    pub(super) fn complete(&mut self, at: usize) {
        let op = self.ops.swap_remove(at);
        if let (Target::Staged(staging), Some(at)) = (&mut self.target, op.buffer) {
            staging.end(at);
        }
        if let (Some(streams), Some(ring), Some(end)) = (&mut self.streams, &self.ring, op.end)
            // Not an event of a ring that was replaced.
            && ring.owns(&end.event)
        {
            streams.return_end(end);
        }
        let job = self.jobs.get_mut(&op.job).expect("it has an operation in flight");
        job.in_flight -= 1;
        let mut outcome = op.outcome.expect("it is over");
        if let (Ok(_), Direction::Read, Some(checksums)) = (outcome, job.direction, &job.checksums)
        {
            // If several layers are in flight, it is unknown which one differs: all of them fail.
            let differing = checksums.differing();
            let files = differing.iter().map(|at| job.moves[*at as usize].file);
            self.lost.extend(files);
            if let Some(at) = differing.first() {
                let Move { position, file, .. } = job.moves[*at as usize];
                let (direction, layer, status) = (job.direction, op.layer, IoStatus::Checksum);
                let errors = differing.len() as u32;
                outcome = Err(Failure { direction, layer, position, file, status, errors });
            }
        }
        let moved = outcome;
        let served = self.memory.as_mut().filter(|_| outcome.is_ok());
        if let Some(Err(failure)) = served.map(|memory| memory.served(job, op.layer)) {
            // The devices may have the right bytes.
            job.layers[op.layer.0 as usize] = LayerState::Ended(Err(failure));
            job.failure.get_or_insert(failure);
            return;
        }
        if let (Ok(done), Some(memory), true) = (&outcome, &mut self.memory, job.is_ahead) {
            memory.prefetched_bytes += done.bytes;
        } else if let (Ok(done), Some(memory)) = (&mut outcome, &mut self.memory) {
            if job.direction == Direction::Read {
                memory.fill(job, op.layer);
            }
            let (objects, bytes) = memory.size(job.hits.len());
            done.objects += objects;
            done.bytes += bytes;
        }
        job.layers[op.layer.0 as usize] = LayerState::Ended(outcome);
        match (moved, job.direction) {
            (Ok(_), Direction::Read) if job.is_ahead => {}
            (Ok(done), Direction::Read) => self.tally.retrieved_bytes += done.bytes,
            (Ok(done), Direction::Write) => self.tally.stored_bytes += done.bytes,
            (Err(failure), _) => self.note_failure(op.job, failure),
        }
    }

    fn note_failure(&mut self, id: JobId, failure: Failure) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Failure { direction, layer, file, status, errors, .. } = failure;
        tracing::warn!(%file, %layer, %status, errors, "{} failed", failure.verb());
        job.failure.get_or_insert(failure);
        if job.is_ahead {
            // Its files may have been rewritten meanwhile. A request that needs them finds out.
            return;
        }
        if let (Direction::Read, Some(map)) = (direction, &job.map) {
            let failed = map.failures().filter_map(|(at, status)| {
                job.moves.get(at as usize).map(|entry| (entry.file, status))
            });
            let lost = failed.chain([(file, status)]).filter(|(_, status)| is_lost(*status));
            self.lost.extend(lost.map(|(file, _)| file));
        }
    }
}

impl Op {
    /// Returns true if neither the ring nor a stream works on it.
    pub(super) fn is_over(&self) -> bool {
        self.outcome.is_some() && self.moved.as_ref().is_none_or(Wait::is_reached)
    }
}

/// Returns true if this status of a read is an error of the file, and not only of the job.
fn is_lost(status: IoStatus) -> bool {
    !matches!(status, IoStatus::Ok | IoStatus::Cancelled | IoStatus::Invalid)
}
