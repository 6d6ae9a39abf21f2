//! Completions: waiting for them, and what follows from them.

use gio_uring::{Completion, IoStatus, Wait};
use nvme_driver::Waiter;
use nvme_spec::nvm::Direction;

use super::{Op, Store, Target};
use kv_catalog::Layer;

use crate::{
    error::{Failure, StoreError},
    transfer::{LayerDone, LayerState, RequestId, Ticket},
};

impl Store {
    /// Waits until all of the layer's data is where it was to go.
    ///
    /// Whatever it returns, nothing touches the layer's blocks any more when it does: after a
    /// timeout or a fault the I/O kernel was stopped and the controllers were recovered first. What
    /// else was in flight then has failed as well, with [`IoStatus::Cancelled`] or
    /// [`IoStatus::Fault`], and its tickets say so.
    ///
    /// # Errors
    /// [`StoreError::Transfer`] names layer, block, file and status. After a failed retrieve the
    /// files that failed are dropped from the index: a lookup misses them.
    /// [`StoreError::Failed`] when the controllers could not be recovered.
    pub fn wait(&mut self, ticket: Ticket) -> Result<LayerDone, StoreError> {
        self.check_ticket(&ticket)?;
        self.settle_layer(ticket.request, ticket.layer)?;
        match self.outcome(ticket.request, ticket.layer) {
            Some(outcome) => outcome,
            None => Err(StoreError::Ended { layer: ticket.layer }),
        }
    }

    /// Checks whether the layer is done, without waiting. After an error, or once it is done, the
    /// ticket has nothing more to say.
    ///
    /// # Errors
    /// As for [`Store::wait`].
    pub fn poll(&mut self, ticket: &Ticket) -> Result<Option<LayerDone>, StoreError> {
        self.check_ticket(ticket)?;
        self.reap()?;
        match self.outcome(ticket.request, ticket.layer) {
            Some(outcome) => outcome.map(Some),
            None if self.requests.contains_key(&ticket.request) => Ok(None),
            None => Err(StoreError::Ended { layer: ticket.layer }),
        }
    }

