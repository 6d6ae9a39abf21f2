//! Processing completions.

use std::collections::BTreeSet;

use gio_uring::{Affine, IoStatus, Progress};
use kv_catalog::FileId;
use nvme_spec::nvm::Direction;

use super::{
    copier::differs,
    job::{Job, LayerState},
    mover::Mover,
    retry::{Attempts, Failed},
    transport::Op,
};
use crate::{
    error::{Failure, StoreError},
    ids::{LayerDone, Move, Ticket},
};

impl Mover {
    /// Processes all operations that have completed.
    pub(crate) fn reap(&mut self) -> Result<Progress, StoreError> {
        self.send_due()?;
        let progress = self.transport.reap()?;
        self.complete_over();
        self.after_completions()?;
        Ok(progress)
    }

    /// Recovers if a completion requires it, then ends abandoned jobs. In this order: a file is
    /// free only when no device can write to it.
    pub(super) fn after_completions(&mut self) -> Result<(), StoreError> {
        if let Some(cause) = self.transport.fault.take() {
            self.recover(&cause)?;
        }
        self.jobs.take_abandoned().into_iter().for_each(|job| self.let_go(&job));
        Ok(())
    }

    /// Ends operations that neither the ring nor a stream works on any more.
    pub(super) fn complete_over(&mut self) {
        while let Some(op) = self.transport.take_over() {
            self.complete(op);
        }
    }

    fn complete(&mut self, op: Op) {
        let ticket @ Ticket { layer, .. } = op.ticket;
        let job = self.jobs.get_mut(ticket.job).expect("it has an operation in flight");
        job.in_flight -= 1;
        let sizes = (self.setup.shape.object_bytes, self.setup.geometry.object_bytes);
        let mut ended = outcome(&op, job, job.rows(&self.setup.shape, layer).len(), sizes);
        if let (Some(at), Ok(_), Direction::Read) = (op.buffer, &ended, job.direction) {
            let damaged = self.copier.decode(&job.copies, layer, at, &*self.clock);
            if let Some(first) = damaged.first() {
                let is_damaged = |at: &u32| damaged.contains(&job.moves[*at as usize]);
                let failed = (0..job.moves.len() as u32).filter(is_damaged);
                let failed = failed.map(|at| (at, IoStatus::Checksum)).collect();
                ended = Err((differs(first, layer, damaged.len() as u32), failed));
            }
        }
        match ended {
            Ok(done) => {
                let again = op.attempts.part.iter().flatten();
                let again: Vec<_> = again.map(|at| job.moves[*at as usize].file).collect();
                if let Some(at) = op.buffer {
                    self.copier.end_operation(&job.copies, at);
                }
                self.jobs.trust(&again);
                self.moved(ticket, done);
            }
            Err((failure, failed)) => {
                let lost = self.lost_files(&op, &failed);
                if let Some(op) = self.send_later(op, failure, &failed) {
                    self.jobs.trust(&lost);
                    self.jobs.lost.extend(lost);
                    self.give_up_layer(ticket, op.buffer, failure);
                }
            }
        }
    }

