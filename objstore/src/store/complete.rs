//! Completions: waiting for them, and what follows from them.

use gio_uring::{Completion, IoStatus, IocbId};

use super::Store;
use crate::{
    error::{Direction, Failure, StoreError},
    ids::Layer,
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

    /// Looks whether the layer is done, without waiting. After an error, or once it is done, the
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

    /// Waits for everything in flight, whoever started it. Failures stay with their requests.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn drain(&mut self) -> Result<(), StoreError> {
        self.check()?;
        while let Some(op) = self.ops.first().copied() {
            self.settle_layer(op.request, op.layer)?;
        }
        self.sync()
    }

    fn check_ticket(&self, ticket: &Ticket) -> Result<(), StoreError> {
        self.check()?;
        if ticket.home.is(&self.home) {
            Ok(())
        } else {
            Err(StoreError::Foreign { what: "ticket" })
        }
    }

    /// What became of a layer; `None` while it is in flight or when nobody knows it.
    fn outcome(&self, request: RequestId, layer: Layer) -> Option<Result<LayerDone, StoreError>> {
        match self.requests.get(&request)?.layers[layer.0 as usize] {
            LayerState::Done { objects } => {
                let bytes = objects * u64::from(self.shape.object_bytes);
                Some(Ok(LayerDone { layer, objects, bytes }))
            }
            LayerState::Failed(failure) => Some(Err(StoreError::Transfer { failure })),
            LayerState::Idle | LayerState::InFlight(_) => None,
        }
    }

    /// Waits until a layer is not in flight, and recovers whatever has to be.
    pub(super) fn settle_layer(
        &mut self,
        request: RequestId,
        layer: Layer,
    ) -> Result<(), StoreError> {
        let state = self.requests.get(&request).map(|request| request.layers[layer.0 as usize]);
        if let Some(LayerState::InFlight(iocb)) = state {
            let deadline = self.clock.now() + self.options.wait_timeout;
            match self.ring()?.wait_cqe(iocb, deadline) {
                Ok(completion) => self.complete(iocb, completion),
                // No word from the kernel, or none that makes sense: stop it.
                Err(error) => self.fault = Some(error.to_string()),
            }
        }
        self.after_completions()
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
            let iocb = self.ops[at].iocb;
            match self.ring()?.try_cqe(iocb) {
                // Another one takes its place.
                Ok(Some(completion)) => self.complete(iocb, completion),
                Ok(None) => at += 1,
                Err(error) => {
                    self.fault = Some(error.to_string());
                    break;
                }
            }
        }
        self.after_completions()
    }

    /// Recovers if a completion asked for it, then ends the requests nobody holds any more. In
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

    /// Takes note of one completion.
    pub(super) fn complete(&mut self, iocb: IocbId, completion: Completion) {
        let Some(at) = self.ops.iter().position(|op| op.iocb == iocb) else { return };
        let op = self.ops.swap_remove(at);
        let Some(request) = self.requests.get_mut(&op.request) else { return };
        request.in_flight -= 1;
        if request.dropped && request.in_flight == 0 {
            self.ended.push(op.request);
        }
        let objects = completion.objects;
        if completion.is_ok() {
            request.layers[op.layer.0 as usize] = LayerState::Done { objects };
            let bytes = objects * u64::from(self.shape.object_bytes);
            match request.direction {
                Direction::Retrieve => self.tally.retrieved_bytes += bytes,
                Direction::Store => self.tally.stored_bytes += bytes,
            }
            return;
        }
        let (status, entry) = completion.error.unwrap_or((IoStatus::Incomplete, 0));
        self.note_failure(op.request, op.layer, status, entry, completion.errors);
    }

    fn note_failure(
        &mut self,
        id: RequestId,
        layer: Layer,
        status: IoStatus,
        entry: u32,
        errors: u32,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let (position, file) = request.entries.get(entry as usize).copied().unwrap_or_else(|| {
            // An index that no kernel should report; the first block stands for it.
            request.entries[0]
        });
        let direction = request.direction;
        let failure = Failure { direction, layer, position, file, status, errors };
        tracing::warn!(%file, %layer, %status, errors, "{direction} failed");
        request.layers[layer.0 as usize] = LayerState::Failed(failure);
        request.failure.get_or_insert(failure);
        let mut still = status.may_still_transfer();
        if let (Direction::Retrieve, Some(map)) = (direction, &request.map) {
            let failures = map.failures().chain([(entry, status)]);
            let lost: Vec<_> = failures
                .inspect(|(_, status)| still |= status.may_still_transfer())
                .filter(|(_, status)| is_lost(*status))
                .filter_map(|(at, _)| request.entries.get(at as usize))
                .map(|(_, file)| *file)
                .collect();
            for file in lost {
                if self.index.is_stored(file) {
                    self.tally.files_lost += 1;
                    self.index.invalidate(file, &mut self.scratch.freed);
                }
            }
            self.free();
        }
        if still {
            self.fault.get_or_insert_with(|| failure.to_string());
        }
    }
}

/// Whether a read that ended so says something about the file, and not only about the request.
fn is_lost(status: IoStatus) -> bool {
    !matches!(status, IoStatus::Ok | IoStatus::Cancelled | IoStatus::Invalid)
}