    /// Waits for everything in flight. Failures stay with their requests.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn drain(&mut self) -> Result<(), StoreError> {
        self.check()?;
        while let Some(op) = self.ops.first() {
            let (request, layer) = (op.request, op.layer);
            self.settle_layer(request, layer)?;
        }
        self.sync()
    }

    fn check_ticket(&self, ticket: &Ticket) -> Result<(), StoreError> {
        self.check()?;
        if ticket.store == self.releases.store {
            Ok(())
        } else {
            Err(StoreError::Foreign { what: "ticket" })
        }
    }

    /// What became of a layer; `None` while it is in flight or when its request has ended.
    fn outcome(&self, request: RequestId, layer: Layer) -> Option<Result<LayerDone, StoreError>> {
        match self.requests.get(&request)?.layers[layer.0 as usize] {
            LayerState::Ended(outcome) => {
                Some(outcome.map_err(|failure| StoreError::Transfer { failure }))
            }
            LayerState::Idle | LayerState::InFlight => None,
        }
    }

    /// Waits until a layer is not in flight, and recovers whatever has to be.
    pub(super) fn settle_layer(
        &mut self,
        request: RequestId,
        layer: Layer,
    ) -> Result<(), StoreError> {
        if let Some(at) = self.op_of(request, layer) {
            if self.ops[at].outcome.is_none() {
                let deadline = self.clock.now() + self.options.wait_timeout;
                let iocb = self.ops[at].iocb;
                match self.ring()?.wait_completion(iocb, deadline) {
                    Ok(completion) => self.arrived(at, completion),
                    // No completion, or an impossible one: stop the kernel.
                    Err(error) => self.fault = Some(error.to_string()),
                }
                self.after_completions()?;
            }
            self.wait_for_move(request, layer)?;
        }
        self.after_completions()
    }

    fn op_of(&self, request: RequestId, layer: Layer) -> Option<usize> {
        self.ops.iter().position(|op| op.request == request && op.layer == layer)
    }

    /// Waits until the stream that moves a layer's objects has moved them.
    fn wait_for_move(&mut self, request: RequestId, layer: Layer) -> Result<(), StoreError> {
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, clock.now() + self.options.wait_timeout);
        while let Some(at) = self.op_of(request, layer) {
            if self.ops[at].is_over() {
                self.complete(at);
                continue;
            }
            // A lost GPU says so to its executor.
            if let Err(error) = self.ring()?.poll() {
                self.fault = Some(error.to_string());
                self.after_completions()?;
            }
            if !waiter.wait()
                && !self.op_of(request, layer).is_some_and(|at| self.ops[at].is_over())
            {
                let cause = format!(
                    "the stream that moves layer {layer} between staging memory and the pool did \
                     not get there in time"
                );
                return Err(self.fail(cause));
            }
        }
        Ok(())
    }

    /// Takes note of all operations that have completed.
    pub(super) fn reap(&mut self) -> Result<(), StoreError> {
        if !self.ops.is_empty()
            && let Err(error) = self.ring()?.poll()
        {
            self.fault = Some(error.to_string());
        }
        let mut at = 0;
        while at < self.ops.len() {
            if self.ops[at].outcome.is_none() {
                let iocb = self.ops[at].iocb;
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
                // Another one takes its place.
                self.complete(at);
            } else {
                at += 1;
            }
        }
        self.after_completions()
    }

    /// Recovers if a completion asked for it, then ends the requests without a handle. In
    /// this order: a file is free only when no device can write to it.
    pub(super) fn after_completions(&mut self) -> Result<(), StoreError> {
        if let Some(cause) = self.fault.take() {
            self.recover(&cause)?;
        }
        while let Some(id) = self.ended.pop() {
            self.end(id);
        }
        Ok(())
    }

    /// Ends a request: at once, or when its last operation completes.
    pub(super) fn end(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if request.in_flight > 0 {
            request.dropped = true;
            return;
        }
        if let Some(request) = self.requests.remove(&id) {
            self.index.abandon(&request.positions, &mut self.scratch.freed);
            self.free();
        }
    }

    /// Takes note of what the ring said of an operation.
    pub(super) fn arrived(&mut self, at: usize, completion: Completion) {
        let outcome = self.outcome_of(&self.ops[at], completion);
        self.ops[at].outcome = Some(outcome);
        if let Err(failure) = outcome {
            let still = |status: IoStatus| status.may_still_transfer();
            let request = self.requests.get(&self.ops[at].request);
            let map = request.filter(|_| failure.direction == Direction::Read);
            let mut entries = map.and_then(|request| request.map.as_ref()).into_iter();
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
            return Ok(LayerDone { layer, objects, bytes });
        }
        let request = &self.requests[&op.request];
        let (status, entry) = error.unwrap_or((IoStatus::Incomplete, 0));
        // For an index that no kernel should report, the first block stands.
        let entry = request.entries.get(entry as usize).unwrap_or(&request.entries[0]);
        let (direction, (position, file)) = (request.direction, *entry);
        Err(Failure { direction, layer, position, file, status, errors })
    }

    /// Ends an operation that nothing works on any more.
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
        let request = self.requests.get_mut(&op.request).expect("it has an operation in flight");
        request.in_flight -= 1;
        if request.dropped && request.in_flight == 0 {
            self.ended.push(op.request);
        }
        let outcome = op.outcome.expect("it is over");
        request.layers[op.layer.0 as usize] = LayerState::Ended(outcome);
        match (outcome, request.direction) {
            (Ok(done), Direction::Read) => self.tally.retrieved_bytes += done.bytes,
            (Ok(done), Direction::Write) => self.tally.stored_bytes += done.bytes,
            (Err(failure), _) => self.note_failure(op.request, failure),
        }
    }

    fn note_failure(&mut self, id: RequestId, failure: Failure) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Failure { direction, layer, file, status, errors, .. } = failure;
        tracing::warn!(%file, %layer, %status, errors, "{} failed", failure.verb());
        request.failure.get_or_insert(failure);
        if let (Direction::Read, Some(map)) = (direction, &request.map) {
            let entries = map.failures().filter_map(|(at, status)| {
                request.entries.get(at as usize).map(|(_, file)| (*file, status))
            });
            let lost: Vec<_> =
                entries.chain([(file, status)]).filter(|(_, status)| is_lost(*status)).collect();
            for (file, _) in lost {
                if self.index.is_stored(file) {
                    self.tally.files_lost += 1;
                    self.index.invalidate(file, &mut self.scratch.freed);
                }
            }
            self.free();
        }
    }
}

impl Op {
    /// Whether neither the ring nor a stream works on it.
    pub(super) fn is_over(&self) -> bool {
        self.outcome.is_some() && self.moved.as_ref().is_none_or(Wait::is_reached)
    }
}

/// Whether a read that ended so says something about the file, and not only about the request.
fn is_lost(status: IoStatus) -> bool {
    !matches!(status, IoStatus::Ok | IoStatus::Cancelled | IoStatus::Invalid)
}