    /// Has the entries of a layer that failed sent again later. Returns the operation if that may
    /// not help, or is too late.
    pub(super) fn send_later(
        &mut self,
        mut op: Op,
        failure: Failure,
        failed: &Failed,
    ) -> Option<Op> {
        let (now, recoveries, options) = (self.clock.now(), self.recoveries(), &self.setup.options);
        let Ok(job) = self.jobs.get_mut(op.ticket.job) else { return Some(op) };
        let is_wanted = !job.abandoned && !job.is_ahead && job.failure.is_none();
        let Attempts { since, failures: before, .. } = op.attempts;
        let devices = &self.transport.devices;
        // One that cannot be helped fails the layer; also if it is that of no entry.
        let statuses = failed.iter().map(|(_, status)| *status).chain([failure.status]);
        let delays = statuses.map(|status| devices.retry_delay(status, before));
        let delay = delays.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
        let due = delay.map(|delay| now + delay);
        let due = due.filter(|due| *due + options.command_timeout <= since + options.wait_timeout);
        let (Some(due), None, true) = (due, &self.transport.streams, is_wanted && op.can_start())
        else {
            return Some(op);
        };
        // A write that a recovery overtook may not have been made, and has no checksum then.
        // Without a recovery, the devices have answered all that failed.
        let is_answered = |(_, status): &(u32, IoStatus)| matches!(status, IoStatus::Nvme(_));
        let is_part = job.direction == Direction::Read
            || job.recoveries == recoveries && failed.iter().all(is_answered);
        let part = is_part.then(|| failed.iter().map(|(index, _)| *index).collect());
        op.attempts = Attempts { since, failures: before + 1, part, again: Some((due, failure)) };
        job.in_flight += 1;
        self.transport.keep(op);
        None
    }

    /// Sends operations again that are due.
    pub(super) fn send_due(&mut self) -> Result<(), StoreError> {
        while let Some(Op { ticket, buffer, attempts, .. }) =
            self.transport.take_due(self.clock.now())
        {
            self.jobs.get_mut(ticket.job)?.in_flight -= 1;
            let failure = attempts.again.map(|(_, failure)| failure);
            let sent = self.send_again(ticket, buffer, attempts);
            if let (Err(error), Some(failure)) = (sent, failure) {
                tracing::debug!(layer = %ticket.layer, %error, "not sent again");
                self.give_up_layer(ticket, buffer, failure);
            }
        }
        Ok(())
    }

    fn send_again(
        &mut self,
        ticket: Ticket,
        buffer: Option<usize>,
        attempts: Attempts,
    ) -> Result<(), StoreError> {
        // Another owner may have written to the files meanwhile.
        self.check_owner()?;
        let job = self.jobs.get(ticket.job).ok_or_else(|| StoreError::no_such_job(ticket.job))?;
        if job.abandoned || job.failure.is_some() {
            return Err(StoreError::Ended { layer: ticket.layer });
        }
        let mut part = None;
        if let Some(indices) = &attempts.part {
            let entries: Vec<Affine> = indices.iter().map(|at| self.affine(job, *at)).collect();
            let ring = self.transport.ring()?;
            let map = ring.upload_map(&entries, self.setup.geometry.devices)?;
            let checksums = match (&job.checksums, job.direction) {
                (Some(all), Direction::Read) => all.of_part(ring, &map, indices)?,
                _ => None,
            };
            part = Some((map, checksums));
        }
        self.issue(ticket, None, buffer, part.as_ref())?;
        self.transport.was_sent_before(attempts);
        Ok(())
    }

    /// Ends a layer that has failed for good.
    pub(super) fn give_up_layer(
        &mut self,
        ticket @ Ticket { layer, .. }: Ticket,
        buffer: Option<usize>,
        failure: Failure,
    ) {
        let Ok(job) = self.jobs.get_mut(ticket.job) else { return };
        let Failure { file, status, errors, .. } = failure;
        if job.is_ahead {
            // Often a file that was rewritten meanwhile.
            tracing::debug!(%file, %status, errors, "reading ahead failed");
        } else if let Some(suppressed) = self.warnings.allow(self.clock.now()) {
            let verb = failure.verb();
            tracing::warn!(%file, %layer, %status, errors, suppressed, "{verb} failed");
        }
        if let Some(at) = buffer {
            self.copier.end_operation(&job.copies, at);
        }
        job.layer(layer).state = LayerState::Ended(Err(failure));
        job.fail(failure);
    }

    /// Returns the files whose data is lost: of which an object cannot be read from its medium, or
    /// has differed from its checksum twice. Errors of a controller, a queue or a link are not
    /// those of a file.
    fn lost_files(&mut self, op: &Op, failed: &Failed) -> Vec<FileId> {
        let Ok(job) = self.jobs.get_mut(op.ticket.job) else { return Vec::new() };
        // Files that are read ahead may have been rewritten meanwhile. A request that needs them
        // finds out.
        if job.is_ahead || job.direction == Direction::Write {
            return Vec::new();
        }
        // An entry that has failed in a layer has failed for those behind it, too; an operation
        // that is sent again has statuses of its own.
        let (noticed, is_again) = (&mut job.noticed, op.attempts.failures > 0);
        let new = failed.iter().filter(|(at, _)| noticed.insert(*at) || is_again);
        let (mut lost, mut differing) = (BTreeSet::new(), BTreeSet::new());
        for (at, status) in new {
            let file = job.moves[*at as usize].file;
            match status {
                IoStatus::Nvme(status) if status.is_loss() => _ = lost.insert(file),
                IoStatus::Checksum => _ = differing.insert(file),
                _ => {}
            }
        }
        // Of a request that has failed, nothing is read a second time.
        match job.failure {
            Some(_) => lost.extend(differing),
            None => lost.extend(self.jobs.suspect(differing)),
        }
        lost.into_iter().collect()
    }

    /// Ends a layer that the devices have moved, with the copies behind that.
    pub(super) fn moved(&mut self, Ticket { job, layer }: Ticket, done: LayerDone) {
        let Self { jobs, copier, tally, .. } = self;
        let Ok(job) = jobs.get_mut(job) else { return };
        let ended = match job.is_ahead {
            true => Ok(done),
            false => copier.end(&job.copies, job.direction, done),
        };
        match ended {
            Ok(ended) => {
                if let Some(begun) = job.moved(layer, ended) {
                    tally.times.moved(job.direction, self.clock.now() - begun);
                }
                match job.direction {
                    Direction::Read if job.is_ahead => copier.read_ahead(done.device_bytes),
                    Direction::Read => tally.retrieved_bytes += done.device_bytes,
                    Direction::Write => tally.stored_bytes += done.device_bytes,
                }
            }
            // The devices may have the right bytes.
            Err(failure) => {
                job.layer(layer).state = LayerState::Ended(Err(failure));
                job.fail(failure);
            }
        }
    }
}

/// Returns the result of an operation that is over, which moves `rows` rows. `sizes`: the bytes of
/// an object of the engine, and on the devices.
fn outcome(
    op: &Op,
    job: &Job,
    rows: usize,
    sizes: (u32, u32),
) -> Result<LayerDone, (Failure, Failed)> {
    let (layer, direction) = (op.ticket.layer, job.direction);
    let completion = op.completion.expect("it is over");
    let failure = |at: usize, status: IoStatus, errors: u32| {
        // For an index that no kernel should report, use the first block.
        let Move { position, file, .. } = *job.moves.get(at).unwrap_or(&job.moves[0]);
        Failure { direction, layer, position, file, status, errors }
    };
    if !completion.is_ok() {
        let (status, entry) = completion.error.unwrap_or((IoStatus::Incomplete, 0));
        let at = op.attempts.index(entry).unwrap_or(0);
        return Err((
            failure(at as usize, status, completion.errors),
            op.attempts.failed(op.map.as_ref(), job.moves.len() as u32, status),
        ));
    }
    if let (Direction::Read, Some(checksums)) = (direction, &job.checksums) {
        // If several layers are in flight, it is unknown which one differs: all of them fail.
        let differing = checksums.differing();
        if let Some(at) = differing.first() {
            let failure = failure(*at as usize, IoStatus::Checksum, differing.len() as u32);
            return Err((failure, differing.iter().map(|at| (*at, IoStatus::Checksum)).collect()));
        }
    }
    let objects = match op.attempts.part {
        Some(_) => job.moves.len() as u64 * rows as u64,
        None => completion.objects,
    };
    let [bytes, device_bytes] = <[u32; 2]>::from(sizes).map(|each| objects * u64::from(each));
    Ok(LayerDone { layer, objects, bytes, device_bytes })
}
